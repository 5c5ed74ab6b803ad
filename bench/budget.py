"""Time against memory: `cf.checkpoint(step, budget=...)` beside torch's own ways to keep less for backward.

Whole training steps (AdamW, float32) of GPT-2 small and ResNet-50, planned without weights. All three do their work on the
nodes of one program, counted by one accountant and priced by one model of a device: what the partitioner behind
`torch._functorch.config.activation_memory_budget` saves, and the segments of `torch.utils.checkpoint.checkpoint_sequential`,
become orders of those nodes (`_orders.py`). At each budget both may use the best of all their settings whose peak fits: the
partitioner of 21 budgets from 0 to 1, `checkpoint_sequential` of all numbers of segments. Budgets are parts of the peak where
everything is kept, and the very peaks at which the partitioner is best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

import colofunc as cf
from bench import Row, Section, fresh
from bench._orders import partitioned, sequential
from bench.memory_plans import adamw, gpt
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Transform
from colofunc.planner.candidate import Finish, FinishedProgram
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Program

DEVICE = "a100-40g"
GOAL, MOST = 3.06, 1.20  # ResNet-50: times less memory, for so many times the time (published: 1.33)
BUDGETS = tuple(k / 20 for k in range(21))
EQUAL = 1e-3
"""Times that differ by a smaller part of the step's are equal."""
BLOCKS = tuple(f"layer{i + 1}.{j}" for i, count in enumerate((3, 4, 6, 3)) for j in range(count))


def resnet50(rows: int = 128) -> tuple[Any, Any, Any]:
    """timm's ResNet-50 on images of 224 x 224."""
    import timm

    with torch.device("meta"):
        net = timm.create_model("resnet50")

    def loss(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out, batch["labels"])

    batch = {"images": cf.abstract((rows, 3, 224, 224)), "labels": cf.abstract((rows,), torch.int64)}
    return adamw(net, batch, loss=loss, inputs=lambda batch: ((batch["images"],), {}))


@attrs.frozen
class Model:
    """`functions`: paths of the modules that `checkpoint_sequential` would be given; `shares`: budgets, of the peak where all is kept."""

    name: str
    make: Callable[[], tuple[Any, Any, Any]]
    functions: tuple[str, ...]
    shares: tuple[float, ...]


MODELS = (
    Model("GPT-2 small, 8 x 1024", lambda: gpt(768, 12, 12, 8), tuple(f"transformer.h.{k}" for k in range(12)),
          (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3)),
    Model("ResNet-50, 128 images", resnet50, ("conv1", "bn1", "act1", "maxpool", *BLOCKS, "global_pool", "fc"),
          (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 1 / GOAL, 0.27)),
)  # fmt: skip


@attrs.frozen
class Point:
    """A step as somebody orders it."""

    how: str
    peak_bytes: int
    seconds: float


def others(
    args: tuple[Any, Any, Any], functions: Sequence[str], budgets: Sequence[float] = BUDGETS, device: str = DEVICE
) -> tuple[Point, list[Point], list[Point]]:
    """(all kept, the partitioner's points, those of `checkpoint_sequential`) of a step, on the nodes that `cf.checkpoint` gets."""
    step, state, batch = args
    found: dict[str, list[Point]] = {"kept": [], "partitioner": [], "sequential": []}

    def refit(program: Program, node_s: NodeSeconds, finish: Finish, _: int | None) -> tuple[FinishedProgram, FinishedProgram]:
        def note(kind: str, how: str, order: Program) -> FinishedProgram:
            done = finish(order)
            found[kind].append(Point(how, done.peak_bytes, sum(node_s(node, done.program.values) for node in done.program.nodes)))
            return done

        whole = note("kept", "all kept", program)
        for budget in budgets:
            note("partitioner", f"budget {budget:g}", partitioned(program, node_s, budget))
        for segments in range(2, len(functions) + 1):
            note("sequential", f"{segments} segments", sequential(program, functions, segments))
        return whole, whole

    looks = Transform("checkpoint", candidates=lambda build: build.evolve(searches=(refit,)))
    stage(cf.shard(step, cf.Mesh(topology=device)), looks).lower(state, batch)
    return found["kept"][0], found["partitioner"], found["sequential"]


def ours(args: tuple[Any, Any, Any], budget_bytes: int, device: str = DEVICE) -> Point | None:
    """What `cf.checkpoint` finds; None where it finds nothing that fits."""
    step, state, batch = args
    try:
        low = cf.checkpoint(cf.shard(step, cf.Mesh(topology=device)), budget=budget_bytes).lower(state, batch)
    except cf.PlanError:
        return None
    return Point("cf.checkpoint", low.memory().peak_bytes["device"], low.cost().seconds)


