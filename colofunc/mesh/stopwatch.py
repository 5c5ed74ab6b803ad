"""Seconds of something that runs on a device, as it would take in a step.

Note [As in a step]. A plan compares seconds of operators with seconds of collectives, so all are measured alike: the
least of a few short runs, because a run that another program interrupts says nothing of the machine (at ten programs on
two cores the middle of three copies of 32 MiB was six times the least), and each behind a write to other memory,
because what a step reads lay elsewhere a moment ago (in a loop of nothing else a collective starts in a fifth of the
time that it takes between layers). Where one thread of the host does all the work, and there are as many cores as
ranks, its own CPU seconds count, which an interruption does not lengthen; collectives, and all else, are timed by the
wall. On a card that write is long, so that the host hands out what is measured while the card is still busy, as in a
step that keeps its card busy; and the card's own events tell the time, so that no wait of the host is in it.

    least_run_s(lambda: a @ b, device)
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from colofunc import env

REPEATS = 5
COLD_BYTES = 1 << 22
"""What a host writes between two collectives: more than a core keeps for itself."""
COLD_HOST_BYTES = 1 << 25
"""What a CPU writes between two kernels: about what all of its cores keep, because between two steps an update has
touched all state."""
COLD_CARD_BYTES = 1 << 28
"""What a card writes between two runs: more than its caches hold, and long enough (0.2 ms on an H100) to hand out some
kernels."""
LEAST_S = 1e-9

TimedCall = Callable[[], object]


def wait(device: torch.device) -> None:
    """Until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def least_run_s(run: TimedCall, device: torch.device, repeats: int = REPEATS, by_host: bool = False) -> float:
    """Least seconds of one run, after one to warm up. See Note [As in a step].

    by_host: for what is more than kernels of one device, such as collectives: until the host has seen the end of it, on
    a card too.
    """
    run()
    by_events = device.type == "cuda" and not by_host
    if by_host:
        cold_bytes = COLD_BYTES
    else:
        cold_bytes = COLD_CARD_BYTES if by_events else COLD_HOST_BYTES
    elsewhere, taken = torch.zeros(cold_bytes, dtype=torch.uint8, device=device), []
    for _ in range(repeats):
        elsewhere.add_(1)
        taken.append(card_s(run, device) if by_events else _on_host_s(run, device, by_host))
    return max(min(taken), LEAST_S)


def _on_host_s(run: TimedCall, device: torch.device, by_host: bool) -> float:
    is_alone = device.type == "cpu" and not by_host and torch.get_num_threads() == 1 and _has_cores()
    clock = time.thread_time if is_alone else time.perf_counter
    wait(device)
    start = clock()
    run()
    wait(device)
    return clock() - start


def _has_cores() -> bool:
    """Whether each rank may have a core to itself; where not, waiting for one is a part of every step."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return ranks <= env.cores()


def card_s(run: TimedCall, device: torch.device) -> float:
    """Seconds of one run by a card's own events; the card may still be busy with what it was given before."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    run()
    end.record(stream)
    wait(device)
    return begin.elapsed_time(end) / 1e3
