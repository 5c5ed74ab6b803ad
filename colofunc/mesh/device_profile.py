"""What one device reaches, measured: products, attention, kernels by their bytes, memory, launches, copies.

Problem: the file of a device says what others have measured of cards of its name, and this one may have other clocks,
other limits of power and another host; a CPU has no file at all. Idea: measure the figures that a plan reads, in the
sizes in which steps have them, each as Note [As in a step] of `stopwatch` says, and give them back as a `Device`, which
a topology's file holds.

    device, links_s = measured_device(base, torch.device("cuda", 0), deadline)

Numbers are random: products of ones take less power than those of a step, and a card that has reached its limit runs
slower.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from colofunc import compat
from colofunc.mesh.attention_profile import attention_curves, attention_rates, beside_known
from colofunc.mesh.curves import WorkRate
from colofunc.mesh.stopwatch import REPEATS, card_s, least_run_s, wait
from colofunc.mesh.topology import Device, Rate

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
"""The dtypes of most steps first: what is left of the time shrinks."""
FLOAT8 = "float8"
SOURCE = "measured"

COPIED_BYTES = 1 << 22
"""Of a copy within a CPU's memory: beyond what a core keeps, and done before anybody interrupts."""
COPIED_CARD_BYTES = 1 << 28
"""Of a copy within a GPU's memory, and from and to the host."""
UPDATED_ELEMENTS = 1 << 22
"""Of an update on the host: its four tensors are beyond what the cores keep."""
LONG_S = 0.005
"""Longer runs are seldom left alone by others."""
LAUNCHES = 20
"""Kernels in a row, of which the middle distance is a launch; on a card fewer than the host hands out while it writes
elsewhere."""
HOST_CALLS = 200
"""Calls in a row that the host hands out; fewer than a card's queue holds."""
MOST_WIDE, LEAST_WIDE = 8192, 128
"""Rows and columns of the largest and the smallest product."""
SUSTAINED_S = 2.0
"""For so long products run one behind the other, to see what is left of their rate; at most a `SUSTAINED_PART` of the
time."""
SUSTAINED_PART = 0.15
CHUNK_S = 0.1
"""Products are handed out for so long at once, and their rate is that of the last."""
ROW = 1024
"""Elements of a row that a norm, a softmax or a sum goes over."""
CARD_BYTES_OF_WORK = (1 << 26, 1 << 24, 1 << 16, 1 << 28, 1 << 22, 1 << 20)
BYTES_OF_WORK = (1 << 20, 1 << 16, 1 << 12, 1 << 24, 1 << 18, 1 << 22, 1 << 14)
"""Bytes of the operand of the kernels that are measured by bytes, middle ones first: where there is little time they
are all there is. The smallest says what each kind takes before it begins.
"""

aten = torch.ops.aten


def measured_device(base: Device, device: torch.device, deadline: float) -> Device:
    """`base` with this device's figures; those of dtypes and kernels that it has not, or for which there was no time,
    stay.

    All is measured in rounds while there is time, and the best of each figure counts: what another program does lasts
    longer than a run.
    """
    began = time.perf_counter()
    left_s = max(0.0, deadline - began)
    is_card = device.type == "cuda"
    launch_s = _launch_s(device)
    products, attention, work = _round(device, launch_s, began, left_s)
    round_s = time.perf_counter() - began
    part, name = 1.0, str(DTYPES[0]).removeprefix("torch.")
    if is_card and name in products:
        part = sustained_part(products[name], device, min(SUSTAINED_S, SUSTAINED_PART * left_s))
    while time.perf_counter() + round_s < deadline:
        more = _round(device, launch_s, time.perf_counter(), round_s)
        products, attention, work = (
            _best(first, second) for first, second in zip((products, attention, work), more, strict=True)
        )
    best = {rate.dtype: rate.flops_per_s / base.sustained for rate in base.rates}
    best |= {dtype: _rate_of(points, device) for dtype, points in products.items()}
    return attrs.evolve(
        base,
        name=torch.cuda.get_device_name(device) if is_card else "cpu",
        rates=tuple(Rate(dtype, flops * part) for dtype, flops in best.items()),
        memory_bytes_per_s=_memory_bytes_per_s(device, launch_s),
        launch_s=launch_s,
        attention=beside_known(tuple(attention_curves(attention, SOURCE)), base.attention),
        sustained=part,
        work=(*_product_curves(products, launch_s, part), *_work_curves(work, device)),
        host_launch_s=_host_s(lambda tiny: aten.add.Tensor(tiny, tiny), device) if is_card else 0.0,
        host_view_s=_host_s(lambda tiny: aten.view.default(tiny, [1]), device),
    )


RatePoint = tuple[float, ...]
"""(size, rates of it)."""
RatesBySize = dict[Any, tuple[RatePoint, ...]]
"""By what they are of; points with the smallest size first."""


