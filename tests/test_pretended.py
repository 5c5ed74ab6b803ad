"""The pretended card finds what it is there for: faults of streams, memory, copies and devices, each beside the program without it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from pretended import Machine, OnCard, on_card
from torch._subclasses.fake_tensor import in_kernel_invocation_manager

from colofunc.executors.pages import pages

SEEDS = range(12)


def side_work(stream: torch.cuda.Stream, x: torch.Tensor) -> torch.Tensor:
    with torch.cuda.stream(stream):
        for _ in range(3):
            x = x + 1
        return x


def computed_too_early(faulty: bool) -> torch.Tensor:
    """A copy to the card on another stream is read before it has come."""
    source, copies = torch.ones(8).pin_memory(), torch.cuda.Stream()
    with torch.cuda.stream(copies):
        x = source.to("cuda", non_blocking=True)
    if not faulty:
        torch.cuda.current_stream().wait_stream(copies)
    return (x * 2).cpu()


def sent_too_early(faulty: bool) -> torch.Tensor:
    """A copy to the host on another stream begins before its source is computed."""
    copies, target = torch.cuda.Stream(), torch.empty(8, pin_memory=True)
    x = torch.ones(8, device="cuda") * 2
    if not faulty:
        copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        target.copy_(x, non_blocking=True)
    torch.cuda.synchronize()
    return target


def freed_while_read(faulty: bool) -> torch.Tensor:
    """Memory goes back to its stream, and to the next tensor there, while another stream still reads it."""
    other = torch.cuda.Stream()
    x = torch.full((8,), 2.0, device="cuda")
    other.wait_stream(torch.cuda.current_stream())
    out = side_work(other, x)
    if not faulty:
        x.record_stream(other)
    del x
    torch.zeros(8, device="cuda")
    torch.cuda.current_stream().wait_stream(other)
    return (out - 3).cpu()


def overwritten_before_sent(faulty: bool) -> torch.Tensor:
    """The host writes to pinned memory that a copy has yet to read."""
    source = torch.full((8,), 2.0).pin_memory()
    x = source.to("cuda", non_blocking=True)
    if not faulty:
        torch.cuda.current_stream().synchronize()
    source.fill_(5.0)
    return x.cpu()


def read_before_it_came(faulty: bool) -> torch.Tensor:
    """The host reads pinned memory that a copy has yet to write."""
    host = torch.full((8,), 2.0, device="cuda").to("cpu", non_blocking=True)
    if not faulty:
        torch.cuda.current_stream().synchronize()
    return host.clone()


def pages_used_again(faulty: bool) -> torch.Tensor:
    """Pinned pages of a pool are handed out again while a copy is in flight, which nobody but the pool knows."""
    slab = pages(64, pinned=True)
    first = torch.from_numpy(slab[:32].view(np.float32)).fill_(2.0)
    x = first.to("cuda", non_blocking=True)
    sent = torch.cuda.current_stream().record_event()
    del first
    if not faulty:
        sent.synchronize()
    torch.from_numpy(slab[:32].view(np.float32)).fill_(7.0)
    return x.cpu()


def event_recorded_early(faulty: bool) -> torch.Tensor:
    """An event stands in front of the work that it is to stand for."""
    other, done = torch.cuda.Stream(), torch.cuda.Event()
    x = torch.ones(8, device="cuda")
    other.wait_stream(torch.cuda.current_stream())
    if faulty:
        done.record(other)
    out = side_work(other, x)
    if not faulty:
        done.record(other)
    torch.cuda.current_stream().wait_event(done)
    return (out - 2).cpu()


def wrong_stream_waits(faulty: bool) -> torch.Tensor:
    """Another stream than the one that reads waits for the event."""
    writer, reader, third = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.ones(8, device="cuda")
    writer.wait_stream(torch.cuda.current_stream())
    out = side_work(writer, x)
    (third if faulty else reader).wait_event(writer.record_event())
    with torch.cuda.stream(reader):
        doubled = out * 0.5
    torch.cuda.current_stream().wait_stream(reader)
    return doubled.cpu()


def written_while_read(faulty: bool) -> torch.Tensor:
    """Memory is written to in place while a copy on another stream reads it."""
    copies, target = torch.cuda.Stream(), torch.empty(8, pin_memory=True)
    x = torch.full((8,), 2.0, device="cuda")
    copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        target.copy_(x, non_blocking=True)
    if not faulty:
        torch.cuda.current_stream().wait_stream(copies)
    x.fill_(9.0)
    torch.cuda.synchronize()
    return target


def rooms_from_another_stream(faulty: bool) -> torch.Tensor:
    """A tensor made on a side stream is handed to the main one, freed there, and its memory goes to the side stream's next at once."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.full((8,), 2.0, device="cuda")
    main = torch.cuda.current_stream()
    main.wait_stream(side)
    out = x * 1.0
    if not faulty:
        x.record_stream(main)
    del x
    with torch.cuda.stream(side):
        torch.full((8,), 4.0, device="cuda")
    return out.cpu()


