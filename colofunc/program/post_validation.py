"""Post-validation: a pipelined step in three parts, so that no stage waits for the others at its end.

Problem: how gradients are clipped, and whether a step is skipped, follows from all stages, and what a rank returns (a
loss, a norm) comes from others. A rank that waits for it at the end of each step makes the pipeline empty between two
steps. Idea: what waits is apart.

    main        forward, backward, squares of each stage: no message of another stage's end is read
    exchange    scalars that stages send to one another behind the schedule, and what follows from them: the norm, the factor, the loss
    update      parameters and moments, by the scalars of the exchange that it reads (`judged`)

The update may run before the exchange has come, by the scalars of the step before. Where these turn out to be others,
what it wrote to is put back from copies and the update is done again by the right ones: numbers are those of one device
in every case.

    parts = deferred(program)        # Deferred, or the reason why this program cannot be taken apart, as a str
    parts = deferred_parts(program, mesh)  # Deferred, or that reason as a PlanError

Source: Zero Bubble Pipeline Parallelism (2401.10241, section 4), where a stage steps by what the stages before it say
and later rolls back. Here the scalars of the last step are what is speculated on, so that all ranks speculate alike and
come to one verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import attrs

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.program.aliases import aliases
from colofunc.program.editor import Editor
from colofunc.program.facts import has_wires, is_copy, is_peer, is_wire, written
from colofunc.program.ir import Node, Program, Timetable, computed_once
from colofunc.program.places import RECEIVE, SEND


@attrs.frozen(eq=False)
class Deferred:
    """A step in parts.

    The inputs of `exchange` and `update` are values of the step's inputs, of what `main` and `exchange` give.

    judged: scalars of the exchange that the update reads. late: outputs of the step that the exchange makes. kept: what
    the update writes to.
    """

    main: Program
    exchange: Program
    update: Program
    judged: tuple[int, ...]
    late: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def speculates(self) -> bool:
        """Whether an update waits for other stages, so that it has to be guessed what they say."""
        return bool(self.update.nodes)

    @property
    def together(self) -> bool:
        """Whether the ranks of a stage have to come to the update at once, as where it ends with a gather."""
        return has_wires(self.update)


def validates_late(program: Program) -> bool:
    """Whether a pipeline's timetable asks for validation in the next step."""
    return any(timetable.validate_late for timetable in _timetables(program))


def behind_schedule(program: Program) -> int:
    """The position behind the last loop that a timetable runs."""
    last = -1
    for position, node in enumerate(program.nodes):
        if node.loop is not None and node.loop.cut_by is not None:
            last = position
    assert last >= 0, "only programs with a pipeline are asked"
    return last + 1


def _timetables(program: Program) -> list[Timetable]:
    loops = [node.loop for node in program.nodes if node.loop is not None]
    return [loop.cut_by for loop in loops if loop.cut_by is not None]


def _made_by(nodes: Iterable[Node]) -> set[int]:
    """The values that nodes make."""
    return {id for node in nodes for id in node.results}


def _read_by(nodes: Iterable[Node]) -> set[int]:
    """The values that nodes read."""
    return {id for node in nodes for id in node.refs}


def _written_by(nodes: Iterable[Node]) -> set[int]:
    """The values that nodes write to in place."""
    return {id for node in nodes for id in written(node)}


@computed_once
def deferred(program: Program) -> Deferred | str:
    """The parts of one rank's program, or of the union of all; a str that says why there are none."""
    timetables = _timetables(program)
    if not timetables:
        return "it has no pipeline"
    (axis,) = {timetable.along for timetable in timetables}
    if any(is_copy(node) for each in program.with_bodies() for node in each.nodes):
        return "values are moved between tiers of memory"
    sorted_out = _Sorted(program, behind_schedule(program))
    main, exchange, update = sorted_out.main, sorted_out.exchange, sorted_out.update
    if not exchange:
        return "no stage waits for another behind the schedule"
    if any(axis in axes for node in update for axes in _axes(program, node)):
        return f"the update itself communicates over {axis}, so that a stage waits for others in it"
    collectives = [node.target for node in exchange if _is_collective(node)]
    if collectives:
        # A rank that looks before others do would be alone in it.
        return f"what stages say is put together by {collectives[0]} behind their messages"
    if _sends_on(exchange):
        return "a stage sends on what another one has told it, so that nobody could read before it does"
    if _writes_what_is_read(program, update, exchange):
        return "the update writes to what the stages are still to be told"
    if update and _writes_inputs(program, main):
        return "the step writes to its inputs before the update"
    return _parts(program, main, exchange, update)


