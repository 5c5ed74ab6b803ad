"""The simulated mesh: all ranks of a local program in this process, in lock step.

Ranks whose operands are the *same tensors* share one computation: an operator is a pure function, so equal tensors in
means equal results out. Nothing is taken on trust from layouts, hence a wrong rule still shows as a wrong number; yet
eight data-parallel ranks cost about one step, because what is replicated is computed once. Which ranks share what
follows from the inputs, so the whole mesh becomes one straight-line function (see `source`).

    v4_0 = linear(v2_0, v0)              # ranks 0 and 1
    v4_1 = linear(v2_1, v0)              # ranks 2 and 3
    v5 = all_reduce((v4_0, v4_1), 'sum')

An asynchronous start hands out a buffer of NaN that the wait fills, so that a missing wait fails here too. A write in
place to a tensor that ranks share, but with different operands, first gives each its own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from colofunc.errors import InputError, ProgramError
from colofunc.executors.copies import COPIER
from colofunc.executors.disk.tensors import OnDisk
from colofunc.executors.faults import ask
from colofunc.executors.kernels import HostCount, first_rows, reduce_members, with_zeros, without_rest
from colofunc.executors.pools import accelerator, pool_of, reads_host_only
from colofunc.executors.source import ABSENT, Look, Partition, StepFunction, Tap, Writer, only
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of
from colofunc.ops.copies import duplicate
from colofunc.ops.flat import flat_of
from colofunc.program.facts import COPIES, written
from colofunc.program.ir import Node, Program, Ref
from colofunc.spec.layout import At
from colofunc.spec.parts import holds

Shards = list[torch.Tensor]


class SimulatedProgram:
    """A program ready to run on every rank of a mesh. Call with `inputs[i][r]`: input i on rank r, without constants."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        bound: Mapping[str, Callable[..., Any]] | None = None,
        tap: Tap | None = None,
        whole: Program | None = None,
    ) -> None:
        """`whole`: the program before it was compiled. Under a `tap` copies allocate: whoever looks may hold on to them."""
        self.program = program
        self.pool = pool_of(program, mesh.size, whole) if tap is None else None
        self._whole = whole
        self._tap = tap
        self.mesh = mesh
        self._bound = bound
        self._host_only = reads_host_only(program)
        self._expected = sum(i not in program.constants for i in program.inputs)
        self._functions: dict[tuple[Partition, torch.device], StepFunction] = {}
        positions = {id: k for k, id in enumerate(i for i in program.inputs if i not in program.constants)}
        self._written = tuple(sorted({positions[i] for node in program.nodes for i in written(node) if i in positions}))

    def __call__(self, inputs: Sequence[Shards]) -> list[Shards]:
        if len(inputs) != self._expected:
            raise InputError(f"the program takes {self._expected} tensors, {len(inputs)} were given")
        partition, flat = distinct(inputs, self.mesh.size)
        if self._written:
            own_memory(flat, partition, self._written)
        device = device_of(self.mesh) if self._host_only else accelerator(flat)
        if self.pool is not None:
            self.pool.allocate(device.type == "cuda")
        function = self._functions.get((partition, device))
        if function is None:
            function = self._functions[partition, device] = self.write(partition, device).function()
        return function.per_lane(function(flat))

    def write(self, partition: Partition, device: torch.device, sparing: bool = True, look: Look | None = None) -> Writer:
        """The source for inputs that are shared as `partition` says."""
        wires = SimulatedWires(self.mesh)
        writer = Writer(
            self.program, self.mesh.size, device, wires, partition, self._bound, sparing, self._tap, look, self.pool, self._whole
        )
        writer.write()
        return writer


def compile_program(program: Program, mesh: Mesh) -> SimulatedProgram:
    """`program` as a function of its inputs' shards; keep it, compiling costs tens of microseconds per node."""
    return SimulatedProgram(program, mesh)


def run_simulated(program: Program, mesh: Mesh, inputs: Sequence[Shards]) -> list[Shards]:
    """Compile and run once."""
    return compile_program(program, mesh)(inputs)


