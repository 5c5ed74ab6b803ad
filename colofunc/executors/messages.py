"""Messages: what single ranks send to one another, as the stages of a pipeline do, begun together and received into
memory that is reused.

Problem: a pipeline's action ends with what it sends and the next one begins with what it receives. Begun one by one,
each is a call of the library, with NCCL a kernel, and each message that comes is memory of its own. Idea: what nothing
stands between goes into a `Batch`, which begins all of it in one call for each process group; what an action has read
to its end is what the next one receives into.

    0F0 sends %8 | receive for 0B0 | 0F1 sends %8 | ...        one batch at each |, in front of an action

Who receives what in which order is the program's, on every rank: nothing here changes it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist

from colofunc import compat
from colofunc.errors import CollectiveError, ProgramError

MessageRoom = tuple[tuple[int, ...], torch.dtype]
"""What memory for a message is told apart by: shape and dtype."""


class Send(Protocol):
    """Sends a tensor with a tag."""

    def __call__(self, x: torch.Tensor, tag: int, last: bool = False, begin: bool = True) -> torch.Tensor: ...


class Mail:
    """Whether messages of this process may be under way whose program did not end.

    One for all meshes, which share a group of all ranks.
    """

    def __init__(self) -> None:
        self.under_way = False

    @contextmanager
    def of_program(self, rank: int) -> Iterator[None]:
        """Inside, a program sends messages and waits for some.

        Raises CollectiveError where an earlier one raised behind its first message.

        Messages of equal tags are taken in the order in which they were sent: this program would compute with that
        one's.
        """
        if self.under_way:
            raise CollectiveError(
                f"rank {rank}: an earlier step raised in the middle, and its messages may still be under way: a "
                "further step would take them for its own. Try: start the processes again, from the last state that "
                "was saved"
            )
        yield
        self.under_way = False  # not where the program raised: no `finally`


@attrs.define(eq=False)
class Message:
    """One half of a message: this rank sends, or receives. works: what the library answered when it was begun.

    None before that.
    """

    op: Callable[..., Any]
    data: torch.Tensor
    peer: int
    group: Any
    tag: int
    works: Sequence[Any] | None = None

    def wait(self) -> None:
        """Until it has come, or has left. One that was not begun is an error of the executor."""
        assert self.works is not None, "a message is begun before it is waited for"
        for work in self.works:
            work.wait()

    def over(self) -> bool:
        """Whether it has come, or has left."""
        return self.works is not None and all(work.is_completed() for work in self.works)


class Batch:
    """Messages that begin together, in the order in which they were added."""

    def __init__(self, mail: Mail) -> None:
        self._mail = mail
        self._added: list[Message] = []

    def add(self, message: Message) -> None:
        self._added.append(message)

    def drop(self) -> None:
        """Forget what was added and never begun, as by a program that raised."""
        self._added.clear()

    def begin(self) -> None:
        """One call for each process group; the library takes the messages of one group at a time."""
        if not self._added:
            return
        self._mail.under_way = True
        of_group: dict[Any, list[Message]] = {}
        for message in self._added:
            of_group.setdefault(message.group, []).append(message)
        self._added = []
        for messages in of_group.values():
            begin_together(messages)


def begin_together(messages: Sequence[Message]) -> None:
    """Begin messages of one process group."""
    ops = [dist.P2POp(one.op, one.data, one.peer, one.group, one.tag) for one in messages]
    works = dist.batch_isend_irecv(ops)
    # NCCL makes one piece of work of all of them, gloo one of each.
    single = len(works) != len(messages)
    for number, message in enumerate(messages):
        message.works = works if single else works[number : number + 1]


class Buffers:
    """Memory that messages are received into.

    What nobody holds any more when an action has ended is received into next, or one action later, or given back. A
    message that is under way is held by the library, and one that is being sent on by its sender.
    """

    def __init__(self) -> None:
        self._held: dict[MessageRoom, list[torch.Tensor]] = {}
        self._free: dict[MessageRoom, list[torch.Tensor]] = {}

    def turn(self, wanted: Iterable[MessageRoom], later: Iterable[MessageRoom] = ()) -> None:
        """An action has ended: keep of what is free as much as will be received into, before the next action and the
        one behind it.
        """
        counts = Counter(wanted) + Counter(later)
        free: dict[MessageRoom, list[torch.Tensor]] = {}
        for room, tensors in self._held.items():
            alone = [compat.is_held_alone(tensor) for tensor in tensors]
            left = [tensor for tensor, free_now in zip(tensors, alone, strict=True) if free_now]
            self._held[room] = [tensor for tensor, free_now in zip(tensors, alone, strict=True) if not free_now]
            free[room] = (self._free.get(room, []) + left)[: counts[room]]
        self._free = free

    def take(self, room: MessageRoom, device: torch.device) -> torch.Tensor:
        """Memory for a message."""
        shape, dtype = room
        free = self._free.get(room)
        memory = free.pop() if free else torch.empty(shape, dtype=dtype, device=device)
        if not compat.is_held_alone(memory):  # torch does not say who holds it
            return memory
        self._held.setdefault(room, []).append(memory)
        return memory.view(shape)  # by which whoever has it holds the memory beside this record

    def drop(self) -> None:
        """Hold nothing."""
        self._held.clear()
        self._free.clear()


class Receiver:
    """Waits for what a member sends with a tag.

    What was posted comes while this rank computes: gloo moves nothing before that.

    begin: makes room for a message with a tag, and gives what waits for it. room: what memory it takes.
    """

    def __init__(
        self, begin: Callable[[int], Callable[[], torch.Tensor]], room: MessageRoom = ((), torch.float32)
    ) -> None:
        self._begin = begin
        self.room = room
        self._posted: deque[tuple[int, Callable[[], torch.Tensor]]] = deque()

    def post(self, tag: int) -> None:
        """Make room for a message that will be waited for, those with equal tags in order."""
        self._posted.append((tag, self._begin(tag)))

    def __call__(self, tag: int) -> torch.Tensor:
        if not self._posted:
            return self._begin(tag)()
        posted, wait = self._posted.popleft()
        if posted != tag:
            raise ProgramError(
                f"a message with tag {tag} is waited for, and the next one that was posted has tag {posted}"
            )
        return wait()


class PostedActions:
    """Actions of a rank one after another.

    What the next one receives is posted before an action begins, with what the last one sends.
    """

    def __init__(self, order: Sequence[tuple[int, int]], batch: Batch, buffers: Buffers) -> None:
        self._order = order
        self._batch = batch
        self.buffers = buffers
        self._receives: dict[int, list[tuple[Receiver, Callable[[int], int]]]] = {}

    def receives(self, part: int, receiver: Receiver, tag: Callable[[int], int]) -> None:
        """A part waits for a message, whose tag is that of the microbatch."""
        self._receives.setdefault(part, []).append((receiver, tag))

    def _received_by(self, number: int) -> list[tuple[Receiver, int]]:
        """What an action receives, with tags."""
        asked: list[tuple[Receiver, int]] = []
        for part, microbatch in self._order[number : number + 1]:
            for receiver, tag in self._receives.get(part, ()):
                asked.append((receiver, tag(microbatch)))
        return asked

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.buffers.drop()  # of a step that raised
        posted = 0
        for number, action in enumerate(self._order):
            asked = [self._received_by(other) for other in range(posted, number + 2)]
            posted = number + 2
            wanted = [receiver.room for some in asked for receiver, _ in some]
            self.buffers.turn(wanted, [receiver.room for receiver, _ in self._received_by(posted)])
            # Each action's apart: a batch of NCCL ends as a whole, and what comes for the next action may be made of
            # what this one sends.
            for some in asked:
                for receiver, tag in some:
                    receiver.post(tag)
                self._batch.begin()
            yield action
        self.buffers.drop()
        self._batch.begin()
