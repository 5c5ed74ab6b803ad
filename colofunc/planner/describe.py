"""What each mesh axis does, in the field's words.

Problem: `{dp: b0, tp: o}` on two hundred operators is exact, but people say "ZeRO-3" and "Megatron". Idea: look at the
operators that do the work (products, convolutions, attention), ask of each where an axis lies on its operand and its
result, and weigh by flops; then look at how parameters, gradients and optimizer state are kept.

    x            y            says                     parameters          state     says
    dim 0        dim 0        batch                    whole               whole     data parallel
    middle dim   middle dim   sequence                 whole               on axis   ZeRO-1 (ZeRO-2: gradients too)
    -            last dim     column                   on axis             on axis   ZeRO-3
    last dim     pending      row                      gathered once       on axis   ZeRO-1, of float32 masters
    experts' weights by expert                         expert parallel

What is sequence parallel around attention has a name by what attention does: by heads it is Ulysses, by rows it is
context parallel. A plugin's own pattern is said by its word: "context parallel (ring)", "tensor parallel (summa)".

Source: ZeRO (1910.02054), Megatron-LM (1909.08053), its sequence parallelism (2205.05198), Ulysses (2309.14509).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import prod

import attrs

from colofunc.mesh import Mesh
from colofunc.planner.sharding.classes import starred
from colofunc.program.ir import Node, Program
from colofunc.spec.layout import Layout, axes_of
from colofunc.spec.rule import Strategy

HEAVY = ("linear", "mm", "addmm", "bmm", "baddbmm", "convolution", "attention", "grouped", "matmul")
NAMED = 3
"""At most this many operators are named in a line."""
WORTH_NAMING = 0.1
"""A plan names the products that are whole on every rank where they are at least this share of the work."""
FACTOR = re.compile(r"[a-z]{1,2}\d*|whole")  # of a rule; a plugin calls its patterns by longer words
UNUSED = "unused: every rank computes everything"
KINDS = ("batch", "sequence", "column", "row", "heads", "whole")


@attrs.frozen
class Shares:
    """Shares in 0..1 of one axis: of heavy forward work by kind, of bytes of parameters, gradients and state split."""

    work: Mapping[str, float]
    params: float
    grads: float
    states: float
    vocabulary: bool
    stream_sequence: bool  # what flows between the heavy operators is split along a middle dim
    experts: bool = False  # experts lie on it
    attention: str = ""  # what most of attention has it on: a factor of the rule, or the word of a pattern
    products: str = ""  # the same of all other heavy work
    other_work: float = 0.0  # of the results of all other forward operators, where there is no heavy work


def describe(
    program: Program, mesh: Mesh, strategies: Sequence[Strategy], inputs: Mapping[int, Layout],
    once: Collection[int] = (), each: bool = False,
) -> tuple[tuple[str, str], ...]:  # fmt: skip
    """(axis, words) for every axis of more than one rank.

    What somebody asked for: `once`, parameters that are gathered once and kept so; `each`, that each microbatch reduces
    gradients.
    """
    axes = [a for a in mesh.axis_names if mesh.axis_size(a) > 1]
    masters = _masters(program).intersection(once)
    return tuple((a, words(shares(program, strategies, inputs, a, masters, each))) for a in axes)


def repeated(program: Program, mesh: Mesh, strategies: Sequence[Strategy], axis: str) -> str:
    """A line that names the products which every rank of an axis does whole, where these are a part worth naming; else
    "".
    """
    whole: dict[str, float] = {}
    total = 0.0
    for node, s in zip(program.nodes, strategies, strict=True):
        name = node.target.split(".")[1] if "." in node.target else node.target
        if node.phase == "forward" and name.startswith(HEAVY) and s.ins and s.outs[0] is not None:
            weight = _weight(program, node)
            total += weight
            if kind_of(name, s, axis) == "whole":
                said = f"{name} in {starred(node.path)!r}"
                whole[said] = whole.get(said, 0.0) + weight
    share = sum(whole.values()) / total if total else 0.0
    if not WORTH_NAMING <= share < 1:
        return ""
    most = sorted(whole, key=lambda said: -whole[said])
    more = f" and {len(most) - NAMED} more" if len(most) > NAMED else ""
    return (
        f"{axis}: each of {mesh.axis_size(axis)} ranks does {100 * share:.0f} % of the products whole, "
        f"{', '.join(most[:NAMED])}{more}: "
        "what reads their results needs whole rows (a norm, a choice of the largest), or a size does not divide"
    )


def _masters(program: Program) -> set[int]:
    """Parameters that forward reads in a narrower dtype only."""
    masters, values = {i for i in program.inputs if program.values[i].role == "param"}, program.values
    for node in program.nodes:
        if node.phase == "forward":
            casts = node.target == "aten._to_copy.default"
            narrows = casts and values[node.outs[0]].dtype.itemsize < values[node.refs[0]].dtype.itemsize  # type: ignore[index]
            masters.difference_update(() if narrows else node.refs)
    return masters


def words(s: Shares) -> str:
    """The field's name of what one axis does."""
    if s.experts:
        return "expert parallel"
    if named := _pattern(s):
        return named + (", weights sharded (ZeRO-3)" if s.params > 0.5 and not named.startswith("tensor") else "")
    dims = {
        "batch": s.work["batch"],
        "sequence": s.work["sequence"],
        "tensor": s.work["column"] + s.work["row"] + s.work["heads"],
        "whole": s.work["whole"],
    }
    kind, share = max(dims.items(), key=lambda item: item[1])
    if kind == "batch":
        text = _data_parallel(s)
    elif kind == "sequence":
        text = "sequence parallel" + (", weights sharded (ZeRO-3)" if s.params > 0.5 else "")
    elif kind == "tensor":
        text = _tensor(s)
    else:
        text = _whole(s)
    if s.vocabulary and kind == "tensor":
        text += ", vocabulary parallel"
    others = [f"{100 * n:.0f} % {k}" for k, n in dims.items() if k != kind and n >= 0.2]
    return f"mostly {text}, {' and '.join(others)}" if others and share < 0.8 else text


