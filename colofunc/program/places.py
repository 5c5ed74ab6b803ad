"""Places: who has a value, who runs a node, and what one rank runs of a program that is the union of all.

Problem: ranks do not all do the same: a pipeline's first stage has the embedding, its last one the loss. Idea: one
program says what all of them do. A node runs at some indices of a mesh axis (`Node.on`), its results exist there; a
`send` makes them exist elsewhere. What a rank runs is what is left of the program when the others' nodes are gone.

    %7: f32[4,8] «a b @pp=0» = tanh(%6) @pp=0
    %8: f32[4,8] «a b @pp=1» = send(%7, ('pp',), 2, 0, (1,))        # rank of pp=0: send(%7, ...); of pp=1: %8 = receive(...)
    %9: f32[4,8] «a b @pp=1» = mm(%8, %3) @pp=1
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain

import attrs

from colofunc.mesh import Mesh
from colofunc.program.actions import ActionTable
from colofunc.program.editor import Editor
from colofunc.program.ir import Loop, Node, Program, Ref, Timetable, computed_once, rewritten
from colofunc.spec.layout import At

SEND = "colofunc.send"
RECEIVE = "colofunc.receive"


def made_at(node: Node) -> At | None:
    """Where the results of a node exist."""
    if node.target != SEND:
        return node.on
    _, (axis,), n, _, targets = node.args
    return None if len(targets) == n else (axis, tuple(targets))


@computed_once
def has_places(program: Program) -> bool:
    """Whether some rank does not do all of a program, or has not all of its values."""
    for id in program.inputs:
        layout = program.values[id].layout
        if layout is not None and layout.at is not None:
            return True
    return _has_nodes_apart(program)


def _has_nodes_apart(program: Program) -> bool:
    """Whether some rank does not run all nodes of a program, or of a body in it."""
    if SEND in program.targets:
        return True
    if any(node.on is not None for node in program.nodes):
        return True
    return any(node.loop is not None and _has_nodes_apart(node.loop.body) for node in program.nodes)


@attrs.frozen(eq=False)
class OnRank:
    """What one rank runs.

    `inputs`, `outputs`, `nodes`: positions of those of the union that it has; inputs are counted without constants.
    """

    program: Program
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    nodes: tuple[int, ...]


@attrs.frozen(eq=False)
class _Rank:
    """A rank and its indices along axes, which every node asks for."""

    mesh: Mesh
    number: int
    known: dict[str | tuple[str, ...], int] = attrs.field(factory=dict, init=False)

    def index(self, axes: str | tuple[str, ...]) -> int:
        """`Mesh.index` of the rank."""
        index = self.known.get(axes)
        if index is None:
            index = self.known[axes] = self.mesh.index(self.number, axes)
        return index

    def has(self, at: At | None) -> bool:
        """Whether the rank is among those that have a value, or run an operator."""
        return at is None or self.index(at[0]) in at[1]


def on_rank(program: Program, mesh: Mesh, rank: int) -> OnRank:
    """What a rank runs of a program: the nodes that it takes part in, the inputs and outputs that exist there."""
    given = [id for id in program.inputs if id not in program.constants]
    if not has_places(program):
        return OnRank(
            program, tuple(range(len(given))), tuple(range(len(program.outputs))), tuple(range(len(program.nodes)))
        )
    one = _Rank(mesh, rank)
    inputs = [id for id in program.inputs if _exists(program, id, one)]
    part, node_positions = _part_of(program, one, inputs)
    there = {*part.inputs, *_results(part.nodes)}
    has_inputs = tuple(position for position, id in enumerate(given) if id in there)
    has_outputs = tuple(position for position, out in enumerate(program.outputs) if out in there)
    return OnRank(part, has_inputs, has_outputs, node_positions)


def _results(nodes: Iterable[Node]) -> Iterator[int]:
    for node in nodes:
        yield from node.results


def _part_of(program: Program, rank: _Rank, inputs: Sequence[int]) -> tuple[Program, tuple[int, ...]]:
    """What a rank runs of a program of which it has these inputs, and the positions of those nodes in the program."""
    nodes: list[Node] = []
    node_positions: list[int] = []
    there = set(inputs)
    for index in _own_positions(program, rank):
        for own in _of_rank(program.nodes[index], program, there, rank):
            nodes.append(own)
            node_positions.append(index)
            there.update(own.results)
    # Outputs and inputs that others have are gone, and the positions of aliases with them.
    kept = [position for position, out in enumerate(program.outputs) if out in there]
    new_position = {position: new for new, position in enumerate(kept)}
    leaf_position = {id: position for position, id in enumerate(inputs)}
    aliases = []
    for out, leaf in program.aliases:
        if out in new_position:
            aliases.append((new_position[out], leaf_position[program.inputs[leaf]]))
    outputs = [program.outputs[position] for position in kept]
    return _editor_of(program, there).written(nodes, outputs, inputs, aliases=tuple(aliases)), tuple(node_positions)


@computed_once
def _positions_by_place(program: Program) -> Mapping[At | None, list[int]]:
    """Place -> positions of the nodes that run there; None: those that run everywhere."""
    positions: dict[At | None, list[int]] = {}
    for index, node in enumerate(program.nodes):
        positions.setdefault(node.on, []).append(index)
    return positions


def _own_positions(program: Program, rank: _Rank) -> list[int]:
    """Positions of the nodes that a rank takes part in, ascending. Of many ranks each has few of them."""
    positions: list[int] = []
    for at, of_place in _positions_by_place(program).items():
        if rank.has(at):
            positions += of_place
    return sorted(positions)


def _editor_of(program: Program, there: Collection[int]) -> Editor:
    """An editor of a program of whose values a rank has these.

    To the rank they exist, and it does not ask where else.
    """
    edit = Editor(program)
    for id in there:
        value = program.values[id]
        if value.layout is not None and value.layout.at is not None:
            value = attrs.evolve(value, layout=value.layout.with_at(None))
        edit.values[id] = value
    return edit


def _exists(program: Program, id: int, rank: _Rank) -> bool:
    """Whether a rank has a value of a program."""
    layout = program.values[id].layout
    return layout is None or rank.has(layout.at)


def _of_rank(node: Node, program: Program, there: Collection[int], rank: _Rank) -> Iterator[Node]:
    """A node as a rank runs it that takes part in it. there: the values that the rank has before it."""
    if node.target == SEND:
        yield from _half_of_send(node, program, rank)
    elif node.loop is not None:
        yield from _part_of_loop(node, node.loop, there, rank)
    elif node.on is None:
        yield node
    else:
        yield rewritten(node, node.args, node.kwargs, node.outs, node.note, None)


def _half_of_send(node: Node, program: Program, rank: _Rank) -> Iterator[Node]:
    """The sender's half, which keeps what it sends where it is a target itself, or a receiver's."""
    _, axes, n, source, targets = node.args
    index = rank.index(axes)
    (out,) = node.results
    if index == source:
        yield attrs.evolve(node, outs=(out,) if index in targets else (), on=None)
    elif index in targets:
        value = program.values[out]
        yield attrs.evolve(node, target=RECEIVE, args=(axes, n, source, value.shape, value.dtype), on=None)


def _part_of_loop(node: Node, loop: Loop, there: Collection[int], rank: _Rank) -> Iterator[Node]:
    """A loop with what the rank runs of its body; nothing where that is nothing."""
    outputs = loop.body.outputs
    args: list[Ref] = []
    inputs: list[int] = []
    for arg, into in zip(node.args, loop.body.inputs, strict=True):
        if arg.id in there:
            args.append(arg)
            inputs.append(into)
    if loop.cut_by is not None:
        loop = _in_parts(loop, loop.cut_by, inputs, rank)
        body = loop.body
    else:
        body, _ = _part_of(loop.body, rank, inputs)
    made = {*body.inputs, *_results(body.nodes)}
    kept = [position for position, out in enumerate(outputs) if out in made]
    if not body.nodes and not kept:  # what each trip gives may be what the loop was given
        return
    gathers = tuple(loop.gathers[position] for position in kept)
    outs = tuple(node.outs[position] for position in kept)
    yield attrs.evolve(node, args=tuple(args), outs=outs, loop=attrs.evolve(loop, body=body, gathers=gathers), on=None)


def _in_parts(loop: Loop, timetable: Timetable, inputs: Sequence[int], rank: _Rank) -> Loop:
    """The parts that a rank does of a loop that is cut.

    What others send is received in the part that first reads it.
    """
    row = timetable.table.rows[rank.index((timetable.along,))]
    own_parts = {(action.stage, action.kind) for action in row}
    parts = []
    nodes_of: list[list[Node]] = []
    received: list[Node] = []
    there = set(inputs)
    positions = _own_positions(loop.body, rank)
    begin = 0
    for part, (_, end) in zip(timetable.parts, timetable.spans(), strict=True):
        # Parts of others have receives of this rank: a send is in the part that makes what is sent.
        nodes: list[Node] = []
        behind = bisect_left(positions, end, begin)
        for position in positions[begin:behind]:
            nodes += _of_rank(loop.body.nodes[position], loop.body, there, rank)
        begin = behind
        there.update(_results(nodes))
        received += [node for node in nodes if node.target == RECEIVE]
        if part in own_parts:
            parts.append(part)
            nodes_of.append([node for node in nodes if node.target != RECEIVE])
    for node in received:
        _receive(node, nodes_of)
    outputs = [out for out in loop.body.outputs if out in there]
    body = _editor_of(loop.body, there).written(list(chain.from_iterable(nodes_of)), outputs, inputs)
    ends = tuple(accumulate(map(len, nodes_of)))
    timetable = attrs.evolve(timetable, table=ActionTable((row,)), parts=tuple(parts), ends=ends)
    return attrs.evolve(loop, body=body, timetable=timetable)


def _receive(node: Node, nodes_of: Sequence[list[Node]]) -> None:
    """Put a receive in front of the first part that reads what comes, or, where nobody does, behind the last."""
    (out,) = node.results
    for nodes in nodes_of:
        if any(out in reader.refs for reader in nodes):
            nodes.insert(0, node)
            return
    nodes_of[-1].append(node)


Channel = tuple[str, int, int, int]  # (axis, index of the sender, index of the receiver, tag)
# (tag, microbatch) of messages as they are sent, and as they are received
MessageOrder = tuple[list[tuple[int, int]], list[tuple[int, int]]]


def channels(program: Program, mesh: Mesh) -> dict[Channel, int]:
    """How messages between parts of loops are divided so that those of one channel are received in the order in which
    they are sent.

    What one index of an axis sends to another is one channel, number 0; where it is received in another order than it
    is sent (a V gives activations and gradients to the same rank), messages of each tag have a channel of their own,
    from number 1 on.
    """
    numbers: dict[Channel, int] = {}
    for axis, pairs in _orders(program, mesh):
        for (source, target), (sent, received) in pairs.items():
            for number, tag in enumerate(sorted({tag for tag, _ in sent}), start=1):
                key = axis, source, target, tag
                numbers[key] = max(numbers.get(key, 0), 0 if sent == received else number)
    return numbers


def out_of_order(program: Program, mesh: Mesh) -> str:
    """The first message of a channel that a rank receives before one that was sent earlier, "" if none is.

    A library that tells messages of a pair by their order alone cannot carry such a loop.
    """
    for axis, pairs in _orders(program, mesh):
        for (source, target), (sent, received) in pairs.items():
            for tag in sorted({tag for tag, _ in sent}):
                sent_microbatches = [microbatch for other, microbatch in sent if other == tag]
                microbatches = [microbatch for other, microbatch in received if other == tag]
                for first, second in zip(sent_microbatches, microbatches, strict=True):
                    if first != second:
                        return f"message {tag} of microbatch {second} from index {source} to {target} of {axis!r}"
    return ""


def _orders(program: Program, mesh: Mesh) -> Iterator[tuple[str, dict[tuple[int, int], MessageOrder]]]:
    """Of each loop that is cut (its axis, (index of the sender, of the receiver) -> the orders of their messages)."""
    for node in program.nodes:
        if node.loop is None or node.loop.cut_by is None:
            continue
        axis = node.loop.cut_by.along
        by_index = [_messages(node, node.loop, program, mesh, rank) for rank in mesh.groups((axis,))[0]]
        pairs: dict[tuple[int, int], MessageOrder] = {}
        for source, of_source in enumerate(by_index):
            for (way, target), message in of_source:
                if way == "to":
                    pairs.setdefault((source, target), ([], []))[0].append(message)
        for target, of_target in enumerate(by_index):
            for (way, source), message in of_target:
                if way == "from":
                    pairs[source, target][1].append(message)
        yield axis, pairs


ChannelMessage = tuple[tuple[str, int], tuple[int, int]]  # ("to" or "from", index of the other), (tag, microbatch)


def _messages(node: Node, loop: Loop, program: Program, mesh: Mesh, rank: int) -> list[ChannelMessage]:
    """What a rank sends and receives in a loop that is cut, in the order in which it does so."""
    messages: list[ChannelMessage] = []
    for own in _part_of_loop(node, loop, set(program.values), _Rank(mesh, rank)):  # one or none
        assert own.loop is not None and own.loop.timetable is not None, "a rank's part of a loop in parts"
        timetable, nodes = own.loop.timetable, own.loop.body.nodes
        spans = dict(zip(timetable.parts, timetable.spans(), strict=True))
        for action in timetable.table.rows[0]:
            first, end = spans[action.stage, action.kind]
            for inner in nodes[first:end]:
                message = int(dict(inner.kwargs).get("tag", 0)), action.microbatch
                if inner.target == RECEIVE:
                    messages.append((("from", inner.args[2]), message))
                elif inner.target == SEND:
                    _, _, _, source, targets = inner.args
                    messages += [(("to", target), message) for target in targets if target != source]
    return messages


def distinct_ranks(program: Program, mesh: Mesh) -> tuple[int, ...]:
    """One rank of each kind that runs something else."""
    first: dict[int, int] = {}
    for rank in range(mesh.size) if has_places(program) else (0,):
        first.setdefault(_kind(rank, program, mesh), rank)
    return tuple(first.values())


def same_as(rank: int, program: Program, mesh: Mesh) -> int:
    """The one of `distinct_ranks` that runs what this rank runs."""
    kind = _kind(rank, program, mesh)
    return next(first for first in distinct_ranks(program, mesh) if _kind(first, program, mesh) == kind)


def _kind(rank: int, program: Program, mesh: Mesh) -> int:
    """Ranks with equal numbers run the same: the index along the axes that tell ranks apart."""
    axes = _axes(program)
    return mesh.index(rank, mesh.ordered(axes)) if axes else 0


@computed_once
def _axes(program: Program) -> tuple[str, ...]:
    """Axes at whose indices something exists or runs."""
    axes: set[str] = set()
    for id in program.inputs:
        layout = program.values[id].layout
        if layout is not None and layout.at is not None:
            axes.add(layout.at[0])
    for each in program.with_bodies():
        for node in each.nodes:
            if node.on is not None:
                axes.add(node.on[0])
            if node.target == SEND:
                axes.update(node.args[1])
    return tuple(sorted(axes))
