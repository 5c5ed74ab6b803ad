"""The combination matrix: every parallel mode beside every other, on simulated ranks, against one device.

    {none, zero1, zero2, zero3, hybrid} x {none, 1d, 1d+sp, 2d, 2.5d, 3d} x {none, ulysses, ring} x {dense, experts}
    x {float64, bf16}, on 4, 8 and 16 ranks; sampled: microbatches, adapters, clipping beside

    outcome = run(Cell("zero3", "2d", "ring", "dense", "float64", 16))

A cell is a training step of an unmodified transformers model under `cf.shard` with the plans of its modes. It is *equal* when
two AdamW steps give what the function itself gives on one device, and each mode shows its signature: where a named
parameter, its moment and the batch lie, how the products, attention or experts that it speaks for are worked on, forward
and backward, which collectives go over its axes, and that no rank does another's products. It
is *refused* when planning raises an error that `REFUSED` lists, for a cell of which its reason is true. A new mode is one line
in a table. How bfloat16 is compared stands in `narrow.py`.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod
from operator import attrgetter
from typing import Any

import attrs
import colofunc_plugins
import narrow
import torch
import transformers
from colofunc_plugins import experts, tensor, zero
from colofunc_plugins.sequence import ring, ulysses

import colofunc as cf
from colofunc.testing import check
from colofunc.testing.check import doubled_inside

LAYERS, WIDTH, VOCABULARY, ROWS, TOKENS, HEADS, EXPERTS = 2, 32, 64, 16, 16, 4, 4
RANKS = (4, 8, 16)
MOST = {"tp": 4, "x": 4, "y": 4, "z": 2, "sp": 4, "cp": 8, "ep": 4, "dpo": 2}  # ranks of an axis

# ---- modes ----

Q, O, UP, DOWN = (f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"))
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
WORK = ("colofunc.linear", "colofunc.attention", "colofunc.experts")
SHARDED, WHOLE = "some dim", "no dim"
Place = int | str  # the dim of a tensor that an axis lies on, SHARDED or WHOLE


@attrs.frozen
class Mode:
    """A column's entry. `axes`: its own mesh axes. `lies`: leaf -> axis -> where; `wires`: axis -> collectives that must be;
    `works`: operator, or module path -> axis -> what a plan calls its part in it, in forward and backward."""

    axes: tuple[str, ...] = ()
    plan: Callable[[], Any] | None = None
    lies: Mapping[str, Mapping[str, Place]] = attrs.field(factory=dict)
    wires: Mapping[str, str] = attrs.field(factory=dict)  # "all_gather|permute reduce_scatter": any of the first, and the second
    works: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)  # "g|heads": either


def _stored(params: Mapping[str, Place], moments: Mapping[str, Place], batch: Mapping[str, Place]) -> dict[str, Mapping[str, Place]]:
    weights = (Q, O)
    return {
        **{f"state.params.{w}": params for w in weights}, **{f"state.opt.exp_avg.{w}": moments for w in weights}, "batch.input_ids": batch,
    }  # fmt: skip


def _both(lies: Mapping[str, Mapping[str, Place]]) -> dict[str, Mapping[str, Place]]:
    """A weight and its moments lie alike."""
    return {f"state.{tree}.{w}": where for w, where in lies.items() for tree in ("params", "opt.exp_avg", "opt.exp_avg_sq")}


def _grid(pattern: str, first: str, second: str, depth: str = "") -> dict[str, dict[str, str]]:
    """How the two products of a pair are worked on; `first` and `second`: the axes of (rows, columns) or (inputs, outputs)."""
    words = {"summa": ("summa rows", "summa columns", "summa depth"), "3d": ("3d inputs", "3d outputs", "3d rows")}[pattern]
    return {
        path: dict(zip((*axes.split(), *depth.split()), words, strict=False))
        for path, axes in (("*.q_proj", first), ("*.up_proj", first), ("*.o_proj", second), ("*.down_proj", second))
    }


_DP = {"dp": "reduce_scatter|all_to_all all_gather|all_to_all"}
_ROWS = {"*.q_proj": {"dp": "b0"}, "*.o_proj": {"dp": "b0"}}
_COLUMNS = _both({Q: {"tp": 0}, O: {"tp": 1}})
_MEGATRON = {
    "*.q_proj": {"tp": "o"}, "*.up_proj": {"tp": "o"}, "*.o_proj": {"tp": "i"}, "*.down_proj": {"tp": "i"},
    "colofunc.attention*": {"tp": "g"},
}  # fmt: skip
_SUMMA = _both({w: {"x": 1, "y": 0} for w in (Q, O, UP, DOWN)})
_PANELS = "all_gather reduce_scatter"  # a forward product gathers panels on both axes, a gradient scatters sums on one of them
ZERO = {
    "none": Mode(),
    "zero1": Mode(("dp",), lambda: zero(1, "dp"), _stored({"dp": WHOLE}, {"dp": SHARDED}, {"dp": 0}), _DP, _ROWS),
    "zero2": Mode(("dp",), lambda: zero(2, "dp"), _stored({"dp": WHOLE}, {"dp": SHARDED}, {"dp": 0}), _DP, _ROWS),
    "zero3": Mode(("dp",), lambda: zero(3, "dp"), _stored({"dp": SHARDED}, {"dp": SHARDED}, {"dp": 0}), _DP, _ROWS),
    "hybrid": Mode(
        ("dpo", "dpi"), lambda: zero(3, "dpi", replicate="dpo"),
        _stored({"dpo": WHOLE, "dpi": SHARDED}, {"dpo": WHOLE, "dpi": SHARDED}, {"dpo": 0, "dpi": 0}),
        {"dpi": "reduce_scatter|all_to_all all_gather|all_to_all", "dpo": "all_reduce|reduce_scatter"},
        {path: {"dpo": "b0", "dpi": "b0"} for path in _ROWS},
    ),
}  # fmt: skip
TENSOR = {
    "none": Mode(),
    "1d": Mode(
        ("tp",), lambda: tensor("1d", "tp"), {**_COLUMNS, **_both({GATE_UP: {"tp": 1}})}, {"tp": "all_reduce"},
        {**_MEGATRON, "colofunc.experts*": {"tp": "f"}},
    ),
    "1d+sp": Mode(
        # From tokens split by tp to tokens split by a context axis is one permute over both, no gather.
        ("tp",), lambda: tensor("1d", "tp", sequence=True), _COLUMNS, {"tp": "all_gather|all_to_all|permute reduce_scatter|all_to_all"},
        {**_MEGATRON, "colofunc.experts*": {"tp": "b0"}},  # experts take the tokens that a rank has
    ),
    "2d": Mode(
        ("x", "y"), lambda: tensor("2d", ("x", "y")), {**_SUMMA, "batch.input_ids": {"x": 0}}, {"x": _PANELS, "y": _PANELS},
        _grid("summa", "x y", "x y"),
    ),
    "2.5d": Mode(
        ("x", "y", "z"), lambda: tensor("2.5d", ("x", "y", "z")), {**_SUMMA, "batch.input_ids": {"x": 0, "z": 0}},
        {"x": _PANELS, "y": _PANELS, "z": "all_reduce|reduce_scatter"},  # over z: gradients of weights, of which it has copies
        _grid("summa", "x y", "x y", "z"),
    ),
    "3d": Mode(
        ("x", "y", "z"), lambda: tensor("3d", ("x", "y", "z")),
        {**_both({w: {"x": 1, "y": 1, "z": 0} for w in (Q, UP)} | {w: {"x": 1, "y": 0, "z": 1} for w in (O, DOWN)}),
         "batch.input_ids": {"x": 0}},
        {"x": _PANELS, "y": _PANELS, "z": _PANELS},
        _grid("3d", "y z", "z y", "x"),  # the second product of a pair has its axes exchanged
    ),
}  # fmt: skip
CONTEXT = {
    "none": Mode(),
    "ulysses": Mode(
        ("sp",), lambda: ulysses("sp"), {"batch.input_ids": {"sp": 1}, "batch.labels": {"sp": 1}}, {"sp": "all_to_all"},
        {"colofunc.attention*": {"sp": "g|heads"}, "*.q_proj": {"sp": "b1"}},
    ),
    "ring": Mode(
        ("cp",), lambda: ring("cp"), {"batch.input_ids": {"cp": 1}, "batch.labels": {"cp": 1}}, {"cp": "permute"},
        {"colofunc.attention*": {"cp": "striped"}, "*.q_proj": {"cp": "b1"}},
    ),
}  # fmt: skip
KIND = {
    "dense": Mode(),
    "experts": Mode(
        ("ep",), lambda: experts("ep"),
        {**_both({GATE_UP: {"ep": 0}, Q: {"ep": WHOLE}}), "batch.input_ids": {"ep": 0}},
        {"ep": "all_to_all all_reduce|reduce_scatter"},
        {"colofunc.experts*": {"ep": "dispatch"}, "*.q_proj": {"ep": "b0"}},
    ),
}  # fmt: skip
COLUMNS = {"zero": ZERO, "tensor": TENSOR, "context": CONTEXT, "kind": KIND, "precision": {"float64": Mode(), "bf16": Mode()}}
EXTRAS = ("", "clip", "accumulate", "lora")


@attrs.frozen
class Cell:
    zero: str = "none"
    tensor: str = "none"
    context: str = "none"
    kind: str = "dense"
    precision: str = "float64"
    ranks: int = 4
    extra: str = ""

    def __str__(self) -> str:
        words = [w for w in (self.zero, self.tensor, self.context) if w != "none"]
        return "-".join([*words, self.kind, self.precision, *([self.extra] if self.extra else []), str(self.ranks)])

    @property
    def modes(self) -> tuple[Mode, ...]:
        return tuple(table[getattr(self, column)] for column, table in COLUMNS.items())

    @property
    def sizes(self) -> dict[str, int] | None:
        """Ranks of each axis: 2, and what is left goes round, the first axes first; None: they do not fit."""
        axes = [a for mode in self.modes for a in mode.axes] or ["dp"]
        found, at = dict.fromkeys(axes, 2), 0
        if 2 ** len(axes) > self.ranks:
            return None
        while prod(found.values()) < self.ranks:
            grows = [a for a in axes if found[a] * 2 <= MOST.get(a, 16)]
            if not grows:
                return None
            # The axis that has grown least; among these another one for each number of ranks and row of the matrix.
            least = min(found[a] for a in grows)
            grows = [a for a in grows if found[a] == least]
            found[grows[(at + len(str(self))) % len(grows)]] *= 2
            at += 1
        return found


# ---- the step ----


@functools.cache
def module_of(kind: str, dtype: torch.dtype, layers: int = LAYERS) -> Any:
    """The model, once: cells do not change it."""
    torch.manual_seed(0)
    size = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=HEADS,
                max_position_embeddings=TOKENS, bos_token_id=1, eos_token_id=1)  # fmt: skip
    if kind == "dense":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=2 * WIDTH, **size)).to(dtype)
    more = dict(intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=2, experts_implementation="grouped_mm")
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**more, **size)).to(dtype)


@functools.cache
def step_of(kind: str, extra: str = "", precision: str = "float64", layers: int = LAYERS) -> tuple[Any, Any, Any]:
    """(step, state, batch) of a cell, before any transform."""
    wide = precision == "float64"
    model = cf.functional(module_of(kind, torch.float64 if wide else torch.float32, layers))
    torch.manual_seed(1)  # after the module: whether it was made before must not change what is drawn next
    if extra == "lora":
        model = cf.lora(model, where="*.q_proj", rank=4)
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2, eps=1e-5 if wide else narrow.EPS)
    step, state = cf.train_step(model, opt, clip=0.5 if extra == "clip" else None)
    ids = torch.randint(2, VOCABULARY, (ROWS, TOKENS))
    labels = ids.clone()
    labels[0, 3:9] = -100  # a mean of means would be wrong
    return step, state, {"input_ids": ids, "labels": labels}


@functools.cache
def machine() -> cf.Topology:
    """As quick as A100s, with as much memory, and no cards: their attention kernels have workspaces, which simulated ranks do not."""
    topology = cf.topology("16xa100-80g")
    return attrs.evolve(topology, device=attrs.evolve(topology.device, name="cpu"))


def mesh_of(cell: Cell) -> cf.Mesh:
    return cf.Mesh(**(cell.sizes or {}), topology=machine())


def staged(cell: Cell, step: Any) -> Any:
    """The step with everything that the cell names."""
    plans = [mode.plan() for mode in cell.modes if mode.plan is not None]
    step = cf.shard(step, mesh_of(cell), *plans, plugins=[colofunc_plugins])
    step = cf.accumulate(step, microbatches=2) if cell.extra == "accumulate" else step
    return cf.precision(step, "bf16") if cell.precision == "bf16" else step


# ---- signatures ----


def signature(cell: Cell, low: Any) -> list[str]:
    """What a cell does not show of its modes; empty if all is there."""
    specs = {leaf.name: leaf.spec for leaf in low.plan.inputs}
    calls: dict[str, set[str]] = {}
    for kind, axes in low.cost().calls:
        for axis in axes.split(","):
            calls.setdefault(axis.split("[")[0], set()).add(kind)  # "dpi[1:4]" is a part of an axis
    for axes in [axes.split(",") for kind, axes in low.cost().calls if kind == "permute" and "," in axes]:
        both = set().union(*(calls[axis.split("[")[0]] for axis in axes))  # axes that exchange ranks: a gather over one is over either
        calls |= {axis.split("[")[0]: both for axis in axes}
    wrong = []
    for mode in cell.modes:
        for leaf, where in mode.lies.items():
            if cell.extra == "lora" and leaf not in specs:
                leaf = leaf.replace("state.params.", "frozen.")  # under adapters the weights of the model lie there
            if leaf not in specs:
                if not _without(cell, leaf):
                    wrong.append(f"no leaf {leaf}")
                continue
            spec = specs[leaf]
            if cell.precision == "bf16" and leaf.startswith("state.params."):  # masters: stages 1 and 2 store them as moments
                where = {a: SHARDED if a == "dp" else w for a, w in where.items()}
            wrong += [f"{leaf} lies as {spec!r}, and {a} should be on {w}" for a, w in where.items() if not meets(spec, a, w)]
        for axis, wanted in mode.wires.items():
            for some in wanted.split():
                if not set(some.split("|")) & calls.get(axis, set()):
                    wrong.append(f"no {some} over {axis}, only {sorted(calls.get(axis, ()))}")
        wrong += _worked(cell, low.plan, mode)
    cover = low.coverage()
    if cover.fallbacks:
        wrong.append(f"operators without a rule: {cover.fallbacks}")
    if any(mode.axes for mode in cell.modes) and cover.efficiency < 0.9:
        wrong.append(f"ranks do one another's work: {cover.efficiency:.0%} of the flops of a perfect split")
    return wrong


def _worked(cell: Cell, plan: cf.Plan, mode: Mode) -> list[str]:
    """Products, attention and experts that a mode speaks for and that are worked on in another way, or not there."""
    wrong = []
    for glob, where in mode.works.items():
        names = attrgetter("target" if glob.startswith("colofunc.") else "path")
        found = [d for d in plan.decisions if fnmatchcase(names(d), glob) and d.target.startswith(WORK)]
        if cell.extra == "lora" and glob == "*.q_proj":  # its adapter's two products stand under the same path
            continue
        if not found and not _without(cell, glob):
            wrong.append(f"no product {glob}")
        for d in found:
            for axis, words in where.items():
                if dict(d.axes).get(axis) not in words.split("|"):
                    wrong.append(f"{d.path} {d.target} is worked on as {dict(d.axes)}, and {axis} should be {words}")
    return wrong


def _without(cell: Cell, name: str) -> bool:
    """Whether a cell's model has no such weight or product: adapters and experts stand in the place of others."""
    if "experts" in name:
        return cell.kind == "dense" or (cell.extra == "lora" and name.startswith("state.opt."))
    return cell.extra == "lora" or (cell.kind == "experts" and re.search(r"(up|down)_proj(\.weight)?$", name) is not None)


