"""`python -m bench gpu` runs whole on a card that is pretended, with tiny sizes; what such a card has not, each row says."""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from pretended import Machine
from pretended.nccl import Nccl
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed import device_mesh, fsdp

import colofunc as cf
from bench import Row
from bench.gpu import __main__ as command
from bench.gpu import attention, compiled, experts, host, nccl, offload, one, runner
from bench.gpu import zoo as models_of_the_zoo
from bench.gpu.measuring import STEP, Step, eager, host_waits_of, profiled_waits, seconds_in, staged_run
from bench.gpu.models import Llama, Opt, weight
from bench.gpu.parts import Part, Setup, Slice, lacks_here
from bench.gpu.record import GPU, NOTHING, Record
from bench.gpu.runner import AGAIN, measure, open_parts, run
from bench.gpu.sizes import TINY, Training
from bench.gpu.slices import SLICES
from colofunc.mesh import device_profile

PRETENDED = {
    "a card": "the card is pretended: these tests want a real one",
    "eager": "the pretended card has no autograd, and eager PyTorch finds no attention kernel there",
    "inductor": "the pretended card runs nothing that is compiled for it",
    "compute-sanitizer": "compute-sanitizer wants a real card",
    "CUPTI": "the pretended card counts waits itself",
}
SHORT = "these sizes have fewer"
"""Parts for lengths and models that the tiny sizes do not have."""
SWEPT = {
    3: (
        "waits, dropout", "waits, all state and updates on the host", "waits, microbatches", "waits, ZeRO-3 on two simulated ranks",
        "waits, a ring of two simulated ranks", "waits, experts on two simulated ranks",
    ),
    6: ("a step",),
    7: ("LLaMA", "OPT with dropout", "LLaMA, recomputed, 90 %", "OPT with dropout, offloaded, 60 %"),
    9: ("model 1", "model 2", "model 3"),
    10: ("in 40 GB", "exposed copies", "disk"),
    12: ("speed",),
    13: ("int4",),
    14: ("numbers, rowwise", "numbers, rowwise_with_gw_hp", "numbers, delayed", "speed"),
    15: ("decode, int8", "decode, nf4", "decode, int8-dynamic", "decode, fp8-dynamic", "decode, fp8-g128-dynamic"),
    16: ("speed and peak",),
    17: ("bits, fp8", "a step, int8", "a step, fp8", "speed, int8", "speed, fp8"),
}  # fmt: skip
"""Slice -> parts that take seconds and whose kind another part has."""
READ = {"in 40 GB": ("on the device",)}
"""Part -> others whose rows it reads: they are measured before it."""


@contextmanager
def pretended_group(card: Machine) -> Iterator[None]:
    """Slice 12 makes a process group of one rank; here it is one of gloo that takes what NCCL takes."""

    @contextmanager
    def group() -> Iterator[None]:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            with Nccl(card, bound=True):
                yield
        finally:
            dist.destroy_process_group()

    with mock.patch.object(nccl, "group", group):
        yield


def measured(of: Slice, folder: Path) -> dict[str, list[Row]]:
    said: list[str] = []
    record = Record(folder / "GPU.md")
    with Machine(seed=of.number) as card, pretended_group(card):
        assert measure(of, Setup(TINY, PRETENDED), record, said.append)
        assert not open_parts(of, record, runner.machine())
    return record.parts(of.number)


def check(of: Slice, folder: Path) -> None:
    found = measured(of, folder)
    assert list(found) == [part.name for part in of.parts]
    for part in of.parts:
        assert found[part.name]
        for row in found[part.name]:
            assert not row.figure.startswith("failed"), row
            assert not (part.name.startswith("waits") and row.met is False), row  # a pretended card counts them as a real one
            said = row.figure.removeprefix("not run: ")
            assert said == row.figure or said in PRETENDED.values() or said.startswith(SHORT), row
        needs = [need for need in part.needs if need in PRETENDED]
        if needs:
            assert [row.figure for row in found[part.name]] == [f"not run: {PRETENDED[needs[0]]}"]


