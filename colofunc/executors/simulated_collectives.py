"""Collectives of the simulated mesh, as lines of the generated source that all ranks share.

    v5 = all_reduce((v4_0, v4_1), 'sum')      # of the members of a group, one variable each

Groups whose members hold the same tensors are computed once. A value that was started and not waited for is a buffer of
NaN, so that a missing wait fails here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from colofunc.errors import ProgramError
from colofunc.executors.faults import ask
from colofunc.executors.kernels import HostCount, first_rows, in_its_memory, reduce_members, with_zeros, without_rest
from colofunc.executors.source import ABSENT, Writer, listed, only
from colofunc.mesh import Mesh
from colofunc.ops.copies import duplicate
from colofunc.ops.flat import flat_of
from colofunc.program.facts import COPIES
from colofunc.program.ir import Node, Ref
from colofunc.spec.layout import At
from colofunc.spec.parts import holds


class SimulatedWires:
    """Collectives among the lanes of one function."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks: Sequence[int] = range(mesh.size)
        # What a started value is called -> on each lane, the variable that has the result.
        self._hidden: dict[str, tuple[str, ...]] = {}
        # The same of a value that is what it will be at once, as of what is written to disk: the expression that waits
        # for it.
        self._waits: dict[str, tuple[str, ...]] = {}

    def emit(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        if kind == "wait":
            self._wait(writer, node)
        elif kind in COPIES:
            self._copy(writer, node, kind, asynchronous)
        elif kind == "axis_index":
            self._axis_index(writer, node)
        elif kind == "take_shard":
            self._take_shard(writer, node)
        elif kind == "keep_first":
            self._keep_first(writer, node)
        elif kind == "send":
            self._send(writer, node)
        else:
            self._ask(writer, kind.removesuffix("_flat"))
            out = only(node)
            if asynchronous:
                self._start(writer, out, self._collective(writer, node, kind, f"h{writer.stem(out)}"))
            else:
                writer.where[out] = self._collective(writer, node, kind, writer.stem(out))

    def in_order(self, actions: Sequence[tuple[int, int]], device: torch.device) -> Sequence[tuple[int, int]]:
        return actions

    def place(self, axes: Sequence[str], lane: int) -> int:
        return self.mesh.index(lane, axes)

    def here(self, at: At | None) -> tuple[bool, ...]:
        if at is None:
            return (True,) * self.mesh.size
        return tuple(holds(at, self.mesh, rank) for rank in self.ranks)

    def behind(self, writer: Writer, node: Node) -> None:
        """All members are here: nothing has to be told."""

    # ---- communication ----

    def _ask(self, writer: Writer, kind: str) -> None:
        """A line that asks whether a test wants some of the ranks to fail here."""
        running = tuple(rank for rank in self.ranks if writer.runs[rank])
        writer.line(f"{writer.bind(ask, 'ask')}({kind!r}, {running!r})")

    def _collective(self, writer: Writer, node: Node, kind: str, stem: str) -> tuple[str, ...]:
        """Write a collective; the variable of its result per lane. Groups with equal members are computed once."""
        _, axes, _, *rest = node.args
        # The text of what each lane sends: a variable, or a tuple of them.
        source = [writer.literal(node.args[0], lane) if writer.runs[lane] else ABSENT for lane in self.ranks]
        groups: list[tuple[int, ...]] = []
        for group in self.mesh.groups(axes):
            if all(writer.runs[rank] for rank in group):
                groups.append(group)
        if kind == "permute":
            return self._permute(writer, source, groups, rest[0], stem)
        function = writer.bind(_MEMBERS[kind], kind)
        one_each = kind in ("reduce_scatter", "all_to_all")  # each member gets a result of its own
        results = [ABSENT] * len(source)
        # what members send and the options -> the variable of each member's result
        done: dict[tuple[str, ...], list[str]] = {}
        for group in groups:
            members = [source[rank] for rank in group]
            options = "".join(f", {writer.literal(option, group[0])}" for option in rest)
            key = (*members, options)
            if key not in done:
                name = f"{stem}_{len(done)}"
                names = [f"{name}_{place}" for place in range(len(group))] if one_each else [name] * len(group)
                targets = listed(names) if one_each else name
                writer.line(f"{targets} = {function}(({', '.join(members)},){options})")
                done[key] = names
            for rank, variable in zip(group, done[key], strict=True):
                results[rank] = variable
        return tuple(results)

    def _permute(
        self, writer: Writer, source: Sequence[str], groups: Sequence[Sequence[int]], table: Sequence[int], stem: str
    ) -> tuple[str, ...]:
        """What a rank receives is a buffer of its own, even if no other rank has the same data.

        table: member i receives what member table[i] sends.
        """
        received = list(source)
        for group in groups:
            for place, rank in enumerate(group):
                received[rank] = source[group[table[place]]]
        copy_of: dict[str, str] = {}
        for name in received:
            if name != ABSENT:
                copy_of.setdefault(name, f"{stem}_{len(copy_of)}")
        clone = writer.bind(contiguous_clone, "contiguous_clone")
        for name, copy in copy_of.items():
            writer.line(f"{copy} = {clone}({name})")
        return tuple(copy_of.get(name, ABSENT) for name in received)

    def _send(self, writer: Writer, node: Node) -> None:
        """What arrives is a buffer of its own, also where the sender keeps what it sends: the sender's, where nobody
        reads that later.

        Whoever measures what ranks hold is shown the copy that a real rank receives.
        """
        ref, axes, _, source, targets = node.args
        self._ask(writer, "send")
        received = [ABSENT] * writer.lanes
        for group in self.mesh.groups(axes):
            for target in targets:
                received[group[target]] = writer.where[ref.id][group[source]]
        writer.runs = tuple(name != ABSENT for name in received)
        if not writer.loops and writer.look is None and writer.sharing.dies(node, ref.id):
            arrive = writer.bind(torch.Tensor.contiguous, "contiguous")
        else:
            arrive = writer.bind(contiguous_clone, "contiguous_clone")
        for name, lane in writer.assign(only(node), received):
            writer.line(f"{name} = {arrive}({received[lane]})")

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
        if started in self._waits:
            waits = self._waits.pop(started)
            for name, lane in writer.assign(only(node), waits):
                writer.line(f"{name} = {waits[lane]}")
            return
        if started not in self._hidden:
            raise ProgramError(
                f"wait for value {ref.id} ({writer.program.values[ref.id].name}), which nothing has started"
            )
        hidden, source = self._hidden.pop(started), writer.where[ref.id]
        for name, lane in writer.assign(only(node), source):
            writer.line(f"{name} = {source[lane]}.copy_({hidden[lane]})")

    # ---- copies between tiers ----

    def _copy(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        """A copy that was started is NaN until its wait, which reads the source as it is then: nobody may write to
        either.
        """
        values = writer.program.values
        on_disk = any(values[id].tier == "disk" for id in (*node.refs, *node.results))
        on_cpu = writer.device.type == "cpu"
        if on_disk or not on_cpu:
            # On a card what has not come is whatever was there; a buffer of NaN would be one more copy, from memory
            # that is not pinned.
            self._move(writer, node, kind, asynchronous, spoil=on_cpu)
        elif kind == "put":
            self._put(writer, node, asynchronous)
        else:
            self._duplicate(writer, node, kind, asynchronous)

    def _put(self, writer: Writer, node: Node, asynchronous: bool) -> None:
        """A copy into memory that a value has already, on a CPU."""
        into, x = node.refs
        writer.sharing.separate(node, (into,), list(zip(writer.where[into], writer.where[x], strict=True)))
        source, target = writer.where[x], writer.where[into]
        source_of = dict(zip(target, source, strict=True))
        source_of.pop(ABSENT, None)
        if not asynchronous:
            for name, given in source_of.items():
                writer.line(f"{name}.copy_({given})")
            return
        spoil = writer.bind(spoiled, "spoiled")
        for name in source_of:
            writer.line(f"{spoil}({name})")
        out = only(node)
        for name, lane in writer.assign(out, target):
            writer.line(f"{name} = {target[lane]}")  # a variable of its own: `into` may die before it or after it
        self._hidden[writer.stem(out)] = source

    def _duplicate(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        """A copy to new memory, or to a buffer of the pool, on a CPU."""
        out = only(node)
        source, pool = writer.where[node.refs[0]], writer.pooled(out)
        if asynchronous:
            copy = writer.bind(unfilled_copy, f"{kind}_start")
            spoil = writer.bind(spoiled, "spoiled") if pool else ""
        else:
            copy, spoil = writer.bind(duplicate, kind), ""
        for name, lane in writer.assign(out, source):
            if not pool:
                writer.line(f"{name} = {copy}({source[lane]})")
            elif asynchronous:
                writer.line(f"{name} = {spoil}({pool}.like({source[lane]}))")
            else:
                writer.line(f"{name} = {pool}.like({source[lane]}).copy_({source[lane]})")
        if asynchronous:
            self._hidden[writer.stem(out)] = source

    def _move(self, writer: Writer, node: Node, kind: str, asynchronous: bool, spoil: bool) -> None:
        """Threads, or the engines of a GPU, move the bytes from the start on.

        spoil: until the wait there is NaN, or an error where a file is read.
        """
        start, device = writer.bind(writer.start, "copy_start"), writer.bind(writer.device, "device")
        pool = writer.pooled(node.outs[0]) if node.outs else ""
        into_pool = f", {pool}" if pool else ""
        if kind == "put":
            writer.sharing.separate(node, node.refs[:1], _variables(writer, node))
        operands = _variables(writer, node)
        writer.disk += 1
        move_of: dict[tuple[str, ...], str] = {}  # operands -> the variable of the copy that is on its way
        for names, runs in zip(operands, writer.runs, strict=True):
            if runs:
                move_of.setdefault(names, f"d{writer.disk}_{len(move_of)}")
        for names, move in move_of.items():
            call = f"{start}({kind!r}, ({', '.join(names)},), {device}{into_pool})"
            writer.line(f"{move} = {call}" if asynchronous else f"{move} = {call}.wait()")
        if not node.outs:
            writer.line(f"del {', '.join(move_of.values())}")
            return
        out = only(node)
        moves = tuple(move_of.get(names, ABSENT) for names in operands)
        if not asynchronous:
            writer.where[out] = moves
            return
        writer.extra[writer.stem(out)] = tuple(move_of.values())
        waits = tuple(f"{move}.wait()" for move in moves)
        if not spoil or kind in ("put", "to_disk"):
            self._waits[writer.stem(out)] = waits
            for name, lane in writer.assign(out, moves):
                writer.line(f"{name} = {moves[lane]}.result")
            return
        blank = writer.bind(unfilled_copy, f"{kind}_start")
        for name, lane in writer.assign(out, moves):
            writer.line(f"{name} = {blank}({operands[lane][0]})")
        self._hidden[writer.stem(out)] = waits

    # ---- without communication ----

    def _axis_index(self, writer: Writer, node: Node) -> None:
        places = self._places(node.args[0])
        for name, lane in writer.assign(only(node), places):
            number = torch.tensor(places[lane], device=writer.device)
            writer.line(f"{name} = {writer.bind(number, f'i{places[lane]}')}")

    def _places(self, axes: Sequence[str]) -> list[int]:
        """Each rank's place in its group along axes."""
        places = [0] * self.mesh.size
        for group in self.mesh.groups(axes):
            for place, rank in enumerate(group):
                places[rank] = place
        return places

    def _take_shard(self, writer: Writer, node: Node) -> None:
        ref: Ref = node.args[0]
        places, source = self._places(node.args[1]), writer.where[ref.id]
        keys = list(zip(source, places, strict=True))
        for name, lane in writer.assign(only(node), keys):
            writer.line(f"{name} = {source[lane]}[{places[lane]}]")

    def _keep_first(self, writer: Writer, node: Node) -> None:
        """What all members hold, as a pending reduction: of a sum only the first keeps it, of a maximum all do."""
        ref, axes, _, how = node.args
        source = writer.where[ref.id]
        keeps = [place == 0 or how != "sum" for place in self._places(axes)]
        zeros, own = writer.bind(torch.zeros_like, "zeros_like"), writer.bind(in_its_memory, "in_its_memory")
        for name, lane in writer.assign(only(node), list(zip(source, keeps, strict=True))):
            kept = f"{own}({source[lane]})" if how == "sum" else source[lane]
            writer.line(f"{name} = {kept}" if keeps[lane] else f"{name} = {zeros}({source[lane]})")


def _variables(writer: Writer, node: Node) -> list[tuple[str, ...]]:
    """The variables of a node's operands on each lane."""
    return list(zip(*(writer.where[id] for id in node.refs), strict=True))


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


def _all_to_all(
    members: Sequence[torch.Tensor], rows: torch.Tensor | None = None, expected: int = 0
) -> list[torch.Tensor]:
    """What each member receives. rows: how many rows of each chunk travel, None: all.

    What a card receives is cut behind them.
    """
    places = range(len(members))
    if rows is None:
        return [_chunks(members, place) for place in places]
    if rows.is_cuda:
        return [without_rest(_chunks(members, place), rows) for place in places]
    count = HostCount(rows).value()
    received = []
    for place in places:
        parts = [first_rows(sent[place : place + 1], count)[0] for sent in members]
        received.append(with_zeros(torch.stack(parts), members[0]))
    return received


def _chunks(members: Sequence[torch.Tensor], place: int) -> torch.Tensor:
    """What all members send to one."""
    return torch.stack([sent[place] for sent in members])


def _reduce_scatter(members: Sequence[torch.Tensor], how: str) -> list[torch.Tensor]:
    received = []
    for place in range(len(members)):
        # Chunk by chunk, so that every rank's part has memory of its own.
        received.append(reduce_members([sent[place] for sent in members], how))
    return received


_MEMBERS: dict[str, Callable[..., Any]] = {
    "all_gather": torch.stack,
    "all_gather_flat": _all_gather_flat,
    "all_reduce": reduce_members,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