def _round(
    device: torch.device, launch_s: float, began: float, seconds: float
) -> tuple[RatesBySize, RatesBySize, RatesBySize]:
    """Products by dtype, attention by its kernel and the size of a head, other kernels by their kind."""
    return (
        product_rates(device, began + 0.45 * seconds),
        attention_rates(device, began + 0.7 * seconds),
        work_rates(device, launch_s, began + seconds),
    )


def _best(first: RatesBySize, second: RatesBySize) -> RatesBySize:
    """The better of both at each size."""
    found: RatesBySize = {}
    for key in {**first, **second}:
        points: dict[float, RatePoint] = {}
        for size, *rates in (*first.get(key, ()), *second.get(key, ())):
            points[size] = tuple(map(max, points.get(size, (0.0,) * len(rates)), rates))
        found[key] = tuple((size, *rates) for size, rates in sorted(points.items()))
    return found


# ---- memory, launches, the host


def _memory_bytes_per_s(device: torch.device, launch_s: float) -> float:
    """Of elementwise kernels on a card, of a copy on a host."""
    if device.type == "cuda":
        x = torch.randn(COPIED_CARD_BYTES // 2, dtype=torch.bfloat16, device=device)
        y = torch.randn_like(x)
        return _beside(3 * x.nbytes, least_run_s(lambda: x + y, device), launch_s)
    here, there = torch.empty(COPIED_BYTES, dtype=torch.uint8), torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    return 2 * here.nbytes / least_run_s(lambda: here.copy_(there), device)


def _launch_s(device: torch.device) -> float:
    """Of a kernel that does nothing, in a row of such; on a card without what the host takes."""
    tiny = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            tiny.add_(1)

    return least_run_s(launches, device) / LAUNCHES


def _host_s(call: Callable[[Tensor], object], device: torch.device) -> float:
    """Seconds in which the host hands out a call of an operator, least of some rows of them."""
    tiny, taken = torch.zeros(1, device=device), []
    for _ in range(REPEATS + 1):
        wait(device)
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call(tiny)
        taken.append((time.perf_counter() - start) / HOST_CALLS)
    wait(device)
    return min(taken)


def copies_s(device: torch.device) -> tuple[int, dict[tuple[str, str], float]]:
    """(bytes, seconds by ends) of copies between device and host, pinned where there is a card."""
    is_card = device.type == "cuda"
    big = torch.ones(COPIED_CARD_BYTES if is_card else COPIED_BYTES, dtype=torch.uint8)
    here, there = torch.empty_like(big, device=device), torch.zeros_like(big, device=device)
    pinned = big.pin_memory() if is_card else big
    seconds = {
        ("host", "device"): least_run_s(lambda: here.copy_(pinned, non_blocking=True), device),
        ("device", "host"): least_run_s(lambda: pinned.copy_(there, non_blocking=True), device),
    }
    return big.nbytes, seconds


def host_update_bytes_per_s() -> float:
    """What this process reads and writes a second in an update of float32 values on the host, with the threads that
    torch has now.
    """
    cpu = torch.device("cpu")
    moved_bytes, run = _update(torch.randn(UPDATED_ELEMENTS), torch.randn(UPDATED_ELEMENTS))
    return moved_bytes / least_run_s(run, cpu)


# ---- products


def product_rates(device: torch.device, deadline: float) -> RatesBySize:
    """By dtype, operations a second of square products by their operations, launches included, grown until one is long
    or time is up.

    What the device does not multiply is not there. A CPU without instructions for int8 multiplies it in float32, at the
    rate of that.
    """
    found: RatesBySize = {}
    makers: list[tuple[str, Callable[[int], Callable[[], object]]]] = []
    for dtype in DTYPES:
        makers.append((str(dtype).removeprefix("torch."), lambda n, dtype=dtype: _product(n, dtype, device)))  # type: ignore[misc]
    if device.type == "cuda":
        makers.insert(1, (FLOAT8, lambda n: _float8_product(n, device)))
    if device.type == "cuda" or compat.has_int_mm_on_cpu():
        makers.append(("int8", lambda n: _int8_product(n, device)))
    for place, (name, make) in enumerate(makers):
        # A share of what is left, so that a dtype that is slow here does not starve the ones after it.
        now = time.perf_counter()
        points = tuple(_grown(make, device, now + max(0.0, deadline - now) / (len(makers) - place)))
        if points:
            found[name] = points
    if device.type == "cpu" and not compat.has_int_mm_on_cpu() and "float32" in found:
        found["int8"] = found["float32"]
    return found


def _grown(
    make: Callable[[int], Callable[[], object]], device: torch.device, until: float
) -> Iterator[tuple[float, float]]:
    n = LEAST_WIDE
    while n <= MOST_WIDE:
        try:
            taken_s = least_run_s(make(n), device)
        except RuntimeError:  # no kernel for this dtype here: the planner uses the nearest that has one
            return
        yield 2.0 * n**3, 2.0 * n**3 / taken_s
        # The next size takes eight times as long, and runs once more than it counts.
        if taken_s > LONG_S or time.perf_counter() + 8 * (REPEATS + 1) * taken_s > until:
            return
        n *= 2


def _product(n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Of two matrices: the square of one reads a third less, which counts where products are small."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return lambda: a @ b


def _float8_product(n: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=device)
    return lambda: compat.scaled_mm(a, b.t(), scale, scale, torch.bfloat16, None)


def _int8_product(n: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randint(-127, 128, (n, n), dtype=torch.int8, device=device) for _ in range(2))
    return lambda: compat.int_mm(a, b.t())


def _rate_of(points: tuple[RatePoint, ...], device: torch.device) -> float:
    """Operations a second. On a CPU the middle of all sizes: a step has products of every size and shape, and none does
    better than these. On a GPU small ones are nothing but launches, which count by themselves, so there the best is the
    rate.
    """
    rates = [rate for _, rate in points]
    return max(rates) if device.type == "cuda" else statistics.median(rates)


def sustained_part(points: tuple[RatePoint, ...], device: torch.device, seconds: float) -> float:
    """What is left of the best rate where products run one behind the other for some time."""
    flops, rate = max(points, key=lambda point: point[1])
    run = _product(round((flops / 2) ** (1 / 3)), DTYPES[0], device)
    count = max(1, round(min(CHUNK_S, seconds) * rate / flops))

    def chunk() -> None:
        for _ in range(count):
            run()

    until, last_s = time.perf_counter() + seconds, count * flops / rate
    while time.perf_counter() < until:
        last_s = max(card_s(chunk, device), 1e-9)
    return min(1.0, count * flops / rate / last_s)


def _product_curves(products: RatesBySize, launch_s: float, part: float) -> Iterator[WorkRate]:
    for dtype, points in products.items():
        yield WorkRate(
            "product",
            dtype,
            tuple((flops, part * _beside(flops, flops / rate, launch_s)) for flops, rate in points),
            SOURCE,
        )


def _beside(work: float, taken_s: float, launch_s: float) -> float:
    """Work a second beside a launch, which is at most half of what a call takes: a timer of another device says no
    less.
    """
    return work / max(taken_s - launch_s, taken_s / 2)


# ---- kernels by their bytes


def work_rates(device: torch.device, launch_s: float, deadline: float) -> RatesBySize:
    """By kind of kernels, bytes a second by the bytes that they read and write, beside a launch."""
    dtype, sizes = (torch.bfloat16, CARD_BYTES_OF_WORK) if device.type == "cuda" else (torch.float32, BYTES_OF_WORK)
    found: dict[Any, list[RatePoint]] = {}
    for size in sizes:
        if time.perf_counter() > deadline:
            break
        x = torch.randn(max(1, size // ROW // dtype.itemsize), ROW, device=device).to(dtype)
        for kind, (moved, run) in _kernels(x).items():
            found.setdefault(kind, []).append((float(moved), _beside(moved, least_run_s(run, device), launch_s)))
    return {kind: tuple(sorted(points)) for kind, points in found.items()}


def _work_curves(work: RatesBySize, device: torch.device) -> Iterator[WorkRate]:
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    for kind, points in work.items():
        yield WorkRate(kind, dtype, tuple((moved, rate) for moved, rate in points), SOURCE)


def _kernels(x: Tensor) -> dict[str, tuple[int, Callable[[], object]]]:
    """Kind -> (bytes that it moves, a call) of kernels that steps have."""
    y = torch.randn_like(x)
    weight = torch.ones(ROW, dtype=x.dtype, device=x.device)
    where = torch.randperm(x.shape[0], device=x.device)
    return {
        "elementwise": (3 * x.nbytes, lambda: x + y),
        "transcendental": (2 * x.nbytes, lambda: F.gelu(x)),
        "normalisation": (2 * x.nbytes, lambda: F.layer_norm(x, (ROW,), weight)),
        "softmax": (2 * x.nbytes, lambda: torch.softmax(x, 1)),
        "reduction": (x.nbytes, lambda: x.sum(0)),
        "update": _update(x, y),
        "gather": (2 * x.nbytes, lambda: x.index_select(0, where)),
    }


def _update(x: Tensor, gradient: Tensor) -> tuple[int, Callable[[], object]]:
    """(bytes that it moves, a call) of AdamW: four tensors are read, three are written."""
    first, second, step = torch.zeros_like(x), torch.zeros_like(x), torch.ones((), device=x.device)
    options = dict(lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)
    return 7 * x.nbytes, lambda: aten._fused_adamw_([x], [gradient], [first], [second], [], [step], **options)
