"""From a rule to every strategy it allows.

A rule says which factors an operator has; a strategy places each mesh axis on one factor, or lets a pending reduction
pass, or leaves the axis out (copies). `{dp: b, tp: o}` of linear `b* i, o i -> b* o` wants x as `(dp b) i`, w as
`(tp o) i` and gives `(dp b) (tp o)`.

    placement   factor -> its atoms, e.g. {"b0": ((2, "dp"), (4, None))}
    lay_out     an operand's dims + a placement -> its Layout
    place       the other way round: the placement that a given layout implies, or None where it cuts across factors

Strategies that are not of this form (local code with its own collectives) come from strategy functions and are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import permutations, product
from math import prod
from typing import Any

import torch

from colofunc.mesh import Mesh
from colofunc.spec.layout import Atom, Dim, Layout, make_layout, replicated
from colofunc.spec.rule import Call, Cost, Operand, Rule, Strategy, TensorType

Placement = Mapping[str, Dim]
Way = str | tuple[int, str] | None  # of one axis: a factor, a reduction that passes through (index of its set, how), nothing
Only = tuple[tuple[str, tuple[Way, ...]], ...]  # axis -> the ways that it may take; absent: all
_ANY = torch.float32  # layouts do not depend on it

# Operators that only describe memory anew: they cost nothing to run.
FREE = frozenset(
    f"aten.{name}"
    for name in (
        "view reshape _unsafe_view permute transpose t expand squeeze unsqueeze select slice split split_with_sizes "
        "unsafe_split unsafe_split_with_sizes unsafe_chunk _reshape_alias unbind detach alias view_as_real view_as_complex "
        "as_strided diagonal narrow chunk"
    ).split()
)


def lay_out(operand: Operand, typ: TensorType, rule: Rule, placement: Placement, pending: tuple[tuple[str, str], ...] = ()) -> Layout:
    """The layout of an operand whose factors are placed as `placement` says (factors not in it are local)."""
    dims = []
    for factors in operand:
        atoms: list[Atom] = []
        for factor in factors:
            atoms.extend(placement.get(factor) or ((rule.sizes[factor], None),))
        dims.append(tuple(atoms))
    return make_layout(tuple(dims), typ.shape, pending)


def place(operand: Operand, rule: Rule, layout: Layout) -> dict[str, Dim] | None:
    """The placement of `operand`'s factors under `layout`; None where an axis would straddle two factors."""
    placement: dict[str, Dim] = {}
    if layout.is_padded:
        return None
    for factors, dim in zip(operand, layout.dims, strict=True):
        rest = list(dim)
        for factor in factors:
            taken = _take(rest, rule.sizes[factor])
            if taken is None:
                return None
            if any(axis is not None for _, axis in taken):
                placement[factor] = taken
    return placement


