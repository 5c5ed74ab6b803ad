"""Rules over time: what the nodes of a *local* program do with the factors of their dims.

Operators have their rule from the registry. A local program has more: collectives, layout moves, and random operators
that already know where their part of the global tensor lies. Seen from time they are operators like any other:

    all_gather       d* -> [n] d*           over dp, say: n counts its members, time may be on any d
    reduce_scatter   [n] d* -> d*
    rearrange        the pattern it carries
    dropout, placed  d* -> d*               a part of a part: sizes, strides and offset are refined

A pending sum over time is accumulated before a collective, so that a gradient is reduced over the mesh once, after the
loop, and not once per microbatch; where memory is short, it passes reduce_scatter. Taking a part is no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import attrs
import torch

from colofunc.errors import ProgramError
from colofunc.mesh import Mesh
from colofunc.ops.collectives import axis_index
from colofunc.ops.targets import argument_at, argument_names
from colofunc.program.cost import RuleOf
from colofunc.program.facts import facts_of, sides
from colofunc.program.ir import map_refs
from colofunc.spec.layout import Dim, Layout, make_layout
from colofunc.spec.rule import Call, Factors, Operand, Ref, Rule
from colofunc.spec.rules.attention_call import AttentionCall
from colofunc.spec.rules.local import rerun


def time_rule(call: Call, rule_of: RuleOf) -> Rule | None:
    """The rule of one call of a local program; None where it has to run whole."""
    own = _RULES.get(call.target)
    if own is not None:
        return own(call)
    if facts_of(call.target).draws_by_place and _is_placed(call):
        return _placed(call, rule_of)
    return rule_of(call)


def _whole(call: Call) -> Rule | None:
    """No rule: once for all microbatches."""
    return None


def _dims(shape: Iterable[int], first: int = 0) -> tuple[Operand, dict[str, int]]:
    names = {f"d{place}": size for place, size in enumerate(shape, first)}
    return tuple((name,) for name in names), names


def _same(call: Call) -> Rule | None:
    """d* -> d*"""
    dims, sizes = _dims(call.ins[0].shape)
    return Rule((dims,), (dims,), sizes)


def _gather(call: Call) -> Rule | None:
    """d* -> [n] d*"""
    dims, sizes = _dims(call.ins[0].shape)
    return Rule((dims,), ((("n",), *dims),), {"n": call.args[2], **sizes}, whole=frozenset("n"))


def _chunk(call: Call) -> Rule | None:
    """[n] d* -> d*"""
    dims, sizes = _dims(call.ins[0].shape[1:])
    linear = (frozenset({0}),) if call.target == "colofunc.take_shard" or call.args[3] == "sum" else ()
    return Rule(
        ((("n",), *dims),),
        (dims,),
        {"n": call.args[2], **sizes},
        whole=frozenset("n"),
        reduce={"n": "sum"},
        linear=linear,
    )


def _chunks(call: Call) -> Rule | None:
    """[n] d* -> [n] d*

    Where only some rows travel, the operand that says how many has d0, too, and how many are expected follows.
    """
    dims, sizes = _dims(call.ins[0].shape[1:])
    both: Operand = (("n",), *dims)
    rows = (dims[:1],) if len(call.ins) > 1 else ()

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Any:
        share = ins[1].shape[0] // max(1, ins[1].local_shape[0])
        return (*call.args[:4], -(-call.arg(4, "expected", 0) // share)), call.kwargs

    return Rule(
        (both, *rows), (both,), {"n": call.args[2], **sizes}, whole=frozenset("n"), localize=localize if rows else None
    )


def _rearrange(call: Call) -> Rule | None:
    """The pattern itself; the sizes that the call names become local ones."""
    _, pattern, names, given = call.args
    left, right = (tuple(map(tuple, side)) for side in sides(pattern))
    sizes = dict(zip(names, given, strict=True))
    for dim, size in zip(left, call.ins[0].shape, strict=True):
        for name in dim:
            if name not in sizes:
                known = prod(sizes.get(other, 1) for other in dim)
                sizes[name] = size // max(1, known)

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Any:
        local = {**sizes, **_local(left, sizes, ins[0])}
        return (call.args[0], pattern, names, tuple(local[name] for name in names)), call.kwargs

    return Rule((left,), (right,), sizes, linear=(frozenset({0}),), localize=localize)


def _local(operand: tuple[Factors, ...], sizes: Mapping[str, int], layout: Layout) -> dict[str, int]:
    """Local sizes of the factors of dims that are cut in whole atoms."""
    found: dict[str, int] = {}
    for dim, atoms in zip(operand, layout.dims, strict=True):
        rest = [list(atom) for atom in atoms]
        for name in dim:
            left, local = sizes[name], 1
            while left > 1:
                step = min(left, int(rest[0][0] or 1))
                local *= 1 if rest[0][1] is not None else step
                left //= step
                rest[0][0] = int(rest[0][0] or 1) // step
                if rest[0][0] == 1:
                    rest.pop(0)
            found[name] = local
    return found


_RULES: dict[str, Callable[[Call], Rule | None]] = {
    "colofunc.all_reduce": _same,
    "colofunc.permute": _same,
    "colofunc.send": _same,
    "colofunc.keep_first": _same,
    "colofunc.all_gather": _gather,
    "colofunc.take_shard": _chunk,
    "colofunc.reduce_scatter": _chunk,
    "colofunc.all_to_all": _chunks,
    "colofunc.rearrange": _rearrange,
    "colofunc.debug": _whole,
}


def with_time(layout: Layout | None, over: Layout) -> Layout | None:
    """The layout over mesh and time together: `(dp a) b` whose local part lies as `(time a) b` is `(dp time a) b`."""
    if over.is_replicated:
        return layout
    if layout is None or layout.is_padded or layout.tier != "device" or 0 in layout.shape:
        return None
    dims = []
    for mine, theirs in zip(layout.dims, over.dims, strict=True):
        rest = [list(atom) for atom in theirs]
        atoms: list[tuple[int, str | None]] = []
        for size, owner in mine:
            if owner is not None:
                atoms.append((size, owner))
                continue
            while size > 1:
                n = int(rest[0][0] or 1)
                step = min(n, size)
                if n % step or size % step or (rest[0][1] is not None and step != n):
                    return None
                atoms.append((step, rest[0][1]))  # type: ignore[arg-type]
                size //= step
                rest[0][0] = n // step
                if rest[0][0] == 1:
                    rest.pop(0)
        dims.append(tuple(atoms))
    return make_layout(
        tuple(dims), layout.shape, (*layout.pending, *over.pending), layout.tier, layout.scheme, layout.at
    )


# ---- one element per row ----


def index_of_rows(call: Call) -> tuple[int, ...]:
    """Operands that index dims 0 and 1 together, `x[rows, columns]`, with one index per row; () for other calls."""
    if call.target not in ("aten.index.Tensor", "aten.index_put.default"):
        return ()
    x, indices = call.args[:2]
    if len(indices) != 2 or not all(isinstance(index, Ref) for index in indices):
        return ()
    shape = call.ins[x.id].shape
    rows = shape[:1]
    if any(call.ins[index.id].shape != rows for index in indices):
        return ()
    if call.target == "aten.index_put.default" and call.ins[call.args[2].id].shape != rows + shape[2:]:
        return ()
    return tuple(index.id for index in indices)


def rows_rule(call: Call) -> Rule:
    """b [w] d*, b, b -> b d*, for `x[arange(b), columns]`

    Row t of the result is of row t of x, so rows may be split.
    """
    x, put = call.args[0].id, call.target == "aten.index_put.default"
    shape = call.ins[x].shape
    rest, sizes = _dims(shape[2:], 2)
    whole: Operand = (("b",), ("w",), *rest)
    part: Operand = (("b",), *rest)
    rows, columns = index_of_rows(call)
    ins = {x: whole, rows: (("b",),), columns: (("b",),)}
    if put:
        ins[call.args[2].id] = part
    sizes |= {"b": shape[0], "w": shape[1]}

    def code(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Callable[..., Any]:
        count = ins[rows].local_shape[0]

        def local(*shards: torch.Tensor, mesh: Mesh) -> Any:
            operands = list(shards)
            operands[rows] = torch.arange(count)
            return rerun(call, operands, {})

        return local

    operands = tuple(ins[position] for position in range(len(call.ins)))
    return Rule(operands, (whole if put else part,), sizes, whole=frozenset("w"), local=code)


# ---- random operators that know their place ----


def _is_placed(call: Call) -> bool:
    first = argument_at(call.target, "sizes")
    return bool(call.arg(first, "sizes", ())) or isinstance(call.arg(first + 2, "offset"), Ref)


def _placed(call: Call, rule_of: RuleOf) -> Rule | None:
    """The operator's own rule for a call that knows no place, with local code that refines the place it knows."""
    first = argument_at(call.target, "sizes")
    offset = call.arg(first + 2, "offset")
    at = offset.id if isinstance(offset, Ref) else len(call.ins)
    rule = rule_of(_without_place(call, first, at))
    if rule is None:
        return None

    # The rule is of the operands without the offset: those behind it move up by one.
    def moved(positions: Iterable[int]) -> frozenset[int]:
        return frozenset(position + (position >= at) for position in positions)

    ins = rule.ins
    if at < len(call.ins):
        ins = (*ins[:at], (), *ins[at:])
    return attrs.evolve(
        rule,
        ins=ins,
        linear=tuple(moved(operands) for operands in rule.linear),
        addends=moved(rule.addends),
        localize=None,
        local=_refined,
    )


