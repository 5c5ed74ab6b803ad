"""Files that `colofunc plan` writes: whether each can be written is known before a plan is made."""

from __future__ import annotations

import importlib
import json
import os

from rich.console import Console

from colofunc import owned
from colofunc.compiler.lowered import Lowered
from colofunc.errors import InputError
from colofunc.planner.plan import MARK as PLAN_MARK
from colofunc.program.lanes import TRACE_MARK, chrome_trace

MARKS = {"trace": TRACE_MARK, "save": PLAN_MARK}


def writable(**paths: str) -> None:
    """Raises InputError where a file that is asked for cannot be written: now, not when the plan is made."""
    named: dict[str, str] = {}
    for option, path in paths.items():
        if not path:
            continue
        if named.setdefault(path, option) != option:
            raise InputError(f"--{named[path]} and --{option} both name {path}; write two files")
        where = owned.given(path, f"--{option}", InputError, owned.A_FILE)
        if option == "picture":
            pictures = importlib.import_module("colofunc.pictures")  # with matplotlib, only where it is used
            pictures.check_ending(path)
            pictures.check_replaceable(where)
        else:
            owned.check_own_kind(where, MARKS[option], f"--{option}", InputError)
        try:
            there = os.path.lexists(where)
            open(where, "ab").close()  # what was there stays
            if not there:
                os.unlink(where)
        except OSError as error:
            why = error.strerror or error
            raise InputError(f"--{option} {path} cannot be written: {why}; name a file in a folder that is there") from error


def written(console: Console, low: Lowered, target: str, picture: str, trace: str, save: str) -> None:
    """The files that were asked for."""
    if picture:
        pictures = importlib.import_module("colofunc.pictures")  # with matplotlib, only where it is used
        words = [f"{target} on {low.priced.topology.name}", *map(str, low.plan.axes), *low.plan.memory]
        pictures.memory_picture(low, picture, low.priced.capacity_bytes("device"), " · ".join(words))
    if trace:
        data = chrome_trace(low.lanes(), low.memory(), f"{target} on {low.priced.topology.name}, as planned")
        owned.write_text(trace, json.dumps(data), TRACE_MARK, "--trace", InputError)
    if save:
        low.plan.save(save)
    for path in (picture, trace, save):
        if path:
            console.print(f"wrote {path}", highlight=False)