@pytest.mark.parametrize("of", SLICES, ids=lambda of: f"slice {of.number}")
def test_a_slice_ends_on_a_pretended_card(of: Slice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_profile, "COPIED_CARD_BYTES", 1 << 20)
    parts = tuple(part for part in of.parts if part.name not in SWEPT.get(of.number, ()))
    check(attrs.evolve(of, parts=parts), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("number, name", [(number, name) for number, names in SWEPT.items() for name in names])
def test_other_parts_end_on_a_pretended_card(number: int, name: str, tmp_path: Path) -> None:
    of, names = SLICES[number - 1], (name, *READ.get(name, ()))
    check(attrs.evolve(of, parts=tuple(part for part in of.parts if part.name in names)), tmp_path)


def test_slices_are_seventeen_and_their_parts_have_names_of_their_own() -> None:
    assert [of.number for of in SLICES] == list(range(1, 18))
    for of in SLICES:
        assert len({part.name for part in of.parts}) == len(of.parts)
        assert set(SWEPT.get(of.number, ())) <= {part.name for part in of.parts}


def test_the_record_in_the_tree_has_no_row_of_a_pretended_card() -> None:
    text = GPU.read_text()
    assert "pretended" not in text
    assert (NOTHING in text) == (not any(Record().parts(of.number) for of in SLICES))


# ---- what the pretended card cannot run, on the host ----


def on_host(of: Training) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, of.shape.vocabulary, (of.rows, of.length))}


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_models_train_in_eager_as_they_do_here(kind: str) -> None:
    of, batch = TINY.llama, on_host(TINY.llama)
    module = (Llama(of.shape, torch.float32) if kind == "llama" else Opt(of.shape, torch.float32, of.length)).double()
    step_fn, state = cf.train_step(cf.functional(copy.deepcopy(module)), cf.adapt(torch.optim.AdamW, lr=1e-4), loss=lambda loss: loss)
    with cf.testing.float64():
        theirs, mine = eager(module, batch), staged_run(cf.shard(step_fn, cf.Mesh(device="cpu")), state, batch)
        found = [(float(theirs()), float(mine())) for _ in range(3)]
    assert found[2][0] < found[0][0]
    for a, b in found:
        assert a == pytest.approx(b, rel=1e-6)  # fused updates sum in another order


def test_attention_by_other_ways_gives_the_same() -> None:
    x = {name: t.double() for name, t in attention.operands(Setup(TINY, {}), 32, "cpu").items()}
    of = torch.arange(32) // 8
    _, mine = cf.shard(partial(attention.with_backward, attention.causal), cf.Mesh(device="cpu"))(x)
    for a, b in zip(attention.eager_backward(attention.causal, x), mine.values(), strict=True):
        torch.testing.assert_close(a, b.full())
    x = {name: t.float() for name, t in x.items()}
    masked = attention.chain(partial(attention.masked, of), x)
    torch.testing.assert_close(attention.chain(attention.flex(of, lambda fn: fn), x), masked)


def test_experts_by_grouped_products_give_the_same() -> None:
    x, up, down = (weight(*shape, dtype=torch.bfloat16).detach() * 30 for shape in ((16, 16), (2, 32, 16), (2, 16, 16)))
    index, share, _ = cf.moe.route(torch.randn(16, 2), k=experts.K)
    share = share.bfloat16()
    mine = cf.moe.experts(x, index, share, up, down)
    found = experts.by_groups({"x": x, "up": up, "down": down}, index, share)
    assert mine.abs().max() > 0.1
    torch.testing.assert_close(found, mine, rtol=0.05, atol=0.05)  # sums of products that bfloat16 rounds


class Processes:
    """A pool of one process. A model "ends" it, one "breaks" its card."""

    def __init__(self, workers: int) -> None:
        self.broken = self.ended = False

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, run: Any, name: str) -> Future[str | None]:
        result: Future[str | None] = Future()
        self.ended |= "ends" in name
        if self.ended:
            result.set_exception(BrokenProcessPool())
        else:
            result.set_result(None if self.broken else name if "is" in name or "breaks" in name else "")
        self.broken |= "breaks" in name
        return result


