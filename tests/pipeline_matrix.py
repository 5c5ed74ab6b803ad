"""The matrix of pipelines: every schedule beside ZeRO, tensor parallelism, memory and precision, against one device.

    {11 schedules} x {none, zero1, zero2, zero3} x {none, 1d} x {none, checkpoint, offload} x {float64, bf16}, and sampled
    {ulysses, ring, experts, lora, local_stats, dropout} beside

    outcome = run(Cell("zb-v", "zero3", "1d", "offload", "bf16"))

A cell is a training step with clipping under `cf.pipeline` on simulated ranks. It is *equal* when two AdamW steps give what the function
itself gives on one device, and each column shows its signature: every weight lies on the ranks of its stage and on no others, the loop is
run by the schedule's own table, moments and parameters are split as the stage of ZeRO says, products as the tensor plan says, values are
made again or lie on the host, and simulated ranks hold as many bytes as the accountant says. It is *refused* when planning raises an error
that `REFUSED` lists, for a cell of which its reason is true. In bfloat16 `check` bounds what rounding does in that very step.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import attrs
import matrix
import torch
from colofunc_plugins import experts, tensor, zero
from colofunc_plugins.sequence import ring, ulysses
from live_bytes import measure
from matrix import Outcome
from pipelined import loop_of
from torch import nn

import colofunc as cf
from colofunc.compiler.observation import arguments_of
from colofunc.program.check import check_program
from colofunc.testing import check
from colofunc.testing.check import doubled_inside

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev", "auto", "auto-v")
ZERO = ("none", "zero1", "zero2", "zero3")
TENSOR = ("none", "1d")
MEMORY = ("none", "checkpoint", "offload")
PRECISION = ("float64", "bf16")
BESIDE = ("", "ulysses", "ring", "experts", "lora", "local_stats", "dropout")
COLUMNS = {"schedule": SCHEDULES, "zero": ZERO, "tensor": TENSOR, "memory": MEMORY, "precision": PRECISION, "beside": BESIDE}

RANKS, MICROBATCHES, ROWS, SEQUENCES, WIDTH = 2, 4, 1024, 64, 16
BLOCKS = 4  # one for each stage of a schedule with two stages a rank
LAYERS = 2  # of a model, which has an embedding and a head beside them


@attrs.frozen
class Cell:
    """One combination."""

    schedule: str
    zero: str = "none"
    tensor: str = "none"
    memory: str = "none"
    precision: str = "float64"
    beside: str = ""

    def __str__(self) -> str:
        words = [getattr(self, column) for column in COLUMNS]
        return "-".join(word for word in words if word not in ("none", ""))

    @property
    def sizes(self) -> dict[str, int]:
        """Its mesh axes; `dp` where ZeRO or statistics of a rank need it."""
        sizes = {"pp": RANKS}
        sizes |= {"dp": 2} if self.zero != "none" or self.beside == "local_stats" else {}
        sizes |= {"tp": 2} if self.tensor != "none" else {}
        return sizes | {"ulysses": {"sp": 2}, "ring": {"cp": 2}, "experts": {"ep": 2}}.get(self.beside, {})


# ---- steps ----


class Block(nn.Module):
    """A residual pair of products behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks that are a stage each. middle: what comes between two of them."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.middle = middle or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            x = self.middle(x) if number == 1 else x
        return x


MIDDLE: dict[str, Callable[[], nn.Module]] = {"local_stats": lambda: nn.BatchNorm1d(WIDTH), "dropout": lambda: nn.Dropout(0.25)}
MODELS = {"ulysses": "dense", "ring": "dense", "experts": "experts", "lora": "dense"}


@functools.cache
def step_of(beside: str, precision: str, layers: int = LAYERS) -> tuple[Any, Any, Any]:
    """(step, state, batch) before any transform; cells do not change them."""
    wide = precision == "float64"
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2, eps=1e-5)
    torch.manual_seed(1)
    if beside in MODELS:
        model = cf.functional(matrix.module_of(MODELS[beside], torch.float64 if wide else torch.float32, layers))
        model = cf.lora(model, where="*.q_proj", rank=4) if beside == "lora" else model
        step, state = cf.train_step(model, opt, clip=0.5)
        ids = torch.randint(2, matrix.VOCABULARY, (SEQUENCES, matrix.TOKENS))
        labels = ids.clone()
        labels[0, 3:9] = -100  # a mean of means would be wrong
        return step, state, {"input_ids": ids, "labels": labels}
    net = Net(MIDDLE[beside]() if beside in MIDDLE else None).to(torch.float64 if wide else torch.float32)
    step, state = cf.train_step(
        cf.functional(net), opt, lambda out, b: (out - b[1]).pow(2).mean(), inputs=lambda b: ((b[0],), {}), clip=0.5
    )
    rows = torch.randn(2, ROWS, WIDTH).to(torch.float64 if wide else torch.float32)
    return step, state, (rows[0], rows[1])


