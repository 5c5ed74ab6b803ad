"""Seconds, bytes and waits of things that run on a card."""

from __future__ import annotations

import gc
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

import colofunc as cf
from bench import Row
from bench.gpu.sizes import Training

Run = Callable[[], Any]


@attrs.frozen
class Step:
    """What steps of one kind took. `peak_bytes`: the most that torch had on the card, beside what lay there before."""

    seconds: float
    peak_bytes: int
    result: float

    def words(self, tokens: int) -> str:
        return f"{tokens / self.seconds:,.0f} tokens/s ({1e3 * self.seconds:.4g} ms a step), peak {self.peak_bytes / 1e9:.2f} GB"


def seconds_in(rows: Sequence[Row]) -> float | None:
    """Seconds of a step as `Step.words` has written them in the first of some rows; None where they were not measured."""
    found = re.search(r"\(([0-9.e+-]+) ms a step\)", rows[0].figure) if rows else None
    return float(found.group(1)) / 1e3 if found else None


def usable() -> bool:
    """Whether this process can still use its card: an illegal access stays with it."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def clear() -> int:
    """Let go of what nobody has; bytes that are left on the card."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def steps(make: Callable[[], Run], count: int, warm: int = 2) -> Step:
    """Make a step, run it a few times without counting, then `count` times with the host far ahead, and let it go."""
    before = clear()
    step = make()
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(count):
        result = step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / count
    found = Step(seconds, torch.cuda.max_memory_allocated() - before, float(result))
    del step, result
    clear()
    return found


def side_by_side(runs: dict[str, Run], repeats: int, warm: int = 3) -> dict[str, float]:
    """Median seconds of each, in turn, each until the card has done it."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(-min(warm, repeats), repeats):
        for name, run in runs.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if k >= 0:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in taken.items()}


def host_seconds(run: Run, repeats: int) -> float:
    """Least seconds until a call has handed over its work, which the card may still be doing."""
    taken = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return min(taken[1:])


@contextmanager
def waits() -> Iterator[list[str]]:
    """Where the host waited for the card meanwhile, as `torch.cuda.set_sync_debug_mode` tells it.

    On a real card it says nothing of waits for events and for the whole card (`profiled_waits` counts them); a pretended one does.
    """
    found: list[str] = []
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{w.filename.rsplit('/', 1)[-1]}:{w.lineno}" for w in told if "called a synchronizing CUDA operation" in str(w.message)]


HOST_WAITS = frozenset({"cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"})
"""Calls of the CUDA runtime in which the host waits; copies of torch are `cudaMemcpyAsync`, with one of these behind them if they wait."""
STEP = "one step of the benchmark"


def host_waits_of(events: Iterable[Any], mark: str = STEP) -> Counter[str]:
    """How often the host waited for the card, by the call in which it did, in the profiler's events between begin and end of `mark`.

    Torch's profiler itself waits for the card when it ends, which is behind the mark.
    """
    held = list(events)
    marks = [e.time_range for e in held if e.name == mark and e.device_type == torch.autograd.DeviceType.CPU]
    if not marks:
        raise ValueError(f"the profiler has no event {mark!r}")
    begin, end = min(m.start for m in marks), max(m.end for m in marks)
    return Counter(e.name for e in held if e.name in HOST_WAITS and begin <= e.time_range.start <= end)


def profiled_waits(run: Run) -> Counter[str]:
    """How often the host waits for the card in a call, as CUPTI tells torch's profiler: waits for events too."""
    kinds = torch.profiler.ProfilerActivity
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as told, torch.profiler.record_function(STEP):
        run()
    return host_waits_of(told.events())


def ids(of: Training) -> dict[str, torch.Tensor]:
    """Random tokens on the card."""
    numbers = torch.randint(0, of.shape.vocabulary, (of.rows, of.length), generator=torch.Generator().manual_seed(0))
    return {"ids": numbers.to("cuda")}


def training(make: Callable[[], torch.nn.Module]) -> tuple[Any, Any]:
    """(step function, state) of a module that gives its loss, with AdamW."""
    model = cf.functional(cf.lazy(make))
    return cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4), loss=lambda loss: loss)


def ours(make: Callable[[], torch.nn.Module], batch: Any, wrap: Callable[[Any], Any]) -> Run:
    """A training step as `wrap` stages it; each call is one, and gives the loss on the card."""
    step_fn, state = training(make)
    return staged_run(wrap(step_fn), state, batch)


def staged_run(staged: Any, state: Any, batch: Any) -> Run:
    held = {"state": staged.init(state, batch)}

    def step() -> Any:
        held["state"], metrics = staged(held["state"], batch)
        return metrics["loss"]

    return step


def eager(module: torch.nn.Module, batch: Any, call: Callable[..., Any] | None = None) -> Run:
    """The same in eager PyTorch; `call`: in place of the module, such as it compiled."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> Any:
        optimizer.zero_grad()
        loss = module(**batch) if call is None else call(**batch)  # a compiled module has a length, and so no truth of its own
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
