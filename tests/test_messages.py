"""Messages of a rank: what goes in one batch, what is received into again, and which groups NCCL is given."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from colofunc import compat
from colofunc.executors import messages
from colofunc.executors.messages import Batch, Buffers, Mail, Message, PostedActions, Receiver

F32 = torch.float32
CPU = torch.device("cpu")


class Library:
    """In place of `torch.distributed`: every message comes at once, filled with its tag. `batches`: the tags that began together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[int]] = []
        monkeypatch.setattr(messages, "begin_together", self.begin)

    def begin(self, begun: Sequence[Message]) -> None:
        self.batches.append([one.tag for one in begun])
        for one in begun:
            one.works = ()
            if one.op is dist.irecv:
                one.data.fill_(one.tag)


def test_a_batch_is_one_call_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    library, mail = Library(monkeypatch), Mail()
    batch = Batch(mail)
    batch.begin()
    assert not library.batches and not mail.under_way
    for tag, group in ((1, "there"), (2, "back"), (3, "there")):
        batch.add(Message(dist.isend, torch.zeros(1), 1, group, tag))
    assert not mail.under_way, "nothing has been begun"
    batch.begin()
    assert library.batches == [[1, 3], [2]] and mail.under_way
    batch.add(Message(dist.isend, torch.zeros(1), 1, "there", 4))
    batch.drop()
    batch.begin()
    assert library.batches == [[1, 3], [2]]


@pytest.mark.parametrize("works", [2, 1])
def test_works_of_a_batch(monkeypatch: pytest.MonkeyPatch, works: int) -> None:
    """One for each message, as with gloo, or one for all, as with NCCL."""
    answered = [f"work {number}" for number in range(works)]
    monkeypatch.setattr(dist, "P2POp", lambda *words: words)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: answered)
    both = [Message(dist.isend, torch.zeros(1), 1, None, tag) for tag in (1, 2)]
    messages.begin_together(both)
    assert [list(one.works or ()) for one in both] == ([["work 0"], ["work 1"]] if works == 2 else [["work 0"]] * 2)


def test_what_an_action_sends_goes_with_what_the_next_one_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """And memory that nobody holds any more is received into again; what somebody holds never is."""
    library = Library(monkeypatch)
    batch, buffers = Batch(Mail()), Buffers()
    lies: dict[int, int] = {}

    def begin(tag: int):
        out = buffers.take(((8,), F32), CPU)
        lies[tag] = out.data_ptr()
        message = Message(dist.irecv, out, 1, "there", tag)
        batch.add(message)
        return lambda: out

    # Part 0 receives a message of 8 numbers, part 1 sends one. What microbatch 0 received is kept to the last action.
    ahead = PostedActions([(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3)], batch, buffers)
    receiver = Receiver(begin, ((8,), F32))
    ahead.receives(0, receiver, lambda microbatch: microbatch)
    kept = {}
    for part, microbatch in ahead:
        if part == 0:
            got = receiver(microbatch)
            assert got.tolist() == [float(microbatch)] * 8
            if microbatch == 0:
                kept[0] = got
            del got
        else:
            batch.add(Message(dist.isend, torch.zeros(8), 1, "back", 10 + microbatch))
        assert not kept or kept[0].tolist() == [0.0] * 8
    assert library.batches == [[0], [1], [10], [2], [11], [3], [12]]
    assert lies[0] not in (lies[1], lies[2], lies[3]) and lies[1] == lies[2] == lies[3]
    assert not buffers._held, "nothing is held behind the last action"


def test_messages_of_two_actions_are_never_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL ends a batch as a whole: the first action would wait for what the second receives, which may be made of what the first sends."""
    library = Library(monkeypatch)
    batch = Batch(Mail())

    def begin(tag: int):
        batch.add(Message(dist.irecv, torch.zeros(1), 1, "there", tag))
        return lambda: torch.tensor(tag)

    ahead = PostedActions([(0, 0), (1, 0), (2, 0)], batch, Buffers())
    receivers = [Receiver(begin) for _ in range(3)]
    for part, receiver in enumerate(receivers):
        ahead.receives(part, receiver, lambda microbatch, part=part: part)
    for part, _ in ahead:
        assert int(receivers[part](part)) == part
    assert library.batches == [[0], [1], [2]]


def test_memory_that_is_not_received_into_next_is_given_back() -> None:
    buffers = Buffers()
    first = buffers.take(((8,), F32), CPU)
    lay = first.data_ptr()
    view = first[2:]
    del first
    buffers.turn([((8,), F32)])
    second = buffers.take(((8,), F32), CPU)
    assert second.data_ptr() != lay, "a view of it is held"
    del view
    buffers.turn([((4,), F32), ((8,), torch.float64)])
    assert not any(buffers._free.values()), "no message of this shape and dtype comes next"
    buffers.turn([((8,), F32)] * 2)
    assert not any(buffers._free.values()), "it is held no more by this record either"


def test_memory_of_which_torch_does_not_say_who_holds_it_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "is_held_alone", lambda x: False)
    buffers = Buffers()
    assert buffers.take(((8,), F32), CPU).shape == (8,)
    assert not buffers._held
