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
from colofunc.ops.targets import is_view
from colofunc.spec.layout import Atom, Dim, Layout, axes_of, make_layout, replicated
from colofunc.spec.rule import Call, Cost, Operand, Rule, Strategy, TensorType

FactorPlacement = Mapping[str, Dim]
Pending = tuple[str, str]  # (axis, how): a reduction that is not done yet
PassingReduction = tuple[
    str, int, str
]  # (axis, index of the linear or monotone set, how): a reduction that passes through
# of one axis: a factor, a reduction that passes through (index of its set, how), nothing
AxisWay = str | tuple[int, str] | None
Only = tuple[tuple[str, tuple[AxisWay, ...]], ...]  # axis -> the ways that it may take; absent: all

_ANY_DTYPE = torch.float32
"""The dtype where only layouts are asked for: they do not depend on it."""


def lay_out(
    operand: Operand, typ: TensorType, rule: Rule, placement: FactorPlacement, pending: tuple[Pending, ...] = ()
) -> Layout:
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
    if layout.is_padded:
        return None
    placement: dict[str, Dim] = {}
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
        atom_size, axis = rest.pop(0)
        if atom_size and size % atom_size == 0:  # an empty tensor has dims of 0
            taken.append((atom_size, axis))
            size //= atom_size
        elif axis is None and atom_size % size == 0:
            taken.append((size, None))
            rest.insert(0, (atom_size // size, None))
            size = 1
        else:
            return None
    return tuple(taken)


def build(call: Call, rule: Rule, placement: FactorPlacement, passing: Sequence[PassingReduction] = ()) -> Strategy:
    """The strategy with this placement; the reductions in `passing` pass through."""
    axes: list[tuple[str, str]] = []
    for factor, dim in placement.items():
        axes += [(axis, factor) for axis in axes_of(dim)]
    pending_in = _pending_operands(rule, axes, passing)
    operand_layouts = []
    for operand, typ, pending in zip(rule.ins, call.ins, pending_in, strict=True):
        operand_layouts.append(lay_out(operand, typ, rule, placement, tuple(pending)))
    ins = tuple(operand_layouts)

    passed = [(axis, how) for axis, _, how in passing]
    result_layouts: list[Layout | None] = []
    for number, (result, out_type) in enumerate(zip(rule.outs, call.outs, strict=True)):
        if result is None or out_type is None:
            result_layouts.append(None)
            continue
        # An axis on a factor that the result lacks leaves a reduction over it.
        kept = _factors_of(result)
        left: list[Pending] = []
        for axis, factor in axes:
            if factor not in kept and (number, factor) not in rule.copied:
                left.append((axis, rule.reduce[factor]))
        result_layouts.append(lay_out(result, out_type, rule, placement, (*passed, *left)))
    outs = tuple(result_layouts)

    local = None if rule.local is None else rule.local(call, ins, outs)
    return Strategy(_name(axes, passing), ins, outs, cost_of(call, rule, ins, outs, axes), local, tuple(axes))


def _pending_operands(
    rule: Rule, axes: Sequence[tuple[str, str]], passing: Sequence[PassingReduction]
) -> list[list[Pending]]:
    """Per operand the reductions that are pending on it."""
    pending: list[list[Pending]] = [[] for _ in rule.ins]
    for axis, index, how in passing:
        sets = rule.linear if how == "sum" else rule.monotone
        for position in sets[index]:
            pending[position].append((axis, how))
    # The ranks' results will be added up, and a bias is to be in the sum once: it is a pending sum itself.
    reduced = _reduced(rule)
    for axis, factor in axes:
        if factor in reduced:
            for position in rule.addends:
                pending[position].append((axis, "sum"))
    return pending


def _name(axes: Sequence[tuple[str, str]], passing: Sequence[PassingReduction]) -> str:
    """`{dp: b, tp: +}`: axes on factors, then what passes through."""
    words = [f"{axis}: {factor}" for axis, factor in axes]
    for axis, _, how in passing:
        words.append(f"{axis}: +" if how == "sum" else f"{axis}: {how}")
    return "{" + ", ".join(words) + "}"


def _factors_of(operand: Operand) -> set[str]:
    return set().union(*operand)


def _reduced(rule: Rule) -> set[str]:
    """Factors that are missing from at least one result."""
    reduced: set[str] = set()
    for number, result in enumerate(rule.outs):
        if result is not None:
            missing = rule.sizes.keys() - _factors_of(result)
            reduced.update(factor for factor in missing if (number, factor) not in rule.copied)
    return reduced


def cost_of(
    call: Call, rule: Rule | None, ins: Sequence[Layout], outs: Sequence[Layout | None], axes: Iterable[tuple[str, str]]
) -> Cost:
    """Work of one rank: the rule's flops shared among the axes placed on factors, bytes of the local parts."""
    if is_view(call.target):
        return Cost()
    nbytes = 0
    largest_in = 0
    for layout, typ in zip(ins, call.ins, strict=True):
        nbytes += layout.local_numel * typ.dtype.itemsize
        largest_in = max(largest_in, layout.local_numel)
    largest_out = 0
    for out_layout, out_type in zip(outs, call.outs, strict=True):
        if out_layout is not None and out_type is not None:
            nbytes += out_layout.local_numel * out_type.dtype.itemsize
            largest_out = max(largest_out, out_layout.local_numel)
    if rule is None or rule.flops is None:
        return Cost(float(max(largest_in, largest_out)), float(nbytes))
    # Only axes on factors share the work; others repeat it.
    sizes = _axis_sizes(ins, outs)
    ways = prod(sizes.get(axis, 1) for axis, _ in axes)
    return Cost(rule.flops / ways, float(nbytes))


def _axis_sizes(ins: Sequence[Layout], outs: Sequence[Layout | None]) -> dict[str, int]:
    """Size of each axis that splits an operand or a result."""
    sizes: dict[str, int] = {}
    for layout in (*ins, *outs):
        if layout is None:
            continue
        for dim in layout.dims:
            for size, axis in dim:
                if axis is not None:
                    sizes[axis] = size
    return sizes


def usable(rule: Rule) -> tuple[str, ...]:
    """Factors an axis can be placed on: every result either has the factor or reduces it."""
    return tuple(factor for factor in rule.shardable() if _is_accounted_for(rule, factor))


def _is_accounted_for(rule: Rule, factor: str) -> bool:
    """Whether every result has the factor, reduces it or does not depend on it."""
    if factor in rule.reduce:
        return True
    for number, result in enumerate(rule.outs):
        if result is None or (number, factor) in rule.copied:
            continue
        if not any(factor in dim for dim in result):
            return False
    return True


def enumerate_strategies(
    call: Call, rule: Rule | None, mesh: Mesh, axes: Sequence[str] | None = None, orders: bool = True, only: Only = ()
) -> tuple[Strategy, ...]:
    """Every strategy of `rule` on `mesh`; the first one is replicated. `axes`: only these axes are placed.

    `orders`: also every order of several axes on one factor; False: only the mesh's. `only`: see `as_fixed`.
    """
    free_axes = mesh.axis_names if axes is None else axes
    open_axes = tuple(axis for axis in free_axes if mesh.axis_size(axis) > 1)
    return _enumerate(call, _RuleKey(rule), mesh, open_axes, orders, only)


def as_fixed(call: Call, rule: Rule, mesh: Mesh, axes: Iterable[str], fixed: Strategy) -> Only:
    """Of each of `axes` the ways in which it lies, in every operand and result, where it lies in `fixed`."""
    only = []
    # A way is known by what it does to operands and results: several may do the same.
    for axis in axes:
        wanted = _lies_in_each(fixed, axis)
        same = []
        for way in _ways(rule):
            if isinstance(way, str) and rule.sizes[way] % mesh.axis_size(axis):
                continue
            if _lies_in_each(_alone(call, rule, mesh, axis, way), axis) == wanted:
                same.append(way)
        only.append((axis, tuple(same)))
    return tuple(only)


def _alone(call: Call, rule: Rule, mesh: Mesh, axis: str, way: AxisWay) -> Strategy:
    """The strategy in which one axis goes a way, and no other is placed."""
    if way is None:
        return build(call, rule, {})
    if isinstance(way, str):
        return build(call, rule, {way: major(rule.sizes[way], (axis,), mesh)})
    index, how = way
    return build(call, rule, {}, ((axis, index, how),))


AxisLayout = tuple[tuple[int, ...], tuple[Pending, ...]]  # the dims that an axis splits, what is pending over it


def _lies_in_each(strategy: Strategy, axis: str) -> list[AxisLayout | None]:
    """How an axis lies in each operand and result; None of what is no tensor."""
    return [None if layout is None else _lies(layout, axis) for layout in (*strategy.ins, *strategy.outs)]


def _lies(layout: Layout, axis: str) -> AxisLayout:
    """On which dims an axis lies, and what is pending over it."""
    dims = tuple(number for number, dim in enumerate(layout.dims) if axis in axes_of(dim))
    return dims, tuple(pending for pending in layout.pending if pending[0] == axis)


def _ways(rule: Rule) -> list[AxisWay]:
    """What an axis can do: nothing, be placed on a factor, or leave a reduction pending that passes through."""
    ways: list[AxisWay] = [None, *usable(rule)]
    ways += [(index, "sum") for index in range(len(rule.linear))]
    ways += [(index, "max") for index in range(len(rule.monotone))]
    return ways


class _RuleKey:
    """A rule as part of a cache key: what it says of its factors.

    Two plugins may have different rules for the same call.
    """

    __slots__ = ("identity", "rule")

    def __init__(self, rule: Rule | None) -> None:
        self.rule = rule
        self.identity: tuple[Any, ...] = ()
        if rule is not None:
            sets = map(frozenset, (rule.sizes.items(), rule.reduce.items(), rule.whole, rule.addends, rule.copied))
            passing = (tuple(map(frozenset, rule.linear)), tuple(map(frozenset, rule.monotone)))
            self.identity = (rule.ins, rule.outs, *sets, *passing, rule.flops)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RuleKey) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


@lru_cache(maxsize=4096)
def _enumerate(
    call: Call, key: _RuleKey, mesh: Mesh, axes: tuple[str, ...], orders: bool, only: Only
) -> tuple[Strategy, ...]:
    rule = key.rule
    if rule is None:
        return (replicated_strategy(call),)
    by_layouts: dict[tuple[object, ...], Strategy] = {}  # of strategies with the same layouts the first is enough
    for placement, passing in placements(rule, mesh, axes, orders, only):
        strategy = build(call, rule, placement, passing)
        by_layouts.setdefault((strategy.ins, strategy.outs), strategy)
    return tuple(by_layouts.values())


def replicated_strategy(call: Call) -> Strategy:
    """Every rank computes the whole result from whole operands: always correct for deterministic operators."""
    ins = tuple(replicated(typ.shape) for typ in call.ins)
    outs = tuple(None if typ is None else replicated(typ.shape) for typ in call.outs)
    return Strategy("{}", ins, outs, cost_of(call, None, ins, outs, ()))


def placements(
    rule: Rule, mesh: Mesh, axes: tuple[str, ...], orders: bool = True, only: Only = ()
) -> Iterator[tuple[dict[str, Dim], tuple[PassingReduction, ...]]]:
    """(placement, passing) for every way to give each axis a factor, a passing reduction or nothing."""
    all_ways = tuple(_ways(rule))
    allowed = dict(only)
    for choice in product(*[allowed.get(axis, all_ways) for axis in axes]):
        on_factor: dict[str, list[str]] = {}  # factor -> axes placed on it
        passing: list[PassingReduction] = []
        for axis, way in zip(axes, choice, strict=True):
            if isinstance(way, str):
                on_factor.setdefault(way, []).append(axis)
            elif way is not None:
                passing.append((axis, *way))
        if not _all_divide(rule, mesh, on_factor):
            continue
        for ordered in _orders(on_factor, orders):
            placement = {factor: major(rule.sizes[factor], group, mesh) for factor, group in ordered.items()}
            yield placement, tuple(passing)


def _all_divide(rule: Rule, mesh: Mesh, on_factor: Mapping[str, Sequence[str]]) -> bool:
    """Whether the size of each factor is a multiple of the ranks that are to share it."""
    for factor, axes in on_factor.items():
        ranks = prod(mesh.axis_size(axis) for axis in axes)
        if rule.sizes[factor] % ranks:
            return False
    return True


def _orders(on_factor: Mapping[str, Sequence[str]], orders: bool) -> Iterator[dict[str, Sequence[str]]]:
    """`on_factor` with the axes of each factor in every order, or (`orders` is False) as they are."""
    if not orders:
        yield dict(on_factor)
        return
    for groups in product(*[permutations(axes) for axes in on_factor.values()]):
        yield dict(zip(on_factor, groups, strict=True))


def major(size: int, axes: Iterable[str], mesh: Mesh) -> Dim:
    """Atoms of a factor of `size` with `axes` as its major atoms: `(dp tp rest)`."""
    atoms: list[Atom] = []
    for axis in axes:
        ranks = mesh.axis_size(axis)
        atoms.append((ranks, axis))
        size //= ranks
    return (*atoms, (size, None))


def enumerate_layouts(
    shape: tuple[int, ...], mesh: Mesh, axes: Sequence[str] | None = None, fixed: Layout | None = None
) -> tuple[Layout, ...]:
    """Every major-only layout of a tensor without pending reductions; the first one is replicated.

    `fixed`: those in which every axis but `axes` lies on the same dim as there.
    """
    names = tuple(f"dim{number}" for number in range(len(shape)))
    operand = tuple((name,) for name in names)
    rule = Rule((), (operand,), dict(zip(names, shape, strict=True)))
    typ = TensorType(shape, _ANY_DTYPE)
    free_axes = mesh.axis_names if axes is None else axes
    placed_axes = free_axes if fixed is None else mesh.axis_names
    open_axes = tuple(axis for axis in placed_axes if mesh.axis_size(axis) > 1)
    only: Only = ()
    if fixed is not None:
        # each axis that is fixed stays on its dim, or on none
        dim_of: dict[str, str] = {}
        for name, dim in zip(names, fixed.dims, strict=True):
            dim_of.update(dict.fromkeys(axes_of(dim), name))
        only = tuple((axis, (dim_of.get(axis),)) for axis in open_axes if axis not in free_axes)
    layouts: dict[Layout, None] = {}  # an ordered set
    for placement, _ in placements(rule, mesh, open_axes, True, only):
        layouts[lay_out(operand, typ, rule, placement)] = None
    return tuple(layouts)


def as_operands_lie(
    call: Call, rule: Rule, layouts: Sequence[Layout], axes: Sequence[tuple[str, str]]
) -> Strategy | None:
    """The strategy that takes all operands as they lie; None where they do not fit together.

    `axes`: (axis, factor), in the order of the strategy's name.
    """
    placement: dict[str, Dim] = {}
    for operand, layout in zip(rule.ins, layouts, strict=True):
        placed = place(operand, rule, layout)
        if placed is None or any(placement.setdefault(factor, dim) != dim for factor, dim in placed.items()):
            return None
    factors = dict.fromkeys(factor for _, factor in axes)
    if factors.keys() != placement.keys():
        return None
    passing = []
    for axis, how in dict.fromkeys(pending for layout in layouts for pending in layout.pending):
        if axis in {placed_axis for placed_axis, _ in axes}:
            continue  # of an addend, whose sum the strategy makes
        pending_on = {operand for operand, layout in enumerate(layouts) if (axis, how) in layout.pending}
        sets = rule.linear if how == "sum" else rule.monotone
        index = next((number for number, positions in enumerate(sets) if set(positions) == pending_on), None)
        if index is None:
            return None
        passing.append((axis, index, how))
    strategy = build(call, rule, {factor: placement[factor] for factor in factors}, passing)
    return strategy if strategy.ins == tuple(layouts) else None


def follow(call: Call, rule: Rule, operand: int, layout: Layout) -> Strategy | None:
    """The strategy that takes operand `operand` as it lies, striped or composite as it may be; None if it cannot."""
    placement = place(rule.ins[operand], rule, layout)
    if placement is None:
        return None
    open_factors = usable(rule)
    if any(factor not in open_factors for factor in placement):
        return None
    passing = []
    # What is pending has to pass through the operator as well.
    for axis, how in layout.pending:
        sets = rule.linear if how == "sum" else rule.monotone
        index = next((number for number, positions in enumerate(sets) if operand in positions), None)
        if index is None:
            return None
        passing.append((axis, index, how))
    return build(call, rule, placement, passing)