PLANS: dict[str, Callable[[], Any]] = {
    "zero1": lambda: zero(1, "dp"),
    "zero2": lambda: zero(2, "dp"),
    "zero3": lambda: zero(3, "dp"),
    "1d": lambda: tensor("1d", "tp"),
    "ulysses": lambda: ulysses("sp"),
    "ring": lambda: ring("cp"),
    "experts": lambda: experts("ep"),
}


def staged(cell: Cell, step: Any) -> Any:
    """The step with everything that the cell names."""
    plans = [PLANS[word]() for word in (cell.zero, cell.tensor, cell.beside) if word in PLANS]
    in_specs = (None, "(dp b) ...") if cell.beside == "local_stats" else None
    step = cf.shard(step, cf.Mesh(**cell.sizes), *plans, in_specs=in_specs)
    step = cf.local_stats(step, axes="dp") if cell.beside == "local_stats" else step
    step = cf.pipeline(step, microbatches=MICROBATCHES, schedule=cell.schedule)
    step = {
        "none": lambda: step,
        "checkpoint": lambda: cf.checkpoint(step, policy="nothing"),
        "offload": lambda: cf.offload(step, policy="host"),
    }[cell.memory]()
    return cf.precision(step, "bf16") if cell.precision == "bf16" else step


# ---- signatures ----


def signature(cell: Cell, low: Any) -> list[str]:
    """What a cell does not show of its columns; empty if all is there."""
    specs = {leaf.name: leaf.spec for leaf in low.plan.inputs}
    stages = {leaf.name: leaf.at for leaf in low.plan.inputs}
    weights = {name: spec for name, spec in specs.items() if name.startswith(("state.params.", "frozen.")) and name.endswith(".weight")}
    params = {name: spec for name, spec in specs.items() if name.startswith("state.params.")}
    moments = {name: spec for name, spec in specs.items() if name.startswith("state.opt.exp_avg.")}
    away = [f"{name} lies on {stages[name]}, and is no stage's alone" for name in weights if len((stages[name] or ("", ()))[1]) != 1]
    wrong = [*away, *_table(cell, low), *_zero(cell, params, moments), *_tensor(cell, specs)]
    if cell.memory == "checkpoint" and not any("made again" in words for words in low.plan.memory):
        wrong.append("nothing is made again")
    hosts = [v for v in map(low.program.value, low.program.inputs) if v.shape and v.role == "state" and v.tier == "host"]
    if cell.memory == "offload" and len(hosts) < len(moments):
        wrong.append(f"{len(hosts)} tensors of the optimizer lie on the host, fewer than {len(moments)}")
    return wrong


def _table(cell: Cell, low: Any) -> list[str]:
    """The loop is run by the table of the schedule, and some schedules hand on two stages a rank.

    One that looks at costs counts those with a name that have its stages as well, and may be run by one of them.
    """
    timetable = loop_of(low.program).timetable
    placements = low.registry.schedules[cell.schedule].placements
    schedules = list(placements)
    if any(each.looks_at_costs for each in placements):
        schedules += [each for each in low.registry.schedules.values() if any(each.alike(placement) for placement in placements)]
    schedule = next((each for each in schedules if each.name == timetable.schedule), None)
    if schedule is None:
        return [f"the loop is run by {timetable.schedule!r}"]
    if timetable.table.stages != RANKS * schedule.stages_per_rank:
        return [f"{timetable.table.stages} stages on {RANKS} ranks"]
    idle = [part for part, (first, end) in zip(timetable.parts, timetable.spans(), strict=True) if first == end and part[1] == "F"]
    if idle:
        return [f"nothing is done in {idle}"]
    if schedule.looks_at_costs:
        return []
    want = [[str(a).replace("B", "I") for a in row if a.kind != "W"] for row in schedule.table(RANKS, MICROBATCHES).rows]
    have = [[str(a).replace("B", "I") for a in row if a.kind != "W"] for row in timetable.table.rows]
    return [] if want == have else [f"the order of actions is {have}, that of the schedule {want}"]


def _zero(cell: Cell, params: dict[str, str], moments: dict[str, str]) -> list[str]:
    """Which of moments and parameters are split over `dp`. Masters of bf16 are stored as moments are."""
    if cell.zero == "none":
        return []
    split = {"moments": any("dp" in spec for spec in moments.values()), "parameters": any("dp" in spec for spec in params.values())}
    masters = cell.precision == "bf16" or cell.zero == "zero3"
    want = {"moments": True, "parameters": masters}
    return [] if split == want else [f"split over dp: {split}, wanted {want}"]


