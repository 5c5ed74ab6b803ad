"""check_plan: proof by trying that a named plan keeps the numbers, does something, and goes with others.

    cf.testing.check_plan(my_plan("tp"), plugins=[my_plugin])

Problem: a plan is a page of wishes, and what is wrong with it shows in steps that its author did not try: a strategy
that forgets a reduction for one shape, a mask that is dropped, a pass in which every rank computes everything. Idea: a
few small steps that differ in kind (`programs.NAMED`, and attention with padding), on several meshes, alone and beside
batch sharding on another axis. Each is either refused, with a reason that names a value, or it equals one device in
float64 over two optimizer steps, with the work split over the axes that the plan names.

    step             mesh            outcome  worst    work per rank
    mlp              tp=2            equal    2.2e-16  0.50
    conv_net         tp=2            refused  tensor(1d, tp) finds no two products ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colofunc.errors import CheckError, ColofuncError, InputError, PluginError, near
from colofunc.mesh import Mesh
from colofunc.planner.wishes.wish import NamedPlan, Wish
from colofunc.program.ir import Program
from colofunc.testing import programs
from colofunc.testing.check import check, doubled_inside
from colofunc.testing.numerics import float64
from colofunc.transforms.shard import shard

TOPOLOGY = "8xa100-80g"  # communication costs more than these steps are worth: what is split was wished
ROWS = 8  # of every batch
BESIDE = "rows"


@attrs.frozen
class TriedPlan:
    """One step on one mesh.

    `share`: flops per rank against the whole; `reason`: why it was refused, "" where it ran.
    """

    step: str
    mesh: str
    worst: float = 0.0
    share: float = 1.0
    reason: str = ""

    @property
    def refused(self) -> bool:
        return bool(self.reason)

    @property
    def ranks(self) -> int:
        return prod(int(n) for n in re.findall(r"=(\d+)", self.mesh))

    def __str__(self) -> str:
        said = f"refused  {self.reason}" if self.refused else f"equal    {self.worst:<8.2g} {self.share:.2f}"
        return f"{self.step:17s} {self.mesh:15s} {said}"


@attrs.frozen
class TriedPlans:
    """The table of what was tried."""

    plan: str
    rows: tuple[TriedPlan, ...]

    @property
    def equal(self) -> tuple[TriedPlan, ...]:
        return tuple(row for row in self.rows if not row.refused)

    @property
    def refused(self) -> tuple[TriedPlan, ...]:
        return tuple(row for row in self.rows if row.refused)

    def __str__(self) -> str:
        head = f"{self.plan}: {len(self.equal)} equal, {len(self.refused)} refused"
        return "\n".join((head, f"{'step':17s} {'mesh':15s} outcome  worst    work per rank", *map(str, self.rows)))


def padded_attention(batch: int = 4, seq: int = 8, width: int = 16) -> programs.Step:
    """Attention over keys of which some are padding, no two rows alike."""
    torch.manual_seed(0)
    kept = torch.arange(seq) < torch.arange(batch).remainder(seq - 2)[:, None] + 2
    rows = {"x": torch.randn(batch, seq, width + 1, dtype=torch.float64)}
    rows["x"][..., -1] = kept
    return programs.training(_Padded(width).double(), rows, lambda out, b: F.mse_loss(out, b["x"][..., :-1]))


class _Padded(nn.Module):
    """(b, s, width + 1), of which the last says whether it counts -> (b, s, width)."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = x[..., :-1], x[..., -1] > 0
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (b, h, s, e)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=kept[:, None, None, :])
        return self.out(mixed.transpose(1, 2).flatten(2))


STEPS: Mapping[str, Callable[[int], programs.Step]] = {**programs.NAMED, "padded_attention": padded_attention}