def distinct(inputs: Sequence[Shards], lanes: int) -> tuple[Partition, list[torch.Tensor]]:
    """Which lanes hold the same memory, and the distinct tensors of all inputs in order."""
    if lanes == 1:
        return ((0,),) * len(inputs), [shards[0] for shards in inputs]
    partition: list[tuple[int, ...]] = []
    flat: list[torch.Tensor] = []
    for shards in inputs:
        first = shards[0]
        if all(s is first for s in shards):
            partition.append((0,) * lanes)
            flat.append(first)
            continue
        classes: dict[Any, int] = {}
        mine: list[int] = []
        for shard in shards:
            # Different objects may be views of the same memory; writing to it once per object would be wrong.
            key = (shard.data_ptr(), shard.stride()) if shard.numel() and not isinstance(shard, OnDisk) else id(shard)
            if key not in classes:
                classes[key] = len(classes)
                flat.append(shard)
            mine.append(classes[key])
        partition.append(tuple(mine))
    return tuple(partition), flat


def own_memory(flat: list[torch.Tensor], partition: Partition, positions: Sequence[int]) -> None:
    """Inputs that will be written to must not share memory with other inputs: such ones are copied, in `flat`."""
    addresses = [0 if type(x) is OnDisk else x.untyped_storage().data_ptr() for x in flat]
    if len(set(addresses)) == len(addresses):
        return
    starts = [0]
    for lanes in partition:
        starts.append(starts[-1] + max(lanes) + 1)
    owners: dict[int, int] = {}
    shared: set[int] = set()
    owner = [k for k, lanes in enumerate(partition) for _ in range(max(lanes) + 1)]
    for address, k in zip(addresses, owner, strict=True):
        if address and owners.setdefault(address, k) != k:
            shared.add(address)
    if not shared:
        return
    overlap = _overlapping(flat, owner, [j for j, address in enumerate(addresses) if address in shared])
    for k in positions:
        for j in range(starts[k], starts[k + 1]):
            if j in overlap:
                COPIER.arrived((flat[j],))
                flat[j] = flat[j].clone()


def _overlapping(flat: Sequence[torch.Tensor], owner: Sequence[int], some: Sequence[int]) -> set[int]:
    """Which of `some` tensors reach into memory that a tensor of another owner reaches into; neighbours in a buffer do not."""
    found: set[int] = set()
    run: list[int] = []
    end = 0
    for first, last, j in sorted((*_span(flat[j]), j) for j in some if flat[j].numel()):
        if run and first < end:
            run.append(j)
        else:
            found |= set(run) if len({owner[i] for i in run}) > 1 else set()
            run = [j]
        end = max(end, last)
    return found | (set(run) if len({owner[i] for i in run}) > 1 else set())


def _span(x: torch.Tensor) -> tuple[int, int]:
    """First address, and the one behind the last, of a tensor's elements."""
    first = x.data_ptr()
    return first, first + (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))) * x.itemsize