def meets(spec: str, axis: str, where: Place) -> bool:
    dims = [d for d, dim in enumerate(_dims(spec)) if axis in dim.split()]
    return not dims if where == WHOLE else bool(dims) if where == SHARDED else dims == [where]


def _dims(spec: str) -> list[str]:
    """`(tp dp a) b` -> ["tp dp a", "b"]."""
    return [a or b for a, b in re.findall(r"\(([^)]*)\)|(\S+)", spec)]


# ---- refusals ----


@attrs.frozen
class Refusal:
    """`says`: what planning raises; `holds`: whether the reason is true of the cell; `why`: for the list."""

    says: str
    holds: Callable[[Cell, Mapping[str, int]], bool]
    why: str


REFUSED: tuple[Refusal, ...] = ()
"""None: every entry of every column goes beside every other, on the sizes that are here."""


@attrs.frozen
class Outcome:
    """`refused`: why, "" if equal. `worst`: the largest difference, of what is allowed in bf16."""

    cell: Any  # a `Cell` of this matrix or of another
    worst: float
    refused: str = ""


def run(cell: Cell, layers: int = LAYERS) -> Outcome:
    """Plan, check the signature, run two steps, compare. Raises AssertionError or CheckError where the cell is broken."""
    step, state, batch = step_of(cell.kind, cell.extra, cell.precision, layers)
    if cell.precision == "bf16":
        known = known_of(cell.kind, cell.extra, layers)
        return _run(cell, staged(cell, step), state, batch, functools.partial(narrow.check, known=known))
    with cf.testing.float64():
        state, batch = doubled_inside((state, batch))
        return _run(cell, staged(cell, step), state, batch, check)


