"""Lowering: apply a plan to a global program, giving the program that one rank runs.

For each node, in order: bring every operand to the layout the chosen strategy wants (conversions become collective
nodes, shared by all consumers that want the same), emit the operator with local sizes or the strategy's local code,
remember the layout of what came out. A value may exist in several layouts at once; a conversion starts from the
cheapest copy there is.

    %5 [(dp b) i]  linear wants  b (tp i)    ->    all_gather(dp), take_shard(tp), linear
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from colofunc.errors import ProgramError
from colofunc.mesh import Mesh
from colofunc.program.ir import Node, Program, Ref, Value, map_refs
from colofunc.program.placing import Placing, everywhere, is_sent_as_source, is_view
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
    """The node as a `Call` (operand k is `Ref(k)`; repeats stay separate operands) and the value ids of its operands."""
    ids: list[int] = []

    def operand(id: int) -> Ref:
        ids.append(id)
        return Ref(len(ids) - 1)

    args = map_refs(node.args, operand)
    kwargs = map_refs(node.kwargs, operand)
    ins = tuple(TensorType(values[i].shape, values[i].dtype) for i in ids)
    outs = tuple(None if o is None else TensorType(values[o].shape, values[o].dtype) for o in node.outs)
    return Call(node.target, args, kwargs, ins, outs), tuple(ids)


class Builder:
    """Collects the nodes and values of a local program."""

    def __init__(self, mesh: Mesh, regather: frozenset[int] = frozenset()) -> None:
        self.mesh = mesh
        self.regather = regather  # values whose conversions are made anew in every phase, so that they can die between
        self.made_in: dict[int, str] = {}  # local id of a converted copy of such a value -> phase
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = {}
        self.copies: dict[int, dict[Layout, int]] = {}  # global id -> layout -> local id
        self.views: dict[int, tuple[Node, Choice]] = {}  # global id -> the view that it is, where values are at places

    def new_value(self, like: Value, layout: Layout | None, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> int:
        id = len(self.values)
        self.values[id] = Value(id, shape, dtype or like.dtype, like.name, like.role, layout, like.device_free)
        return id

    def define(self, global_id: int, like: Value, layout: Layout) -> int:
        """A local id for `like` in `layout`, known as a copy of the global value from now on."""
        id = self.new_value(like, layout, layout.local_shape)
        self.copies.setdefault(global_id, {})[layout] = id
        return id

    def is_at(self, global_id: int, at: At | None) -> bool:
        """Whether some copy of a value is there."""
        return any(covers(layout.at, at) for layout in self.copies[global_id])

    def want(self, global_id: int, layout: Layout, source: Node | None) -> int:
        """The local id of a copy of the value in `layout`, converted from the cheapest copy if it is not there yet."""
        phase = source.phase if source is not None else ""
        copies = self.copies[global_id]
        if global_id in self.regather:
            copies = {lay: id for lay, id in copies.items() if self.made_in.get(id, phase) == phase}
        if layout in copies:
            return copies[layout]
        any_id = next(iter(copies.values()))
        like = self.values[any_id]
        itemsize = like.dtype.itemsize
        best = min(copies, key=lambda have: conversion_s(have, layout, self.mesh, itemsize))
        current = copies[best]
        conv = conversion(best, layout, self.mesh, itemsize)
        for move in conv.moves:
            out = self.new_value(like, move.layout, move.local_shape)
            note = f"{best.text()} -> {layout.text()}"
            target, args, origin = f"colofunc.{move.target}", (Ref(current), *move.args), source or Node("", (), (), ())
            self.nodes.append(Node(target, args, (), (out,), origin.phase, origin.path, origin.line, note, on=move.on))
            current = out
        if conv.moves and self.values[current].layout is not layout:
            self.values[current] = attrs.evolve(self.values[current], layout=layout)
        self.copies[global_id][layout] = current
        if global_id in self.regather:
            self.made_in[current] = phase
        return current

    def splice(self, body: Program, ids: Sequence[int], node: Node, name: str) -> tuple[int, ...]:
        """Append the nodes of a recorded local function applied to `ids`; returns the ids of its outputs."""
        here: dict[int, int] = dict(zip(body.inputs, ids, strict=True))
        if body.constants:
            raise ProgramError(f"local code of {node.target} {name} captures tensors; create them inside the function")
        for inner in body.nodes:
            outs: list[int | None] = []
            for o in inner.outs:
                if o is None:
                    outs.append(None)
                    continue
                v = body.values[o]
                here[o] = self.new_value(v, None, v.shape)
                outs.append(here[o])
            args = map_refs(inner.args, lambda i: Ref(here[i]))
            kwargs = map_refs(inner.kwargs, lambda i: Ref(here[i]))
            note = f"{node.target} {name}"
            self.nodes.append(Node(inner.target, args, kwargs, tuple(outs), node.phase, node.path, node.line, note, on=node.on))
        return tuple(here[o] for o in body.outputs)


def lower(
    program: Program,
    choices: Sequence[Choice],
    input_layouts: Mapping[int, Layout],
    output_layouts: Sequence[Layout],
    mesh: Mesh,
    record_local: RecordLocal,
    regather: frozenset[int] = frozenset(),
    build: Builder | None = None,
    placing: Placing | None = None,
) -> Program:
    """The local program. `choices` is parallel to `program.nodes`; layouts cover every input and output.

    `regather`: inputs whose conversions are not kept from one phase to the next (ZeRO-3's second gather). `build`: a new
    builder, for callers that want to know afterwards which local value is a copy of which global one. `placing`: where inputs, nodes and
    outputs are; None: everywhere.
    """
    build = build or Builder(mesh, regather)
    places = placing or everywhere(program)
    inputs = tuple(
        build.define(i, program.values[i], input_layouts[i].with_at(at)) for i, at in zip(program.inputs, places.inputs, strict=True)
    )
    constants = {local: program.constants[i] for local, i in zip(inputs, program.inputs, strict=True) if i in program.constants}
    for node, choice, at in zip(program.nodes, choices, places.nodes, strict=True):
        if placing is not None and is_view(node):
            build.views.update(dict.fromkeys(node.results, (node, choice)))
        _lower_node(build, program, node, choice, at, record_local)
    outputs = tuple(
        build.want(i, layout.with_at(at), None) for i, layout, at in zip(program.outputs, output_layouts, places.outputs, strict=True)
    )
    for of, copies in build.copies.items():
        build.values.update({id: attrs.evolve(build.values[id], of=of) for id in copies.values()})
    return Program(inputs, tuple(build.nodes), outputs, build.values, constants, program.aliases, "local")


def _lower_node(build: Builder, program: Program, node: Node, choice: Choice, at: At | None, record_local: RecordLocal) -> None:
    call, ids = call_of(node, program.values)
    strategy = choice.strategy
    for i in ids:
        _look_again(build, program, i, at, record_local)
    operands = [build.want(i, layout.with_at(at), node) for i, layout in zip(ids, strategy.ins, strict=True)]
    if strategy.local is not None:
        types = [TensorType(build.values[i].shape, build.values[i].dtype) for i in operands]
        body = record_local(partial(strategy.local, mesh=build.mesh), types)
        results = build.splice(body, operands, attrs.evolve(node, on=at), strategy.name)
        tensors = [(o, lay) for o, lay in zip(node.outs, strategy.outs, strict=True) if o is not None and lay is not None]
        for (id, layout), result in zip(tensors, results, strict=True):  # results that are None are not recorded
            _adopt(build, program, id, layout.with_at(at), result, node)
        return
    args, kwargs = call.args, call.kwargs
    if choice.rule is not None and choice.rule.localize is not None:
        args, kwargs = choice.rule.localize(call, strategy.ins, strategy.outs)
    outs = [
        None if o is None or layout is None else build.define(o, program.values[o], layout.with_at(at))
        for o, layout in zip(node.outs, strategy.outs, strict=True)
    ]

    def local(k: int) -> Ref:
        """Operand k of the call is a local value here."""
        return Ref(operands[k])

    build.nodes.append(
        attrs.evolve(node, args=map_refs(args, local), kwargs=map_refs(kwargs, local), outs=tuple(outs), note=strategy.name, on=at)
    )


def _look_again(build: Builder, program: Program, id: int, at: At | None, record_local: RecordLocal) -> None:
    """Take a view once more where what it looks at has come or is sent in its place, so that it need not be sent itself."""
    if id not in build.views or build.is_at(id, at):
        return
    node, choice = build.views[id]
    for ref in node.refs:
        _look_again(build, program, ref, at, record_local)
    if is_sent_as_source(program, id) or all(build.is_at(ref, at) for ref in node.refs):
        _lower_node(build, program, node, choice, at, record_local)


def _adopt(build: Builder, program: Program, global_id: int, layout: Layout, local_id: int, node: Node) -> None:
    """Make a spliced result the copy of a global value."""
    like, made = program.values[global_id], build.values[local_id]
    if made.shape != layout.local_shape or made.dtype != like.dtype:
        raise ProgramError(
            f"local code of {node.target} gave {tuple(made.shape)} {made.dtype}, "
            f"its layout {layout.text()} wants {layout.local_shape} {like.dtype}"
        )
    build.values[local_id] = attrs.evolve(made, name=like.name, role=like.role, layout=layout)
    build.copies.setdefault(global_id, {})[layout] = local_id
