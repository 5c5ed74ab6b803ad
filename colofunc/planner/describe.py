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
from colofunc.ops.experts_parts import EXPERTS
from colofunc.ops.torch_facts import BATCHED_PRODUCTS, CONVOLUTIONS
from colofunc.planner.sharding.classes import starred
from colofunc.program.facts import facts_of, is_lookup, is_product
from colofunc.program.ir import Node, Program
from colofunc.spec.layout import Layout, axes_of
from colofunc.spec.rule import Strategy
from colofunc.spec.rules.attention_call import AttentionCall

NAMED = 3
"""At most this many operators are named in a line."""
WORTH_NAMING = 0.1
"""A plan names the products that are whole on every rank where they are at least this share of the work."""
FACTOR = re.compile(r"[a-z]{1,2}\d*|whole")  # of a rule; a plugin calls its patterns by longer words
UNUSED = "unused: every rank computes everything"
STREAM = frozenset(("aten.add.Tensor", "aten.native_layer_norm.default"))
"""What stands between the heavy operators of a network: sums of a residual stream, and its norms."""
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
    masters = _masters(program).intersection(once)
    described = []
    for axis in mesh.axis_names:
        if mesh.axis_size(axis) > 1:
            described.append((axis, words(shares(program, strategies, inputs, axis, masters, each))))
    return tuple(described)


def repeated_products(program: Program, mesh: Mesh, strategies: Sequence[Strategy], axis: str) -> str:
    """A line that names the products which every rank of an axis does whole, where these are a part worth naming; else
    "".
    """
    whole: dict[str, float] = {}
    total = 0.0
    for node, strategy in zip(program.nodes, strategies, strict=True):
        if not _is_heavy(node, strategy):
            continue
        weight = _weight(program, node)
        total += weight
        if axis_kind(node.target, strategy, axis) == "whole":
            said = f"{_name(node.target)} in {starred(node.path)!r}"
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


def _name(target: str) -> str:
    """As people read it: `aten.mm.default` -> `mm`."""
    return target.split(".")[1] if "." in target else target


def _is_heavy(node: Node, strategy: Strategy) -> bool:
    """Whether an operator is one by whose work an axis is named: a product, in whatever numbers its definition has it,
    or attention. Experts have a word of their own.
    """
    does_work = is_product(node.target) or node.target in AttentionCall.TARGETS
    if node.phase != "forward" or not does_work or node.target == EXPERTS:
        return False
    return bool(strategy.ins) and strategy.outs[0] is not None


def _masters(program: Program) -> set[int]:
    """Parameters that forward reads in a narrower dtype only."""
    values = program.values
    masters = {id for id in program.inputs if values[id].role == "param"}
    for node in program.nodes:
        if node.phase != "forward":
            continue
        casts = node.target == "aten._to_copy.default"
        narrows = casts and values[node.outs[0]].dtype.itemsize < values[node.refs[0]].dtype.itemsize  # type: ignore[index]
        if not narrows:
            masters.difference_update(node.refs)
    return masters


def words(shares: Shares) -> str:
    """The field's name of what one axis does."""
    if shares.experts:
        return "expert parallel"
    sharded_weights = ", weights sharded (ZeRO-3)" if shares.params > 0.5 else ""
    named = _pattern(shares)
    if named:
        return named if named.startswith("tensor") else named + sharded_weights
    work = shares.work
    kinds = {
        "batch": work["batch"],
        "sequence": work["sequence"],
        "tensor": work["column"] + work["row"] + work["heads"],
        "whole": work["whole"],
    }
    kind, share = max(kinds.items(), key=lambda item: item[1])
    if kind == "batch":
        text = _data_parallel(shares)
    elif kind == "sequence":
        text = "sequence parallel" + sharded_weights
    elif kind == "tensor":
        text = _tensor(shares)
    else:
        text = _whole(shares)
    if shares.vocabulary and kind == "tensor":
        text += ", vocabulary parallel"
    # What else takes a fifth of the work is said, unless nearly all is of one kind.
    others = []
    for other, part in kinds.items():
        if other != kind and part >= 0.2:
            others.append(f"{100 * part:.0f} % {other}")
    if others and share < 0.8:
        return f"mostly {text}, {' and '.join(others)}"
    return text


def _whole(shares: Shares) -> str:
    """An axis along which every rank does the same work."""
    if shares.params > 0.5:
        return "sharded storage, gathered for use"
    if shares.states > 0.5:
        return "sharded optimizer state, every rank computes everything"
    if shares.other_work > 0.5:
        return "elementwise work split"
    return UNUSED


def _pattern(shares: Shares) -> str:
    """The name of sequence sharding by what attention does, or of a pattern of a plugin; "" for all else."""
    if shares.products and not FACTOR.fullmatch(shares.products):
        return f"tensor parallel ({shares.products})"
    sequence = (
        shares.work["sequence"]
        > shares.work["column"] + shares.work["row"] + shares.work["batch"] + shares.work["whole"]
    )
    if sequence and shares.attention in ("g", "r", "heads"):
        return "Ulysses"
    if shares.attention and not FACTOR.fullmatch(shares.attention):
        return f"context parallel ({shares.attention})"
    if sequence:
        return {"s": "context parallel (gathered keys)"}.get(shares.attention, "")
    return ""