def check_plan(
    plan: Any,
    mesh: Mesh | Sequence[Mesh] | None = None,
    *,
    steps: Mapping[str, Callable[[int], programs.Step]] | Sequence[str] | None = None,
    plugins: Sequence[Any] = (),
) -> TriedPlans:
    """Try a named plan (or its constructor) on small steps and meshes; the table of what was tried.

    `mesh`: None: its axes at 1, at 2, the first at 3 and 4, and at 2 beside batch and states sharded over another axis.
    `steps`: names among `STEPS`, or name -> function(rows of the batch) -> `programs.Step`. `plugins`: where its
    strategies come from. Raises CheckError that names the step and the mesh: numbers that differ from one device, an
    axis over which less than half of the work is split, a step that runs alone but not beside another axis, an error
    that is no ColofuncError or names nothing, a step that runs on several ranks but not on one, or a plan that refuses
    all.
    """
    plan = plan if isinstance(plan, NamedPlan) or not callable(plan) else plan()
    if not isinstance(plan, NamedPlan):
        raise InputError(
            f"check_plan wants a plan with axes and wishes(program, mesh), not {plan!r}. Try: check_plan(zero(3, 'dp'))"
        )
    if mesh is None:
        meshes = tuple(_meshes(plan.axes))
    else:
        meshes = (mesh,) if isinstance(mesh, Mesh) else tuple(mesh)
    done: list[TriedPlan] = []
    for name, make in _chosen(steps).items():
        ran: list[str] = []
        whole = _flops(make(ROWS))
        for grid in meshes:
            tried = _try(plan, name, make(ROWS), whole, grid, tuple(plugins))
            if tried.refused and ran and _beside(plan, grid) and _words(grid, plan.axes) in ran:
                raise CheckError(
                    f"{_title(plan)}: {name} runs on {_words(grid, plan.axes)} and not on {tried.mesh}: {tried.reason}"
                )
            ran += [] if tried.refused else [tried.mesh]
            done.append(tried)
        lone = next((row for row in done if row.step == name and row.refused and row.ranks == 1), None)
        if lone and ran:
            said = f"{_title(plan)}: {name} runs on {ran[0]} and not on {lone.mesh}: {lone.reason}"
            raise CheckError(f"{said}. Try: no wishes for an axis of one")
    table = TriedPlans(_title(plan), tuple(done))
    if not any(row.ranks > 1 for row in table.equal):
        raise CheckError(
            f"{_title(plan)} refuses every step on every mesh of more than one rank. Try: steps= of your own\n{table}"
        )
    return table


def _chosen(
    steps: Mapping[str, Callable[[int], programs.Step]] | Sequence[str] | None,
) -> Mapping[str, Callable[[int], programs.Step]]:
    if isinstance(steps, Mapping):
        return steps
    for name in steps or ():
        if name not in STEPS:
            raise InputError(f"check_plan has no step {name!r}{near(name, STEPS)}")
    return {name: STEPS[name] for name in steps or STEPS}


def _meshes(axes: Sequence[str]) -> Iterator[Mesh]:
    """Meshes of the plan's axes, and one with an axis beside them."""
    ones: dict[str, Any] = dict.fromkeys(axes, 1)
    twos: dict[str, Any] = dict.fromkeys(axes, 2)
    for sizes in (ones, twos, {**twos, axes[0]: 3}, {**twos, axes[0]: 4}, {BESIDE: 2, **twos}):
        yield Mesh(topology=TOPOLOGY, **sizes)


def _beside(plan: NamedPlan, mesh: Mesh) -> tuple[str, ...]:
    """The axes of more than one rank that the plan does not name."""
    mine = mesh.atoms(plan.axes)
    return tuple(axis for axis in mesh.axis_names if axis not in mine and mesh.axis_size(axis) > 1)


def _title(plan: Any) -> str:
    return str(getattr(plan, "name", None) or type(plan).__name__)


def _words(mesh: Mesh, axes: Sequence[str] = ()) -> str:
    return " ".join(f"{name}={size}" for name, size in mesh.axes if not axes or name in mesh.atoms(tuple(axes)))


