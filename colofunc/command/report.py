"""What the command line says of a plan, and the files that it writes.

    Files are checked before the plan is made, which may take a while: `check_writable(picture="plan.png")`.
"""

from __future__ import annotations

import json
import os

from rich.console import Console

from colofunc import owned
from colofunc.compiler.lowered import Lowered
from colofunc.errors import InputError
from colofunc.mesh.sizes import size_text
from colofunc.planner.plan import MARK as PLAN_MARK
from colofunc.planner.plan_table import time_text
from colofunc.program.chrome_trace import TRACE_MARK, chrome_trace

MARKS = {"trace": TRACE_MARK, "save": PLAN_MARK}
"""Option -> what the files that it writes begin with, so that nothing else is written over."""


def report(
    console: Console, low: Lowered, target: str, rows: int, budget_bytes: int | None, disk: bool = False
) -> None:
    """What was decided and why, what is held, and how long it takes.

    rows: of the table of decisions. budget_bytes: what the plan may hold on a device. disk: whether there is one.
    """
    console.print(_heading(low, target, budget_bytes, disk), style="bold", highlight=False, soft_wrap=True)
    node_devices = low.priced.topology.node_devices
    boxes, left_over = divmod(low.priced.size, node_devices)
    if boxes and left_over:
        console.print(
            f"  boxes of {node_devices} devices: {low.priced.size} ranks use {left_over} of the last one",
            highlight=False,
            soft_wrap=True,
        )
    for line in (*map(str, low.plan.axes), *low.plan.memory, *low.plan.notes, *low.plan.card):
        console.print(f"  {line}", highlight=False, markup=False)

    tables = []
    if rows and low.mesh.size > 1:  # one device leaves nothing to decide but what lies where
        tables.append(low.plan.table(costly=rows))
    if low.plan.pipeline is not None:
        tables.append(low.pipeline().text())
    tables.append(low.memory().table())
    for table in tables:
        console.print(table, markup=False, highlight=False, soft_wrap=True)

    lanes = low.lanes()
    busy = ", ".join(f"{lane} {time_text(seconds)}" for lane, seconds in lanes.busy_s().items())
    flops = low.cost().flops
    console.print(f"a step takes {time_text(lanes.end_s)}: {busy}; {flops:.3g} operations a rank", highlight=False)


def _heading(low: Lowered, target: str, budget_bytes: int | None, disk: bool) -> str:
    """The step, the machine, its mesh, and the memory that a rank has of each tier."""
    device_bytes = low.priced.topology.tier("device").capacity_bytes
    capacities = {"device": device_bytes, "host": low.priced.capacity_bytes("host")}
    if disk:
        capacities["disk"] = low.priced.capacity_bytes("disk")
    mesh = " ".join(f"{name}={size}" for name, size in low.plan.mesh) or "one device"
    words = [f"{target} on {low.priced.topology.name}, {mesh}"]
    for tier, capacity_bytes in capacities.items():
        if capacity_bytes is not None:
            words.append(f"{tier} {size_text(capacity_bytes)} a rank")
    if budget_bytes is not None and budget_bytes != device_bytes:
        words.append(f"tensors within {size_text(budget_bytes)}")
    return " · ".join(words)


# ---- files ----


def check_writable(**paths: str) -> None:
    """Raises InputError where a file that is asked for cannot be written: now, not when the plan is made."""
    option_of: dict[str, str] = {}
    for option, path in paths.items():
        if not path:
            continue
        if path in option_of:
            raise InputError(f"--{option_of[path]} and --{option} both name {path}; write two files")
        option_of[path] = option
        where = owned.given(path, f"--{option}", InputError, owned.A_FILE)
        if option == "picture":
            from colofunc.pictures import check_ending, check_replaceable

            check_ending(path)
            check_replaceable(where)
        else:
            owned.check_own_kind(where, MARKS[option], f"--{option}", InputError)
        try:
            existed = os.path.lexists(where)
            open(where, "ab").close()  # what was there stays
            if not existed:
                os.unlink(where)
        except OSError as error:
            why = error.strerror or error
            raise InputError(
                f"--{option} {path} cannot be written: {why}; name a file in a folder that is there"
            ) from error


def write_files(
    console: Console, low: Lowered, target: str, budget_bytes: int | None, picture: str, trace: str, save: str
) -> None:
    """The files that were asked for; "" for none."""
    title = f"{target} on {low.priced.topology.name}"
    if picture:
        from colofunc.pictures import memory_picture

        words = [title, *map(str, low.plan.axes), *low.plan.memory]
        memory_picture(low, picture, budget_bytes, " · ".join(words))
    if trace:
        data = chrome_trace(low.lanes(), low.memory(), f"{title}, as planned")
        owned.write_text(trace, json.dumps(data), TRACE_MARK, "--trace", InputError)
    if save:
        low.plan.save(save)
    for path in (picture, trace, save):
        if path:
            console.print(f"wrote {path}", highlight=False)