FAULTS: list[Callable[[bool], torch.Tensor]] = [
    computed_too_early, sent_too_early, freed_while_read, overwritten_before_sent, read_before_it_came, pages_used_again,
    event_recorded_early, wrong_stream_waits, written_while_read, rooms_from_another_stream,
]  # fmt: skip
TWO = torch.full((8,), 2.0)


@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.__name__)
def test_a_seeded_fault_is_a_wrong_number_and_without_it_there_is_none(program: Callable[[bool], torch.Tensor]) -> None:
    wrong = 0
    for seed in SEEDS:
        with Machine(seed=seed):
            assert torch.equal(program(False), TWO)
            wrong += not torch.equal(program(True), TWO)
    assert wrong >= 3, f"{wrong} of {len(SEEDS)} orders showed it"


def test_devices_do_not_mix() -> None:
    with Machine(cards=2):
        x = torch.ones(3, device="cuda")
        assert x.is_cuda and str(x.device) == "cuda:0" and (x + torch.tensor(1.0)).cpu().tolist() == [2.0] * 3
        for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
            with pytest.raises(RuntimeError, match=r"same device|different devices"):
                x + other
        with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
            torch.ones(3, device="cuda:2")


def test_a_fused_update_with_a_step_count_on_the_host_is_an_illegal_access() -> None:
    with Machine():
        tensors = [[torch.ones(3, device="cuda")] for _ in range(4)]
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
        torch._fused_adamw_(*tensors, [], [torch.ones((), device="cuda")], **options)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            torch._fused_adamw_(*tensors, [], [torch.ones(())], **options)


def test_dtypes_and_strides_are_those_of_a_card() -> None:
    with Machine():
        x = torch.randn(2, 4, device="cuda", dtype=torch.bfloat16)
        _, mean, _ = torch.native_layer_norm(x, [4], None, None, 1e-5)
        assert mean.dtype == torch.float32
        tall = torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last)
        assert (tall * 2).stride() == tall.stride()


def test_what_the_host_waits_for_and_what_is_launched_is_counted() -> None:
    with Machine() as machine:
        x = torch.ones(4, 4).pin_memory().to("cuda", non_blocking=True)
        y = x @ x + 1
        z = y.t()[1:]
        z.add_(1)
        assert not machine.waits and sum(machine.launches.values()) == 3
        assert float(y[0, 0]) == 5.0 and machine.waits == {"item": 1}
        torch.nonzero(y)
        y.cpu()
        torch.ones(4).to("cuda", non_blocking=True)  # pageable
        torch.cuda.synchronize()
        assert machine.waits == {"item": 1, "shape": 1, "copy to the host": 1, "copy to the card": 1, "device": 1}


def test_a_wait_for_a_stream_or_an_event_is_a_wait_of_the_host() -> None:
    with Machine() as machine:
        x = torch.ones(4, device="cuda")
        done = torch.cuda.current_stream().record_event()
        torch.cuda.current_stream().wait_event(done)  # the stream waits, the host does not
        assert not done.query() and not machine.waits
        done.synchronize()
        torch.cuda.current_stream().synchronize()
        assert done.query() and machine.waits == {"event": 1, "stream": 1}
        machine.to_card(x.cpu())
        assert machine.waits == {"event": 1, "stream": 1, "copy to the host": 1}  # what the pretence does itself does not count