def deferred_parts(program: Program, mesh: Mesh) -> Deferred:
    """The parts of a program whose timetable asks for validation in the next step. mesh: with what is known of its
    machine.

    Raises PlanError that says why where there are none, or where ranks may not come to the same verdict.
    """
    parts: Deferred | str = (
        "its ranks are of unlike devices, whose scalars may differ in the last bit, so that not all would step"
    )
    if not mesh.topology.ranks:
        parts = deferred(program)
    if isinstance(parts, str):
        raise PlanError(f'cf.pipeline(validate="next step"): {parts}. Try: validate="step", or another plan')
    return parts


def _axes(program: Program, node: Node) -> list[tuple[str, ...]]:
    """Of the mesh, along which a node communicates."""
    inner = attrs.evolve(program, nodes=(node,)).with_bodies()
    return [each.args[1] for part in inner for each in part.nodes if is_wire(each) or is_peer(each)]


def _is_collective(node: Node) -> bool:
    """Whether all of a group have to come to a node at once."""
    return is_wire(node) or (node.loop is not None and has_wires(node.loop.body))


class _Sorted:
    """The nodes of a program by part, each part in the program's order."""

    def __init__(self, program: Program, start: int) -> None:
        self.program, self.memory = program, aliases(program)
        self.main: list[Node] = list(program.nodes[:start])
        self.exchange: list[Node] = []
        self.update: list[Node] = []
        self._made: dict[int, list[Node]] = {}  # value -> the part that makes it
        self._touched: set[int] = set()  # memory that late nodes read or write
        self._written: set[int] = set()
        self._by_update: set[int] = set()  # memory that the update touches
        self._own: set[int] = set()  # memory of what the exchange makes
        for node in program.nodes[start:]:
            self._add(node)
        self._state_last()

    def _add(self, node: Node) -> None:
        reads = {self.memory.group(id) for id in node.refs}
        writes = {self.memory.group(id) for id in written(node)}
        follows = any(id in self._made for id in node.refs)
        clashes = not writes.isdisjoint(self._touched) or not reads.isdisjoint(self._written)
        if not (follows or clashes or self._is_message(node)):
            self.main.append(node)
            return
        part = self.exchange if self._is_exchanged(node, reads, writes) else self.update
        part.append(node)
        self._made.update(dict.fromkeys(node.results, part))
        groups = reads | writes | {self.memory.group(id) for id in node.results}
        self._touched |= groups
        self._written |= writes
        if part is self.update:
            self._by_update |= groups
        else:
            self._own |= {self.memory.group(id) for id in node.results}

    def _is_message(self, node: Node) -> bool:
        """Whether a node sends scalars, or puts them together to be sent."""
        values = self.program.values
        if node.target == RECEIVE:  # of what one rank runs
            return values[node.results[0]].shape == () or self._readers(node) == {"aten.select.int"}
        if node.target == SEND:
            source = self.program.makers.get(node.refs[0])
            return values[node.refs[0]].shape == () or (source is not None and self._is_stack_to_send(source))
        return self._is_stack_to_send(node)

    def _is_stack_to_send(self, node: Node) -> bool:
        """Whether a node puts scalars together that are sent then, and do nothing else."""
        if node.target != "aten.stack.default" or any(self.program.values[id].shape != () for id in node.refs):
            return False
        return self._readers(node) == {SEND}

    def _readers(self, node: Node) -> set[str]:
        """The operators that read what a node makes."""
        positions = {position for id in node.results for position in self.program.readers.get(id, ())}
        return {self.program.nodes[position].target for position in positions}

    def _is_exchanged(self, node: Node, reads: Collection[int], writes: Collection[int]) -> bool:
        """Whether a late node is part of the exchange: it is of scalars alone, runs on all ranks and needs nothing of
        the update.
        """
        if self._is_message(node):
            return all(self._made.get(id) is not self.update for id in node.refs)
        if node.on is not None or not self._by_update.isdisjoint({*reads, *writes}):
            return False
        if not self._own.issuperset(writes):
            return False
        return all(self._made.get(id) is self.exchange or self.program.values[id].shape == () for id in node.refs)

    def _state_last(self) -> None:
        """Scalars that take the place of inputs are part of the update, unless the update reads them."""
        new_state = {self.program.outputs[out] for out, _ in self.program.aliases}
        while True:
            made = _made_by(self.exchange)
            read = _read_by(self.update) & made
            state = self._behind(new_state & made) - self._behind(read)
            moved: list[Node] = []
            for node in self.exchange:
                if not state.isdisjoint(node.results) and not self._is_message(node):
                    moved.append(node)
            if not moved:
                return
            self.exchange = [node for node in self.exchange if node not in moved]
            late = {*map(id, self.update), *map(id, moved)}
            self.update = [node for node in self.program.nodes if id(node) in late]

    def _behind(self, ids: Iterable[int]) -> set[int]:
        """Values of the exchange that these are computed of, and themselves."""
        behind = set(ids)
        for node in reversed(self.exchange):
            if not behind.isdisjoint([*node.results, *written(node)]):
                behind.update(node.refs)
        return behind & _made_by(self.exchange)