@functools.cache
def known_of(kind: str, extra: str, layers: int) -> narrow.Known:
    """What the narrow step of a kind does on one device; the same for all its cells."""
    step, state, batch = step_of(kind, extra, "bf16", layers)
    return narrow.measured(staged(Cell(kind=kind, precision="bf16", extra=extra), step).reference, state, batch)


def _run(cell: Cell, step: Any, state: Any, batch: Any, compare: Callable[..., Any]) -> Outcome:
    try:
        low = step.lower(state, batch)
    except cf.ColofuncError as error:
        sizes = cell.sizes or {}
        known = [r for r in REFUSED if re.search(r.says, str(error)) and r.holds(cell, sizes)]
        if not known:
            raise
        return Outcome(cell, 0.0, known[0].why)
    wrong = signature(cell, low)
    assert not wrong, f"{cell} on {cell.sizes}: " + "; ".join(wrong) + f"\n{low.plan}"
    return Outcome(cell, compare(step, state, batch).worst)


# ---- which cells ----


def every() -> Iterator[Cell]:
    """All cells whose axes fit their ranks."""
    for ranks, values in itertools.product(RANKS, itertools.product(*COLUMNS.values())):
        cell = Cell(*values, ranks)
        if cell.sizes is not None:
            yield cell


def modes_in(cell: Cell) -> int:
    """How many columns are not at their first entry."""
    return sum(getattr(cell, column) != next(iter(table)) for column, table in COLUMNS.items())


