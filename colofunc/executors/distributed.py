"""Real ranks: one process per rank, `torch.distributed` between them.

The same straight-line source as on the simulated mesh, with one lane and real collectives (see `groups`). Before a
program runs for the first time all ranks compare a hash of it; a rank that fails publishes its traceback and all end
(see `watch`). Started by `torchrun`, by `launch`, or inside a process group that the user made.

    torchrun --nproc-per-node 2 train.py          # init_from_env(mesh) joins the group: gloo on CPU, NCCL on CUDA
"""

from __future__ import annotations

import atexit
import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import count
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from colofunc import compat, env
from colofunc.errors import InputError, MeshError, PlanError
from colofunc.executors.faults import ask
from colofunc.executors.flight import Flight, mark
from colofunc.executors.gpus import adopt_gpu, own_gpu
from colofunc.executors.groups import Ahead, Groups, Start, Started, exchange
from colofunc.executors.kernels import HostCount, first_rows, with_zeros
from colofunc.executors.launch import before_end
from colofunc.executors.pools import accelerator, in_tier, pool_of, reads_host_only
from colofunc.executors.post_validated import Unsettled
from colofunc.executors.presence import Limits
from colofunc.executors.program_cache import Kept
from colofunc.executors.rendezvous import Meeting
from colofunc.executors.simulated import Shards, own_memory
from colofunc.executors.source import StepFunction, Tap, Writer, only
from colofunc.executors.watch import Watch, meet
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of, group_moves_gpu_memory, use_gpu
from colofunc.mesh.transport import MIXED, carriers, make_group
from colofunc.program.editor import Editor
from colofunc.program.facts import COPIES, PEERS, has_wires, is_copy, is_peer, is_wire, written
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.memory import memory
from colofunc.program.passes.coalesce import outputs_late, updates_late, views_late
from colofunc.program.passes.loop import within
from colofunc.program.passes.one_call import small_updates_in_one_call, updates_side_by_side
from colofunc.program.passes.schedule import overlap
from colofunc.program.places import RECEIVE, OnRank, has_places, on_rank, out_of_order
from colofunc.spec.layout import At
from colofunc.spec.parts import holds


class RankProgram:
    """A program ready to run on this rank. Making one is collective: process groups are made, hashes compared."""

    def __init__(
        self,
        program: Program,
        groups: Groups,
        watch: Watch | None,
        bound: Mapping[str, Callable[..., Any]] | None = None,
        tap: Tap | None = None,
        whole: Program | None = None,
        union: Program | None = None,
        mine: OnRank | None = None,
        begins: bool = False,
    ) -> None:
        """`whole`: the program before it was compiled. Under a `tap` copies allocate: whoever looks may hold on to them.

        `union`: what all ranks run, where `program` is only this one's part of it; `mine`: which part. begins: its results are
        those of `program`, and nobody waits until what it sends has come.
        """
        self.program = program
        self._begins = begins
        self._union = union or program
        self._mine = mine
        self._sends_messages = not begins and any(is_peer(node) for each in self._union.with_bodies() for node in each.nodes)
        self.pool = pool_of(program, 1, whole) if tap is None else None
        self._whole = whole
        self._tap = tap
        self._bound = bound
        self._host_only = reads_host_only(program)
        self._groups = groups
        self._watch = watch
        self._function: StepFunction | None = None
        self._hash = ""  # of a program that communicates, from the first call on
        positions = {id: k for k, id in enumerate(i for i in program.inputs if i not in program.constants)}
        self._expected = sum(i not in self._union.constants for i in self._union.inputs)
        self._written = tuple(sorted({positions[i] for node in program.nodes for i in written(node) if i in positions}))

    def __call__(self, inputs: Sequence[Shards]) -> list[Shards]:
        with self._watch or nullcontext(), self._groups.messages() if self._sends_messages else nullcontext():
            return self._call(inputs)

    def _call(self, inputs: Sequence[Shards]) -> list[Shards]:
        if len(inputs) != self._expected:
            raise InputError(f"the program takes {self._expected} tensors, {len(inputs)} were given")
        flat = [shards[0] for shards in inputs]
        if self._mine is not None:
            flat = [flat[k] for k in self._mine.inputs]
        partition = ((0,),) * len(flat)
        if self._written:
            own_memory(flat, partition, self._written)
        device = device_of(self._groups.mesh) if self._host_only else accelerator(flat)
        if self.pool is not None:
            self.pool.allocate(device.type == "cuda")
        if self._function is None:
            if self._watch is not None and has_wires(self._union):
                self._hash = program_hash(self._union, self._groups.mesh)
                self._watch.agree("the lowered program", self._hash, self._watch.deadline_s)
            self._make_groups()
            flight = None if self._watch is None or device.type == "cpu" else self._watch.flight
            wires = RankWires(self._groups, flight)
            writer = Writer(self.program, 1, device, wires, partition, self._bound, tap=self._tap, pool=self.pool, whole=self._whole)
            writer.write()
            self._function = writer.function()
        if self._watch is None or not self._hash:
            return self._outputs(self._function.per_lane(self._function(flat)), device)
        self._watch.advance(self._hash)
        outs = self._function(flat) if device.type == "cpu" else in_flight(self._watch.launched(), device, self._function, flat)
        return self._outputs(self._function.per_lane(outs), device)

    def _make_groups(self) -> None:
        """All ranks make all process groups, in the order of what all run, also those that they have no part in."""
        if self._mine is not None:
            for each in self._union.with_bodies():
                for node in each.nodes:
                    if is_wire(node) or is_peer(node):
                        self._groups.of(node.args[1])

    def _outputs(self, mine: list[Shards], device: torch.device) -> list[Shards]:
        """The outputs of the whole: empty where they do not exist on this rank."""
        if self._mine is None or self._begins:
            return mine
        self._groups.delivered()
        here = dict(zip(self._mine.outputs, mine, strict=True))
        values = [self._union.values[i] for i in self._union.outputs]
        return [here[k] if k in here else [torch.empty(0, dtype=value.dtype, device=device)] for k, value in enumerate(values)]