def _flops(step: programs.Step) -> float:
    """Of one device."""
    with float64():
        return shard(step.fn, Mesh(topology=TOPOLOGY)).lower(*doubled_inside((step.state, step.batch))).cost().flops


def _try(
    plan: NamedPlan, name: str, step: programs.Step, whole: float, mesh: Mesh, plugins: tuple[Any, ...]
) -> TriedPlan:
    words = _words(mesh)
    what = f"{_title(plan)}: {name} on {words}"
    beside = _beside(plan, mesh)
    plans = (plan, BatchSharded(beside)) if beside else (plan,)
    staged = shard(step.fn, mesh, *plans, plugins=plugins)
    with float64():
        try:
            low = staged.lower(*doubled_inside((step.state, step.batch)))
        except PluginError as error:
            fault = error.__cause__ or error
            raise CheckError(
                f"{what} fails with {type(fault).__name__}: {fault}; a refusal is a ColofuncError"
            ) from error
        except ColofuncError as error:
            return TriedPlan(name, words, reason=_reason(error, mesh, what))
        except Exception as error:
            raise CheckError(
                f"{what} fails with {type(error).__name__}: {error}; a refusal is a ColofuncError"
            ) from error
        try:
            checked = check(staged, step.state, step.batch, steps=2)
        except Exception as error:
            raise CheckError(
                f"{what}: {error}" if isinstance(error, ColofuncError) else f"{what} fails as it runs: {error!r}"
            ) from error
    share = low.cost().flops / whole
    _check_share(share, mesh, what, low.plan)
    return TriedPlan(name, words, checked.worst, share)


def _reason(error: ColofuncError, mesh: Mesh, what: str) -> str:
    """The message of a refusal, which must name something that a user can look up: an axis, a name, a size."""
    said = str(error).split("\n", maxsplit=1)[0]
    if not (re.search(r"""\d|['"{(]""", said) or any(re.search(rf"\b{axis}\b", said) for axis in mesh.axis_names)):
        raise CheckError(
            f"{what} is refused without naming a value: {said!r}. Try: the axis, the size or the tensor that it is "
            "about"
        )
    return said


def _check_share(share: float, mesh: Mesh, what: str, plan: Any) -> None:
    """Whether work is split over every axis: half of it along the smallest at least."""
    smallest = min((n for _, n in mesh.axes if n > 1), default=1)
    bound = (1 + smallest) / 2 / mesh.size
    if share > bound:
        raise CheckError(
            f"{what}: a rank does {share:.2f} of all work, at most {bound:.2f} was expected: an axis holds copies "
            f"({str(plan).splitlines()[0]}). Try: along=True on the wish, or wishes on the operators that do the work; "
            "if the plan is about other steps, steps=[...] without this one, or a PlanError that says so"
        )


@attrs.frozen
class BatchSharded:
    """The rows of the batch on `axes`, and parameters and moments stored on the first dim that these divide."""

    axes: tuple[str, ...] = (BESIDE,)
    name: str = "batch sharding"

    def wishes(self, program: Program, mesh: Mesh) -> list[Wish]:
        on, ways = " ".join(self.axes), prod(mesh.axis_size(axis) for axis in self.axes)
        found = []
        for value in (program.values[id] for id in program.inputs):
            if value.role == "batch" and value.shape:
                found.append(Wish(value.name, f"({on} _) ...", self.axes, ("batch",), self.name, along=True))
            elif value.role in ("param", "state"):
                specs: list[str] = []
                for dim, size in enumerate(value.shape):
                    if size % ways == 0:
                        groups = ["_"] * len(value.shape)
                        groups[dim] = f"({on} _)"
                        specs.append(" ".join(groups))
                found.append(Wish(value.name, tuple(specs) or "...", self.axes, (value.role,), self.name))
        return found
