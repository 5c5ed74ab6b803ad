"""Lowering: apply a plan to a global program, giving the program that one rank runs.

For each node, in order: bring every operand to the layout the chosen strategy wants (conversions become collective
nodes, shared by all consumers that want the same), emit the operator with local sizes or the strategy's local code,
remember the layout of what came out. A value may exist in several layouts at once; a conversion starts from the
cheapest copy there is.

    %5 [(dp b) i]  linear wants  b (tp i)    ->    all_gather(dp), take_shard(tp), linear
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from colofunc.errors import ProgramError
from colofunc.mesh import Mesh
from colofunc.program.ir import Node, Program, Ref, Value, computed_once, map_refs, rewritten
from colofunc.program.placing import Placing, is_free_view, is_sent_as_source, placed_everywhere
from colofunc.spec.conversions.conversion import conversion, conversion_s
from colofunc.spec.layout import At, Layout, covers
from colofunc.spec.rule import Call, Rule, Strategy, TensorType

RecordLocal = Callable[[Callable[..., Any], Sequence[TensorType]], Program]


@attrs.frozen
class Choice:
    """What the plan decided for one node."""

    strategy: Strategy
    rule: Rule | None


def call_of(node: Node, values: Mapping[int, Value]) -> tuple[Call, tuple[int, ...]]:
    """The node as a `Call` and the value ids of its operands.

    Operand k is `Ref(k)`; repeats stay separate operands.
    """
    ids: list[int] = []

    def operand(id: int) -> Ref:
        ids.append(id)
        return Ref(len(ids) - 1)

    args = map_refs(node.args, operand)
    kwargs = map_refs(node.kwargs, operand)
    ins = tuple(TensorType(values[id].shape, values[id].dtype) for id in ids)
    outs = tuple(None if out is None else TensorType(values[out].shape, values[out].dtype) for out in node.outs)
    return Call(node.target, args, kwargs, ins, outs), tuple(ids)


def call_in(program: Program, node: Node) -> tuple[Call, tuple[int, ...]]:
    """`call_of` a node of a program; equal calls are one object, and each is made once however often it is asked for."""
    calls = _calls(program)
    known = calls.of_node.get(id(node))
    if known is None or known[0] is not node:
        call, ids = call_of(node, program.values)
        known = calls.of_node[id(node)] = node, calls.same.setdefault(call, call), ids
    return known[1], known[2]


@attrs.frozen(eq=False)
class _Calls:
    """Calls of a program's nodes: by the node's id, with the node itself, and each as the first that equals it."""

    of_node: dict[int, tuple[Node, Call, tuple[int, ...]]] = attrs.field(factory=dict)
    same: dict[Call, Call] = attrs.field(factory=dict)


@computed_once
def _calls(program: Program) -> _Calls:
    return _Calls()


class Builder:
    """A local program while it is made. Old ids are those of the program that is lowered, new ids its own.

    `copies`: old id -> layout -> new id, in which layouts a value is there so far.
    """

    def __init__(
        self, program: Program, mesh: Mesh, record_local: RecordLocal, regather: frozenset[int] = frozenset()
    ) -> None:
        self.program, self.mesh, self.record_local = program, mesh, record_local
        self.regather = regather  # values whose conversions are made anew in every phase, so that they can die between
        # by id of a strategy, kept here
        self.recorded: dict[tuple[int, tuple[TensorType, ...]], tuple[Program, Strategy]] = {}
        self.made_in: dict[int, str] = {}  # new id of a converted copy of such a value -> phase
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = {}
        self.copies: dict[int, dict[Layout, int]] = {}
        self.views: dict[int, tuple[Node, Choice]] = {}  # old id -> the view that it is, where values are at places

    def finished(self, outputs: Iterable[int]) -> Program:
        """The local program of all that was run, with these new ids as outputs."""
        program = self.program
        inputs = tuple(next(iter(self.copies[old].values())) for old in program.inputs)
        constants: dict[int, torch.Tensor] = {}
        for new, old in zip(inputs, program.inputs, strict=True):
            if old in program.constants:
                constants[new] = program.constants[old]
        return Program(inputs, tuple(self.nodes), tuple(outputs), self.values, constants, program.aliases, "local")

    # ---- values ----

    def new(self, like: Value, layout: Layout | None, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> int:
        """The id of a new value."""
        id = len(self.values)
        dtype = dtype or like.dtype
        # Not `attrs.evolve`, which takes four times as long: this is done for every value.
        self.values[id] = Value(id, shape, dtype, like.name, like.role, layout, like.device_free, like.of, like.place)
        return id

    def define(self, old: int, layout: Layout) -> int:
        """A new value that is the old one in `layout`."""
        id = self.new(self.program.values[old], self.layout_of(old, layout), layout.local_shape)
        self.copies.setdefault(old, {})[layout] = id
        return id

    def layout_of(self, old: int, layout: Layout | None) -> Layout | None:
        """What is written to a copy of an old value in `layout`; None on the way between two layouts."""
        return layout

    def emit(self, node: Node) -> None:
        """Append a node whose values are there."""
        self.nodes.append(node)

    # ---- conversions ----

    def is_at(self, old: int, at: At | None) -> bool:
        """Whether some copy of a value is there."""
        return any(covers(layout.at, at) for layout in self.copies[old])

    def want(self, old: int, layout: Layout, reader: Node | None) -> int:
        """The new id of a copy of the value in `layout`, converted from the cheapest copy if it is not there yet.

        No reader: an output.
        """
        phase = reader.phase if reader is not None else ""
        copies = self.copies[old]
        if old in self.regather:
            copies = {lay: id for lay, id in copies.items() if self.made_in.get(id, phase) == phase}
        if layout in copies:
            return copies[layout]
        itemsize = self.program.values[old].dtype.itemsize
        best = min(copies, key=lambda have: conversion_s(have, layout, self.mesh, itemsize))
        made = self.convert(
            old, copies[best], best, layout, reader or Node("", (), (), ()), f"{best.text()} -> {layout.text()}"
        )
        if old in self.regather and made != copies[best]:  # what is everywhere is at one place as it is
            self.made_in[made] = phase
        return made

    def convert(self, old: int, copy: int, have: Layout, layout: Layout, where: Node, note: str) -> int:
        """The nodes that bring one copy of a value from one layout to another.

        `where`: the node of which they have phase and line.
        """
        like = attrs.evolve(self.program.values[old], dtype=self.values[copy].dtype)
        moves = conversion(have, layout, self.mesh, like.dtype.itemsize).moves
        for move in moves:
            out = self.new(like, self.layout_of(old, move.layout), move.local_shape)
            target, args, on = (
                f"colofunc.{move.target}",
                (Ref(copy), *move.args),
                where.on if move.on is None else move.on,
            )
            self.emit(Node(target, args, (), (out,), where.phase, where.path, where.line, note, on=on))
            copy = out
        if moves:
            self.adopt(old, layout, copy)
        self.copies[old][layout] = copy
        return copy

    def adopt(self, old: int, layout: Layout, new: int) -> None:
        """Make a new value the copy of an old one in `layout`."""
        like, said = self.program.values[old], self.layout_of(old, layout)
        self.values[new] = attrs.evolve(self.values[new], name=like.name, role=like.role, of=like.of, layout=said)
        self.copies.setdefault(old, {})[layout] = new

    # ---- nodes ----

    def run(
        self, node: Node, choice: Choice, at: At | None = None, called: tuple[Call, tuple[int, ...]] | None = None
    ) -> None:
        """A node under the strategy that was chosen. at: the place that was found for it, and where its operands are
        wanted. called: what `call_of` says of it, where it was asked.
        """
        call, ids = called or call_in(self.program, node)
        strategy = choice.strategy
        for id in ids:
            self._look_again(id, at)
        operands = [self.want(id, layout.with_at(at), node) for id, layout in zip(ids, strategy.ins, strict=True)]
        if strategy.local is not None:
            self._splice(node, strategy, operands, at)
            return
        args, kwargs = call.args, call.kwargs
        if choice.rule is not None and choice.rule.localize is not None:
            args, kwargs = choice.rule.localize(call, strategy.ins, strategy.outs)
        outs: list[int | None] = []
        for old, layout in zip(node.outs, strategy.outs, strict=True):
            outs.append(None if old is None or layout is None else self.define(old, layout.with_at(at)))
        args, kwargs = map_refs((args, kwargs), lambda position: Ref(operands[position]))
        self.emit(rewritten(node, args, kwargs, tuple(outs), strategy.name, at or node.on))

    def _splice(self, node: Node, strategy: Strategy, operands: Sequence[int], at: At | None) -> None:
        """The local code of a strategy in place of a node."""
        assert strategy.local is not None, "a strategy with local code"
        types = tuple(TensorType(self.values[id].shape, self.values[id].dtype) for id in operands)
        key = id(strategy), types  # identical layers share the strategy
        if key not in self.recorded:
            self.recorded[key] = self.record_local(partial(strategy.local, mesh=self.mesh), types), strategy
        body, _ = self.recorded[key]
        if body.constants:
            raise ProgramError(
                f"local code of {node.target} {strategy.name} captures tensors; create them inside the function"
            )
        here: dict[int, int] = dict(zip(body.inputs, operands, strict=True))
        for inner in body.nodes:
            here.update({id: self.new(body.values[id], None, body.values[id].shape) for id in inner.results})
            args, kwargs = map_refs((inner.args, inner.kwargs), lambda id: Ref(here[id]))
            outs = tuple(None if id is None else here[id] for id in inner.outs)
            note = f"{node.target} {strategy.name}"
            self.emit(Node(inner.target, args, kwargs, outs, node.phase, node.path, node.line, note, on=at or node.on))
        tensors: list[tuple[int, Layout]] = []  # results that are None are not recorded
        for old_id, layout in zip(node.outs, strategy.outs, strict=True):
            if old_id is not None and layout is not None:
                tensors.append((old_id, layout))
        for (old, layout), result in zip(tensors, body.outputs, strict=True):
            self._check(node, old, layout, here[result])
            self.adopt(old, layout.with_at(at), here[result])

    def _check(self, node: Node, old: int, layout: Layout, new: int) -> None:
        like, made = self.program.values[old], self.values[new]
        if made.shape != layout.local_shape or made.dtype != like.dtype:
            raise ProgramError(
                f"local code of {node.target} gave {tuple(made.shape)} {made.dtype}, its layout {layout.text()} wants "
                f"{layout.local_shape} {like.dtype}"
            )

    def _look_again(self, old: int, at: At | None) -> None:
        """Take a view once more where what it looks at has come or is sent in its place, so that it need not be sent
        itself.
        """
        if old not in self.views or self.is_at(old, at):
            return
        node, choice = self.views[old]
        for ref in node.refs:
            self._look_again(ref, at)
        if is_sent_as_source(self.program, old) or all(self.is_at(ref, at) for ref in node.refs):
            self.run(node, choice, at)


def lower(
    program: Program,
    choices: Sequence[Choice],
    input_layouts: Mapping[int, Layout],
    output_layouts: Sequence[Layout],
    mesh: Mesh,
    record_local: RecordLocal,
    regather: frozenset[int] = frozenset(),
    placing: Placing | None = None,
) -> Program:
    """The local program. `choices` is parallel to `program.nodes`; layouts cover every input and output.

    `regather`: inputs whose conversions are not kept from one phase to the next (ZeRO-3's second gather). `placing`:
    where inputs, nodes and outputs are; None: everywhere. An output that is split along the axis of its place is on all
    of its ranks.
    """
    build = Builder(program, mesh, record_local, regather)
    places = placing or placed_everywhere(program)
    for id, at in zip(program.inputs, places.inputs, strict=True):
        build.define(id, input_layouts[id].with_at(at))
    for node, choice, at in zip(program.nodes, choices, places.nodes, strict=True):
        if placing is not None and is_free_view(node):
            build.views.update(dict.fromkeys(node.results, (node, choice)))
        build.run(node, choice, at)
    ends = zip(program.outputs, output_layouts, places.outputs, strict=True)
    outputs = [build.want(id, layout.where_free(at), None) for id, layout, at in ends]
    for of, copies in build.copies.items():
        build.values.update({id: attrs.evolve(build.values[id], of=of) for id in copies.values()})
    return build.finished(outputs)