def _whole(s: Shares) -> str:
    """An axis along which every rank does the same work."""
    if s.params > 0.5:
        return "sharded storage, gathered for use"
    if s.states > 0.5:
        return "sharded optimizer state, every rank computes everything"
    if s.other_work > 0.5:
        return "elementwise work split"
    return UNUSED


def _pattern(s: Shares) -> str:
    """The name of sequence sharding by what attention does, or of a pattern of a plugin; "" for all else."""
    if s.products and not FACTOR.fullmatch(s.products):
        return f"tensor parallel ({s.products})"
    sequence = s.work["sequence"] > s.work["column"] + s.work["row"] + s.work["batch"] + s.work["whole"]
    if sequence and s.attention in ("g", "r", "heads"):
        return "Ulysses"
    if s.attention and not FACTOR.fullmatch(s.attention):
        return f"context parallel ({s.attention})"
    if sequence:
        return {"s": "context parallel (gathered keys)"}.get(s.attention, "")
    return ""


def _data_parallel(s: Shares) -> str:
    if s.params > 0.5:
        return "ZeRO-3"
    if s.states > 0.5:
        return "ZeRO-2" if s.grads > 0.5 else "ZeRO-1"
    return "data parallel"


def _tensor(s: Shares) -> str:
    column, row = s.work["column"], s.work["row"]
    if min(column, row) >= 0.15 * (column + row):
        return "Megatron column/row" + (" with sequence parallel" if s.stream_sequence else "")
    if column > row:
        return "column parallel"
    return "row parallel" if row else "split by heads"