def test_what_ends_a_process_or_breaks_its_card_is_no_fault_of_the_next_model() -> None:
    names = ["a", "breaks", "b", "ends", "is wrong", "c", "d"]
    found = models_of_the_zoo.side_by_side(names, Processes, 2)
    assert found == {"a": "", "breaks": "breaks", "b": "", "ends": "its process ended", "is wrong": "is wrong", "c": "", "d": ""}


def test_what_is_compared_with_is_tried_in_a_way_that_fits() -> None:
    tried: list[str] = []

    def at(name: str, fits: bool) -> Step:
        tried.append(name)
        if not fits:
            raise torch.OutOfMemoryError(name)
        return Step(1.0, 1, 0.0)

    tries = {"whole": lambda: at("whole", False), "less": lambda: at("less", True)}
    assert offload.that_fits(tries) == ("less", Step(1.0, 1, 0.0)) and tried == ["whole", "less"]
    assert offload.that_fits({"first": lambda: at("first", True), **tries})[0] == "first"
    with pytest.raises(torch.OutOfMemoryError, match="last"):
        offload.that_fits({"whole": tries["whole"], "last": lambda: at("last", False)})


@pytest.mark.sweep
@pytest.mark.parametrize("fits", [True, False])
def test_fsdp2_trains_as_eager_does(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host; where there is too little memory, blocks are computed again."""
    of, made = TINY.offload, []

    def steps(make: Any, count: int, warm: int) -> Step:
        if not fits and not made:
            made.append(None)
            raise torch.OutOfMemoryError
        torch.manual_seed(0)
        run = make()
        made.append([float(run()) for _ in range(3)])
        return Step(1.0, 1, 0.0)

    @contextmanager
    def group() -> Iterator[None]:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            yield
        finally:
            dist.destroy_process_group()

    on_cpu, unpinned = device_mesh.init_device_mesh, fsdp.CPUOffloadPolicy(pin_memory=False)
    monkeypatch.setattr(device_mesh, "init_device_mesh", lambda kind, shape: on_cpu("cpu", shape))
    monkeypatch.setattr(fsdp, "CPUOffloadPolicy", lambda: unpinned)
    batch = on_host(of)
    for name, value in {"group": group, "steps": steps, "mixed": lambda: False, "ids": lambda of: batch}.items():
        monkeypatch.setattr(offload, name, value)
    setup = Setup(attrs.evolve(TINY, dtype=torch.float32), {}, {"in 40 GB": [Row("", Step(2.0, 1, 0.0).words(32))]})
    first, *_, last = offload.fsdp2(setup)
    assert ("computed again" in first.what) != fits and last.figure == "0.50"
    torch.manual_seed(0)
    alone = eager(Opt(of.shape, torch.float32, of.length), batch)
    assert made[-1] == pytest.approx([float(alone()) for _ in range(3)], rel=1e-5)


def test_the_compiler_finds_nothing_of_what_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(compiled, "nothing_kept", lambda: begun.append("fresh") or nullcontext())
    assert compiled.growth(lambda: begun.append("few") or 1.0, lambda: begun.append("many") or 2.0) == (1.0, 2.0)
    assert begun == ["fresh", "few", "fresh", "few", "fresh", "many"]


def called(name: str, start: float, end: float, device: Any = torch.autograd.DeviceType.CPU) -> Any:
    """An event as torch's profiler gives it."""
    return FunctionEvent(id=0, name=name, thread=1, start_us=start, end_us=end, device_type=device)


def test_waits_of_the_host_are_counted_among_the_events_of_a_profiler() -> None:
    card = torch.autograd.DeviceType.CUDA
    before = [called("cudaDeviceSynchronize", 1, 9), called(STEP, 10, 50), called(STEP, 200, 300, card)]
    within = [
        called("cudaLaunchKernel", 11, 12), called("cudaEventSynchronize", 13, 20), called("cudaStreamWaitEvent", 21, 22),
        called("cudaEventQuery", 22, 23), called("cudaMemcpyAsync", 23, 24), called("cudaStreamSynchronize", 24, 30),
        called("aten::item", 23, 31), called("gemm", 12, 90, card), called("cudaEventSynchronize", 40, 60), called("cudaMemcpy", 35, 36),
    ]  # fmt: skip
    behind = [called("cudaDeviceSynchronize", 51, 99)]  # the profiler's own
    counted = host_waits_of([*before, *within, *behind])
    assert counted == {"cudaEventSynchronize": 2, "cudaStreamSynchronize": 1, "cudaMemcpy": 1}
    assert not host_waits_of([before[1], *behind])
    with pytest.raises(ValueError, match="no event"):
        host_waits_of(within)


def test_a_profiled_call_is_marked() -> None:
    with mock.patch.object(torch.cuda, "synchronize"):
        assert profiled_waits(lambda: torch.ones(2) + 1) == {}


@pytest.mark.parametrize("cupti", [True, False])
def test_the_row_of_waits_is_of_the_profiler_where_it_sees_the_card(cupti: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ours", lambda make, batch, wrap: lambda: None)
    monkeypatch.setattr(host, "ids", lambda of: None)
    monkeypatch.setattr(host, "waits", lambda: nullcontext(["copies.py:7", "copies.py:7"]))
    monkeypatch.setattr(host, "profiled_waits", lambda run: Counter(cudaEventSynchronize=3))
    (row,) = host.host_waits("a LLaMA", Setup(TINY, {} if cupti else {"CUPTI": "not here"}))
    assert row.figure == ("3 (3 cudaEventSynchronize; 2 at copies.py:7)" if cupti else "2 (2 at copies.py:7)") and row.met is False
    assert host.host_waits(host.UPDATED_ON_HOST, Setup(TINY, {}))[0].met is None


def test_seconds_are_read_as_they_are_written() -> None:
    for seconds in (1.23456e-5, 0.0123, 1.75, 12345.6):
        assert seconds_in([Row("x", Step(seconds, 10, 0.0).words(8192))]) == pytest.approx(seconds, rel=1e-3)
    assert seconds_in([]) is None and seconds_in([Row("x", "not run: no room")]) is None


# ---- resuming ----


def three(counts: dict[str, int], broken: str = "") -> Slice:
    def part(name: str) -> Part:
        def count(setup: Setup) -> list[Row]:
            counts[name] = counts.get(name, 0) + 1
            if name == broken:
                raise ValueError("a | b")
            return [Row(f"{name} | of one", "1.5 | 2", "at most 2", True), Row("free", "3")]

        return Part(name, count)

    return Slice(4, "Three", tuple(part(name) for name in ("a", "b", "c")))


def test_parts_with_rows_are_passed_over_and_others_are_not(tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    of, record, setup = three(counts), Record(tmp_path / "GPU.md"), Setup(TINY, {})
    with Machine():
        assert measure(of, setup, record, lambda words: None, until=0.0) and not counts  # no time is left
        measure(attrs.evolve(of, parts=of.parts[:1]), setup, record, lambda words: None)
        measure(of, setup, record, lambda words: None)
        assert counts == {"a": 1, "b": 1, "c": 1}
        record.forget(of.number)
        assert NOTHING in record.path.read_text()
        measure(of, setup, record, lambda words: None)
        assert counts == {"a": 2, "b": 2, "c": 2}
    assert record.parts(4)["a"] == [Row("a | of one", "1.5 | 2", "at most 2", True), Row("free", "3")]
    with Machine(name="NVIDIA B200"):  # another card's rows are not this one's
        assert len(open_parts(of, record, runner.machine())) == 3
        measure(attrs.evolve(of, parts=of.parts[:1]), setup, record, lambda words: None)
    assert list(record.parts(4)) == ["a"] and "B200" in record.machine(4)


def test_a_part_that_raises_has_a_row_and_the_others_run(tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    of, record = three(counts, broken="b"), Record(tmp_path / "GPU.md")
    with Machine():
        measure(of, Setup(TINY, {}), record, lambda words: None)
    assert counts == {"a": 1, "b": 1, "c": 1}
    assert record.parts(4)["b"] == [Row("b", "failed: ValueError: a | b", "it runs", False)]


def test_a_part_that_leaves_the_card_unusable_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}
    of, record = three(counts), Record(tmp_path / "GPU.md")
    with Machine():
        monkeypatch.setattr(runner, "usable", lambda: "b" not in counts)
        assert not measure(of, Setup(TINY, {}), record, lambda words: None)
    assert list(record.parts(4)) == ["a", "b"]


def test_a_part_that_had_less_than_the_limit_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_child", lambda command, of, record, until: time.sleep(0.02))
    record = Record(tmp_path / "GPU.md")
    assert not run(three({}), record, "a card", lambda words: None, limit_s=0.01)
    assert not record.parts(4)


@pytest.mark.parametrize("ends, rows", [
    ([("ab", AGAIN), ("c", 0)], {"a": "1", "b": "1", "c": "1"}),
    ([("a", -11), ("c", 0)], {"a": "1", "b": "failed: its process ended with signal 11", "c": "1"}),
    ([("a", None)], {"a": "1"}),  # b had a part of the time only: the next call begins with it
    ([("", None)], {"a": "failed: stopped after 450 s"}),
    ([("", 1), ("bc", 0)], {"a": "failed: its process ended with status 1", "b": "1", "c": "1"}),
    ([("a", 0)], {"a": "1"}),  # the time was over between two parts
], ids=["again", "signal", "stopped", "whole limit", "status", "between"])  # fmt: skip
def test_a_process_that_ends_on_the_way(
    ends: list[tuple[str, int | None]], rows: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, record, left = three({}), Record(tmp_path / "GPU.md"), list(ends)

    def child(command: Any, of: Slice, record: Record, until: float) -> int | None:
        if not left:
            return 0  # nothing more in the time that is left
        names, status = left.pop(0)
        for name in names:
            record.add(of, name, [Row(name, "1")], "a card")
        if status is None:
            monkeypatch.setattr(runner, "now", lambda: until + 1)
        return status

    monkeypatch.setattr(runner, "_child", child)
    assert run(of, record, "a card", lambda words: None) == (len(rows) == 3)
    assert {name: found[0].figure for name, found in record.parts(4).items()} == rows


def test_a_process_is_stopped_at_the_limit_with_all_that_it_started(tmp_path: Path) -> None:
    sleeps = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    assert runner._child(sleeps, three({}), Record(tmp_path / "GPU.md"), time.monotonic() + 0.2) is None


def test_a_process_measures_its_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one, "REAL", TINY)
    monkeypatch.setattr(sys, "argv", ["one", "8", str(tmp_path / "GPU.md"), "100"])
    with Machine():
        assert one.main() == 0
    rows = Record(tmp_path / "GPU.md").parts(8)
    assert list(rows) == ["a product", "a layer"] and rows["a product"][0].figure.endswith("TFLOP/s")


def test_the_command_begins_what_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    begun: list[int] = []

    def all_of(of: Slice, record: Record, where: str, say: Any, limit_s: float) -> bool:
        begun.append(of.number)
        for part in open_parts(of, record, where):
            record.add(of, part.name, [Row("x", "1", "at most 2", of.number != 9)], where)
        return True

    monkeypatch.setattr(command, "run", all_of)
    path = ["--record", str(tmp_path / "GPU.md")]
    with Machine():
        assert command.main([*path, "--slice", "4", "--slice", "2"]) == 0 and begun == [2, 4]
        assert command.main([*path, "--minutes", "1"]) == 1 and begun == [2, 4]  # no time for another one
        assert command.main(path) == 1 and begun == [2, 4, 1, 3, *range(5, 18)]  # an aim of the ninth is missed
        assert "open none, with an aim that is missed [9]" in capsys.readouterr().out
        assert command.main([*path, "--slice", "4", "--again"]) == 0 and begun[-1] == 4 and len(begun) == 18


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "a card" in lacks_here()
    assert command.main(["--slice", "4"]) == 2
    assert "there is no usable GPU" in capsys.readouterr().err