class SimulatedWires:
    """Collectives among the lanes of one function."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks: Sequence[int] = range(mesh.size)
        self._hidden: dict[str, tuple[str, ...]] = {}  # what a started value is called -> per lane, the variable that has the result
        self._writing: dict[str, tuple[str, ...]] = {}  # the same of what is written to disk: what waits for it

    def emit(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        if kind == "wait":
            self._wait(writer, node)
        elif kind in COPIES:
            self._copy(writer, node, kind, asynchronous)
        elif kind in ("axis_index", "take_shard", "keep_first"):
            getattr(self, "_" + kind)(writer, node)
        elif kind == "send":
            self._send(writer, node)
        else:
            who = tuple(rank for rank in self.ranks if writer.runs[rank])
            writer.line(f"{writer.bind(ask, 'ask')}({kind.removesuffix('_flat')!r}, {who!r})")
            out = only(node)
            results = self._collective(writer, node, kind, f"h{writer.stem(out)}" if asynchronous else writer.stem(out))
            if asynchronous:
                self._start(writer, out, results)
            else:
                writer.where[out] = results

    def in_order(self, actions: Sequence[tuple[int, int]], device: torch.device) -> Sequence[tuple[int, int]]:
        return actions

    def place(self, axes: Sequence[str], lane: int) -> int:
        return self.mesh.index(lane, axes)

    def here(self, at: At | None) -> tuple[bool, ...]:
        return tuple(holds(at, self.mesh, rank) for rank in range(self.mesh.size)) if at is not None else (True,) * self.mesh.size

    def behind(self, writer: Writer, node: Node) -> None:
        """All members are here: nothing has to be told."""

    # ---- communication ----

    def _collective(self, writer: Writer, node: Node, kind: str, stem: str) -> tuple[str, ...]:
        """Write a collective; the variable of its result per lane. Groups with equal members are computed once."""
        _, axes, _, *rest = node.args
        # The text of what each lane sends: a variable, or a tuple of them.
        source = tuple(writer.literal(node.args[0], lane) if writer.runs[lane] else ABSENT for lane in range(writer.lanes))
        groups = [group for group in self.mesh.groups(axes) if all(writer.runs[rank] for rank in group)]
        if kind == "permute":
            return self._permute(writer, source, groups, rest[0], stem)
        fn = writer.bind(_MEMBERS[kind], kind)
        each = kind in ("reduce_scatter", "all_to_all")
        result: list[str] = [""] * len(source)
        done: dict[tuple[str, ...], list[str]] = {}
        for group in groups:
            members = tuple(source[r] for r in group)
            options = "".join(f", {writer.literal(option, group[0])}" for option in rest)
            if (key := (*members, options)) not in done:
                n = len(done)
                names = [f"{stem}_{n}_{j}" for j in range(len(group))] if each else [f"{stem}_{n}"] * len(group)
                left = f"{', '.join(names)}{',' if len(names) == 1 else ''}" if each else names[0]
                writer.line(f"{left} = {fn}(({', '.join(members)},){options})")
                done[key] = names
            for r, name in zip(group, done[key], strict=True):
                result[r] = name
        return tuple(result)

    def _permute(
        self, writer: Writer, source: tuple[str, ...], groups: Sequence[Sequence[int]], table: Sequence[int], stem: str
    ) -> tuple[str, ...]:
        """What a rank receives is a buffer of its own, even if no other rank has the same data."""
        came = list(source)
        for group in groups:
            for i, r in enumerate(group):
                came[r] = source[group[table[i]]]
        copies = {name: f"{stem}_{k}" for k, name in enumerate(dict.fromkeys(name for name in came if name != ABSENT))}
        clone = writer.bind(contiguous_clone, "contiguous_clone")
        for name, copy in copies.items():
            writer.line(f"{copy} = {clone}({name})")
        return tuple(copies.get(name, ABSENT) for name in came)

    def _send(self, writer: Writer, node: Node) -> None:
        """What arrives is a buffer of its own, also where the sender keeps what it sends: the sender's, where nobody reads that later.

        Whoever measures what ranks hold is shown the copy that a real rank receives.
        """
        ref, axes, _, source, targets = node.args
        writer.line(f"{writer.bind(ask, 'ask')}('send', {tuple(r for r in self.ranks if writer.runs[r])!r})")
        came = [ABSENT] * writer.lanes
        for group in self.mesh.groups(axes):
            for target in targets:
                came[group[target]] = writer.where[ref.id][group[source]]
        writer.runs = tuple(name != ABSENT for name in came)
        dies = not writer.loops and writer.look is None and writer.sharing.dies(node, ref.id)
        arrive = writer.bind(torch.Tensor.contiguous, "contiguous") if dies else writer.bind(contiguous_clone, "contiguous_clone")
        for name, lane in writer.assign(only(node), came):
            writer.line(f"{name} = {arrive}({came[lane]})")

    def _start(self, writer: Writer, out: int, results: tuple[str, ...]) -> None:
        """The started value is NaN until it is waited for."""
        blank = writer.bind(unfilled, "unfilled")
        for name, lane in writer.assign(out, results):
            writer.line(f"{name} = {blank}({results[lane]})")
        self._hidden[writer.stem(out)] = results
        writer.extra[writer.stem(out)] = tuple(dict.fromkeys(results))

    def _wait(self, writer: Writer, node: Node) -> None:
        (ref,) = node.args
        started = writer.stem(ref.id)
        if started in self._writing:
            ends = self._writing.pop(started)
            for name, lane in writer.assign(only(node), ends):
                writer.line(f"{name} = {ends[lane]}")
            return
        if started not in self._hidden:
            raise ProgramError(f"wait for value {ref.id} ({writer.program.values[ref.id].name}), which nothing has started")
        hidden, source = self._hidden.pop(started), writer.where[ref.id]
        for name, lane in writer.assign(only(node), source):
            writer.line(f"{name} = {source[lane]}.copy_({hidden[lane]})")

    # ---- copies between tiers ----

    def _copy(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        """A copy that was started is NaN until its wait, which reads the source as it is then: nobody may write to either."""
        disk = any(writer.program.values[i].tier == "disk" for i in (*node.refs, *node.results))
        if disk or writer.device.type != "cpu":
            # On a card what has not come is whatever was there; a buffer of NaN would be one more copy, from memory that is not pinned.
            self._moved(writer, node, kind, asynchronous, spoil=writer.device.type == "cpu")
        elif kind == "put":
            into, x = node.refs
            writer.sharing.separate(node, (into,), list(zip(writer.where[into], writer.where[x], strict=True)))
            source, target = writer.where[x], writer.where[into]
            pairs = {name: given for name, given in zip(target, source, strict=True) if name != ABSENT}
            spoil = writer.bind(spoiled, "spoiled")
            for name, given in pairs.items():
                writer.line(f"{spoil}({name})" if asynchronous else f"{name}.copy_({given})")
            if not asynchronous:
                return
            for name, lane in writer.assign(only(node), target):
                writer.line(f"{name} = {target[lane]}")  # a variable of its own: `into` may die before it or after it
            self._hidden[writer.stem(only(node))] = source
        else:
            source, pool = writer.where[node.refs[0]], writer.pooled(only(node))
            copy = writer.bind(unfilled_copy if asynchronous else duplicate, f"{kind}_start" if asynchronous else kind)
            spoil = writer.bind(spoiled, "spoiled") if pool and asynchronous else ""
            for name, lane in writer.assign(only(node), source):
                if pool:
                    room = f"{pool}.like({source[lane]})"
                    writer.line(f"{name} = {spoil}({room})" if asynchronous else f"{name} = {room}.copy_({source[lane]})")
                else:
                    writer.line(f"{name} = {copy}({source[lane]})")
            if asynchronous:
                self._hidden[writer.stem(only(node))] = source

    def _moved(self, writer: Writer, node: Node, kind: str, asynchronous: bool, spoil: bool) -> None:
        """Threads, or the engines of a GPU, move the bytes from the start on.

        spoil: until the wait there is NaN, or an error where a file is read.
        """
        start, device = writer.bind(writer.start, "copy_start"), writer.bind(writer.device, "device")
        pool = writer.pooled(node.outs[0]) if node.outs else ""
        if kind == "put":
            writer.sharing.separate(node, node.refs[:1], list(zip(*(writer.where[i] for i in node.refs), strict=True)))
        operands = list(zip(*(writer.where[i] for i in node.refs), strict=True))
        there = [names for names, runs in zip(operands, writer.runs, strict=True) if runs]
        writer.disk += 1
        moves = {names: f"d{writer.disk}_{k}" for k, names in enumerate(dict.fromkeys(there))}
        for names, move in moves.items():
            call = f"{start}({kind!r}, ({', '.join(names)},), {device}{', ' * bool(pool)}{pool})"
            writer.line(f"{move} = {call}" + ("" if asynchronous else ".wait()"))
        mine = tuple(moves.get(names, ABSENT) for names in operands)
        if not node.outs:
            writer.line(f"del {', '.join(moves.values())}")
            return
        out = only(node)
        if not asynchronous:
            writer.where[out] = mine
            return
        writer.extra[writer.stem(out)] = tuple(moves.values())
        ends = tuple(f"{move}.wait()" for move in mine)
        if not spoil or kind in ("put", "to_disk"):
            self._writing[writer.stem(out)] = ends
            for name, lane in writer.assign(out, mine):
                writer.line(f"{name} = {mine[lane]}.result")
            return
        blank = writer.bind(unfilled_copy, f"{kind}_start")
        for name, lane in writer.assign(out, mine):
            writer.line(f"{name} = {blank}({operands[lane][0]})")
        self._hidden[writer.stem(out)] = ends

    # ---- without communication ----

    def _axis_index(self, writer: Writer, node: Node) -> None:
        groups = self.mesh.groups(node.args[0])
        index = [0] * self.mesh.size
        for group in groups:
            for i, r in enumerate(group):
                index[r] = i
        for name, lane in writer.assign(only(node), index):
            number = torch.tensor(index[lane], device=writer.device)
            writer.line(f"{name} = {writer.bind(number, f'i{index[lane]}')}")

    def _members(self, node: Node) -> list[int]:
        """Each rank's place in its group."""
        place = [0] * self.mesh.size
        for group in self.mesh.groups(node.args[1]):
            for i, r in enumerate(group):
                place[r] = i
        return place

    def _take_shard(self, writer: Writer, node: Node) -> None:
        ref: Ref = node.args[0]
        place, source = self._members(node), writer.where[ref.id]
        keys = list(zip(source, place, strict=True))
        for name, lane in writer.assign(only(node), keys):
            writer.line(f"{name} = {source[lane]}[{place[lane]}]")

    def _keep_first(self, writer: Writer, node: Node) -> None:
        ref, _, _, how = node.args
        place, source = self._members(node), writer.where[ref.id]
        keys = [(name, i == 0 or how != "sum") for name, i in zip(source, place, strict=True)]
        zeros = writer.bind(torch.zeros_like, "zeros_like")
        for name, lane in writer.assign(only(node), keys):
            writer.line(f"{name} = {source[lane]}" if keys[lane][1] else f"{name} = {zeros}({source[lane]})")