def _without_place(call: Call, first: int, at: int) -> Call:
    """The call with `sizes, strides, offset` as on one device and without the offset among its operands."""
    args = [*call.args]
    for position, value in ((first, ()), (first + 1, ()), (first + 2, None)):
        if position < len(args):
            args[position] = value
    kwargs = tuple((k, v) for k, v in call.kwargs if k not in ("sizes", "strides", "offset"))
    renumbered = map_refs((tuple(args), kwargs), lambda k: Ref(k - (k > at)))
    return attrs.evolve(call, args=renumbered[0], kwargs=renumbered[1], ins=(*call.ins[:at], *call.ins[at + 1 :]))


def _refined(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Callable[..., Any] | None:
    first = argument_at(call.target, "sizes")
    shape_at = argument_at(call.target, "shape") if "shape" in argument_names(call.target) else None
    dims, placed = _place_dims(call, ins, outs)
    if not any(axis for dim in dims for _, axis in dim):
        return None
    old = call.arg(first + 2, "offset")
    sizes, strides, steps = refine(call.arg(first, "sizes", ()), call.arg(first + 1, "strides", ()), dims, placed)
    local_shape = [_local_size(dim) for dim in dims]

    def local(*shards: torch.Tensor, mesh: Mesh) -> Any:
        offset: Any = shards[old.id] if isinstance(old, Ref) else 0
        for axis, stride in steps:
            offset = offset + axis_index((axis,), mesh) * stride
        changes: dict[tuple[int, str], Any] = {
            (first, "sizes"): sizes, (first + 1, "strides"): strides, (first + 2, "offset"): offset,
        }  # fmt: skip
        if shape_at is not None:
            changes[shape_at, "shape"] = local_shape
        return rerun(call, shards, changes)

    return local


def _local_size(dim: Dim) -> int:
    """The product of the factors of a dim that no axis takes."""
    return prod(size for size, axis in dim if axis is None)


def _place_dims(
    call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]
) -> tuple[tuple[Dim, ...], tuple[int, ...]]:
    """Dims (over time) of the tensor whose elements are counted, and its shape."""
    if call.target not in AttentionCall.TARGETS:
        assert outs[0] is not None
        return outs[0].dims, outs[0].shape
    # The weights (b, h, queries, keys). The backward operator has the gradient in front of its queries.
    first = 1 if call.target == AttentionCall.BACKWARD else 0
    query, key = ins[call.args[first].id], ins[call.args[first + 1].id]
    keys = key.shape[2]
    return (*query.dims[:3], ((keys, None),)), (*query.shape[:3], keys)