def best(points: Sequence[Point], budget_bytes: int) -> Point | None:
    """The fastest that fits."""
    return min((p for p in points if p.peak_bytes <= budget_bytes), key=lambda p: (p.seconds, p.peak_bytes), default=None)


def front(points: Sequence[Point]) -> list[Point]:
    """Those that nothing else is both leaner and no slower than, the largest first."""
    found: list[Point] = []
    for p in sorted(points, key=lambda p: (p.seconds, p.peak_bytes)):
        if not found or p.peak_bytes < found[-1].peak_bytes:
            found.append(p)
    return found


def sweep(name: str) -> dict[str, Any]:
    """All points of a model, in its own process."""
    model = next(m for m in MODELS if m.name == name)
    args = model.make()
    whole, torchs, sequences = others(args, model.functions)
    shares = {f"{share:.3g} of the peak": int(share * whole.peak_bytes) for share in model.shares}
    lean = front([p for p in torchs if p.peak_bytes < 0.95 * whole.peak_bytes])
    budgets = shares | {f"the partitioner's peak at {p.how}": p.peak_bytes for p in lean}
    points = [(where, budget, ours(args, budget), best(torchs, budget), best(sequences, budget)) for where, budget in budgets.items()]
    told = [(w, b, *(None if p is None else attrs.asdict(p) for p in found)) for w, b, *found in points]
    least = [min(p.peak_bytes for p in points) for points in (torchs, sequences)]
    return {"whole": attrs.asdict(whole), "points": told, "least": least}


def said(point: Point | None, whole: Point) -> str:
    if point is None:
        return "nothing fits"
    how = f" ({point.how})" if point.how != "cf.checkpoint" else ""
    return f"{point.seconds / whole.seconds:.3f} of the time at {point.peak_bytes / whole.peak_bytes:.3f} of the peak{how}"


def rows(model: Model) -> list[Row]:
    told = fresh("budget", f"m.sweep({model.name!r})")
    whole = Point(**told["whole"])
    out = [Row(f"{model.name}: all kept", f"peak {whole.peak_bytes / 1e9:.2f} GB, {whole.seconds * 1e3:.1f} ms as planned")]
    met = worse = better = ahead = 0
    for where, budget, *dicts in told["points"]:
        mine, torchs, sequence = (None if p is None else Point(**p) for p in dicts)
        inside = mine is not None and mine.peak_bytes <= budget
        slower = [p is not None and (mine is None or mine.seconds > p.seconds + EQUAL * whole.seconds) for p in (torchs, sequence)]
        met += torchs is not None
        better += torchs is not None and mine is not None and mine.seconds < torchs.seconds - EQUAL * whole.seconds
        worse, ahead = worse + slower[0], ahead + (not slower[1])
        figure = f"{said(mine, whole)}; partitioner {said(torchs, whole)}; checkpoint_sequential {said(sequence, whole)}"
        good = inside and not any(slower)
        out.append(Row(f"{model.name}: {where}", figure, f"within {budget / 1e9:.2f} GB, not slower than either", good))
        if where == f"{1 / GOAL:.3g} of the peak":
            times = float("inf") if mine is None else mine.seconds / whole.seconds
            aim = f"at most {MOST} (published: 1.33)"
            out.append(Row(f"{model.name}: {GOAL} times less memory", f"{times:.3f} of the time", aim, times <= MOST))
    least = " and ".join(f"{n / whole.peak_bytes:.3f}" for n in told["least"])
    figure = f"better at {better} of the {met} budgets that it meets, worse at {worse}; least peaks, its and the other's: {least}"
    good = better > met / 2 and not worse
    out.append(Row(f"{model.name}: against the partitioner", figure, "better at more than half, never worse", good))
    count = len(told["points"])
    figure = f"not slower at {ahead} of {count} budgets"
    out.append(Row(f"{model.name}: against checkpoint_sequential", figure, "all", ahead == count))
    return out


def bench() -> Section:
    setting = (
        f"Training steps (AdamW, float32) planned for {DEVICE}: seconds by the roofline of each operator, peaks by the accountant, both of "
        "the finished program. The partitioner is torch's (min-cut with activation_memory_budget, of 21 budgets the fastest that fits), "
        "given the same nodes and, for its knapsack, the same seconds; it counts on a compiler that fuses what it makes again, which this "
        "model of time does not. checkpoint_sequential: of all numbers of segments the fastest that fits. "
        f"Equal: within {EQUAL:.1%} of the step. torch {torch.__version__}."
    )
    return Section("Time against memory", setting, [row for model in MODELS for row in rows(model)])
