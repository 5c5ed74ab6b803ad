"""Cut: the body of a loop in parts that ranks do for one microbatch and another, as a timetable says.

Problem: in a loop over microbatches each trip goes through all stages of a pipeline before the next begins, so that one
stage works and the others wait. Idea: a trip consists of parts, and a schedule is a table that says which rank does
which part for which microbatch:

    F0 F1 F2 | B2 B1 B0 [| W2 W1 W0]        forward of each stage, its backward, or input gradients (I) and weight gradients (W) apart

What part a node is in, `parts_of_nodes` finds. See Note [Floating] there of what is in none.

What is sent belongs to the part that makes it, and is received in the part that first reads it
(`places.on_rank`). A value that is sent only to be gathered is gathered where it is, and sent once, behind the loop.

Source: the parts F, B, I and W are those of Zero Bubble Pipeline Parallelism (2401.10241), section 2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import attrs

from colofunc.errors import PlanError
from colofunc.program.editor import Editor
from colofunc.program.ir import Loop, Node, Part, Program, Ref, Timetable, map_refs
from colofunc.program.passes.parts_of_nodes import FORWARD, WEIGHTS, PartsOfNodes, split_along_stages
from colofunc.program.places import SEND
from colofunc.spec.layout import At


def cut(program: Program) -> Program:
    """`program` with the body of each loop that has a timetable in parts.

    Raises PlanError where a stage needs what a later one makes, or the timetable lacks an action.
    """
    edit = Editor(program)
    for index, node in enumerate(program.nodes):
        timetable = _timetable_to_follow(node)
        if timetable is not None:
            edit.replace(index, *_cut(node, timetable, edit, _owned(program, timetable)))
    return edit.done()


def to_be_cut(program: Program) -> bool:
    """Whether a loop has a timetable that nobody has looked at yet."""
    return any(_timetable_to_follow(node) is not None for node in program.nodes)


def _timetable_to_follow(node: Node) -> Timetable | None:
    """The timetable of a loop that is not cut yet."""
    if node.loop is None or node.loop.timetable is None or node.loop.timetable.ends:
        return None
    return node.loop.timetable


def _owned(program: Program, timetable: Timetable) -> dict[int, int]:
    """Value outside of the loop -> the stage that it belongs to: that of the one weight that it is made of, by casts
    and gathers.

    What is made of a buffer (rotary tables) may be for all layers.
    """
    owned: dict[int, int] = {}
    made_of: dict[int, frozenset[int]] = {}  # value -> the stages of the weights that it is made of
    for id in program.inputs:
        value = program.values[id]
        if value.name in timetable.stages:
            stage = timetable.stages[value.name]
            owned[id] = stage
            made_of[id] = frozenset() if value.role == "buffer" else frozenset({stage})
    if not made_of:
        return owned
    for node in program.nodes:
        stages = frozenset[int]().union(*[made_of[ref] for ref in node.refs if ref in made_of])
        for out in node.results:
            made_of[out] = stages
            if len(stages) == 1:
                (owned[out],) = stages
    return owned


def _cut(node: Node, timetable: Timetable, edit: Editor, owned: Mapping[int, int]) -> Iterator[Node]:
    """The nodes in place of a loop: what all ranks gather, the loop in parts, and what is sent when it has ended."""
    node, sends = _sent_behind(node, edit)
    of_nodes = PartsOfNodes(node, _loop_of(node).body, timetable, owned)
    body = of_nodes.body
    apart = [
        position for position, out in enumerate(body.outputs) if out in of_nodes.floating or out not in body.makers
    ]
    if apart:
        yield _part_of_loop(node, apart, None)
        rest = [position for position in range(len(node.outs)) if position not in apart]
        node = _part_of_loop(node, rest, timetable)
        of_nodes = PartsOfNodes(node, _loop_of(node).body, timetable, owned)
    body, parts, ends = _Parts(of_nodes).written()
    timetable = attrs.evolve(timetable, parts=parts, ends=ends)
    yield attrs.evolve(node, loop=attrs.evolve(_loop_of(node), body=body, timetable=timetable))
    yield from sends


def _loop_of(node: Node) -> Loop:
    assert node.loop is not None, "a loop stays a loop"
    return node.loop


def _sent_behind(node: Node, edit: Editor) -> tuple[Node, list[Node]]:
    """The loop gathering, where they are, values that are sent only to be gathered; and the nodes that send what was
    gathered.
    """
    body = _loop_of(node).body
    outs = list(node.outs)
    outputs = list(body.outputs)
    sends: list[Node] = []
    moved: set[int] = set()  # results of sends that the body no longer has
    for position, out in enumerate(body.outputs):
        send = body.makers.get(out)
        if send is None or send.target != SEND:
            continue
        if out in body.readers or body.outputs.count(out) > 1:
            continue
        whole = outs[position]
        assert whole is not None, "a loop has all that it gathers"
        _, (axis, *_), _, index, _ = send.args
        layout = edit.values[whole].layout
        layout_there = None if layout is None else layout.with_at((axis, (index,)))
        gathered = edit.new(edit.values[whole], layout=layout_there)
        (outputs[position],) = send.refs
        outs[position] = gathered
        sends.append(attrs.evolve(send, args=(Ref(gathered), *send.args[1:]), outs=(whole,)))
        moved.add(out)
    if not moved:
        return node, []
    nodes = [inner for inner in body.nodes if moved.isdisjoint(inner.results)]
    body = Editor(body).written(nodes, outputs)
    return attrs.evolve(node, outs=tuple(outs), loop=attrs.evolve(_loop_of(node), body=body)), sends


def _part_of_loop(node: Node, which: Collection[int], timetable: Timetable | None) -> Node:
    """The loop that gathers only some of what a loop gathers."""
    loop = _loop_of(node)
    outputs = tuple(loop.body.outputs[position] for position in which)
    needed = set(outputs)
    nodes: list[Node] = []
    for inner in reversed(loop.body.nodes):
        shows = not inner.outs and timetable is not None  # once, in the loop that has all else
        if shows or not needed.isdisjoint(inner.results):
            needed.update(inner.refs)
            nodes.append(inner)
    nodes.reverse()
    args: list[Ref] = []
    inputs: list[int] = []
    for arg, into in zip(node.args, loop.body.inputs, strict=True):
        if into in needed:
            args.append(arg)
            inputs.append(into)
    body = Editor(loop.body).written(nodes, outputs, inputs)
    gathers = tuple(loop.gathers[position] for position in which)
    outs = tuple(node.outs[position] for position in which)
    loop = attrs.evolve(loop, body=body, gathers=gathers, timetable=timetable)
    return attrs.evolve(node, args=tuple(args), outs=outs, loop=loop)


class _Parts:
    """The body written down part after part."""

    def __init__(self, of_nodes: PartsOfNodes) -> None:
        self.of_nodes = of_nodes
        self.body = of_nodes.body
        self.edit = Editor(self.body)
        self.along = of_nodes.timetable.along
        self.nodes: list[Node] = []
        self.there: dict[tuple[int, object], int] = {}  # (value, rank) or, of one that floats, (value, part) -> its id
        self.used: set[int] = set()
        self.sends = 0

    def written(self) -> tuple[Program, tuple[Part, ...], tuple[int, ...]]:
        """The new body, its parts in an order in which one trip can run, and the position behind each.

        Raises PlanError where the timetable has no action for a part.
        """
        instances: dict[Part, list[tuple[int, int]]] = {}  # part -> (position, rank) of the nodes in it
        for instance, part in self.of_nodes.part.items():
            instances.setdefault(part, []).append(instance)
        table = self.of_nodes.timetable.table
        actions = {(action.stage, action.kind) for row in table.rows for action in row}
        missing = sorted(set(instances) - actions)
        if missing:
            stage, kind = missing[0]
            raise PlanError(
                f"the timetable has no action {stage}{kind}, and the step has such a part; use a schedule that has it"
            )
        parts = tuple(sorted(actions, key=_in_trip))
        ends = []
        for part in parts:
            for index, rank in sorted(instances.get(part, ())):
                self._write(self.body.nodes[index], part, rank)
            ends.append(len(self.nodes))
        outputs = [self._gathered(out) for out in self.body.outputs]
        return self.edit.written(self.nodes, outputs), parts, tuple(ends)

    def _gathered(self, out: int) -> int:
        """The id of an output; where several ranks make it each has its own, and all of them one name."""
        maker = self.body.makers[out]
        if maker.target == SEND:
            return out
        ids = {self.there[out, rank] for rank in self.of_nodes.ranks(maker)}
        if len(ids) > 1 and not maker.line:
            raise split_along_stages(self.body, maker, self.along)
        if len(ids) > 1:
            stages = " and ".join(map(str, sorted(self.of_nodes.ranks(maker))))
            raise PlanError(
                f"{maker.target} ({maker.line}) runs on ranks {stages} of {self.along!r}, and what it gives is wanted "
                "once: operators are on the stage of the parameters that they read, and weights that a step makes of "
                "gradients, for a second forward pass, are on none. Try: cf.accumulate and zero(...) in place of "
                "cf.pipeline for this step"
            )
        return ids.pop()

    def _write(self, node: Node, part: Part, rank: int) -> None:
        """A node as one rank runs it."""
        operands = {ref: self._operand(ref, part, rank) for ref in dict.fromkeys(node.refs)}
        args, kwargs = map_refs((node.args, node.kwargs), lambda id: Ref(operands[id]))
        if node.target == SEND:
            self.sends += 1
            self.nodes.append(attrs.evolve(node, args=args, kwargs=(("tag", self.sends),)))
            _, _, _, source, targets = node.args
            for out in node.results:
                for index in (*targets, source):
                    self.there[out, index] = out
            return
        self._instance(attrs.evolve(node, args=args, kwargs=kwargs), rank, rank)

    def _instance(self, node: Node, rank: int, key: object) -> None:
        """One copy of a node; the first keeps the ids of its results."""
        here: At = (self.along, (rank,))
        outs: list[int | None] = []
        for out in node.outs:
            if out is None:
                outs.append(None)
                continue
            value = self.edit.values[out]
            layout = None if value.layout is None else value.layout.with_at(here)
            new = self.edit.new(value, layout=layout) if out in self.used else out
            self.edit.values[new] = attrs.evolve(self.edit.values[new], layout=layout)
            self.used.add(new)
            self.there[out, key] = new
            outs.append(new)
        self.nodes.append(attrs.evolve(node, outs=tuple(outs), on=here))

    def _operand(self, id: int, part: Part, rank: int) -> int:
        """The id of a value for a node in a part on a rank."""
        maker = self.body.makers.get(id)
        if maker is None:
            return id
        if id not in self.of_nodes.floating:
            return self.there[id, rank]
        self._float(maker, part, rank)
        return self.there[id, part]

    def _float(self, node: Node, part: Part, rank: int) -> None:
        """Have a floating node in a part, behind what it reads."""
        todo = [node]
        while todo:
            top = todo[-1]
            if all((out, part) in self.there for out in top.results):
                todo.pop()
                continue
            lacking = [ref for ref in top.refs if ref in self.body.makers and (ref, part) not in self.there]
            if lacking:
                todo += [self.body.makers[ref] for ref in lacking]
                continue
            args, kwargs = map_refs((top.args, top.kwargs), lambda id: Ref(self.there.get((id, part), id)))
            self._instance(attrs.evolve(todo.pop(), args=args, kwargs=kwargs), rank, part)


def _in_trip(part: Part) -> tuple[int, int]:
    """Where a part stands in one trip: forward from the first stage, then backward from the last, then weight
    gradients.
    """
    stage, kind = part
    if kind == FORWARD:
        return 0, stage
    return (2 if kind == WEIGHTS else 1), -stage