def shares(
    program: Program, strategies: Sequence[Strategy], inputs: Mapping[int, Layout], axis: str,
    masters: Collection[int] = (), each: bool = False,
) -> Shares:  # fmt: skip
    """Where `axis` lies, as shares.

    `masters`: parameters that are optimizer state, whose casts are what is computed with.
    """
    work = dict.fromkeys(KINDS, 0.0)
    grads = [0.0, 0.0]
    stream = [0.0, 0.0]
    other_work = [0.0, 0.0]
    vocabulary = experts = False
    on: dict[bool, dict[str, float]] = {True: {}, False: {}}  # of attention, of the rest: weight per factor
    for node, s in zip(program.nodes, strategies, strict=True):
        name = node.target.split(".")[1] if "." in node.target else node.target
        if node.phase == "forward" and name.startswith(HEAVY) and s.ins and s.outs[0] is not None:
            work[kind_of(name, s, axis)] += (weight := _weight(program, node))
            tally, factor = on[name.startswith("attention")], dict(s.axes).get(axis, "whole")
            tally[factor] = tally.get(factor, 0.0) + weight
        elif name == "experts":
            experts |= axis in axes_of(s.ins[3].dims[0])
        elif name == "embedding" and s.ins:
            vocabulary |= any(axis in axes_of(lay.dims[0]) for lay in s.ins if len(lay.shape) == 2)
        elif node.phase == "forward" and name in ("add", "layer_norm", "native_layer_norm") and s.outs[0] is not None:
            out = s.outs[0]
            _count(stream, out, any(axis in axes_of(out.dims[d]) for d in range(1, len(out.shape) - 1)))
        elif node.phase == "forward" and s.outs and s.outs[0] is not None:
            _count(other_work, s.outs[0], axis in s.outs[0].axes)
        for o, lay in zip(node.outs, s.outs, strict=True):
            widened = bool(masters) and name == "_to_copy"  # already reduced to what updates the masters
            if o is not None and lay is not None and program.values[o].role == "grad" and not widened:
                _count(grads, lay, axis in lay.axes)
    total = sum(work.values())
    kept = {role: [0.0, 0.0] for role in ("param", "state")}
    for id, lay in inputs.items():
        role = "state" if id in masters else program.values[id].role
        role = "param" if role == "frozen" else role
        if role in kept:
            _count(kept[role], lay, axis in lay.axes)
    return Shares(
        {k: (n / total if total else float(k == "whole")) for k, n in work.items()},
        _share(kept["param"]),
        1.0 if each else _share(grads),
        _share(kept["state"]),
        vocabulary,
        _share(stream) > 0.5,
        experts,
        _most(on[True]),
        _most(on[False]),
        0.0 if total else _share(other_work),
    )


def _most(weights: Mapping[str, float]) -> str:
    """What holds more than half, "" if nothing does."""
    return next((name for name, weight in weights.items() if weight > 0.5 * sum(weights.values())), "")


def kind_of(name: str, s: Strategy, axis: str) -> str:
    """batch, sequence, column, row, heads or whole: where the axis lies on operand 0 and result 0."""
    x, y = s.ins[0], s.outs[0]
    assert y is not None
    if axis in (a for a, _ in y.pending):
        return "row"
    for d in range(len(y.shape)):
        if axis in axes_of(y.dims[d]):
            # of rows (b (cp s)) that are flat
            inner = len(y.shape) == 2 and next(a for n, a in y.dims[d] if n > 1) is None
            return "sequence" if d == 0 and inner else _dim_word(name, d, len(y.shape))
    return "row" if axis in x.axes else "whole"


def _dim_word(name: str, d: int, dims: int) -> str:
    """What dim `d` of an operator's result is."""
    words: tuple[str, ...]
    if name.startswith("convolution"):
        words, rest = ("batch", "column"), "sequence"
    elif name.startswith("attention"):
        words, rest = ("batch", "heads"), "sequence"
    elif name in ("bmm", "baddbmm"):
        words, rest = ("batch", "sequence"), "column"
    elif d == dims - 1:
        return "column"
    else:
        words, rest = ("batch",), "sequence"
    return words[d] if d < len(words) else rest


def _weight(program: Program, node: Node) -> float:
    """Roughly the flops: for y[b, o] = x[b, i] w[i, o] the root of |x| |w| |y| is b i o."""
    operands = sorted(prod(program.values[r].shape) for r in node.refs)[-2:]
    out = next((prod(program.values[o].shape) for o in node.results), 1)
    return float(prod(operands) * out) ** 0.5


def _count(tally: list[float], layout: Layout, hit: bool) -> None:
    elements = prod(layout.shape)
    tally[0] += elements * hit
    tally[1] += elements


def _share(tally: Sequence[float]) -> float:
    return tally[0] / tally[1] if tally[1] else 0.0