def refine(
    sizes: Iterable[int], strides: Iterable[int], dims: tuple[Dim, ...], shape: tuple[int, ...]
) -> tuple[list[int], list[int], list[tuple[str, int]]]:
    """Sizes and strides of what time leaves of the atoms (sizes, strides) of `shape`, and (axis, stride) of what it
    takes.

    >>> refine((4, 3), (6, 1), (((2, "time"), (2, None)), ((3, None),)), (4, 3))
    ([2, 3], [6, 1], [('time', 12)])
    """
    atoms = [[size, stride] for size, stride in zip(sizes, strides, strict=True) if size != 1]
    if not atoms and prod(shape) > 1:
        atoms = [[size, prod(shape[dim + 1 :])] for dim, size in enumerate(shape) if size != 1]
    left: list[tuple[int, int]] = []
    taken: list[tuple[str, int]] = []
    for dim in dims:
        left_before = len(left)
        for size, axis in dim:
            while size > 1:
                atom_size, stride = atoms[0]
                step = min(size, atom_size)  # the major part of the atom
                if atom_size % step or size % step or (axis is not None and step != size):
                    raise ProgramError(
                        f"{axis or 'a local factor'} of size {size} cuts across the factors {atoms} of a random tensor"
                    )
                stride *= atom_size // step
                if axis is None:
                    left.append((step, stride))
                else:
                    taken.append((axis, stride))
                size //= step
                atoms[0][0] //= step
                if atoms[0][0] == 1:
                    atoms.pop(0)
        if len(left) == left_before:
            left.append((1, 0))
    return [size for size, _ in left], [stride for _, stride in left], taken