def in_flight(flight: Flight, device: torch.device, step: StepFunction, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A step whose collectives a GPU does, when the host has gone on."""
    try:
        outs = step(inputs)
    except BaseException:
        flight.give_up()
        raise
    flight.end(mark(device))
    return outs


class Later:
    """An exchange of messages in two steps: what this rank knows is sent when it is called, the rest is done when that is called."""

    def __init__(self, program: Program, mine: OnRank, groups: Groups, watch: Watch | None) -> None:
        self._groups, self._watch = groups, watch
        self._first, self._rest = _around_receives(mine.program)
        self._receives = [node for node in mine.program.nodes if node.target == RECEIVE]
        self._mine, self._outputs = mine, program
        self._sends = RankProgram(self._first, groups, watch, union=program, mine=mine, begins=True)
        self._ends = RankProgram(self._rest, groups, watch)

    def __call__(self, inputs: Sequence[Shards]) -> Callable[[], list[Shards]]:
        device = device_of(self._groups.mesh)
        waits = []
        with self._groups.messages():
            for node in self._receives:
                axes, _, source, shape, dtype = node.args
                begin = self._groups.awaiter(axes, source, shape, dtype, device)
                waits.append(begin(_own_tag(node)))
            known = self._sends(inputs)
        here = [inputs[k] for k in self._mine.inputs]

        def finish() -> list[Shards]:
            with self._watch or nullcontext():  # where a peer has ended it says which
                came = [[wait()] for wait in waits]
            found = self._ends([*here, *known, *came])
            by_place = dict(zip(self._mine.outputs, found, strict=True))
            values = [self._outputs.values[id] for id in self._outputs.outputs]
            missing = {k: [torch.empty(0, dtype=value.dtype, device=device)] for k, value in enumerate(values)}
            return list((missing | by_place).values())

        return finish


def _around_receives(program: Program) -> tuple[Program, Program]:
    """(What a rank can do before anything has come, the rest). Inputs of the rest: the program's, what the first gives, what comes."""
    came = [out for node in program.nodes if node.target == RECEIVE for out in node.results]
    late = set(came)
    first: list[Node] = []
    rest: list[Node] = []
    for node in program.nodes:
        if node.target == RECEIVE:
            continue
        waits = any(ref in late for ref in node.refs)
        (rest if waits else first).append(node)
        if waits:
            late.update(node.results)
    read = {ref for node in rest for ref in node.refs} | set(program.outputs)
    known = [out for node in first for out in node.results if out in read]
    edit = Editor(program)
    given = [id for id in program.inputs if id not in program.constants]
    constants = [id for id in program.inputs if id in program.constants]
    return edit.written(first, known), edit.written(rest, program.outputs, [*given, *known, *came, *constants])


class RankWires:
    """Collectives of one rank with its peers. flight: where they are done by a GPU."""

    def __init__(self, groups: Groups, flight: Flight | None = None) -> None:
        self.groups = groups
        self.flight = flight
        self.ranks: Sequence[int] = (groups.rank,)
        self._limits: tuple[Program, set[int]] | None = None
        self._ahead: Ahead | None = None  # of the loop in parts that is written, where receives are posted ahead

    def emit(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        if kind in COPIES:
            self._copy(writer, node, kind, asynchronous)
            return
        if kind in PEERS:
            self._peer(writer, node, kind)
            return
        out = only(node)
        name = writer.stem(out)
        writer.where[out] = (name,)
        if kind == "axis_index":
            place = self.groups.of(node.args[0]).place
            number = writer.bind(torch.tensor(place, device=writer.device), f"i{place}")
            writer.line(f"{name} = {number}")
            return
        source = writer.literal(node.args[0], 0)
        if kind == "wait":
            writer.line(f"{name} = {source}.wait()")
            return
        _, axes, _, *rest = node.args
        if kind == "take_shard":
            writer.line(f"{name} = {source}[{self.groups.of(axes).place}]")
        elif kind == "keep_first":
            zeros = rest[0] == "sum" and self.groups.of(axes).place != 0
            writer.line(f"{name} = {writer.bind(torch.zeros_like, 'zeros_like')}({source})" if zeros else f"{name} = {source}")
        else:
            limited = kind == "all_to_all" and rest
            start = _watched(kind, self.groups.start(kind, axes, *(() if limited else rest)), self.groups.rank)
            if self.flight is not None:
                start = _named(_text(writer.program, node, kind), start, self.flight)
            fn = writer.bind(_limited(start) if limited else start, f"{kind}_{'_'.join(a for a in axes if a.isidentifier())}")
            source += f", {count_of(writer, rest[0])}" if limited else ""
            writer.line(f"{name} = {fn}({source})" + ("" if asynchronous else ".wait()"))

    def _peer(self, writer: Writer, node: Node, kind: str) -> None:
        """This rank's half of a send: what it sends may be written over when the line has passed."""
        if kind == "receive":
            axes, _, source, shape, dtype = node.args
            receiver = self.groups.receiver(axes, source, shape, dtype, writer.device)
            if self._ahead is not None and writer.loops and writer.loops[-1][0].cut_by is not None:
                self._ahead.receives(writer.part, receiver, partial(_number, _own_tag(node), writer.loops[-1][0].trips))
            call = f"{writer.bind(receiver, 'receive')}({_tag(writer, node)})"
        else:
            ref, axes, _, _, targets = node.args
            call = f"{writer.bind(self.groups.sender(axes, targets), 'send')}({writer.where[ref.id][0]}, {_tag(writer, node)})"
        if node.results:
            out = only(node)
            writer.where[out] = (writer.stem(out),)
            writer.line(f"{writer.bind(ask, 'ask')}('send', {tuple(self.ranks)!r})")
            writer.line(f"{writer.stem(out)} = {call}")
        else:
            writer.line(f"{writer.bind(ask, 'ask')}('send', {tuple(self.ranks)!r})")
            writer.line(call)

    def here(self, at: At | None) -> tuple[bool, ...]:
        return (holds(at, self.groups.mesh, self.groups.rank),)

    def behind(self, writer: Writer, node: Node) -> None:
        """How many rows will travel is told to the host as soon as it is known, and read by the first exchange."""
        for o in node.outs:
            if o is not None and o in self._limits_in(writer.program):
                stem, count_rows = writer.stem(o), writer.bind(HostCount, "count_rows")
                writer.line(f"{stem}_count = {count_rows}({stem})")
                writer.extra[stem] = (*writer.extra.get(stem, ()), f"{stem}_count")

    def _limits_in(self, program: Program) -> set[int]:
        """Values that say how many rows travel. Asked for each node of one program after another: kept for one."""
        if self._limits is None or self._limits[0] is not program:
            exchanges = [n for n in program.nodes if n.target.startswith("colofunc.all_to_all") and len(n.args) > 3]
            self._limits = program, {n.args[3].id for n in exchanges if isinstance(n.args[3], Ref)}
        return self._limits[1]

    def in_order(self, actions: Sequence[tuple[int, int]], device: torch.device) -> Iterable[tuple[int, int]]:
        """NCCL runs what is given to it one after another: a receive that is posted early would keep back what is sent meanwhile."""
        self._ahead = Ahead(actions) if self.groups.carriers.get(device.type) == "gloo" else None
        return actions if self._ahead is None else self._ahead

    def place(self, axes: Sequence[str], lane: int) -> int:
        return self.groups.mesh.index(self.groups.rank, axes)

    def _copy(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        start, device = writer.bind(writer.start, "copy_start"), writer.bind(writer.device, "device")
        operands = "".join(f"{writer.where[i][0]}, " for i in node.refs)
        pool = writer.pooled(node.outs[0]) if node.outs else ""
        call = f"{start}({kind!r}, ({operands}), {device}{', ' * bool(pool)}{pool})" + ("" if asynchronous else ".wait()")
        if not node.outs:
            writer.line(call)
            return
        out = only(node)
        writer.where[out] = (writer.stem(out),)
        writer.line(f"{writer.stem(out)} = {call}")


def _tag(writer: Writer, node: Node) -> str:
    """Which message of a pair it is, as an expression: in a loop its own number in each trip."""
    tag = _own_tag(node)
    if not tag or not writer.loops:
        return str(tag)
    loop, counter = writer.loops[-1]
    return f"{tag * loop.trips} + {counter}"


def _own_tag(node: Node) -> int:
    return int(dict(node.kwargs).get("tag", 0))


def _number(tag: int, trips: int, trip: int) -> int:
    """The number that `_tag` writes."""
    return tag * trips + trip if tag else 0


def count_of(writer: Writer, rows: Ref) -> str:
    """The variable with the number of rows that a value says; an input of the program is read where it is needed."""
    (name,) = writer.where[rows.id]
    told = f"{name}_count" in writer.extra.get(name, ())
    return f"{name}_count" if told else f"{writer.bind(HostCount, 'count_rows')}({name})"


def _watched(kind: str, start: Start, rank: int) -> Start:
    ranks = (rank,)

    def run(x: Any) -> Started:
        ask(kind.removesuffix("_flat"), ranks)
        return start(x)

    return run


def _named(name: str, start: Start, flight: Flight) -> Start:
    """The host has gone on when this collective waits: whoever looks then has its name."""

    def run(x: Any) -> Started:
        started = start(x)
        flight.started(name, started.works)
        return started

    return run


def _text(program: Program, node: Node, kind: str) -> str:
    """`all_gather of 0.weight over dp (in net.0 at train.py:12)`."""
    names = [program.values[i].name for i in (*node.refs, *node.results) if program.values[i].name]
    where = " at ".join(word for word in (node.path, node.line) if word)
    return f"{kind}{f' of {names[0]}' if names else ''} over {', '.join(node.args[1])}" + (f" (in {where})" if where else "")


class _Padded:
    """An all-to-all of the first rows in flight: what comes has zeros behind it."""

    def __init__(self, started: Started, like: torch.Tensor) -> None:
        self._started, self._like = started, like

    def wait(self) -> torch.Tensor:
        return with_zeros(self._started.wait(), self._like)


def _limited(start: Start) -> Callable[[torch.Tensor, HostCount], _Padded]:
    """An all-to-all of so many rows of each chunk as all members have agreed on."""
    return lambda x, count: _Padded(start(first_rows(x, count.value())), x)


class Distributed:
    """Backend of a process that is one rank of the mesh."""

    name = "distributed"

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._carriers = carriers()
        self.watch = watch_of_group()
        adopt_gpu(self.watch)
        self.unsettled: Unsettled | None = None
        self._groups: dict[Mesh, Groups] = {}
        self._delivers = False  # whether it is known what is to be done before this process ends
        self._kept = Kept(self.compile)

    def ranks(self, mesh: Mesh) -> tuple[int, ...]:
        return (self.rank,)

    def compile(
        self, program: Program, mesh: Mesh, bound: Mapping[str, Callable[..., Any]] | None = None, whole: Program | None = None
    ) -> RankProgram:
        """`program` ready to run on this rank, collectives started early and waited for late.

        `bound`: callables of targets that are no registered operators. `whole`: the program before it was compiled.
        """
        return self._prepared(program, mesh, bound, whole=whole)

    def later(self, program: Program, mesh: Mesh) -> Later:
        if self._by_nccl(mesh):
            raise PlanError(
                'cf.pipeline(validate="next step") posts what it will receive before it sends, which waits for ever with NCCL; it has run '
                f'with gloo only. Try: validate="step", or {mesh!r} with device="cpu"'
            )
        groups = self._groups_of(mesh)
        if not self._delivers:
            # A process that ends takes along what it has not sent yet.
            self._delivers = True
            before_end(self._deliver)
            atexit.register(self._deliver)
        return Later(program, on_rank(program, mesh, self.rank), groups, self.watch)

    def order(self, program: Program) -> Program:
        return overlapped(program, grouped=True)

    def observe(self, program: Program, mesh: Mesh, tap: Tap) -> RankProgram:
        return RankProgram(program, self._groups_of(mesh), self.watch, tap=tap)

    def _prepared(
        self, program: Program, mesh: Mesh, bound: Mapping[str, Callable[..., Any]] | None, whole: Program | None
    ) -> RankProgram:
        groups = self._groups_of(mesh)
        if not has_places(program):
            return RankProgram(self.order(program), groups, self.watch, bound, whole=whole)
        if self._by_nccl(mesh):
            _check_message_order(program, mesh)
        mine = on_rank(program, mesh, self.rank)
        return RankProgram(self.order(mine.program), groups, self.watch, bound, whole=whole, union=program, mine=mine)

    def _deliver(self) -> None:
        for groups in self._groups.values():
            groups.delivered()

    def _by_nccl(self, mesh: Mesh) -> bool:
        return self._carriers.get("cuda") == "nccl" and mesh.device != "cpu"

    def _groups_of(self, mesh: Mesh) -> Groups:
        groups = self._groups.get(mesh)
        if groups is None:
            if mesh.device == "cpu" and "cpu" not in self._carriers:
                there = ", ".join(self._carriers.values())
                raise MeshError(
                    f"{mesh!r} is to run on the CPU and the process group carries tensors on GPUs only ({there}). Try: "
                    f"torch.distributed.init_process_group({MIXED!r}), or leave it to cf.join(mesh) to make the group"
                )
            groups = self._groups[mesh] = Groups(mesh, self.rank, self._carriers, sub_limit_s(self.watch))
        return groups

    def limit(self) -> None:
        """What `cf.join` has said holds for the groups that are there too; a group of all ranks that somebody else made keeps its own."""
        limit_s = sub_limit_s(self.watch)
        if self.watch is not None and self.watch.made_group:
            compat.set_group_limit(dist.group.WORLD, limit_s)
        for groups in self._groups.values():
            groups.limit(limit_s)

    def run(self, program: Program, mesh: Mesh, inputs: Sequence[Shards]) -> list[Shards]:
        return self._kept.get(program, mesh)(inputs)

    def exchange(self, what: str, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        """Send tensors to other ranks and receive into others', by rank. Collective. `what` it is for, for errors."""
        meet(self.watch, what)
        with self.watch or nullcontext():
            exchange(sent, received)


def _check_message_order(program: Program, mesh: Mesh) -> None:
    """Raises PlanError where NCCL, which knows messages of a pair by their order, would deliver one for another."""
    message = out_of_order(program, mesh)
    if message:
        raise PlanError(
            f"NCCL delivers messages in the order in which they are sent, and this schedule receives {message} before one that was sent "
            'earlier. Try: schedule="1f1b", or a group that carries tensors on GPUs with gloo'
        )


def overlapped(program: Program, ahead_bytes: float = inf, grouped: bool = False) -> Program:
    """`program` as real ranks run it: collectives started early and waited for late, so that their buffers live longer.

    In the bodies of loops too. One with copies between tiers was in this order before they were written into it
    (`compiler.budget`), and is timed and counted as it stands: nobody reorders it. ahead_bytes: of results that are started ahead,
    at most so many, or one collective's. grouped: small updates stand side by side, as far as the peak allows; what is only counted need
    not be, for no peak is another by that.
    """
    if any(is_copy(node) for node in program.nodes):
        return program
    ids = count(program.next_id)
    ahead = partial(overlap, ids=ids) if ahead_bytes == inf else partial(overlap, ids=ids, ahead=1, ahead_bytes=int(ahead_bytes))
    inside = within(program, lambda body: ahead(outputs_late(views_late(body)), body=True))
    done = updates_side_by_side(ahead(views_late(updates_late(inside))))
    return small_updates_in_one_call(done, partial(memory, sent=True)) if grouped else done


def init_from_env(mesh: Mesh, limits: Limits | None = None) -> bool:
    """Join the process group that a launcher set up; True if this process is one of several ranks now."""
    limits = limits or Limits()
    launch = env.launched()
    if dist.is_initialized():
        return dist.get_world_size() > 1
    if launch is None or launch.world_size == 1:
        return False
    if mesh.size != launch.world_size:
        raise MeshError(
            f"{mesh} has {mesh.size} ranks but {launch.world_size} processes were launched; "
            "start as many processes as the mesh has ranks, or write one axis as -1"
        )
    # The watch comes first: it sees that a rank ends while the process group is made.
    meeting = Meeting.at(launch, limits)
    watch = Watch(launch.rank, launch.world_size, limits, meeting)
    limit, store = timedelta(seconds=limits.limit_s), meeting.group_store(len(_WATCHES))
    gpu = own_gpu(mesh, launch, watch)
    if gpu is not None:
        use_gpu(gpu)
    with watch:
        make_group(gpu, timeout=limit, store=store, rank=launch.rank, world_size=launch.world_size)
    _WATCHES[dist.group.WORLD] = watch
    watch.chosen = watch.made_group = True
    return True


def sub_limit_s(watch: Watch | None) -> float:
    """How long a collective of a group along single axes may take: as long as one of the whole, whoever made that.

    What `cf.join` was told comes first; a group that somebody else made has its own limit.
    """
    if watch is None:
        return Limits().limit_s
    device = "cuda" if group_moves_gpu_memory() else "cpu"
    own_s = None if watch.chosen else compat.group_limit_s(dist.group.WORLD, device)
    return watch.deadline_s if own_s is None else own_s


# Process group -> what ties this rank to the others of it. Kept as long as the process: groups are few.
_WATCHES: dict[Any, Watch] = {}


def watch_of_group(limits: Limits | None = None) -> Watch | None:
    """The tie to the other ranks of the process group, made where the group is not ours; None for a group of one."""
    if dist.get_world_size() == 1:
        return None
    if dist.group.WORLD not in _WATCHES:
        _WATCHES[dist.group.WORLD] = Watch(dist.get_rank(), dist.get_world_size(), limits)
    watch = _WATCHES[dist.group.WORLD]
    if limits is not None:
        watch.limits, watch.chosen = limits, True
    return watch


def broadcast_object(thing: Any) -> Any:
    """Rank 0's object on every rank; the object itself where there is one rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return thing
    box = [thing if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main_seed(watch: Watch | None, seed: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rank 0's seed, on the device that draws by it. Every rank has drawn one on the host, so that their generators stay in step.

    It travels once and is never read back, so that the host does not wait for the device.
    """
    if watch is None:
        return in_tier(seed, "device", device)
    carried = in_tier(seed, "device", device) if group_moves_gpu_memory() else seed
    with watch:
        dist.broadcast(carried, src=0)
    return in_tier(carried, "device", device)


def program_hash(program: Program, mesh: Mesh) -> str:
    """A hash that is equal exactly on ranks that are about to run the same program."""
    digest = hashlib.sha256(mesh.fingerprint.encode())
    for node in program.nodes:
        digest.update(repr((node.target, node.args, node.kwargs, node.outs, node.on)).encode())
        if node.loop is not None:
            digest.update(repr((node.loop.trips, node.loop.axis, node.loop.gathers)).encode())
            timetable = node.loop.timetable
            if timetable is not None:
                digest.update(repr((timetable.along, timetable.table, timetable.parts, timetable.ends)).encode())
            digest.update(program_hash(node.loop.body, mesh).encode())
    for id, value in program.values.items():
        digest.update(repr((id, value.shape, value.dtype, value.layout)).encode())
    for id, tensor in program.constants.items():
        digest.update(pickle.dumps((id, tuple(tensor.shape), str(tensor.dtype))))
        if tensor.numel() <= 1 << 16:
            digest.update(repr(tensor.tolist()).encode())
    digest.update(repr((program.inputs, program.outputs, program.aliases)).encode())
    return digest.hexdigest()
