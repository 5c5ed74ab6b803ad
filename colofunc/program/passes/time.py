"""Time: the program of one rank split once more, over microbatches.

Problem: accumulating over microbatches must give the numbers of the whole batch, whatever the step computes from it.
Idea: a microbatch is a rank on an axis `time`. The local program is lowered a second time, onto a mesh with that axis
alone; batch leaves lie as `(time b) ...` and every operator follows by the rules that split it over `dp`:

    linear        (time b) i, o i   ->  (time b) o           the same code on a microbatch
    linear_dw     (time b) o, (time b) i  ->  o i +time      a pending sum: the accumulator
    nll_loss      the mean divides by the number of labels of the *whole* batch: an all_reduce over time

What comes out is a program in which `time` is an axis like any other (it can run on a simulated mesh that has it);
`fold.fold` then runs its ranks one after another. A value lies in one of three ways over time: split on a dim, pending,
or whole. Conversions are an accumulation (pending -> whole), a stack (split -> whole) and a slice (whole -> split), so
each node takes its operands as they lie wherever a strategy allows. Strategies that need fewer accumulations before
them come first; among those, fewer conversions.

Note [Accumulators]. What is summed over microbatches is summed at least in float32: a bfloat16 sum of 256 ones stays at
256, however many more are added. The sum is rounded once, behind the loop.

Whole values that are wanted split are computed split from the start where that is cheap (masks, expanded gradients), so
that nothing of the size of the batch is made only to be sliced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.ops.targets import is_view
from colofunc.program.facts import COLLECTIVES, kind_of
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.lower import Builder, Choice, RecordLocal, call_in
from colofunc.program.passes.time_rules import index_of_rows, rows_rule, time_rule, with_time
from colofunc.program.places import made_at
from colofunc.spec.layout import At, Layout, make_layout, replicated
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.strategies import build, enumerate_strategies, follow, place, replicated_strategy, usable

Extra = Callable[[Call, Mesh], tuple[Strategy, ...]]
# Operators whose results depend on their operand's shape alone, and the value they fill it with.
_LIKE: Mapping[str, int] = {"aten.ones_like.default": 1, "aten.zeros_like.default": 0}


@attrs.frozen
class LoweringRules:
    """What the lowering asks: rules and further strategies of calls, and the recorder of local code."""

    rule: Callable[[Call], Rule | None]
    extra: Extra
    record_local: RecordLocal


def over_time(
    program: Program,
    leaves: Iterable[int],
    microbatches: int,
    axis: str,
    rules: LoweringRules,
    minor: bool = False,
    lean: bool = False,
) -> Program:
    """`program` (local, functional) with one more axis of `microbatches`, on dim 0 of the values `leaves`.

    minor: microbatch t has the rows t, t + microbatches, ... instead of one run of rows. The numbers are the same; a
    split of the batch over more mesh axes in the middle of the program then leaves microbatches as they are.
    lean: gradients are reduce-scattered before they are accumulated, once per microbatch: accumulators are shards.
    """
    return _finished(_build(program, leaves, microbatches, axis, rules, minor, lean))


def lies_over_time(
    program: Program, leaves: Iterable[int], microbatches: int, rules: LoweringRules
) -> tuple[dict[int, Layout], Program]:
    """How each value of a program, local or global, lies over time, and the program with that axis."""
    built = _build(program, leaves, microbatches, "time", rules)
    lies = dict(built.lies)
    return lies, _finished(built)


def _finished(built: _Build) -> Program:
    program = built.program
    return built.finished([built.want(id, replicated(program.values[id].shape), None) for id in program.outputs])


def _build(
    program: Program,
    leaves: Iterable[int],
    microbatches: int,
    axis: str,
    rules: LoweringRules,
    minor: bool = False,
    lean: bool = False,
) -> _Build:
    axes: dict[str, Any] = {axis: microbatches}
    built = _Build(program, Mesh(**axes), axis, rules, lean)
    split = {id: _split_rows(program.values[id].shape, microbatches, axis, minor) for id in leaves}
    built.leaves.update(split)
    for id in program.inputs:
        built.define(id, replicated(program.values[id].shape))
        layout = program.values[id].layout
        built.places[id] = None if layout is None else layout.at
        if id in split:
            built.lies[id] = split[id]
    for node in program.nodes:
        built.node(node)
        for out in node.outs:
            if out in split and out is not None and not built.lies[out].axes:
                built.lies[out] = split[out]
    return built


def _split_rows(shape: tuple[int, ...], n: int, axis: str, minor: bool) -> Layout:
    rows = ((shape[0] // n, None), (n, axis)) if minor else ((n, axis), (shape[0] // n, None))
    return make_layout((rows, *(((size, None),) for size in shape[1:])), shape)


class _Build(Builder):
    """The program while it is made: lowered as onto any mesh, but each strategy is chosen when its node is reached."""

    def __init__(self, program: Program, mesh: Mesh, axis: str, rules: LoweringRules, lean: bool) -> None:
        super().__init__(program, mesh, rules.record_local)
        self.axis, self.rules, self.lean = axis, rules, lean
        self.lies: dict[int, Layout] = {}  # old id -> how consumers had best take it
        self.level: dict[int, int] = {}  # new id -> accumulations that have to end before it is known
        self.makers: dict[int, Node] = {}
        self.leaves: set[int] = set()  # old ids of the batch's leaves, however they were moved over the mesh
        self.places: dict[int, At | None] = {}  # old id -> where it exists
        self.known: dict[Call, Rule | None] = {}
        self.more: dict[Call, tuple[Strategy, ...]] = {}
        # a call and how its operands lie -> (its rule, what was chosen)
        self.chosen: dict[Any, tuple[Rule | None, Strategy]] = {}

    # ---- values ----

    def define(self, old: int, layout: Layout) -> int:
        id = super().define(old, layout)
        self.lies.setdefault(old, layout)
        self.level.setdefault(id, 0)
        return id

    def adopt(self, old: int, layout: Layout, new: int) -> None:
        super().adopt(old, layout, new)
        self.lies.setdefault(old, layout)

    def layout_of(self, old: int, layout: Layout | None) -> Layout | None:
        """How a value lies over mesh and time together."""
        return None if layout is None else with_time(self.program.values[old].layout, layout)

    def emit(self, node: Node) -> None:
        node = _filled(node, self.values)
        super().emit(node)
        level = max((self.level[ref] for ref in node.refs), default=0) + reduces_over_time(node, self.axis)
        self.level.update(dict.fromkeys(node.results, level))

    # ---- conversions over time ----

    def want(self, old: int, layout: Layout, reader: Node | None) -> int:
        """The new id of the value as it should lie: converted by way of the whole, or computed so from the start."""
        copies = self.copies[old]
        if layout in copies:
            return copies[layout]
        whole = replicated(layout.shape)
        if whole not in copies:
            self._convert(old, next(iter(copies)), whole, reader)
            return self.want(old, layout, reader)
        if layout.axes and not layout.pending and self.lies[old] is whole:
            made = self._at_source(old, layout)
            if made is not None:
                return made
        return self._convert(old, whole, layout, reader)

    def _convert(self, old: int, have: Layout, layout: Layout, reader: Node | None) -> int:
        """Add the nodes of a conversion; `reader` is who wants it."""
        copy, like = self.copies[old][have], self.program.values[old]
        where = attrs.evolve(reader or self.makers.get(old) or Node("", (), (), ()), on=self.places[old])
        if 0 in layout.shape:  # no element to move
            zeros = self.define(old, layout)
            self.emit(
                Node("aten.full.default", (layout.local_shape, 0), (("dtype", like.dtype),), (zeros,), on=where.on)
            )
            return zeros
        wide = bool(have.pending) and like.dtype.is_floating_point and like.dtype.itemsize < torch.float32.itemsize
        if wide:  # see Note [Accumulators]
            copy = self._cast(copy, torch.float32, where)
        user = "an output" if reader is None else f"{_user_of(reader)} needs {layout.text()}"
        note = f"{have.text()} -> {layout.text()}: {user}"
        made = self.convert(old, copy, have, layout, where, note)
        if wide:
            made = self._cast(made, like.dtype, where)
            self.adopt(old, layout, made)
        return made

    def _cast(self, id: int, dtype: torch.dtype, where: Node) -> int:
        """The new value in another dtype."""
        value = self.values[id]
        out = self.new(value, value.layout, value.shape, dtype)
        told = (where.phase, where.path, where.line, f"accumulated in {torch.float32}")
        self.emit(Node("aten._to_copy.default", (Ref(id),), (("dtype", dtype),), (out,), *told, on=where.on))
        return out

    def _at_source(self, old: int, over: Layout) -> int | None:
        """The value computed split, from operands that are split or sliced, where its operator is cheap to run in
        parts.
        """
        node = self.makers.get(old)
        if node is None or kind_of(node) is not None or len(node.outs) != 1:
            return None
        call, ids = call_in(self.program, node)
        rule = self.rule_at(call, ids)
        if rule is None or rule.flops is not None or rule.outs[0] is None:
            return None
        placement = place(rule.outs[0], rule, over)
        if placement is None or any(f not in usable(rule) for f in placement):
            return None
        strategy = build(call, rule, placement)
        if strategy.outs[0] is not over or any(lay.pending for lay in strategy.ins):
            return None
        self._run(node, strategy, rule, (call, ids))
        return self.copies[old][over]

    # ---- nodes ----

    def rule_at(self, call: Call, ids: Sequence[int]) -> Rule | None:
        """The rule of a node, by who made its operands: `x[arange(b), i]` takes one element of each row."""
        rows = index_of_rows(call)
        if rows and self._counts(ids[rows[0]], call.ins[rows[0]].shape[0]):
            return rows_rule(call)
        return self.rule(call)

    def _counts(self, old: int, n: int) -> bool:
        """Whether a value is 0, 1, ... n - 1."""
        value = self.program.constants.get(old)
        if value is not None:
            return value.dtype == torch.int64 and torch.equal(value.cpu(), torch.arange(n))
        node = self.makers.get(old)
        if node is None:
            return False
        if node.target == "aten.arange.default":
            return node.args == (n,)
        if node.target == "aten.arange.start":
            return node.args == (0, n)
        return node.target == "aten.arange.start_step" and node.args in ((0, n), (0, n, 1))

    def rule(self, call: Call) -> Rule | None:
        if call not in self.known:
            self.known[call] = time_rule(call, self.rules.rule)
        return self.known[call]

    def node(self, node: Node) -> None:
        node = _filled(node, self.program.values)
        self.makers.update(dict.fromkeys(node.results, node))
        self.places.update(dict.fromkeys(node.results, made_at(node)))
        call, ids = call_in(self.program, node)
        lies = [self.lies[id] for id in ids]
        given = bool(ids) and kind_of(node) is not None and all(id in self.leaves for id in ids)
        if given or not any(lay.axes or lay.pending for lay in lies):
            if given:
                self.leaves.update(node.results)  # the batch itself is moved once
            self._run(node, replicated_strategy(call), None, (call, ids))
            return
        rule = self.rule_at(call, ids)
        strategy = self._chosen(call, ids, lies, rule)
        if all(lay is None or lay.is_replicated for lay in (*strategy.ins, *strategy.outs)):
            strategy, rule = replicated_strategy(call), None
        self._run(node, strategy, rule, (call, ids))

    def _run(
        self,
        node: Node,
        strategy: Strategy,
        rule: Rule | None,
        called: tuple[Call, tuple[int, ...]],
    ) -> None:
        """The node under a strategy. Where it is one node still, it says what the plan for the mesh has said."""
        if strategy.local is None:
            strategy = attrs.evolve(strategy, name=node.note)
        self.run(node, Choice(strategy, rule), called=called)

    # ---- which strategy ----

    def _chosen(self, call: Call, ids: Sequence[int], lies: Sequence[Layout], rule: Rule | None) -> Strategy:
        """What `_choose` says, asked once of calls whose operands lie alike: layers of a model mostly do."""
        have = []
        for old in ids:
            have.append(tuple((layout, self.level[new]) for layout, new in self.copies[old].items()))
        key = call, tuple(map(ids.index, ids)), tuple(lies), tuple(have), id(rule)
        if key not in self.chosen:
            self.chosen[key] = rule, self._choose(call, ids, lies, rule)  # the rule, so that its `id` is nobody else's
        return self.chosen[key][1]

    def _choose(self, call: Call, ids: Sequence[int], lies: Sequence[Layout], rule: Rule | None) -> Strategy:
        if not any(lay.axes for lay in lies):
            return self._passing(call, ids, lies, rule) or replicated_strategy(call)
        options: dict[Any, Strategy] = {}
        if rule is not None:
            for position, lay in enumerate(lies):
                if lay.axes and 0 not in lay.shape:
                    followed = follow(call, rule, position, lay)
                    if followed is not None:
                        options.setdefault((followed.ins, followed.outs), followed)
            if not _only_own(call):
                for found in enumerate_strategies(call, rule, self.mesh):
                    options.setdefault((found.ins, found.outs), found)
        for found in self.extra(call):
            options.setdefault((found.ins, found.outs), found)
        whole = replicated_strategy(call)
        options[whole.ins, whole.outs] = whole
        # The first of the cheapest. The whole call always has a price.
        best, best_price = whole, None
        for option in options.values():
            price = self._price(ids, lies, option)
            if price is not None and (best_price is None or price < best_price):
                best, best_price = option, price
        return best

    def extra(self, call: Call) -> tuple[Strategy, ...]:
        if call not in self.more:
            self.more[call] = self.rules.extra(call, self.mesh)
        return self.more[call]

    def _price(
        self, ids: Sequence[int], lies: Sequence[Layout], strategy: Strategy
    ) -> tuple[int, int, int, int] | None:
        """(level of the result, accumulations and stacks, bytes of stacks, slices); None if there is no way."""
        level = stacks = stacked = slices = 0
        for id, lay, wanted in zip(ids, lies, strategy.ins, strict=True):
            copies = self.copies[id]
            if wanted in copies:
                level = max(level, self.level[copies[wanted]])
                continue
            have = next(iter(copies))
            level = max(level, self.level[copies[have]])
            if not have.is_replicated:
                if wanted.pending or (wanted.axes and have.axes):
                    return None  # a stack that is cut again along another dim: everything may as well be computed whole
                level = max(level, self.level[copies[have]] + 1)
                stacks += 1
                stacked += self.program.values[id].nbytes if have.axes else 0
            slices += wanted is not lay
        rise = int(strategy.local is not None)  # at equal price the plain operator is better
        # What is computed whole does not get smaller with more microbatches.
        whole = sum(lay is not None and lay.is_replicated for lay in strategy.outs)
        return level, stacks + whole + rise, stacked, slices

    def _passing(self, call: Call, ids: Sequence[int], lies: Sequence[Layout], rule: Rule | None) -> Strategy | None:
        """A strategy that lets pending operands through; None where it is better to accumulate before the node."""
        if rule is None or not call.outs:
            return None
        pending = {position: lay.pending[0] for position, lay in enumerate(lies) if lay.pending}
        distinct = {ids[position] for position in pending}
        view = is_view(call.target) or call.target in ("colofunc.rearrange", "colofunc.take_shard")
        view = view or (self.lean and call.target == "colofunc.reduce_scatter")
        out = call.outs[0]
        widens = False
        if out is not None and call.target.startswith("aten._to_copy"):
            widens = out.dtype.itemsize > call.ins[0].dtype.itemsize
        if not (view or widens or len(distinct) > 1) or len(set(pending.values())) > 1:
            return None
        axis, how = next(iter(pending.values()))
        for index, members in enumerate(rule.linear if how == "sum" else rule.monotone):
            if members == frozenset(pending):
                return build(call, rule, {}, [(axis, index, how)])
        return None


def _filled(node: Node, values: Mapping[int, Value]) -> Node:
    """`ones_like(x)` as a factory: it does not depend on x."""
    if node.target not in _LIKE or dict(node.kwargs).get("memory_format"):
        return node
    value, fill = values[node.results[0]], _LIKE[node.target]
    args = (value.shape, float(fill) if value.dtype.is_floating_point else fill)
    return attrs.evolve(node, target="aten.full.default", args=args, kwargs=(("dtype", value.dtype),))


def _user_of(node: Node) -> str:
    """The operator that a node belongs to: a collective in the local code of one says whose in its note."""
    inside = kind_of(node) is not None and node.note and " -> " not in node.note
    return node.note.split(" ", maxsplit=1)[0] if inside else node.target


def _only_own(call: Call) -> bool:
    """Collectives are followed, never enumerated."""
    return call.target in COLLECTIVES or call.target == "colofunc.rearrange"


def reduces_over_time(node: Node, axis: str) -> bool:
    """Whether a node reduces or gathers over time."""
    kind = kind_of(node)
    return kind is not None and kind[0] in ("all_reduce", "all_gather") and tuple(node.args[1]) == (axis,)
