"""Process groups of a mesh, and its collectives on real ranks.

Problem: a group of ranks along mesh axes has an order of its own, a process group is sorted by rank; backends lack some
collectives and some dtypes. Idea: one process group per set of ranks, made when a program first needs it and in the
program's own order, which is the same on all ranks. Each collective is one function that starts it and says how to
finish it (`collective_starts`; `gloo` where that carries them):

    started = groups.start("all_gather", ("dp",), 2)(x)
    started.wait()                                       # (2, *x.shape)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from colofunc import compat
from colofunc.executors.collective_starts import MAKERS, Group, Start, Started, bytes_of
from colofunc.executors.gloo import GLOO, through_host
from colofunc.executors.messages import Batch, Buffers, Mail, Message, Receiver, Send
from colofunc.mesh import Mesh
from colofunc.ops.dtypes import DOUBLED


class ProcessGroups:
    """All process groups that programs on one mesh have asked for so far."""

    def __init__(
        self, mesh: Mesh, rank: int, carriers: Mapping[str, str], limit_s: float, mail: Mail | None = None
    ) -> None:
        """`carriers`: device type -> backend.

        `limit_s`: after so long a collective that a member does not join is an error.
        """
        self.mesh = mesh
        self.mail = mail or Mail()
        self.rank = rank
        self.carriers = carriers
        self.limit_s = limit_s
        self._made: dict[tuple[tuple[int, ...], ...], Any] = {}
        # (sender, receiver, number) -> process group; None where this rank is neither
        self._pairs: dict[tuple[int, int, int], Any] = {}
        self._groups: dict[tuple[str, ...], Group] = {}
        self.batch = Batch(self.mail)
        self._sent: list[Message] = []  # what is on its way to single members
        # (axis, source, target, tag) -> the group of such messages
        self._channels: dict[tuple[str, int, int, int], Any] = {}

    def of(self, axes: Sequence[str]) -> Group:
        """The group along `axes`. Collective the first time: every rank makes the same groups in the same order."""
        key = tuple(axes)
        if key not in self._groups:
            groups = self.mesh.groups(key)
            sets = tuple(sorted(tuple(sorted(group)) for group in groups))
            if sets not in self._made:
                self._made[sets] = self._make(sets)
            members = next(group for group in groups if self.rank in group)
            by_rank = sorted(members)
            order: tuple[int, ...] | None = tuple(by_rank.index(rank) for rank in members)
            inverse: tuple[int, ...] | None = tuple(members.index(rank) for rank in by_rank)
            if order == inverse == tuple(range(len(members))):
                order = inverse = None
            self._groups[key] = Group(self._made[sets], members, members.index(self.rank), order, inverse)
        return self._groups[key]

    def _make(self, sets: tuple[tuple[int, ...], ...]) -> Any:
        """A process group for each set of ranks; this rank's."""
        if len(sets) == 1:
            return dist.group.WORLD
        own = None
        for ranks in sets:
            pg = dist.new_group(list(ranks), timeout=timedelta(seconds=self.limit_s))
            if self.rank in ranks:
                own = pg
        return own

    def limit(self, limit_s: float) -> None:
        """From now on so long, also for the groups that are there; that of all ranks is whose it is."""
        self.limit_s = limit_s
        for pg in (*self._made.values(), *self._pairs.values()):
            if pg is not None and pg is not dist.group.WORLD:
                compat.set_group_limit(pg, limit_s)

    def open_channels(self, numbers: Mapping[tuple[str, int, int, int], int], device: torch.device) -> None:
        """Make a group of two for the messages from one index of an axis to another, for those of different numbers
        another one each.

        For NCCL, which does the messages of a group one after another: one that waits holds back no other. Collective:
        all ranks make all groups in one order, and both members begin with a sum, because NCCL connects them at the
        first call, which both have to make. numbers: see `places.channels`.
        """
        for (axis, source, target, tag), number in numbers.items():
            for members in self.mesh.groups((axis,)):
                pair = members[source], members[target]
                pg = self._channel(pair, number, device)
                if self.rank in pair:
                    self._channels[axis, source, target, tag] = pg

    def _channel(self, pair: tuple[int, int], number: int, device: torch.device) -> Any:
        key = (*pair, number)
        if key not in self._pairs:
            pg: Any = dist.new_group(sorted(pair), timeout=timedelta(seconds=self.limit_s))
            self._pairs[key] = pg if self.rank in pair else None
            if self.rank in pair:
                dist.all_reduce(torch.zeros(1, device=device), group=pg)
        return self._pairs[key]

    def sender(self, axes: Sequence[str], targets: Sequence[int], own_tag: int = 0) -> Send:
        """A function that sends a copy of a tensor to other members, and gives that copy.

        `delivered` waits until they have it.

        last: nobody uses the tensor's memory from then on; it is sent as it is, if it fills that memory. begin: no
        other message follows at once, with which this one could go. Messages of a pair with equal tags are received in
        the order in which they are sent (gloo; with NCCL those of one group are).
        """
        group = self.of(axes)
        others = [place for place in targets if place != group.place]
        by_host = self.carriers.get("cuda") == "gloo"

        def send(x: torch.Tensor, tag: int, last: bool = False, begin: bool = True) -> torch.Tensor:
            self._sent = [message for message in self._sent if not message.over()]
            whole = x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()
            kept = x if last and whole else x.clone(memory_format=torch.contiguous_format)
            if DOUBLED.get() and kept.dtype is torch.float32:
                kept = kept.double()  # as the receiver's buffer is
            carried = kept.cpu() if by_host else kept
            to = others if x.numel() else []
            for place in to:
                pg = self._channels.get((axes[0], group.place, place, own_tag), group.pg)
                message = Message(dist.isend, bytes_of(carried), group.members[place], pg, tag)
                self._sent.append(message)
                self.batch.add(message)
            if begin:
                self.batch.begin()
            return kept

        return send

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Inside, a program sends messages and waits for some (see `Mail`)."""
        with self.mail.of_program(self.rank):
            self.batch.drop()
            yield

    def delivered(self) -> None:
        """Wait for all that was sent: a process that ended before would take it along."""
        self.batch.begin()
        for message in self._sent:
            message.wait()
        self._sent.clear()

    def receiver(
        self,
        axes: Sequence[str],
        source: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        buffers: Buffers | None = None,
        own_tag: int = 0,
    ) -> Receiver:
        """A function that waits for what a member sends with a tag.

        Messages are begun with the batch, or by whoever waits for one first. buffers: what they are received into;
        None: memory of their own.
        """
        group = self.of(axes)
        room = tuple(shape), dtype
        lies_on = torch.device("cpu") if self.carriers.get("cuda") == "gloo" else device

        def begin(tag: int) -> Callable[[], torch.Tensor]:
            if buffers is None:
                out = torch.empty(room[0], dtype=dtype, device=lies_on)
            else:
                out = buffers.take(room, lies_on)
            pg = self._channels.get((axes[0], source, group.place, own_tag), group.pg)
            message = Message(dist.irecv, bytes_of(out), group.members[source], pg, tag)
            if out.numel():
                self.batch.add(message)

            def wait() -> torch.Tensor:
                if out.numel():
                    if message.works is None:
                        self.batch.begin()
                    message.wait()
                return out.to(device)

            return wait

        return Receiver(begin, room)

    def start(self, kind: str, axes: Sequence[str], *options: Any) -> Start:
        """The function that starts one collective; `options`: the node's arguments after the group size."""
        group = self.of(axes)
        makers = GLOO if self.carriers.get("cpu") == "gloo" else MAKERS
        on_host = makers[kind](group, *options)
        gloo_on_gpu = self.carriers.get("cuda") == "gloo"
        on_gpu = through_host(on_host) if gloo_on_gpu else MAKERS[kind](group, *options)

        def begin(x: Any) -> Started:
            first = x if isinstance(x, torch.Tensor) else x[0]
            # What is around the caller changes no buffer: one that `cf.testing.float64` doubles would hold other bytes
            # than are sent.
            with compat.no_function_modes():
                return on_gpu(x) if first.is_cuda else on_host(x)

        return begin
