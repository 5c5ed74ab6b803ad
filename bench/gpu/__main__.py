"""`python -m bench gpu`. See the package's docstring."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.parts import lacks_here
from bench.gpu.record import GPU, Record
from bench.gpu.runner import LIMIT_S, machine, open_parts, run
from bench.gpu.slices import SLICES

LEAST_S = 120.0
"""A slice is not begun with less time than that."""


def main(words: Sequence[str] | None = None) -> int:
    """0: every part that was asked for has rows, and every aim is met. 1: not so. 2: it cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description="Measure on a GPU what bench/GPU.md has no rows of yet.")
    slices = "; ".join(f"{s.number} {s.title}" for s in SLICES)
    parser.add_argument("--slice", type=int, action="append", choices=[s.number for s in SLICES], metavar="N", help=slices)
    parser.add_argument("--again", action="store_true", help="measure anew what has rows")
    parser.add_argument("--minutes", type=float, default=None, help="begin and go on for so long; the next call does the rest")
    parser.add_argument("--record", type=Path, default=GPU, help="write there; a file that is not there begins as a copy of bench/GPU.md")
    options = parser.parse_args(words)
    why = lacks_here().get("a card")
    if why:
        print(f"python -m bench gpu: {why}. It needs a torch with CUDA and a GPU that it sees", file=sys.stderr)
        return 2
    if not options.record.exists() and GPU.exists():
        shutil.copyfile(GPU, options.record)
    record, where = Record(options.record), machine()
    chosen = [s for s in SLICES if options.slice is None or s.number in options.slice]
    until = float("inf") if options.minutes is None else time.monotonic() + 60 * options.minutes
    if options.again:
        for of in chosen:
            record.forget(of.number)
    for of in chosen:
        if not open_parts(of, record, where):
            print(f"{of.number}. {of.title}: has its rows (--again measures anew)")
        elif until - time.monotonic() > LEAST_S:
            run(of, record, where, print, min(LIMIT_S, until - time.monotonic()))
    still = [of.number for of in chosen if open_parts(of, record, where)]
    missed = [of.number for of in chosen if any(r.met is False for rows in record.parts(of.number).values() for r in rows)]
    print(f"{options.record}: open {still or 'none'}, with an aim that is missed {missed or 'none'}")
    return 1 if still or missed else 0


if __name__ == "__main__":
    sys.exit(main())
