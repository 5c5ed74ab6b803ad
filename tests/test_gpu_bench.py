"""`python -m bench gpu` runs whole on a card that is pretended, with tiny sizes; what such a card has not, each row says."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from pretended import Machine

from bench import Row
from bench.gpu import __main__ as command
from bench.gpu import runner
from bench.gpu.parts import Part, Setup, Slice, lacks_here
from bench.gpu.record import GPU, NOTHING, Record
from bench.gpu.runner import AGAIN, measure, open_parts, run
from bench.gpu.sizes import TINY
from bench.gpu.slices import SLICES
from colofunc.mesh import profile

PRETENDED = {
    "a card": "the card is pretended: these tests want a real one",
    "eager": "the pretended card has no autograd, and eager PyTorch finds no attention kernel there",
    "inductor": "the pretended card runs nothing that is compiled for it",
    "nccl": "the pretended card has no NCCL",
    "compute-sanitizer": "compute-sanitizer wants a real card",
}
SHORT = "these sizes have fewer"
"""Parts for lengths and models that the tiny sizes do not have."""
SWEPT = {
    3: (
        "waits, microbatches", "waits, ZeRO-3 on two simulated ranks", "waits, a ring of two simulated ranks",
        "waits, experts on two simulated ranks",
    ),
    7: ("OPT with dropout", "OPT with dropout, offloaded, 60 %"),
    10: ("exposed copies", "disk"),
}  # fmt: skip
"""Slice -> parts that take seconds and whose kind another part has."""


def measured(of: Slice, folder: Path) -> dict[str, list[Row]]:
    said: list[str] = []
    record = Record(folder / "GPU.md")
    with Machine(seed=of.number):
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
            said = row.figure.removeprefix("not run: ")
            assert said == row.figure or said in PRETENDED.values() or said.startswith(SHORT), row
        needs = [need for need in part.needs if need in PRETENDED]
        if needs:
            assert [row.figure for row in found[part.name]] == [f"not run: {PRETENDED[needs[0]]}"]


@pytest.mark.parametrize("of", SLICES, ids=lambda of: f"slice {of.number}")
def test_a_slice_ends_on_a_pretended_card(of: Slice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_CARD_BYTES", 1 << 20)
    parts = tuple(part for part in of.parts if part.name not in SWEPT.get(of.number, ()))
    check(attrs.evolve(of, parts=parts), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("number, name", [(number, name) for number, names in SWEPT.items() for name in names])
def test_other_parts_end_on_a_pretended_card(number: int, name: str, tmp_path: Path) -> None:
    of = SLICES[number - 1]
    check(attrs.evolve(of, parts=tuple(part for part in of.parts if part.name == name)), tmp_path)


def test_slices_are_twelve_and_their_parts_have_names_of_their_own() -> None:
    assert [of.number for of in SLICES] == list(range(1, 13))
    for of in SLICES:
        assert len({part.name for part in of.parts}) == len(of.parts)
        assert set(SWEPT.get(of.number, ())) <= {part.name for part in of.parts}


def test_the_record_in_the_tree_has_no_row_of_a_pretended_card() -> None:
    text = GPU.read_text()
    assert "pretended" not in text
    assert (NOTHING in text) == (not any(Record().parts(of.number) for of in SLICES))


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
        monkeypatch.setattr(runner, "_usable", lambda: "b" not in counts)
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


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "a card" in lacks_here()
    assert command.main(["--slice", "4"]) == 2
    assert "there is no usable GPU" in capsys.readouterr().err
