"""Time: the program of one rank split once more, over microbatches.

Problem: accumulating over microbatches must give the numbers of the whole batch, whatever the step computes from it.
Idea: a microbatch is a rank on an axis `time`. The local program is lowered a second time, onto a mesh with that axis
alone; batch leaves lie as `(time b) ...` and every operator follows by the rules that split it over `dp`:

    linear        (time b) i, o i   ->  (time b) o           the same code on a microbatch
    linear_dw     (time b) o, (time b) i  ->  o i +time      a pending sum: the accumulator
    nll_loss      the mean divides by the number of labels of the *whole* batch: an all_reduce over time

What comes out is a program in which `time` is an axis like any other (it can run on a simulated mesh that has it);
`loop.fold` then runs its ranks one after another. A value lies in one of three ways over time: split on a dim, pending,
or whole. Conversions are an accumulation (pending -> whole), a stack (split -> whole) and a slice (whole -> split), so
each node takes its operands as they lie wherever a strategy allows. Strategies that need fewer accumulations before
them come first; among those, fewer conversions.

Note [Accumulators]. What is summed over microbatches is summed at least in float32: a bfloat16 sum of 256 ones stays at 256,
however many more are added. The sum is rounded once, behind the loop.

Whole values that are wanted split are computed split from the start where that is cheap (masks, expanded gradients), so
that nothing of the size of the batch is made only to be sliced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from colofunc.errors import ProgramError
from colofunc.mesh import Mesh
from colofunc.program.facts import COLLECTIVES, kind_of
from colofunc.program.ir import Node, Program, Ref, Value, map_refs
from colofunc.program.lower import RecordLocal, call_of
from colofunc.program.passes.time_rules import index_of_rows, rows_rule, time_rule, with_time
from colofunc.program.places import made_at
from colofunc.spec.conversions.conversion import conversion
from colofunc.spec.layout import At, Layout, make_layout, replicated
from colofunc.spec.rule import Call, Rule, Strategy, TensorType
from colofunc.spec.strategies import FREE, build, enumerate_strategies, follow, place, replicated_strategy, usable

Extra = Callable[[Call, Mesh], tuple[Strategy, ...]]
# Operators whose results depend on their operand's shape alone, and the value they fill it with.
_LIKE: Mapping[str, Any] = {"aten.ones_like.default": 1, "aten.zeros_like.default": 0}


@attrs.frozen
class Rules:
    """What the lowering asks: rules and further strategies of calls, and the recorder of local code."""

    rule: Callable[[Call], Rule | None]
    extra: Extra
    record_local: RecordLocal


def over_time(
    program: Program, leaves: Iterable[int], microbatches: int, axis: str, rules: Rules, minor: bool = False, lean: bool = False
) -> Program:
    """`program` (local, functional) with one more axis of `microbatches`, on dim 0 of the values `leaves`.

    minor: microbatch t has the rows t, t + microbatches, ... instead of one run of rows. The numbers are the same; a
    split of the batch over more mesh axes in the middle of the program then leaves microbatches as they are.
    lean: gradients are reduce-scattered before they are accumulated, once per microbatch: accumulators are shards.
    """
    return _finished(_build(program, leaves, microbatches, axis, rules, minor, lean))


def lies_over_time(
    program: Program, leaves: Iterable[int], microbatches: int, axis: str, rules: Rules
) -> tuple[dict[int, Layout], Program]:
    """How each value of a program, local or global, lies over time, and the program with that axis."""
    build_ = _build(program, leaves, microbatches, axis, rules)
    lies = dict(build_.lies)
    return lies, _finished(build_)


def _finished(build_: _Build) -> Program:
    program = build_.program
    inputs = tuple(build_.copies[id][replicated(program.values[id].shape)] for id in program.inputs)
    constants = {new: program.constants[old] for new, old in zip(inputs, program.inputs, strict=True) if old in program.constants}
    outputs = tuple(build_.want(o, replicated(program.values[o].shape), None) for o in program.outputs)
    return Program(inputs, tuple(build_.nodes), outputs, build_.values, constants, program.aliases, "local")


def _build(
    program: Program, leaves: Iterable[int], microbatches: int, axis: str, rules: Rules, minor: bool = False, lean: bool = False
) -> _Build:
    axes: dict[str, Any] = {axis: microbatches}
    build_ = _Build(program, Mesh(**axes), axis, rules, lean)
    split = {id: _split_rows(program.values[id].shape, microbatches, axis, minor) for id in leaves}
    build_.leaves.update(split)
    for id in program.inputs:
        build_.define(id, replicated(program.values[id].shape))
        layout = program.values[id].layout
        build_.places[id] = None if layout is None else layout.at
        if id in split:
            build_.lies[id] = split[id]
    for node in program.nodes:
        build_.node(node)
        for o in node.outs:
            if o in split and o is not None and not build_.lies[o].axes:
                build_.lies[o] = split[o]
    return build_


def _split_rows(shape: tuple[int, ...], n: int, axis: str, minor: bool) -> Layout:
    rows = ((shape[0] // n, None), (n, axis)) if minor else ((n, axis), (shape[0] // n, None))
    return make_layout((rows, *(((size, None),) for size in shape[1:])), shape)


@attrs.define(eq=False)
class _Build:
    """The program while it is made. Old ids are those of the local program, new ids those of the one with time."""

    program: Program
    mesh: Mesh
    axis: str
    rules: Rules
    lean: bool
    nodes: list[Node] = attrs.field(factory=list)
    values: dict[int, Value] = attrs.field(factory=dict)
    copies: dict[int, dict[Layout, int]] = attrs.field(factory=dict)  # old id -> how it lies over time -> new id
    lies: dict[int, Layout] = attrs.field(factory=dict)  # old id -> how consumers had best take it
    level: dict[int, int] = attrs.field(factory=dict)  # new id -> accumulations that have to end before it is known
    makers: dict[int, Node] = attrs.field(factory=dict)
    leaves: set[int] = attrs.field(factory=set)  # old ids of the batch's leaves, however they were moved over the mesh
    places: dict[int, At | None] = attrs.field(factory=dict)  # old id -> where it exists
    known: dict[Call, Rule | None] = attrs.field(factory=dict)
    more: dict[Call, tuple[Strategy, ...]] = attrs.field(factory=dict)

    # ---- values ----

    def new(self, like: Value, layout: Layout | None, shape: tuple[int, ...]) -> int:
        id = len(self.values)
        self.values[id] = attrs.evolve(like, id=id, layout=layout, shape=shape)
        return id

    def define(self, old: int, over: Layout) -> int:
        """A new value for the old one, lying as `over` over time."""
        like = self.program.values[old]
        id = self.new(like, with_time(like.layout, over, self.axis), over.local_shape)
        self.copies.setdefault(old, {})[over] = id
        self.lies.setdefault(old, over)
        self.level.setdefault(id, 0)
        return id

    def emit(self, node: Node, outs: Sequence[int | None], rise: int = 0) -> None:
        self.nodes.append(node)
        level = max((self.level[r] for r in node.refs), default=0) + rise
        self.level.update({o: level for o in outs if o is not None})

    # ---- conversions over time ----

    def want(self, old: int, over: Layout, node: Node | None) -> int:
        """The new id of the value as it should lie."""
        copies = self.copies[old]
        if over in copies:
            return copies[over]
        whole = replicated(over.shape)
        if whole not in copies:
            self._convert(old, next(iter(copies)), whole, node)
            return self.want(old, over, node)
        if over.axes and not over.pending and self.lies[old] is whole:
            made = self._at_source(old, over)
            if made is not None:
                return made
        self._convert(old, whole, over, node)
        return copies[over]

    def _convert(self, old: int, have: Layout, over: Layout, node: Node | None) -> None:
        """Add the nodes of a conversion; `node` is who wants it."""
        current, like = self.copies[old][have], self.program.values[old]
        if 0 in over.shape:  # no element to move
            current = self.copies[old][over] = self.new(like, None, over.local_shape)
            zeros = Node("aten.full.default", (over.local_shape, 0), (("dtype", like.dtype),), (current,), on=self.places[old])
            self.emit(zeros, (current,))
            self.values[current] = attrs.evolve(self.values[current], layout=with_time(like.layout, over, self.axis))
            return
        maker = attrs.evolve(node or self.makers.get(old) or Node("", (), (), ()), on=self.places[old])
        who = f"{_user_of(node)} needs {over.text()}" if node is not None else "an output"
        wide = bool(have.pending) and like.dtype.is_floating_point and like.dtype.itemsize < torch.float32.itemsize
        if wide:  # see Note [Accumulators]
            current = self._cast(current, torch.float32, maker)
        for move in conversion(have, over, self.mesh, like.dtype.itemsize).moves:
            out = self.new(attrs.evolve(like, dtype=self.values[current].dtype), None, move.local_shape)
            rise = int(move.target in ("all_reduce", "all_gather"))
            made = Node(
                f"colofunc.{move.target}", (Ref(current), *move.args), (), (out,), maker.phase, maker.path, maker.line,
                f"{have.text()} -> {over.text()}: {who}", on=maker.on,
            )  # fmt: skip
            self.emit(made, (out,), rise)
            current = out
        if wide:
            current = self._cast(current, like.dtype, maker)
        self.values[current] = attrs.evolve(self.values[current], layout=with_time(like.layout, over, self.axis))
        self.copies[old][over] = current

    def _cast(self, id: int, dtype: torch.dtype, maker: Node) -> int:
        """The new value in another dtype."""
        value = self.values[id]
        out = self.new(attrs.evolve(value, dtype=dtype), value.layout, value.shape)
        where = (maker.phase, maker.path, maker.line, f"accumulated in {torch.float32}")
        self.emit(Node("aten._to_copy.default", (Ref(id),), (("dtype", dtype),), (out,), *where, on=maker.on), (out,))
        return out

    def _at_source(self, old: int, over: Layout) -> int | None:
        """The value computed split, from operands that are split or sliced, where its operator is cheap to run in parts."""
        node = self.makers.get(old)
        if node is None or kind_of(node) is not None or len(node.outs) != 1:
            return None
        call, ids = call_of(node, self.program.values)
        rule = self.rule_at(node, call, ids)
        if rule is None or rule.flops is not None or rule.outs[0] is None:
            return None
        placement = place(rule.outs[0], rule, over)
        if placement is None or any(f not in usable(rule) for f in placement):
            return None
        strategy = build(call, rule, placement)
        if strategy.outs[0] is not over or any(lay.pending for lay in strategy.ins):
            return None
        self._run(node, call, ids, strategy, rule)
        return self.copies[old][over]

    # ---- nodes ----

    def rule_at(self, node: Node, call: Call, ids: Sequence[int]) -> Rule | None:
        """The rule of a node, by who made its operands: `x[arange(b), i]` takes one element of each row."""
        rows = index_of_rows(call)
        if rows and self._counts(ids[rows[0]], call.ins[rows[0]].shape[0]):
            return rows_rule(call)
        return self.rule(call)

    def _counts(self, old: int, n: int) -> bool:
        """Whether a value is 0, 1, ... n - 1."""
        node, value = self.makers.get(old), self.program.constants.get(old)
        if value is not None:
            return value.dtype == torch.int64 and torch.equal(value.cpu(), torch.arange(n))
        starts = {"aten.arange.default": (n,), "aten.arange.start": (0, n), "aten.arange.start_step": (0, n)}
        return node is not None and node.args in (starts.get(node.target), (0, n, 1) if "step" in node.target else None)

    def rule(self, call: Call) -> Rule | None:
        if call not in self.known:
            self.known[call] = time_rule(call, self.rules.rule)
        return self.known[call]

    def node(self, node: Node) -> None:
        self.makers.update(dict.fromkeys(node.results, node))
        self.places.update(dict.fromkeys(node.results, made_at(node)))
        if node.target in _LIKE and not dict(node.kwargs).get("memory_format"):
            node = self._filled(node)
        call, ids = call_of(node, self.program.values)
        lies = [self.lies[i] for i in ids]
        given = bool(ids) and kind_of(node) is not None and all(i in self.leaves for i in ids)
        if given or not any(lay.axes or lay.pending for lay in lies):
            self.leaves.update(o for o in node.results if given)  # the batch itself is moved once
            self._whole(node)
            return
        rule = self.rule_at(node, call, ids)
        strategy = self._choose(call, ids, lies, rule)
        if all(lay.is_replicated for lay in (*strategy.ins, *(o for o in strategy.outs if o is not None))):
            self._whole(node)
            return
        self._run(node, call, ids, strategy, rule)

    def _filled(self, node: Node) -> Node:
        """`ones_like(x)` as a factory: it does not depend on x."""
        (out,) = node.outs
        assert out is not None
        value = self.program.values[out]
        fill = 1 if "ones" in node.target else 0
        made = attrs.evolve(
            node, target="aten.full.default", args=(value.shape, float(fill) if value.dtype.is_floating_point else fill),
            kwargs=(("dtype", value.dtype),),
        )  # fmt: skip
        self.makers[out] = made
        return made

    def _whole(self, node: Node) -> None:
        """The node as it stands, once for all microbatches."""
        operands = {i: self.want(i, replicated(self.program.values[i].shape), node) for i in dict.fromkeys(node.refs)}
        outs = tuple(None if o is None else self.define(o, replicated(self.program.values[o].shape)) for o in node.outs)
        args, kwargs = map_refs((node.args, node.kwargs), lambda i: Ref(operands[i]))
        self.emit(attrs.evolve(node, args=args, kwargs=kwargs, outs=outs), outs)

    def _run(self, node: Node, call: Call, ids: Sequence[int], strategy: Strategy, rule: Rule | None) -> None:
        """The node under a strategy."""
        operands = [self.want(i, layout, node) for i, layout in zip(ids, strategy.ins, strict=True)]
        if strategy.local is not None:
            self._spliced(node, operands, strategy)
            return
        args, kwargs = call.args, call.kwargs
        if rule is not None and rule.localize is not None:
            args, kwargs = rule.localize(call, strategy.ins, strategy.outs)
        outs = tuple(
            None if o is None or lay is None else self.define(o, lay) for o, lay in zip(node.outs, strategy.outs, strict=True)
        )
        args, kwargs = map_refs((args, kwargs), lambda k: Ref(operands[k]))
        self.emit(attrs.evolve(node, args=args, kwargs=kwargs, outs=outs), outs)

    def _spliced(self, node: Node, operands: Sequence[int], strategy: Strategy) -> None:
        """The local code of a strategy in place of the node."""
        assert strategy.local is not None, "a strategy with local code"
        types = [TensorType(self.values[i].shape, self.values[i].dtype) for i in operands]
        body = self.rules.record_local(partial(strategy.local, mesh=self.mesh), types)
        if body.constants:
            raise ProgramError(f"local code of {node.target} {strategy.name} captures tensors; create them inside the function")
        here = dict(zip(body.inputs, operands, strict=True))
        for inner in body.nodes:
            if inner.target in _LIKE and inner.outs[0] is not None:
                v = body.values[inner.outs[0]]
                fill: float | int = _LIKE[inner.target]
                fill = float(fill) if v.dtype.is_floating_point else fill
                inner = attrs.evolve(inner, target="aten.full.default", args=(v.shape, fill), kwargs=(("dtype", v.dtype),))
            outs = tuple(None if o is None else self.new(body.values[o], None, body.values[o].shape) for o in inner.outs)
            here.update({o: new for o, new in zip(inner.outs, outs, strict=True) if o is not None and new is not None})
            args, kwargs = map_refs((inner.args, inner.kwargs), lambda i: Ref(here[i]))
            note = f"{node.target} {strategy.name}"
            rise = int(is_reduction(inner, self.axis))
            self.emit(Node(inner.target, args, kwargs, outs, node.phase, node.path, node.line, note, on=node.on), outs, rise)
        tensors = [(o, lay) for o, lay in zip(node.outs, strategy.outs, strict=True) if o is not None and lay is not None]
        for (old, lay), result in zip(tensors, body.outputs, strict=True):
            like, new = self.program.values[old], here[result]
            if self.values[new].shape != lay.local_shape or self.values[new].dtype != like.dtype:
                raise ProgramError(f"local code of {node.target} over time gave {self.values[new].shape}, {lay.local_shape} was planned")
            layout = with_time(like.layout, lay, self.axis)
            self.values[new] = attrs.evolve(self.values[new], name=like.name, role=like.role, layout=layout)
            self.copies.setdefault(old, {})[lay] = new
            self.lies.setdefault(old, lay)

    # ---- which strategy ----

    def _choose(self, call: Call, ids: Sequence[int], lies: Sequence[Layout], rule: Rule | None) -> Strategy:
        if not any(lay.axes for lay in lies):
            return self._passing(call, ids, lies, rule) or replicated_strategy(call)
        options: dict[Any, Strategy] = {}
        if rule is not None:
            for k, lay in enumerate(lies):
                if lay.axes and 0 not in lay.shape and (found := follow(call, rule, k, lay)) is not None:
                    options.setdefault((found.ins, found.outs), found)
            for found in enumerate_strategies(call, rule, self.mesh) if not _only_own(call) else ():
                options.setdefault((found.ins, found.outs), found)
        for found in self.extra(call):
            options.setdefault((found.ins, found.outs), found)
        whole = replicated_strategy(call)
        options[whole.ins, whole.outs] = whole
        prices = [(self._price(ids, lies, s), n, s) for n, s in enumerate(options.values())]
        return min(((p, n, s) for p, n, s in prices if p is not None), key=lambda entry: entry[:2])[2]

    def extra(self, call: Call) -> tuple[Strategy, ...]:
        if call not in self.more:
            self.more[call] = self.rules.extra(call, self.mesh)
        return self.more[call]

    def _price(self, ids: Sequence[int], lies: Sequence[Layout], strategy: Strategy) -> tuple[int, int, int, int] | None:
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
        pending = {k: lay.pending[0] for k, lay in enumerate(lies) if lay.pending}
        distinct = {ids[k] for k in pending}
        view = call.target.rsplit(".", 1)[0] in FREE or call.target in ("colofunc.rearrange", "colofunc.take_shard")
        view = view or (self.lean and call.target == "colofunc.reduce_scatter")
        out = call.outs[0]
        widens = call.target.startswith("aten._to_copy") and out is not None and out.dtype.itemsize > call.ins[0].dtype.itemsize
        if not (view or widens or len(distinct) > 1) or len(set(pending.values())) > 1:
            return None
        axis, how = next(iter(pending.values()))
        for index, members in enumerate(rule.linear if how == "sum" else rule.monotone):
            if members == frozenset(pending):
                return build(call, rule, {}, [(axis, index, how)])
        return None


def _user_of(node: Node) -> str:
    """The operator that a node belongs to: a collective in the local code of one says whose in its note."""
    inside = kind_of(node) is not None and node.note and " -> " not in node.note
    return node.note.split(" ", maxsplit=1)[0] if inside else node.target


def _only_own(call: Call) -> bool:
    """Collectives are followed, never enumerated."""
    return call.target in COLLECTIVES or call.target == "colofunc.rearrange"


def is_reduction(node: Node, axis: str) -> bool:
    """Whether a node reduces or gathers over time."""
    kind = kind_of(node)
    return kind is not None and kind[0] in ("all_reduce", "all_gather") and tuple(node.args[1]) == (axis,)
