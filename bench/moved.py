"""Bytes that offload moves: against the least there is on traces small enough to solve, and beside fixed splits of a large model.

A fixed split, as in ZeRO-Offload, keeps a part of the parameters and a part of the optimizer state on the host, whatever fits
(`gemini("static", param=, optim=)`); what moves when is planned as for everybody. OPT-13B is a whole training step (bf16 beside
float32 masters, AdamW) on one device, planned without weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random
from typing import Any

import torch
from colofunc_plugins import gemini

import colofunc as cf
from bench import Row, Section, fresh
from bench.memory_plans import gb, opt
from colofunc.cli import axes_of_text, machine
from colofunc.mesh.sizes import parse_bytes
from colofunc.planner.offload.evict import TraceFacts, evict, spread
from colofunc.planner.offload.least_traffic import least_traffic
from colofunc.planner.offload.residency import Links, OffloadItem, Trace
from colofunc.planner.plan_table import time_text

TRACES, ITEMS = 300, 6
LEAST = re.compile(r"no choice copies less than ([\d.]+ \w+)")  # in a plan made for fewest bytes
CLOSE = 1.001
"""So near to the least there is counts as the least."""
SPLITS = {("40GB", 4): ((1.0, 1.0),), ("80GB", 8): ((1.0, 1.0), (0.5, 1.0), (0.0, 1.0))}
"""Budget and rows of the batch -> parts of (parameters, optimizer state) on the host."""


def least(steps: Sequence[frozenset[int]], writes: Sequence[frozenset[int]], room: int) -> int:
    """Fetches and stores of the best there is, by a search over all contents of the device: all lies on the host before and behind."""
    best: dict[frozenset[tuple[int, bool]], int] = {frozenset(): 0}
    for step, written in zip(steps, writes, strict=True):
        after: dict[frozenset[tuple[int, bool]], int] = {}
        for held, cost in best.items():
            for kept in _kept(held, step, room):
                dirty = {i for i, d in held if d}
                gone = sum(1 for i in dirty if i not in kept | step)
                fetched = sum(1 for i in step if i not in {j for j, _ in held})
                now = frozenset((i, i in written or i in dirty) for i in kept | step)
                after[now] = min(after.get(now, 10**9), cost + gone + fetched)
        best = after
    return min(cost + sum(d for _, d in held) for held, cost in best.items())


def _kept(held: frozenset[tuple[int, bool]], step: frozenset[int], room: int) -> Iterator[frozenset[int]]:
    rest = sorted(i for i, _ in held if i not in step)
    for size in range(min(len(rest), room - len(step)) + 1):
        yield from map(frozenset, combinations(rest, size))


def small(writing: bool) -> tuple[int, int, int]:
    """(traces that move no more than the least, moves, least moves) over random traces of items of one size."""
    equal = moved = best = 0
    for seed in range(TRACES):
        random = Random(seed)
        steps = [frozenset(random.sample(range(ITEMS), random.randint(1, 2))) for _ in range(random.randint(3, 10))]
        writes = [frozenset(i for i in sorted(step) if writing and random.random() < 0.4) for step in steps]
        room = random.randint(2, 4)
        uses = [tuple(p for p, step in enumerate(steps) if i in step) for i in range(ITEMS)]
        items = [OffloadItem(1, True, u, {p for p in u if i in writes[p]}, stays=False) for i, u in enumerate(uses)]
        trace = Trace((1.0,) * len(steps), (), (0,) * len(steps), tuple(items))
        if writing:
            facts = TraceFacts(trace)
            residents, stays = least_traffic(facts, room)
            found = len(spread(facts, stays, residents, room, Links(1.0, 1.0, 0.0))[1])
        else:
            found = sum(len(stays) for stays in evict(TraceFacts(trace), room, ()))
        here = least(steps, writes, room)
        equal, moved, best = equal + (found == here), moved + found, best + here
    return equal, moved, best


def split(budget: str, rows: int, param: float | None, optim: float = 1.0, aim: str = "auto") -> dict[str, Any]:
    """OPT-13B on one device within a budget; without a part of the parameters everything is chosen by time, or by bytes.

    aim="host": all state lies on the host, and all of it is updated there.
    """
    step, state, batch = opt(5120, 40, 40, rows)
    policy: Any = gemini("host") if aim == "host" else aim if param is None else gemini("static", param=param, optim=optim)
    mesh = machine(f"a100-{budget.removesuffix('B').lower()}", "", "512GiB", "")(cf.Mesh(**axes_of_text("")))
    staged = cf.offload(cf.precision(cf.shard(step, mesh), "bf16"), budget=parse_bytes(budget, "budget"), policy=policy)
    try:
        low = staged.lower(state, batch)
    except cf.ColofuncError as error:
        return {"failed": str(error)[:200]}
    moved = {"to_device": 0, "to_host": 0, "put": 0}
    for node in low.program.nodes:
        name = node.target.removeprefix("colofunc.").removesuffix("_start")
        if name in moved:
            moved[name] += low.program.values[node.refs[0]].nbytes
    said = next((m for m in map(LEAST.search, low.plan.memory) if m), None)
    least_bytes = parse_bytes(said[1], "least") if said else 0
    return {"least_bytes": least_bytes, "moved": moved, "peak_bytes": low.memory().peak_bytes["device"], "step_s": low.lanes().end_s}


def rows() -> Iterator[Row]:
    equal, moved, best = small(writing=False)
    figure = f"{moved:,}, the least is {best:,}; equal on {equal}"
    yield Row(f"fetches, {TRACES} traces of up to 10 positions", figure, "equal", equal == TRACES)
    equal, moved, best = small(writing=True)
    figure = f"{moved:,}, the least is {best:,}; equal on {equal}"
    yield Row("copies both ways, items that are written too", figure, "equal", equal == TRACES)
    for (budget, count), parts in SPLITS.items():
        said = f"OPT-13B, {count} x 1024, within {budget}: "
        mine = fresh("moved", f"m.split({budget!r}, {count}, None)")
        lean = fresh("moved", f"m.split({budget!r}, {count}, None, aim='bytes')")
        others = [fresh("moved", f"m.split({budget!r}, {count}, {param}, {optim})") for param, optim in parts]
        host = fresh("moved", f"m.split({budget!r}, {count}, None, aim='host')")
        least_bytes = min(_total(other) for other in (*others, host) if "moved" in other)
        held = [one["peak_bytes"] <= parse_bytes(budget, "budget") for one in (mine, lean)]
        yield Row(f'{said}policy="auto"', _said(mine), "less moved than by any split", _total(mine) < least_bytes and held[0])
        bound = lean["least_bytes"]
        good = (_total(lean) < least_bytes or _total(lean) <= CLOSE * bound) and held[1]
        figure = f"{_said(lean)}; of the splits of updates that were tried none can be done with less than {gb(bound)}"
        yield Row(f'{said}policy="bytes"', figure, "less moved than by any split, or the least that can be", good)
        for (param, optim), other in zip(parts, others, strict=True):
            yield Row(f"{said}{param:.0%} of parameters and {optim:.0%} of optimizer state on the host", _said(other, mine))
        yield Row(f"{said}all state on the host and every update there", _said(host, mine))


def _total(found: dict[str, Any]) -> int:
    return sum(found["moved"].values())


def _said(found: dict[str, Any], ours: dict[str, Any] | None = None) -> str:
    if "failed" in found:
        return f"no plan: {found['failed'].partition(';')[0].removeprefix('no plan found ')}"
    up, down = found["moved"]["to_device"], found["moved"]["to_host"] + found["moved"]["put"]
    ends = f"peak {gb(found['peak_bytes'])}, step {time_text(found['step_s'])} as planned"
    more = "" if ours is None else f"; {found['step_s'] / ours['step_s']:.2f} of our time, {_total(found) / _total(ours):.2f} of our bytes"
    return f"{gb(up)} to the device, {gb(down)} to the host, {gb(up + down)} in all a step; {ends}{more}"


def bench() -> Section:
    setting = (
        f"Traces: {ITEMS} items of one size, on the host before and behind, room for 2 to 4; the least by a search over all contents of "
        f"the device. OPT-13B: bf16 beside float32 masters, AdamW, on one A100. torch {torch.__version__}"
    )
    return Section("Bytes that offload moves", setting, list(rows()))
