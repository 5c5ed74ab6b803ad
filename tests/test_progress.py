"""The line that says how far a plan is: on a stream of the test's own, without its two seconds of silence."""

import io
import threading
import time

import pytest

import colofunc as cf
from colofunc import env, progress


class Terminal(io.StringIO):
    """A stream that says whether it is a terminal, and remembers what was written to it."""

    def __init__(self, terminal: bool = True) -> None:
        super().__init__()
        self.terminal = terminal
        self.wrote = threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        if text != env.ERASED:
            self.wrote.set()
        return count

    def lines(self) -> list[str]:
        """What stood in the line, one after another."""
        return self.getvalue().split(env.ERASED)[1:]

    def shown(self) -> str:
        """What has been written, at the next time that something is."""
        self.wrote.clear()
        assert self.wrote.wait(20), "nothing was written"
        return self.lines()[-1]


def line(stream: Terminal, after_s: float = 0.01):
    return progress.line("planning", stream=stream, after_s=after_s, every_s=0.01)


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLOFUNC_PROGRESS", "COLOFUNC_QUIET"):
        monkeypatch.delenv(name, raising=False)


def test_it_names_what_is_done_and_how_far() -> None:
    stream = Terminal()
    with line(stream):
        progress.at("variants", 3, 5)
        progress.at("checkpoint pieces", 40, 96)
        progress.at("order", 2)
        assert stream.shown().startswith("planning: 3 of 5 variants, checkpoint 40 of 96 pieces, order 2, ")
    assert stream.lines()[0].endswith(" s")


def test_loops_inside_begin_anew_with_the_next_of_the_loop_around() -> None:
    stream = Terminal()
    with line(stream):
        for variant in progress.over("variants", "ab"):
            assert stream.shown().startswith(f"planning: {1 + (variant == 'b')} of 2 variants, 0 s")
            for _ in progress.over("cuts", range(9)):
                break
            progress.at("order", 7)
            assert "variants, order 7" in stream.shown()
        assert "variants" not in stream.shown()


@pytest.mark.parametrize("error", [False, True])
def test_it_is_cleared_at_the_end(error: bool) -> None:
    stream = Terminal()
    try:
        with line(stream):
            stream.shown()
            if error:
                raise ValueError
    except ValueError:
        pass
    assert len(stream.lines()) > 1 and stream.getvalue().endswith(env.ERASED)
    written = stream.getvalue()
    time.sleep(0.05)
    assert stream.getvalue() == written and "\n" not in written


def test_what_is_quick_says_nothing() -> None:
    stream = Terminal()
    with line(stream, after_s=60):
        progress.at("variants", 1, 2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("terminal", "switches", "shown"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"COLOFUNC_PROGRESS": "1"}, True),
        (True, {"COLOFUNC_PROGRESS": "0"}, False),
        (True, {"COLOFUNC_QUIET": "1"}, False),
        (True, {"COLOFUNC_QUIET": "1", "COLOFUNC_PROGRESS": "1"}, False),
    ],
)
def test_where_it_is_written(terminal: bool, switches: dict[str, str], shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    assert env.shows_progress(terminal) == shown
    stream = Terminal(terminal)
    with line(stream):
        if shown:
            stream.shown()
        writing = [thread for thread in threading.enumerate() if thread.name.endswith("(_write)")]
        assert bool(writing) == shown
        time.sleep(0.03)
    assert bool(stream.getvalue()) == shown


def test_only_the_outer_line_is_written() -> None:
    outer, inner = Terminal(), Terminal()
    with line(outer), line(inner):
        progress.at("sharding", 2)
        assert "sharding 2" in outer.shown()
    assert inner.getvalue() == ""


def test_without_a_line_loops_go_on_as_ever() -> None:
    progress.at("variants", 1, 2)
    assert list(progress.over("variants", "ab")) == ["a", "b"]


def test_a_plan_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the searches of a step within a budget note, in their order."""
    noted: list[str] = []
    record = progress.at

    def at(noun: str, number: int, of: int | None = None) -> None:
        noted.append(noun)
        record(noun, number, of)

    monkeypatch.setattr(progress, "at", at)
    monkeypatch.setattr(env, "shows_progress", lambda terminal: True)
    monkeypatch.setenv("COLOFUNC_CACHE", "off")
    step = cf.testing.programs.mlp()
    with pytest.raises(cf.PlanError, match="no plan found within"):
        cf.checkpoint(cf.shard(step.fn, cf.Mesh(dp=2)), budget="100B").lower(step.state, step.batch)
    assert {"sharding searches", "sharding", "checkpoint order", "least budget searches"} <= set(noted)


class Plain:
    """What some programs put in the place of stderr: it can be written to, and no more."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("stream", [Plain(), None], ids=["no isatty", "none"])
def test_a_plan_is_made_whatever_stands_in_the_place_of_stderr(stream: Plain | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    step = cf.testing.programs.mlp()
    assert cf.shard(step.fn, cf.Mesh(dp=2)).lower(step.state, step.batch).program.nodes
    env.say("something")


def test_a_line_is_no_wider_than_the_terminal_and_keeps_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    with line(stream):
        progress.at("variants", 3, 5)
        progress.at("checkpoint pieces", 40, 96)
        shown = stream.shown()
    assert len(shown) == 29 and shown.startswith("planning: 3 of 5 variants") and shown.endswith("0 s")


class Broken(Terminal):
    """Its reader has gone."""

    def write(self, text: str) -> int:
        super().write(text)
        raise BrokenPipeError


def test_where_nobody_reads_the_line_the_plan_goes_on() -> None:
    stream = Broken()
    with line(stream):
        stream.wrote.wait(20)
    assert len(stream.lines()) == 1