def test_an_operator_runs_on_the_stream_of_the_card_where_its_tensors_are() -> None:
    with Machine(cards=2) as machine:
        streams = [torch.cuda.Stream(k) for k in range(2)]

        def given() -> list[int]:
            found = [len(stream.queue) for stream in streams]
            machine.engine.drain()
            return found

        x, host = torch.ones(4, device="cuda:1"), torch.ones(4).pin_memory()
        machine.engine.drain()
        with torch.cuda.stream(streams[1]), torch.cuda.stream(streams[0]), torch.cuda.device(0):
            for program in (
                lambda: x * 2, lambda: x.fill_(3), lambda: torch.ones(4, device="cuda:1"), lambda: x.copy_(host, non_blocking=True),
                lambda: host.to("cuda:1", non_blocking=True), lambda: x.to("cpu", non_blocking=True),
            ):  # fmt: skip
                keep = program()
                other, own = given()
                assert own and not other, keep
                del keep
                machine.engine.drain()


def test_a_copy_between_cards_stands_in_the_streams_of_both() -> None:
    for seed in range(4):
        with Machine(cards=2, seed=seed):
            x = torch.ones(8, device="cuda:0") * 2
            y = torch.full((8,), 5.0, device="cuda:1")
            y.copy_(x)
            x.fill_(7)
            assert (y * 1).cpu().tolist() == [2.0] * 8 and x.to("cuda:1").cpu().tolist() == [7.0] * 8


def test_live_bytes_are_those_of_tensors_that_somebody_has() -> None:
    with Machine(capacity_bytes=4096) as machine:
        x = torch.empty(256, device="cuda")
        view = x[128:]
        del x
        assert machine.live_bytes() == 1024 and torch.cuda.memory_allocated() == 1024
        del view
        y = torch.empty(3, device="cuda")
        assert machine.live_bytes() == 12 and torch.cuda.memory_allocated() == 512 and machine.peak_bytes() == 1024
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4096, device="cuda")
        assert y.numel() == 3


def test_an_error_of_work_comes_out_where_the_host_waits() -> None:
    with Machine():
        rows, at = torch.ones(3, 2, device="cuda"), torch.tensor([7], device="cuda")
        out = torch.index_select(rows, 0, at)
        with pytest.raises(IndexError):
            out.cpu()


class Waits:
    """Waits for the card when the collector finds it, as pinned pages do."""

    def __del__(self) -> None:
        torch.cuda.synchronize()


def test_nothing_runs_in_the_middle_of_a_piece_of_work() -> None:
    ran: list[str] = []

    def first() -> None:
        ran.append("first begins")
        cycle = Waits()
        cycle.__dict__["itself"] = cycle
        del cycle
        ran.append(f"first ends with {len([[] for _ in range(5000)])} lists")  # the collector would come

    threshold = gc.get_threshold()
    with Machine():
        stream = torch.cuda.current_stream()
        for run in (first, lambda: ran.append("second")):
            stream.launch(run)  # type: ignore[attr-defined]
        gc.set_threshold(100, 10, 10)
        try:
            stream.synchronize()
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
    assert ran == ["first begins", "first ends with 5000 lists", "second"]


def test_work_that_runs_in_the_middle_of_an_operator_on_fake_tensors_is_done() -> None:
    """The collector runs anywhere, and what it lets go of may wait for the card."""
    with Machine() as machine:
        x = torch.ones(3, device="cuda") * 2
        with in_kernel_invocation_manager(machine.fakes):
            machine.engine.drain()
        assert x.tolist() == [2.0] * 3


def test_a_thread_has_cards_too_and_begins_with_the_first() -> None:
    with Machine(cards=2, card=1), ThreadPoolExecutor(1) as threads:
        assert str(torch.ones(2, device="cuda").device) == "cuda:1"
        assert str(threads.submit(lambda: torch.ones(2).to("cuda").device).result()) == "cuda:0"


def test_a_tree_of_the_user_on_the_card() -> None:
    with Machine() as machine:
        tree = on_card(machine, {"a": torch.arange(3.0), "b": (torch.ones(2, 2).t(), 7)})
        assert isinstance(tree["a"], OnCard) and tree["a"].tolist() == [0.0, 1.0, 2.0] and tree["b"][1] == 7