def chosen(most: int, seed: int = 0) -> list[Cell]:
    """All single modes and all pairs on all ranks that they fit, and with a fixed seed of triples and more up to `most` cells in all."""
    cells = list(every())
    few = [c for c in cells if modes_in(c) <= 2]
    many = [c for c in cells if modes_in(c) > 2]
    draw = random.Random(seed)
    more = draw.sample(many, min(len(many), max(0, most - len(few))))
    beside = [attrs.evolve(c, extra=extra) for extra in EXTRAS[1:] for c in draw.sample(cells, 12)]
    threes = (Cell("zero1", context="ring", kind="experts", ranks=8), Cell("hybrid", context="ring", ranks=8), *BESIDE)
    return list(dict.fromkeys([*few, *more, *threes, *beside]))


BESIDE = (Cell("zero3", "1d", "none", "experts", ranks=8),)


def quick(seed: int = 0) -> list[Cell]:
    """A sample in which every entry of every column stands at least once, on the smallest meshes that hold it, and `BESIDE`.

    Pairs, because planning over three axes takes five times what planning over two does; the sweep has the rest.
    """
    cells, draw = [c for c in every() if modes_in(c) > 1], random.Random(seed)
    draw.shuffle(cells)
    missing = {(column, name) for column, table in COLUMNS.items() for name in table} | {("ranks", n) for n in RANKS}
    found = []
    while missing:
        new = {c: sum(getattr(c, column) == name for column, name in missing) for c in cells}
        # Two axes where some pair on them has something new, three where none has.
        best = max((c for c in cells if new[c]), key=lambda c: (-max(2, len(c.sizes or {})), new[c], c.precision == "float64"))
        found.append(best)
        missing = {(column, name) for column, name in missing if getattr(best, column) != name}
    return [*found, *BESIDE]