def _take(rest: list[Atom], size: int) -> Dim | None:
    """Remove atoms that multiply to `size` from the front of `rest`, cutting a local atom if need be."""
    taken: list[Atom] = []
    while size > 1:
        if not rest:
            return None
        n, axis = rest.pop(0)
        if n and size % n == 0:  # an empty tensor has dims of 0
            taken.append((n, axis))
            size //= n
        elif axis is None and n % size == 0:
            taken.append((size, None))
            rest.insert(0, (n // size, None))
            size = 1
        else:
            return None
    return tuple(taken)


def build(call: Call, rule: Rule, placement: Placement, passing: Sequence[tuple[str, int, str]] = ()) -> Strategy:
    """The strategy with this placement. `passing`: (axis, index of the linear or monotone set, how) passes through."""
    axes = [(axis, f) for f, dim in placement.items() for _, axis in dim if axis is not None]
    reduced = _reduced(rule)
    pend_in: list[list[tuple[str, str]]] = [[] for _ in rule.ins]
    pend_out: list[tuple[str, str]] = []
    for axis, index, how in passing:
        for k in (rule.linear if how == "sum" else rule.monotone)[index]:
            pend_in[k].append((axis, how))
        pend_out.append((axis, how))
    for axis, factor in axes:
        if factor in reduced:
            for k in rule.addends:
                pend_in[k].append((axis, "sum"))
    ins = tuple(
        lay_out(op, typ, rule, placement, tuple(pend_in[k])) for k, (op, typ) in enumerate(zip(rule.ins, call.ins, strict=True))
    )
    outs: list[Layout | None] = []
    for n, (op, out_type) in enumerate(zip(rule.outs, call.outs, strict=True)):
        if op is None or out_type is None:
            outs.append(None)
            continue
        have = {f for dim in op for f in dim}
        pending = tuple(pend_out) + tuple((a, rule.reduce[f]) for a, f in axes if f not in have and (n, f) not in rule.copied)
        outs.append(lay_out(op, out_type, rule, placement, pending))
    words = [f"{a}: {f}" for a, f in axes] + [f"{a}: +" if how == "sum" else f"{a}: {how}" for a, _, how in passing]
    name = "{" + ", ".join(words) + "}"
    local = None if rule.local is None else rule.local(call, ins, tuple(outs))
    return Strategy(name, ins, tuple(outs), cost_of(call, rule, ins, tuple(outs), axes), local, tuple(axes))


def _reduced(rule: Rule) -> frozenset[str]:
    """Factors that are missing from at least one result."""
    out: set[str] = set()
    for n, op in enumerate(rule.outs):
        if op is not None:
            have = {f for dim in op for f in dim}
            out |= {f for f in rule.sizes if f not in have and (n, f) not in rule.copied}
    return frozenset(out)


def cost_of(call: Call, rule: Rule | None, ins: Sequence[Layout], outs: Sequence[Layout | None], axes: Iterable[tuple[str, str]]) -> Cost:
    """Work of one rank: the rule's flops shared among the axes placed on factors, bytes of the local parts."""
    if call.target.rsplit(".", 1)[0] in FREE:
        return Cost()
    nbytes = sum(lay.local_numel * t.dtype.itemsize for lay, t in zip(ins, call.ins, strict=True))
    local_out = 0
    for lay, typ in zip(outs, call.outs, strict=True):
        if lay is not None and typ is not None:
            nbytes += lay.local_numel * typ.dtype.itemsize
            local_out = max(local_out, lay.local_numel)
    if rule is None or rule.flops is None:
        work = max([local_out, *(lay.local_numel for lay in ins)])
        return Cost(float(work), float(nbytes))
    ways = prod(_axis_sizes(ins, outs).get(a, 1) for a, _ in axes)
    return Cost(rule.flops / ways, float(nbytes))


def _axis_sizes(ins: Sequence[Layout], outs: Sequence[Layout | None]) -> dict[str, int]:
    return {a: n for lay in (*ins, *outs) if lay is not None for dim in lay.dims for n, a in dim if a is not None}


def usable(rule: Rule) -> tuple[str, ...]:
    """Factors an axis can be placed on: every result either has the factor or reduces it."""
    out = []
    for f in rule.shardable():
        if all(
            op is None or f in rule.reduce or (n, f) in rule.copied or any(f in dim for dim in op)
            for n, op in enumerate(rule.outs)
        ):
            out.append(f)
    return tuple(out)


def enumerate_strategies(
    call: Call, rule: Rule | None, mesh: Mesh, axes: Sequence[str] | None = None, orders: bool = True, only: Only = ()
) -> tuple[Strategy, ...]:
    """Every strategy of `rule` on `mesh`; the first one is replicated. `axes`: only these axes are placed.

    `orders`: also every order of several axes on one factor; False: only the mesh's. `only`: see `as_fixed`.
    """
    open_axes = tuple(a for a in (mesh.axis_names if axes is None else axes) if mesh.axis_size(a) > 1)
    return _enumerate(call, _Keyed(rule), mesh, open_axes, orders, only)


def as_fixed(call: Call, rule: Rule, mesh: Mesh, axes: Iterable[str], fixed: Strategy) -> Only:
    """Of each of `axes` the ways in which it lies, in every operand and result, where it lies in `fixed`."""
    found = []
    for axis in axes:
        want = [lay and _lies(lay, axis) for lay in (*fixed.ins, *fixed.outs)]
        ways = []
        for way in _ways(rule):
            placement = {way: major(rule.sizes[way], (axis,), mesh)} if isinstance(way, str) else {}
            if isinstance(way, str) and rule.sizes[way] % mesh.axis_size(axis):
                continue
            alone = build(call, rule, placement, ((axis, *way),) if isinstance(way, tuple) else ())
            if [lay and _lies(lay, axis) for lay in (*alone.ins, *alone.outs)] == want:
                ways.append(way)
        found.append((axis, tuple(ways)))
    return tuple(found)


def _lies(layout: Layout, axis: str) -> tuple[object, ...]:
    """On which dims an axis lies, and what is pending over it."""
    return tuple(d for d, dim in enumerate(layout.dims) for _, a in dim if a == axis), tuple(p for p in layout.pending if p[0] == axis)


def _ways(rule: Rule) -> list[Way]:
    passes = [(i, "sum") for i in range(len(rule.linear))] + [(i, "max") for i in range(len(rule.monotone))]
    return [None, *usable(rule), *passes]


class _Keyed:
    """A rule as part of a cache key: what it says of its factors. Two plugins may have different rules for the same call."""

    __slots__ = ("rule", "says")

    def __init__(self, rule: Rule | None) -> None:
        self.rule = rule
        self.says: tuple[Any, ...] = ()
        if rule is not None:
            passes = (*map(frozenset, rule.linear), None, *map(frozenset, rule.monotone))
            kinds = (frozenset(rule.sizes.items()), frozenset(rule.reduce.items()), frozenset(rule.whole), frozenset(rule.addends))
            self.says = (rule.ins, rule.outs, *kinds, passes, frozenset(rule.copied), rule.flops)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self.says == other.says

    def __hash__(self) -> int:
        return hash(self.says)


@lru_cache(maxsize=4096)
def _enumerate(call: Call, keyed: _Keyed, mesh: Mesh, axes: tuple[str, ...], orders: bool, only: Only) -> tuple[Strategy, ...]:
    rule = keyed.rule
    if rule is None:
        return (replicated_strategy(call),)
    found: dict[tuple[object, ...], Strategy] = {}
    for placement, passing in placements(rule, mesh, axes, orders, only):
        strategy = build(call, rule, placement, passing)
        found.setdefault((strategy.ins, strategy.outs), strategy)
    return tuple(found.values())


def replicated_strategy(call: Call) -> Strategy:
    """Every rank computes the whole result from whole operands: always correct for deterministic operators."""
    ins = tuple(replicated(t.shape) for t in call.ins)
    outs = tuple(None if t is None else replicated(t.shape) for t in call.outs)
    return Strategy("{}", ins, outs, cost_of(call, None, ins, outs, ()))


def placements(
    rule: Rule, mesh: Mesh, axes: tuple[str, ...], orders: bool = True, only: Only = ()
) -> Iterator[tuple[dict[str, Dim], tuple[tuple[str, int, str], ...]]]:
    """(placement, passing) for every way to give each axis a factor, a passing reduction or nothing."""
    ways, held = tuple(_ways(rule)), dict(only)
    for choice in product(*(held.get(axis, ways) for axis in axes)):
        on: dict[str, list[str]] = {}
        passing: list[tuple[str, int, str]] = []
        for axis, what in zip(axes, choice, strict=True):
            if isinstance(what, str):
                on.setdefault(what, []).append(axis)
            elif what is not None:
                passing.append((axis, *what))
        if any(rule.sizes[f] % prod(mesh.axis_size(a) for a in group) for f, group in on.items()):
            continue
        for ordered in product(*(permutations(group) if orders else (group,) for group in on.values())):
            yield {f: major(rule.sizes[f], order, mesh) for f, order in zip(on, ordered, strict=True)}, tuple(passing)


def major(size: int, axes: Iterable[str], mesh: Mesh) -> Dim:
    """Atoms of a factor of `size` with `axes` as its major atoms: `(dp tp rest)`."""
    atoms: list[Atom] = []
    for axis in axes:
        n = mesh.axis_size(axis)
        atoms.append((n, axis))
        size //= n
    return (*atoms, (size, None))


def enumerate_layouts(
    shape: tuple[int, ...], mesh: Mesh, axes: Sequence[str] | None = None, fixed: Layout | None = None
) -> tuple[Layout, ...]:
    """Every major-only layout of a tensor without pending reductions; the first one is replicated.

    `fixed`: those in which every axis but `axes` lies on the same dim as there.
    """
    names = tuple(chr(ord("a") + i) for i in range(len(shape)))
    rule = Rule((), (tuple((n,) for n in names),), dict(zip(names, shape, strict=True)))
    typ = TensorType(shape, _ANY)
    free = mesh.axis_names if axes is None else axes
    open_axes = tuple(a for a in (free if fixed is None else mesh.axis_names) if mesh.axis_size(a) > 1)
    only: Only = ()
    if fixed is not None:
        there = {a: names[d] for d, dim in enumerate(fixed.dims) for _, a in dim if a is not None}
        only = tuple((a, (there.get(a),)) for a in open_axes if a not in free)
    found = {lay_out(rule.outs[0] or (), typ, rule, placement): None for placement, _ in placements(rule, mesh, open_axes, True, only)}
    return tuple(found)


def follow(call: Call, rule: Rule, operand: int, layout: Layout) -> Strategy | None:
    """The strategy that takes operand `operand` as it lies, striped or composite as it may be; None if it cannot."""
    placement = place(rule.ins[operand], rule, layout)
    if placement is None or any(f not in usable(rule) for f in placement):
        return None
    passing = []
    for axis, how in layout.pending:
        sets = rule.linear if how == "sum" else rule.monotone
        index = next((i for i, s in enumerate(sets) if operand in s), None)
        if index is None:
            return None
        passing.append((axis, index, how))
    return build(call, rule, placement, passing)
