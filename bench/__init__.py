"""Benchmarks: `python -m bench` prints every figure of the documentation; `python -m bench NAME...` some of them.

A module of this folder is a benchmark if it has a function `bench() -> Section`: it runs in a process of its own, with
OMP_NUM_THREADS=1 unless that is set, and its rows go into the table and into `RESULTS.md`. A module with a `main()` only
is run as `python bench/NAME.py --write` and writes its section itself.

What two things cost is compared in alternating pairs within one process, by CPU seconds, and the median of the pairs'
ratios counts: machines are noisy, ratios of neighbours are not.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

RESULTS = Path(__file__).with_name("RESULTS.md")


@attrs.frozen
class Row:
    """One figure. `met`: whether it is as good as `target` says; None where there is no target."""

    what: str
    figure: str
    target: str = ""
    met: bool | None = None


@attrs.frozen
class Section:
    """The figures of one benchmark and the setting they hold in."""

    title: str
    setting: str
    rows: Sequence[Row]


def pairs(first: Callable[[], Any], *others: Callable[[], Any], count: int, warm: int = 1) -> list[tuple[float, ...]]:
    """CPU seconds of each callable, run in turn `count` times after `warm` rounds that do not count."""
    found = []
    gc.collect()
    for k in range(warm + count):
        times = []
        for run in (first, *others):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        if k >= warm:
            found.append(tuple(times))
    return found


def ratio(times: Sequence[tuple[float, ...]], above: int, below: int) -> tuple[float, str]:
    """(median of the ratios of two columns, text with the range)."""
    ratios = sorted(t[above] / t[below] for t in times)
    middle = statistics.median(ratios)
    return middle, f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} pairs)"


def seconds(times: Sequence[tuple[float, ...]], column: int) -> str:
    return f"{statistics.median(t[column] for t in times):.3g} s"


def fresh(module: str, call: str) -> Any:
    """The result of an expression in a new process that has imported a module of this folder."""
    code = f"import json, attrs, bench.{module} as m; print('RESULT' + json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=RESULTS.parent.parent)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise RuntimeError(f"bench.{module}: {call} failed\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT"))


def run_section(module: str) -> Section:
    """What `bench()` of a module finds, in a new process."""
    found = fresh(module, "attrs.asdict(m.bench())")
    return Section(found["title"], found["setting"], [Row(**row) for row in found["rows"]])


def peak_rss_bytes() -> int:
    """The most memory this process has had since `forget_peak`."""
    return _status("VmHWM")


def rss_bytes() -> int:
    return _status("VmRSS")


def forget_peak() -> None:
    """Start the peak anew at what the process has now (Linux, proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