def _data_parallel(shares: Shares) -> str:
    if shares.params > 0.5:
        return "ZeRO-3"
    if shares.states > 0.5:
        return "ZeRO-2" if shares.grads > 0.5 else "ZeRO-1"
    return "data parallel"


def _tensor(shares: Shares) -> str:
    column, row = shares.work["column"], shares.work["row"]
    if min(column, row) >= 0.15 * (column + row):
        return "Megatron column/row" + (" with sequence parallel" if shares.stream_sequence else "")
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
    grads, stream, other_work = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    vocabulary = experts = False
    # weight by factor
    attention: dict[str, float] = {}
    products: dict[str, float] = {}
    for node, strategy in zip(program.nodes, strategies, strict=True):
        out = strategy.outs[0] if strategy.outs else None
        if _is_heavy(node, strategy):
            weight = _weight(program, node)
            work[axis_kind(node.target, strategy, axis)] += weight
            tally = attention if node.target in AttentionCall.TARGETS else products
            factor = dict(strategy.axes).get(axis, "whole")
            tally[factor] = tally.get(factor, 0.0) + weight
        elif node.target == EXPERTS:
            first_weight = facts_of(EXPERTS).weights[0]
            experts |= axis in axes_of(strategy.ins[first_weight].dims[0])
        elif is_lookup(node.target) and strategy.ins:
            vocabulary |= axis in axes_of(strategy.ins[0].dims[0])
        elif node.phase == "forward" and out is not None:
            if node.target in STREAM:
                _count(stream, out, any(axis in axes_of(dim) for dim in out.dims[1:-1]))
            else:
                _count(other_work, out, axis in out.axes)
        if masters and node.target == "aten._to_copy.default":  # already reduced to what updates the masters
            continue
        for id, layout in zip(node.outs, strategy.outs, strict=True):
            if id is not None and layout is not None and program.values[id].role == "grad":
                _count(grads, layout, axis in layout.axes)

    kept = {"param": [0.0, 0.0], "state": [0.0, 0.0]}
    for id, layout in inputs.items():
        role = "state" if id in masters else program.values[id].role
        if role == "frozen":
            role = "param"
        if role in kept:
            _count(kept[role], layout, axis in layout.axes)
    total = sum(work.values())
    work_shares = {kind: float(kind == "whole") for kind in work}
    if total:
        work_shares = {kind: weight / total for kind, weight in work.items()}
    return Shares(
        work_shares,
        _share(kept["param"]),
        1.0 if each else _share(grads),
        _share(kept["state"]),
        vocabulary,
        _share(stream) > 0.5,
        experts,
        _most(attention),
        _most(products),
        0.0 if total else _share(other_work),
    )


def _most(weights: Mapping[str, float]) -> str:
    """What holds more than half, "" if nothing does."""
    total = sum(weights.values())
    for name, weight in weights.items():
        if weight > 0.5 * total:
            return name
    return ""


def axis_kind(target: str, strategy: Strategy, axis: str) -> str:
    """batch, sequence, column, row, heads or whole: where the axis lies on operand 0 and result 0."""
    operand, result = strategy.ins[0], strategy.outs[0]
    assert result is not None
    if any(axis == pending for pending, _ in result.pending):
        return "row"
    rank = len(result.shape)
    for number, dim in enumerate(result.dims):
        if axis not in axes_of(dim):
            continue
        # Rows (b (cp s)) that are flat: the batch is the major atom, and the axis splits the sequence.
        if number == 0 and rank == 2 and next(on for size, on in dim if size > 1) is None:
            return "sequence"
        return _dim_word(target, number, rank)
    return "row" if axis in operand.axes else "whole"


def _dim_word(target: str, number: int, dims: int) -> str:
    """What dim `number` of an operator's result is."""
    words: tuple[str, ...]
    if target in CONVOLUTIONS:
        words, rest = ("batch", "column"), "sequence"
    elif target in AttentionCall.TARGETS:
        words, rest = ("batch", "heads"), "sequence"
    elif target in BATCHED_PRODUCTS:
        words, rest = ("batch", "sequence"), "column"
    elif number == dims - 1:
        return "column"
    else:
        words, rest = ("batch",), "sequence"
    return words[number] if number < len(words) else rest


def _weight(program: Program, node: Node) -> float:
    """Roughly the flops: for y[b, o] = x[b, i] w[i, o] the root of |x| |w| |y| is b i o."""
    operands = sorted(prod(program.values[ref].shape) for ref in node.refs)[-2:]
    result = prod(program.values[node.results[0]].shape) if node.results else 1
    return float(prod(operands) * result) ** 0.5


def _count(tally: list[float], layout: Layout, hit: bool) -> None:
    elements = prod(layout.shape)
    tally[0] += elements * hit
    tally[1] += elements


def _share(tally: Sequence[float]) -> float:
    return tally[0] / tally[1] if tally[1] else 0.0