def contiguous_clone(x: torch.Tensor) -> torch.Tensor:
    """A copy in row-major order."""
    return x.clone(memory_format=torch.contiguous_format)


def unfilled(like: torch.Tensor) -> torch.Tensor:
    """A buffer whose values nobody should read."""
    return spoiled(torch.empty(like.shape, dtype=like.dtype, device=like.device))


def unfilled_copy(like: torch.Tensor) -> torch.Tensor:
    """A buffer that lies as `like` does, whose values nobody should read."""
    return spoiled(torch.empty_like(like, memory_format=torch.preserve_format))


def spoiled(target: torch.Tensor) -> torch.Tensor:
    """`target` filled with what nobody should read: NaN, or the least integer."""
    if target.dtype.is_floating_point or target.dtype.is_complex:
        return target.fill_(float("nan"))
    return target.fill_(False if target.dtype == torch.bool else torch.iinfo(target.dtype).min)


def _all_gather_flat(members: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([flat_of(xs) for xs in members])


def _all_to_all(members: Sequence[torch.Tensor], rows: torch.Tensor | None = None, expected: int = 0) -> list[torch.Tensor]:
    if rows is not None and rows.is_cuda:
        return [without_rest(torch.stack([m[j] for m in members]), rows) for j in range(len(members))]
    if rows is not None:
        count = HostCount(rows).value()
        received = []
        for rank in range(len(members)):
            parts = [first_rows(sent[rank : rank + 1], count)[0] for sent in members]
            received.append(with_zeros(torch.stack(parts), members[0]))
        return received
    return [torch.stack([m[j] for m in members]) for j in range(len(members))]


def _reduce_scatter(members: Sequence[torch.Tensor], how: str) -> list[torch.Tensor]:
    # Chunk by chunk, so that every rank's part has memory of its own.
    return [reduce_members([m[j] for m in members], how) for j in range(len(members))]


_MEMBERS: dict[str, Callable[..., Any]] = {
    "all_gather": torch.stack,
    "all_gather_flat": _all_gather_flat,
    "all_reduce": reduce_members,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