def _writes_inputs(program: Program, nodes: Iterable[Node]) -> bool:
    """Whether some of the nodes write to inputs of a program."""
    memory = aliases(program)
    inputs = {memory.group(id) for id in program.inputs}
    return any(memory.group(id) in inputs for id in _written_by(nodes))


def _sends_on(exchange: Iterable[Node]) -> bool:
    """Whether a message of an exchange follows from another one."""
    told: set[int] = set()
    for node in exchange:
        follows = not told.isdisjoint(node.refs)
        if follows and is_peer(node):
            return True
        if follows or is_peer(node):
            told.update(node.results, written(node))
    return False


def _writes_what_is_read(program: Program, update: Iterable[Node], exchange: Sequence[Node]) -> bool:
    """Whether an update writes to what an exchange, which ends behind it, reads of other parts."""
    memory = aliases(program)
    read_of_others = _read_by(exchange) - _made_by(exchange)
    read = {memory.group(id) for id in read_of_others}
    return any(memory.group(id) in read for id in _written_by(update))


def _parts(program: Program, main: Sequence[Node], exchange: Sequence[Node], update: Sequence[Node]) -> Deferred | str:
    """The programs of the parts, each given what it reads of others; a str that says why one cannot be."""
    by_main, by_exchange, by_update = _made_by(main), _made_by(exchange), _made_by(update)
    inputs, outputs = set(program.inputs), set(program.outputs)
    own = _written_by(update)
    memory = aliases(program)
    outside = inputs | by_main
    # What the update writes to, by the name that it has outside: the update may take views of it.
    kept = {id if id in outside else memory.group(id) for id in own} & outside
    read_late = _read_by(exchange)
    read = _read_by(update) | kept
    passed_on = by_main & (read_late | read | outputs)
    for id in sorted(passed_on):
        if program.values[id].layout is None and program.makers[id].on is not None:
            return f"%{id} is passed on and no layout says where it is"
    judged = by_exchange & read
    late = by_exchange & outputs
    changed = inputs & outputs & own
    return Deferred(
        _part(program, main, program.inputs, sorted(passed_on)),
        _part(program, exchange, sorted(outside & read_late), sorted(judged | late)),
        _part(program, update, sorted((outside | judged) & read), sorted(changed | (by_update & outputs))),
        tuple(sorted(judged)),
        tuple(sorted(late)),
        tuple(sorted(kept)),
    )


def _part(program: Program, nodes: Sequence[Node], inputs: Sequence[int], outputs: Sequence[int]) -> Program:
    """A program of some nodes, of whose inputs the constants stand last."""
    constants = {id: program.constants[id] for id in inputs if id in program.constants}
    ordered = [id for id in inputs if id not in constants] + list(constants)
    return Editor(program).written(nodes, outputs, ordered, aliases=(), constants=constants)


def copied_bytes(program: Program) -> int:
    """What one rank copies in each step before it updates on a guess."""
    parts = deferred(program)
    if isinstance(parts, str):
        return 0
    return sum(program.values[id].nbytes for id in parts.kept)


def kept_bytes(program: Program) -> int:
    """What one rank keeps from one step to the next beside its state: copies of what the update writes to, and
    gradients.
    """
    parts = deferred(program)
    if isinstance(parts, str):
        return 0
    # Outputs are counted as the state.
    gradients = (_read_by(parts.update.nodes) & _made_by(parts.main.nodes)) - set(program.outputs)
    return copied_bytes(program) + sum(program.values[id].nbytes for id in gradients)
