"""Places: who has a value, who runs a node, and what one rank runs of a program that is the union of all.

Problem: ranks do not all do the same: a pipeline's first stage has the embedding, its last one the loss. Idea: one program says what
all of them do. A node runs at some indices of a mesh axis (`Node.on`), its results exist there; a `send` makes them exist elsewhere.
What a rank runs is what is left of the program when the others' nodes are gone.

    %7: f32[4,8] «a b @pp=0» = tanh(%6) @pp=0
    %8: f32[4,8] «a b @pp=1» = send(%7, ('pp',), 2, 0, (1,))        # rank of pp=0: send(%7, ...); of pp=1: %8 = receive(...)
    %9: f32[4,8] «a b @pp=1» = mm(%8, %3) @pp=1
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

import attrs

from colofunc.mesh import Mesh
from colofunc.program.actions import ActionTable
from colofunc.program.editor import Editor
from colofunc.program.ir import Loop, Node, Program, Timetable, Value, computed_once
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
    layouts = (program.values[i].layout for i in program.inputs)
    here = any(layout is not None and layout.at is not None for layout in layouts)
    return here or any(node.on is not None or node.target == SEND for each in program.with_bodies() for node in each.nodes)


@attrs.frozen(eq=False)
class OnRank:
    """What one rank runs. `inputs`, `outputs`, `nodes`: positions of those of the union that it has; inputs are counted without
    constants."""

    program: Program
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    nodes: tuple[int, ...]


@attrs.frozen(eq=False)
class _Here:
    """A rank and its indices along axes, which every node asks for."""

    mesh: Mesh
    rank: int
    known: dict[str | tuple[str, ...], int] = attrs.field(factory=dict, init=False)

    def index(self, axes: str | tuple[str, ...]) -> int:
        """`Mesh.index` of the rank."""
        found = self.known.get(axes)
        if found is None:
            found = self.known[axes] = self.mesh.index(self.rank, axes)
        return found

    def has(self, at: At | None) -> bool:
        """Whether the rank is among those that have a value, or run an operator."""
        return at is None or self.index(at[0]) in at[1]


def on_rank(program: Program, mesh: Mesh, rank: int) -> OnRank:
    """What a rank runs of a program: the nodes that it takes part in, the inputs and outputs that exist there."""
    given = [i for i in program.inputs if i not in program.constants]
    if not has_places(program):
        return OnRank(program, tuple(range(len(given))), tuple(range(len(program.outputs))), tuple(range(len(program.nodes))))
    here = _Here(mesh, rank)
    mine, nodes = _filtered(program, here, [i for i in program.inputs if _exists(program, i, here)])
    there = set(mine.inputs)
    made = there | {out for node in mine.nodes for out in node.results}
    outputs = tuple(k for k, out in enumerate(program.outputs) if out in made)
    return OnRank(mine, tuple(k for k, i in enumerate(given) if i in there), outputs, nodes)


def _filtered(program: Program, here: _Here, inputs: Sequence[int]) -> tuple[Program, tuple[int, ...]]:
    """What a rank runs of a program of which it has these inputs, and which nodes that are."""
    nodes: list[Node] = []
    positions_of: list[int] = []
    made = set(inputs)
    for index, node in enumerate(program.nodes):
        for mine in _of_rank(node, program, made, here):
            nodes.append(mine)
            positions_of.append(index)
            made.update(mine.results)
    kept = {k: out for k, out in enumerate(program.outputs) if out in made}
    places = {k: place for place, k in enumerate(kept)}
    positions = {i: k for k, i in enumerate(inputs)}
    aliases = tuple((places[out], positions[program.inputs[into]]) for out, into in program.aliases if out in places)
    return _seen(program, made).written(nodes, kept.values(), inputs, aliases=aliases), tuple(positions_of)


def _seen(program: Program, made: Collection[int]) -> Editor:
    """A program of whose values a rank has these."""
    edit = Editor(program)
    edit.values.update({id: _here(program.values[id]) for id in made})
    return edit


def _here(value: Value) -> Value:
    """A value as a rank sees it that has it."""
    if value.layout is None or value.layout.at is None:
        return value
    return attrs.evolve(value, layout=value.layout.with_at(None))


def _exists(program: Program, id: int, here: _Here) -> bool:
    layout = program.values[id].layout
    return layout is None or here.has(layout.at)


def _of_rank(node: Node, program: Program, there: Collection[int], here: _Here) -> Iterator[Node]:
    """A node as a rank runs it; nothing if it does not. there: the values that the rank has before it."""
    if not here.has(node.on):
        return
    if node.target == SEND:
        yield from _sent(node, program, here)
    elif node.loop is not None:
        yield from _repeated(node, node.loop, there, here)
    else:
        yield attrs.evolve(node, on=None)


def _sent(node: Node, program: Program, here: _Here) -> Iterator[Node]:
    """The sender's half, which keeps what it sends where it is a target itself, or a receiver's."""
    _, axes, n, source, targets = node.args
    index, (out,) = here.index(axes), node.results
    if index == source:
        yield attrs.evolve(node, outs=(out,) if index in targets else (), on=None)
    elif index in targets:
        value = program.values[out]
        yield attrs.evolve(node, target=RECEIVE, args=(axes, n, source, value.shape, value.dtype), on=None)


def _repeated(node: Node, loop: Loop, there: Collection[int], here: _Here) -> Iterator[Node]:
    """A loop with what the rank runs of its body; nothing where that is nothing."""
    outputs = loop.body.outputs
    passed = [(arg, into) for arg, into in zip(node.args, loop.body.inputs, strict=True) if arg.id in there]
    inputs = [into for _, into in passed]
    if loop.cut_by is not None:
        loop = _in_parts(loop, loop.cut_by, inputs, here)
        body = loop.body
    else:
        body, _ = _filtered(loop.body, here, inputs)
    if not body.nodes:
        return
    args = tuple(arg for arg, _ in passed)
    made = {*body.inputs, *(out for inner in body.nodes for out in inner.results)}
    kept = [k for k, out in enumerate(outputs) if out in made]
    gathers, outs = tuple(loop.gathers[k] for k in kept), tuple(node.outs[k] for k in kept)
    yield attrs.evolve(node, args=args, outs=outs, loop=attrs.evolve(loop, body=body, gathers=gathers), on=None)


def _in_parts(loop: Loop, timetable: Timetable, inputs: Sequence[int], here: _Here) -> Loop:
    """The parts that a rank does of a loop that is cut. What others send is received in the part that first reads it."""
    row = timetable.table.rows[here.index((timetable.along,))]
    mine = {(action.stage, action.kind) for action in row}
    by_part: list[list[Node]] = []
    received: list[Node] = []
    made = set(inputs)
    for part, (first, end) in zip(timetable.parts, timetable.spans(), strict=True):
        nodes = [found for node in loop.body.nodes[first:end] for found in _of_rank(node, loop.body, made, here)]
        made.update(out for node in nodes for out in node.results)
        received += [node for node in nodes if node.target == RECEIVE]
        if part in mine:
            by_part.append([node for node in nodes if node.target != RECEIVE])
    for node in received:
        _receive(node, by_part)
    nodes = [node for part in by_part for node in part]
    outputs = (out for out in loop.body.outputs if out in made)
    body = _seen(loop.body, made).written(nodes, outputs, inputs)
    parts = tuple(part for part in timetable.parts if part in mine)
    ends = tuple(accumulate(len(part) for part in by_part))
    return attrs.evolve(loop, body=body, timetable=attrs.evolve(timetable, table=ActionTable((row,)), parts=parts, ends=ends))


def _receive(node: Node, by_part: Sequence[list[Node]]) -> None:
    """Put a receive in front of the first part that reads what comes, or, where nobody does, behind the last."""
    (out,) = node.results
    for part in by_part:
        if any(out in reader.refs for reader in part):
            part.insert(0, node)
            return
    by_part[-1].append(node)


def out_of_order(program: Program, mesh: Mesh) -> str:
    """The first message between parts of a loop that a rank receives before one that the same rank has sent it earlier, "" if none is.

    A library that tells messages of a pair by their order alone cannot carry such a loop.
    """
    for node in program.nodes:
        if node.loop is None or node.loop.cut_by is None:
            continue
        axes = (node.loop.cut_by.along,)
        rows = [_messages(node, program, mesh, rank) for rank in mesh.groups(axes)[0]]
        for source, mine in enumerate(rows):
            for target, theirs in enumerate(rows):
                sent = [message for to, message in mine if to == ("to", target)]
                received = [message for to, message in theirs if to == ("from", source)]
                for first, second in zip(sent, received, strict=True):
                    if first != second:
                        tag, microbatch = second
                        return f"message {tag} of microbatch {microbatch} from index {source} to {target} of {axes[0]!r}"
    return ""


Message = tuple[tuple[str, int], tuple[int, int]]  # ("to" or "from", index of the other), (tag, microbatch)


def _messages(node: Node, program: Program, mesh: Mesh, rank: int) -> list[Message]:
    """What a rank sends and receives in a loop that is cut, in the order in which it does so."""
    found: list[Message] = []
    for mine in _repeated(node, node.loop, set(program.values), _Here(mesh, rank)) if node.loop is not None else ():
        assert mine.loop is not None and mine.loop.timetable is not None, "a rank's part of a loop in parts"
        timetable, nodes = mine.loop.timetable, mine.loop.body.nodes
        spans = dict(zip(timetable.parts, timetable.spans(), strict=True))
        for action in timetable.table.rows[0]:
            for inner in nodes[slice(*spans[action.stage, action.kind])]:
                message = int(dict(inner.kwargs).get("tag", 0)), action.microbatch
                if inner.target == RECEIVE:
                    found.append((("from", inner.args[2]), message))
                elif inner.target == SEND:
                    found += [(("to", target), message) for target in inner.args[4] if target != inner.args[3]]
    return found


def distinct_ranks(program: Program, mesh: Mesh) -> tuple[int, ...]:
    """One rank of each kind that runs something else."""
    first: dict[int, int] = {}
    for rank in range(mesh.size) if has_places(program) else (0,):
        first.setdefault(_kind(rank, program, mesh), rank)
    return tuple(first.values())


def same_as(rank: int, program: Program, mesh: Mesh) -> int:
    """The one of `distinct_ranks` that runs what this rank runs."""
    kind = _kind(rank, program, mesh)
    return next(one for one in distinct_ranks(program, mesh) if _kind(one, program, mesh) == kind)


def _kind(rank: int, program: Program, mesh: Mesh) -> int:
    axes = _axes(program)
    return mesh.index(rank, mesh.ordered(axes)) if axes else 0


@computed_once
def _axes(program: Program) -> tuple[str, ...]:
    """Axes at whose indices something exists or runs."""
    axes = set()
    for each in program.with_bodies():
        layouts = (program.values[i].layout for i in program.inputs) if each is program else ()
        axes |= {layout.at[0] for layout in layouts if layout is not None and layout.at is not None}
        axes |= {node.on[0] for node in each.nodes if node.on is not None}
        axes |= {axis for node in each.nodes if node.target == SEND for axis in node.args[1]}
    return tuple(sorted(axes))