def _tensor(cell: Cell, specs: dict[str, str]) -> list[str]:
    if cell.tensor == "none":
        return []
    up, down = ("q_proj", "o_proj") if cell.beside in MODELS else ("up", "down")
    wrong = []
    for module, dim in ((up, 0), (down, 1)):
        for name, spec in specs.items():
            if name.endswith(f"{module}.weight") and not matrix.meets(spec.split(" @")[0], "tp", dim):
                wrong.append(f"{name} lies as {spec!r}, and tp should be on dim {dim}")
    return wrong


def bytes_differ(staged_step: Any, low: Any, state: Any, batch: Any) -> list[str]:
    """What does not agree between the plan, the accountant, and what simulated ranks hold while they run; then, stage by stage.

    Of the ranks of a stage the fullest counts, as the plan counts it: another one may hold less (by a bias under tensor parallelism).
    """
    given = arguments_of(low, staged_step.arguments((state, batch)))
    measured, counted = measure(low.program, low.mesh, given.copies(range(len(given.shards)))), low.memory()
    found = {"plan": low.plan.peak_bytes, "accountant": counted.peak_bytes["device"], "ranks": measured.peak_bytes["device"]}
    if len(set(found.values())) > 1:
        return [f"bytes at the peak differ: {found}"]
    held = measured.peaks_of_ranks(low.mesh.size)
    of_stages = []
    for index in range(RANKS):
        ranks = low.mesh.at(pp=index)
        planned = max(low.memory(rank).peak_bytes["device"] for rank in ranks)
        of_stages.append((planned, max(held[rank] for rank in ranks)))
    differ = any(planned != most for planned, most in of_stages)
    return [f"bytes at the peak differ by stage: {of_stages}, planned and held"] if differ else []


# ---- refusals, outcomes ----


@attrs.frozen
class Refusal:
    """`says`: what planning raises; `holds`: whether the reason is true of the cell; `why`: for the list."""

    says: str
    holds: Callable[[Cell], bool]
    why: str


REFUSED: tuple[Refusal, ...] = ()


def run(cell: Cell, layers: int = LAYERS) -> Outcome:
    """Plan, check the signature, run two steps, compare. Raises AssertionError or CheckError where the cell is broken."""
    step, state, batch = step_of(cell.beside, cell.precision, layers)
    if cell.precision == "bf16":
        return _run(cell, step, state, batch)
    with cf.testing.float64():
        state, batch = doubled_inside((state, batch))
        return _run(cell, step, state, batch)


def _run(cell: Cell, step: Any, state: Any, batch: Any) -> Outcome:
    chain = staged(cell, step)
    try:
        low = chain.lower(state, batch)
    except cf.ColofuncError as error:
        known = [r for r in REFUSED if re.search(r.says, str(error)) and r.holds(cell)]
        if not known:
            raise
        return Outcome(cell, 0.0, known[0].why)
    check_program(low.program, low.mesh)
    wrong = [*signature(cell, low), *bytes_differ(chain, low, state, batch)]
    assert not wrong, "; ".join(wrong)
    return Outcome(cell, check(chain, state, batch).worst)


# ---- which cells ----


def core() -> list[Cell]:
    """All of the five columns."""
    return [Cell(*values) for values in itertools.product(SCHEDULES, ZERO, TENSOR, MEMORY, PRECISION)]


def beside(most: int = 8, seed: int = 0) -> list[Cell]:
    """Of each of the further columns so many cells of the core, with a fixed seed."""
    draw = random.Random(seed)
    found = []
    for word in BESIDE[1:]:
        found += draw.sample([attrs.evolve(cell, beside=word) for cell in core()], most)
    return found


def quick(seed: int = 0) -> list[Cell]:
    """A sample in which every entry of every column stands at least once, of cells that are planned fast.

    Whole models come first: they take long whatever the schedule, and a schedule that one of them has needs no other cell.
    """
    cells = [*core(), *(attrs.evolve(cell, beside=word) for cell in core() for word in BESIDE[1:])]
    random.Random(seed).shuffle(cells)
    missing = {(column, word) for column, words in COLUMNS.items() for word in words}
    found = []
    while missing:
        new = {c: sum(getattr(c, column) == word for column, word in missing) for c in cells}
        best = max(cells, key=lambda c: (c.beside in MODELS and ("beside", c.beside) in missing, new[c] / _effort(c)))
        found.append(best)
        missing = {(column, word) for column, word in missing if getattr(best, column) != word}
    return found


def _effort(cell: Cell) -> float:
    """About how long a cell takes: whole models, schedules that are searched, plans for memory, and each mesh axis beside `pp`, which
    doubles what is searched."""
    model = 4.0 if cell.beside in MODELS else 1.0
    model *= 2.0 if cell.schedule.startswith("auto") else 1.0
    return model * (1.5 if cell.memory != "none" else 1.0) * 2 ** len(cell.sizes)
