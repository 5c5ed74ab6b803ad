"""Running slices: each in processes of its own, within a limit, its rows written as they come.

`measure` is what such a process does; `run` starts it, and again where it ended on the way. A part that ends its process, or does not end
within the limit of a whole slice, gets a row that says so, and is passed over from then on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import monotonic as now

import attrs
import torch

from bench import Row
from bench.gpu.measuring import usable
from bench.gpu.parts import Part, Setup, Slice, failed, not_run
from bench.gpu.record import Record

LIMIT_S = 450.0
"""Of a slice in one call, the start of its process included: under 8 minutes."""
AGAIN = 75
"""Exit status of a process that has left its card unusable: the rest runs in another one."""
ROOT = Path(__file__).parents[2]
Say = Callable[[str], None]


def machine() -> str:
    """The card and what runs on it, in words."""
    properties = torch.cuda.get_device_properties()
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{properties.name} ({memory}), torch {torch.__version__}, {os.cpu_count()} cores"


def open_parts(of: Slice, record: Record, where: str) -> list[Part]:
    """Parts without rows from this machine."""
    done = record.parts(of.number) if record.machine(of.number) == where else {}
    return [part for part in of.parts if part.name not in done]


def measure(of: Slice, setup: Setup, record: Record, say: Say, until: float = float("inf")) -> bool:
    """Measure the open parts of a slice in this process, until that `now()`. False: the card has to be begun anew."""
    where = machine()
    for part in open_parts(of, record, where):
        if now() >= until:
            break
        say(f"{of.number}. {of.title}: {part.name}")
        began = now()
        rows = rows_of(part, attrs.evolve(setup, done=record.parts(of.number)))
        record.add(of, part.name, rows, where)
        for row in rows:
            say(f"    {row.what}: {row.figure}" + (f" ({row.target})" if row.target else ""))
        say(f"    {now() - began:.0f} s")
        if not usable():
            return False
    return True


def rows_of(part: Part, setup: Setup) -> list[Row]:
    """A part's rows, or one that says why there are none."""
    why = setup.without(*part.needs)
    if why:
        return [not_run(part.name, why)]
    try:
        return part.measure(setup)
    except Exception as error:  # the parts behind it are to run, and this is what there is to know of it
        return [failed(part.name, error)]


def run(of: Slice, record: Record, where: str, say: Say, limit_s: float = LIMIT_S, command: tuple[str, ...] = ()) -> bool:
    """Run a slice in processes of its own; whether all its parts have rows now."""
    until = now() + limit_s
    first = True
    while (left := open_parts(of, record, where)) and now() < until:
        status = _child(command or (sys.executable, "-m", "bench.gpu.one"), of, record, until)
        rest = open_parts(of, record, where)
        if status is None and first and limit_s >= LIMIT_S and rest and rest == left:  # it had the time of a whole slice
            record.add(of, rest[0].name, [failed(rest[0].name, f"stopped after {limit_s:.0f} s")], where)
        elif status not in (None, 0, AGAIN) and rest:
            record.add(of, rest[0].name, [failed(rest[0].name, f"its process ended with {_ending(status)}")], where)
        elif rest == left:
            break
        first = False
    still = open_parts(of, record, where)
    if still:
        say(f"{of.number}. {of.title}: open are {', '.join(part.name for part in still)}; the next call goes on with them")
    return not still


def kept() -> AbstractContextManager[str]:
    """The folder of compiled kernels and of plans: what COLOFUNC_CACHE says, else an empty one, so that nothing old counts."""
    said = os.environ.get("COLOFUNC_CACHE", "off")
    return tempfile.TemporaryDirectory() if said == "off" else nullcontext(said)


def _child(command: tuple[str, ...], of: Slice, record: Record, until: float) -> int | None:
    """The exit status of a process that measures a slice; None where it was stopped at the limit."""
    with kept() as folder:
        return _waited_for(command, of, record, until, folder)


def _waited_for(command: tuple[str, ...], of: Slice, record: Record, until: float, cache: str) -> int | None:
    paths = [str(ROOT), str(ROOT / "tools" / "inplace"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "COLOFUNC_CACHE": cache}
    seconds = until - now()
    words = [*command, str(of.number), str(record.path.resolve()), f"{seconds:.0f}"]
    child = subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True)
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _ending(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"status {status}"
