"""Updates in one call: those that differ in their tensors alone stand side by side (`colofunc.ops.update_lists`).

Problem: an update runs as soon as its gradient is there (`schedule.updates_early`), so that gradients do not wait for
one another; where the peak of a step lies elsewhere that saves nothing, and a hundred small updates are a hundred
calls. Idea: an update waits for others of its kind as long as what its operands hold until then keeps below the peak
that the program has anyway.

    linear_dw(...) adamw_(%p, %g, ...) linear_dw(...) adamw_(%q, %h, ...)
        ->  linear_dw(...) linear_dw(...) adamw_(%p, %g, ...) adamw_(%q, %h, ...)

The nodes stay what they are, so that whatever counts, prints, checks, saves or looks at a program knows each update.
Who runs it calls a run of them (`runs_of_updates`) at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import attrs

from colofunc.mesh import Mesh
from colofunc.ops.kernels import IN_ONE_CALL, PlannedKernel
from colofunc.ops.update_lists import MANY
from colofunc.program.aliases import aliases
from colofunc.program.cost import RuleOf, node_s
from colofunc.program.facts import has_wires, is_copy, rearrange_steps, written
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.memory import MemoryReport, lies, memory
from colofunc.program.places import has_places

SMALL_BYTES = 128 << 10
"""Of an update's tensors, as of biases and norms of a width of 8192: memory of a host moves them in the microseconds
that a call takes."""


def updates_in_one_call(program: Program, count: Callable[[Program], MemoryReport]) -> Program:
    """`program` with updates of a kind moved down to one another, as far as no tier's peak, as `count` says it, is
    higher for that.

    In a program with copies between tiers only small ones move (`small_updates_in_one_call`): a large one may be what
    hides a copy. Programs with collectives stay as they are; what real ranks run is gone through once it is in their
    order.
    """
    if any(map(is_copy, program.nodes)):
        return small_updates_in_one_call(program, count)
    return program if has_wires(program) else _in_one_call(program, _kinds(program), count)


def small_updates_in_one_call(program: Program, count: Callable[[Program], MemoryReport]) -> Program:
    """The same for updates that take less time than to call them, past collectives and copies between tiers.

    `program` is in the order in which it runs.

    Whoever reads what is updated still comes behind it, so no collective and no copy begins later.
    """
    values = program.values
    small = [kind_of_update(node, values) if is_small_update(node, values) else None for node in program.nodes]
    return _in_one_call(program, small, count)


def _kinds(program: Program) -> list[Hashable | None]:
    return [kind_of_update(node, program.values) for node in program.nodes]


def is_small_update(node: Node, values: Mapping[int, Value]) -> bool:
    """Whether a node is an update that may be called with others, and all its tensors, with its gradient and its state,
    take at most `SMALL_BYTES`.
    """
    if kind_of_update(node, values) is None:
        return False
    return sum(values[ref].nbytes for ref in node.refs) <= SMALL_BYTES


def _in_one_call(program: Program, kinds: list[Hashable | None], count: Callable[[Program], MemoryReport]) -> Program:
    if _all_differ(kinds):
        return program
    before = count(program)
    # Where ranks do different things `count` is of one of them, whose positions are others: then what all of them hold
    # says where.
    report = memory(program) if has_places(program) else before
    live_bytes, peak_bytes = report.timeline["device"], report.peak_bytes["device"]
    frees_bytes: dict[int, int] = {}  # node -> what it reads last
    for storage in lies(program).storages:
        if storage.born >= 0 and storage.dies < len(program.nodes):
            frees_bytes[storage.dies] = frees_bytes.get(storage.dies, 0) + storage.nbytes
    moved = _moved(program, kinds, lambda index, held_bytes: live_bytes[index] + held_bytes > peak_bytes, frees_bytes)
    after = count(moved)
    higher = any(after.peak_bytes.get(tier, 0) > peak_bytes for tier, peak_bytes in before.peak_bytes.items())
    return program if higher else moved


def _all_differ(kinds: list[Hashable | None]) -> bool:
    return len(set(kinds) - {None}) == len(kinds) - kinds.count(None)


def _moved(
    program: Program, kinds: list[Hashable | None], stops: Callable[[int, int], bool], frees_bytes: Mapping[int, int]
) -> Program:
    """`program` with updates of a kind moved down to one another, past nodes that they need not come before.

    stops: whether none may wait beyond a node, by its position and the bytes that those which wait hold.
    """
    groups, order, waiting = aliases(program), list[int](), _Waiting()
    for index, node in enumerate(program.nodes):
        reads, writes = {groups.group(ref) for ref in node.refs}, {groups.group(id) for id in written(node)}
        if waiting.nodes and (stops(index, waiting.held_bytes) or waiting.meets(reads, writes)):
            order += waiting.released(kinds)
            waiting = _Waiting()
        if kinds[index] is None:
            order.append(index)
        else:
            waiting.add(index, reads, writes, frees_bytes.get(index, 0))
    order += waiting.released(kinds)
    return program.reordered(program.nodes[k] for k in order)


def updates_side_by_side(program: Program) -> Program:
    """`program` with updates moved down to one another past the views between them, as of gradients that lie in one
    chunk.

    For programs with collectives, in the order in which they run: nothing arrives, is made or is freed in between, so
    no peak is higher.
    """
    kinds = _kinds(program)

    def stops(index: int, held_bytes: int) -> bool:
        return kinds[index] is None and not _only_looks(program.nodes[index], program.values)

    return program if _all_differ(kinds) else _moved(program, kinds, stops, {})


def _only_looks(node: Node, values: Mapping[int, Value]) -> bool:
    """Whether a node surely is a view: a slice, or a tensor of one dim in another shape."""
    if node.target == "aten.slice.Tensor":
        return True
    if node.target != "colofunc.rearrange" or len(values[node.refs[0]].shape) != 1:
        return False
    _, pattern, names, sizes = node.args
    return rearrange_steps(pattern, tuple(names), tuple(sizes), values[node.refs[0]].shape)[1] is None


class _Waiting:
    """Updates that wait for others."""

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.held_bytes = 0  # that would be free if none of them had waited

    def meets(self, reads: set[int], writes: set[int]) -> bool:
        """Whether a node that reads and writes these groups of memory has to come behind one that waits."""
        return not (self.writes.isdisjoint(reads) and self.reads.isdisjoint(writes))

    def add(self, node: int, reads: set[int], writes: set[int], held_bytes: int) -> None:
        self.nodes.append(node)
        self.reads |= reads
        self.writes |= writes
        self.held_bytes += held_bytes

    def released(self, kinds: list[Hashable | None]) -> list[int]:
        """The nodes, those of one kind side by side. Any order is right: none of them needs another."""
        groups: dict[Hashable, list[int]] = {}
        for node in self.nodes:
            groups.setdefault(kinds[node], []).append(node)
        return [node for group in groups.values() for node in group]


def runs_of_updates(program: Program) -> dict[int, tuple[int, ...]]:
    """First node -> nodes of each run of at least two updates that may be called at once."""
    found: dict[int, tuple[int, ...]] = {}
    memory = aliases(program)
    run: list[int] = []
    kind: Hashable | None = None
    waiting = _Waiting()
    for index, node in enumerate(program.nodes):
        here = kind_of_update(node, program.values)
        reads, writes = {memory.group(ref) for ref in node.refs}, {memory.group(id) for id in written(node)}
        if here is None or here != kind or waiting.meets(reads, writes):
            run, kind, waiting = [], here, _Waiting()
        if here is not None:
            run.append(index)
            waiting.add(index, reads, writes, 0)
            if len(run) > 1:
                found[run[0]] = tuple(run)
    return found


def with_one_launch(program: Program, mesh: Mesh, rule_of: RuleOf) -> Program:
    """A local program whose updates have the seconds of a run: all but the first are launched with it."""
    launch_s, changed = mesh.topology.device.launch_s, dict[int, Node]()
    for run in runs_of_updates(program).values() if launch_s else ():
        for index in run[1:]:
            node = program.nodes[index]
            seconds = max(0.0, node_s(node, program.values, mesh, rule_of) - launch_s)
            changed[index] = attrs.evolve(node, kernel=PlannedKernel(IN_ONE_CALL, seconds, 0))
    if not changed:
        return program
    return program.with_nodes(changed.get(index, node) for index, node in enumerate(program.nodes))


def kind_of_update(node: Node, values: Mapping[int, Value]) -> Hashable | None:
    """What is equal of updates that can be called at once: operator, rate, step count and options, the dtype of their
    tensors.

    None: not such an update, or one whose tensors lie off the device or have several dtypes.
    """
    many = MANY.get(node.target)
    if many is None or node.kwargs:
        return None
    own = [arg for place, arg in enumerate(node.args) if place in many.own]
    tensors = [values[arg.id] for arg in own if isinstance(arg, Ref)]
    others = tuple((type(arg), arg) for place, arg in enumerate(node.args) if place not in many.own)
    if len({value.dtype for value in tensors}) != 1 or any(values[ref].tier != "device" for ref in node.refs):
        return None
    return node.target, node.on, tensors[0].dtype, tuple(arg is None for arg in own), others
