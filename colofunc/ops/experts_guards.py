"""Which kernel on CUDA takes a call of experts or of a grouped product, how long it runs and what memory of its own it
holds.

The records of the kernels in `experts_device` and `grouped_device`; guards look at shapes, dtypes and the device.

    grouped     by torch's grouped product: bfloat16, sizes that are multiples of 8, Hopper and, from torch 2.13 on, Blackwell
    tiled       by tiles of one group each: every call

Bytes follow the kernels line by line: what is alive at each of the moments that can be the largest. Seconds are those
of the products at a share of the peak rate, and of what lies between them reads and writes. On an H100 grouped products
of 16,384 rows reach 630 TFLOP/s, 0.64 of the peak rate, and a layer forward and backward takes 41 ms (`make gpu`, slice
8).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch

from colofunc.ops import experts_device, grouped_device
from colofunc.ops.experts_parts import EXPERTS, EXPERTS_BACKWARD, INPUT_GRADIENTS, WEIGHT_GRADIENTS, Interleaved
from colofunc.ops.grouped_device import sizes_of_tiles, torch_scales, torch_takes
from colofunc.ops.kernels import Kernel, KernelCall, Rates, anything, wide

PRODUCT, PRODUCT_OF_GROUPS = "colofunc.grouped_mm", "colofunc.grouped_mm_dw"
CAST_PASSES = 4
"""Reads and writes of an operand in its own dtype that a cast takes, about."""
CAST_BYTES = 14
"""Of an element while it is cast: a copy, its quotient in float32 twice, its bits, and what the product reads."""
INDEX = torch.int64.itemsize
# Share of a device's peak rate that products of many rows reach.
SHARE = 0.6
# Launches of a grouped product beside its matrix products; and of a run of experts, beside its grouped products.
PRODUCT_LAUNCHES = {"grouped": 8, "tiled": 25}
RUN_LAUNCHES = {EXPERTS: 20, EXPERTS_BACKWARD: 45, INPUT_GRADIENTS: 45, WEIGHT_GRADIENTS: 20}


# ---- one grouped product ----


@attrs.frozen
class GroupedProduct:
    """s rows of e groups, matrices (e, i, o), elements of `size` bytes. of_groups: (s, i), (s, o) -> (e, i, o); else
    (s, i) -> (s, o).
    """

    s: int
    e: int
    i: int
    o: int
    size: int
    of_groups: bool = False

    @property
    def result_bytes(self) -> int:
        return (self.e * self.i if self.of_groups else self.s) * self.o * self.size

    def held_bytes(self, how: str) -> int:
        """At most, with its result."""
        if how == "grouped":
            return self.result_bytes + (INDEX + 1) * (self.e if self.of_groups else self.s) + 4 * INDEX * self.e
        tiles, height = sizes_of_tiles(self.s, self.e)
        rows, together = tiles * height, min(tiles, self.e)
        tables = (INDEX + 1) * (rows + self.s) + 8 * INDEX * (tiles + self.e) + together * height
        if self.of_groups:
            narrow = self.size < torch.float32.itemsize
            total = self.e * self.i * self.o * (torch.float32.itemsize if narrow else self.size)
            one = self.i * self.o * self.size
            part = together * (
                one
                + max(height * (self.i + self.o) * self.size, self.i * self.o * torch.float32.itemsize if narrow else 0)
            )
            return tables + total + max(part, self.result_bytes if narrow else 0)
        made = rows * self.o * self.size
        part = together * (height * self.i + self.i * self.o) * self.size
        return tables + made + max(part, self.result_bytes)

    def seconds(self, how: str, dtype: torch.dtype, rates: Rates, share: float = 1.0) -> float:
        """`share`: of the rows that are expected to have a group.

        Torch's kernel leaves out the others; tiles are as many for all.
        """
        tiles, height = sizes_of_tiles(self.s, self.e)
        rows = self.s * share if how == "grouped" else tiles * height
        flops = 2 * rows * self.i * self.o
        moved = (rows * (self.i + self.o) + self.e * self.i * self.o) * self.size
        launches = PRODUCT_LAUNCHES[how]
        if how == "tiled":
            # Rows and matrices of tiles are gathered, and what comes of them is dealt out again.
            gathered = tiles * (height * self.i + (height if self.of_groups else self.i) * self.o)
            moved += 2 * gathered * self.size + 4 * self.result_bytes
            launches += 4 * -(-tiles // max(1, self.e))
        return max(flops / (SHARE * rates.flops_per_s(dtype)), moved / rates.bytes_per_s) + launches * rates.launch_s


def _product_of(call: KernelCall) -> GroupedProduct:
    x, other, offs = call["x"], call["w" if call.target == PRODUCT else "g"], call["offs"]
    of_groups = call.target == PRODUCT_OF_GROUPS
    return GroupedProduct(x.shape[0], offs.shape[0], x.shape[1], other.shape[-1], x.dtype.itemsize, of_groups)


def _is_empty(call: KernelCall) -> bool:
    product = _product_of(call)
    return not min(product.s, product.e, product.i, product.o)


def _torch_multiplies(call: KernelCall) -> bool:
    product = _product_of(call)
    return torch_takes(call["x"].dtype, call.capability, product.i, product.o)


def _product_seconds(call: KernelCall, rates: Rates, how: str) -> float:
    return rates.launch_s if _is_empty(call) else _product_of(call).seconds(how, call["x"].dtype, rates)


def _product_bytes(call: KernelCall, how: str) -> int:
    product = _product_of(call)
    return 0 if _is_empty(call) else product.held_bytes(how) - product.result_bytes


# ---- experts ----


@attrs.frozen
class Layer:
    """A layer of experts: sizes, choices in all and of one run, bytes of an element and of what sums are taken in."""

    tokens: int
    choices: int
    run: int
    e: int
    d: int
    hidden: int
    f: int
    size: int
    wide: int  # of a sum over choices
    wide_weight: int  # of the gradient of a choice's weight

    @classmethod
    def of(cls, call: KernelCall) -> Layer:
        up, down, choices = call["gate_up"], call["down"], call["index"].numel
        outer, inner = (2, 1) if call["transposed"] else (1, 2)
        d, hidden, f = down.shape[outer], up.shape[outer], down.shape[inner]
        run = min(choices, experts_device.at_once(up.numel + down.numel, d, hidden))
        total = torch.promote_types(up.dtype, call["weight"].dtype) if call.target == EXPERTS else up.dtype
        sums = wide(total).itemsize, wide(call["weight"].dtype).itemsize
        return cls(call["x"].numel // max(1, d), choices, run, up.shape[0], d, hidden, f, up.dtype.itemsize, *sums)

    @property
    def is_empty(self) -> bool:
        return not min(self.choices, self.e, self.d, self.f)

    @property
    def runs(self) -> int:
        return -(-self.choices // max(1, self.run))

    def product(self, i: int, o: int, of_groups: bool = False) -> GroupedProduct:
        return GroupedProduct(self.run, self.e, i, o, self.size, of_groups)

    @property
    def sorted_bytes(self) -> int:
        """The order of choices; of a run its tokens, experts, which are of no expert, and their order where terms are
        summed.
        """
        return INDEX * (3 * self.choices + 6 * self.run) + self.run


def _alike(call: KernelCall) -> bool:
    dtype = call["gate_up"].dtype
    return all(x is None or x.dtype == dtype for x in (call["down"], call["gate_up_bias"], call["down_bias"]))


def _torch_computes(call: KernelCall) -> bool:
    layer = Layer.of(call)
    takes = torch_takes(call["gate_up"].dtype, call.capability, layer.d, layer.hidden, layer.f)
    return not _is_float8(call) and _alike(call) and takes


def _tiles_compute(call: KernelCall) -> bool:
    return not _is_float8(call)


def _torch_scales(call: KernelCall) -> bool:
    layer = Layer.of(call)
    takes = torch_scales(call["gate_up"].dtype, call.capability, layer.d, layer.hidden, layer.f)
    return _is_float8(call) and _alike(call) and takes


def _is_float8(call: KernelCall) -> bool:
    return call.target in (EXPERTS, EXPERTS_BACKWARD) and bool(call["float8"])


def _needs_weights(call: KernelCall) -> bool:
    """Whether it makes gradients of experts' weights."""
    return call.target == WEIGHT_GRADIENTS or (call.target == EXPERTS_BACKWARD and bool(call["need_weights"]))


def _products(call: KernelCall, layer: Layer) -> list[GroupedProduct]:
    """Those of a run."""
    d, hidden, f = layer.d, layer.hidden, layer.f
    if call.target == EXPERTS:
        return [layer.product(d, hidden), layer.product(f, d)]
    found = [layer.product(d, hidden), layer.product(d, f), layer.product(hidden, d)]
    if call.target == WEIGHT_GRADIENTS:
        found = []
    return [*found, *_of_weights(layer)] if _needs_weights(call) else found


def _of_weights(layer: Layer) -> tuple[GroupedProduct, GroupedProduct]:
    """The products that gradients of weights are."""
    return layer.product(layer.hidden, layer.d, True), layer.product(layer.d, layer.f, True)


def _experts_seconds(call: KernelCall, rates: Rates, how: str) -> float:
    """Products, and what lies between them: gathers, activations, sums over choices."""
    layer = Layer.of(call)
    if layer.is_empty:
        return rates.launch_s
    multiplied_s = sum(
        product.seconds(how, call["gate_up"].dtype, rates, call["share"]) for product in _products(call, layer)
    )
    between_s = layer.run * _passes_bytes(call, layer) / rates.bytes_per_s
    runs_s = layer.choices / layer.run * (multiplied_s + between_s)  # the last run is as short as what is left
    launches_s = layer.runs * RUN_LAUNCHES[call.target] * rates.launch_s
    return runs_s + launches_s + _sums_bytes(call, layer) / rates.bytes_per_s


def _passes_bytes(call: KernelCall, layer: Layer) -> int:
    """What a choice has read and written between the products."""
    of_units = (layer.hidden + layer.f) * layer.size
    if call.target == WEIGHT_GRADIENTS:
        # Rows of x, of g, of gradients and of units are gathered; those of g are weighed.
        return 7 * layer.d * layer.size + 2 * of_units
    passes = 2 * layer.d * layer.size + of_units + 6 * layer.d * layer.wide
    backward = call.target != EXPERTS
    if backward:
        passes += 4 * layer.d * layer.size + of_units
    if call.target == INPUT_GRADIENTS:  # and dealt out in the order of the choices
        passes += 4 * of_units
    # operators of torch, one after another
    if not experts_device.is_one_pass(call["act"], call["gated"], call["gate_up"].dtype):
        passes += 3 * layer.f * layer.size
        if backward:
            passes += (layer.hidden + 7 * layer.f) * layer.size + 6 * layer.f * layer.wide_weight
    return passes


def _sums_bytes(call: KernelCall, layer: Layer) -> int:
    """What runs behind the first read and write to add their gradients of weights to those of before."""
    if not _needs_weights(call):
        return 0
    return (layer.runs - 1) * 3 * sum(product.result_bytes for product in _of_weights(layer))


def _experts_bytes(call: KernelCall, how: str) -> int:
    """The most that is alive at one of the moments, without the results."""
    layer = Layer.of(call)
    if layer.is_empty:
        return 0
    moments = _forward_moments if call.target == EXPERTS else _backward_moments
    if call.target == WEIGHT_GRADIENTS:
        moments = _weight_moments
    alive, results = moments(call, layer, how)
    return max(0, layer.sorted_bytes + alive - results)


def _forward_moments(call: KernelCall, layer: Layer, how: str) -> tuple[int, int]:
    """(bytes alive, bytes of the result)."""
    run, size, d, hidden, f = layer.run, layer.size, layer.d, layer.hidden, layer.f
    total = layer.tokens * d * layer.wide
    result = layer.tokens * d * torch.promote_types(call["gate_up"].dtype, call["weight"].dtype).itemsize
    first, second = (product.held_bytes(how) for product in _products(call, layer))
    moments = [
        run * d * size + first,
        run * (d + 3 * hidden) * size if call["gate_up_bias"] is not None else 0,
        run * (hidden + _activation(call) * f) * size,
        run * f * size + second,
        run * 3 * d * size if call["down_bias"] is not None else 0,
        run * d * (size + layer.wide + (layer.wide if layer.wide != size else 0)),
    ]
    return total + max(*moments, result), result


def _backward_moments(call: KernelCall, layer: Layer, how: str) -> tuple[int, int]:
    """(bytes alive, bytes of the results)."""
    results = call["x"].nbytes + call["weight"].nbytes
    sums = layer.tokens * layer.d * layer.wide + layer.choices * layer.wide_weight
    moments = [sums + _of_run(call, layer, how), sums + call["x"].nbytes]
    if call.target == INPUT_GRADIENTS:
        kept = layer.choices * (layer.hidden + layer.f) * layer.size
        return max(moments) + kept, results + kept
    if _needs_weights(call):
        weights = sum(product.result_bytes for product in _of_weights(layer))
        biases = _biases(call)
        results += weights + biases * layer.size
        moments = [alive + biases * layer.wide for alive in (*moments, sums + weights)]
        if layer.runs > 1:  # gradients of weights that runs before have made
            last = layer.run if layer.runs > 2 else layer.choices - layer.run
            moments.append(sums + biases * layer.wide + weights + _of_run(call, attrs.evolve(layer, run=last), how))
    return max(moments), results


def _biases(call: KernelCall) -> int:
    """Elements of both."""
    return sum(x.numel for x in (call["gate_up_bias"], call["down_bias"]) if x is not None)


def _weight_moments(call: KernelCall, layer: Layer, how: str) -> tuple[int, int]:
    """(bytes alive, bytes of the results) of gradients of weights alone."""
    weights = sum(product.result_bytes for product in _of_weights(layer))
    results = weights + _biases(call) * layer.size

    def alive(of: Layer) -> int:
        rows = of.run * (2 * of.d + 1 + of.hidden + of.f) * of.size
        return _of_weights_in_run(call, of, how, rows + of.run * of.d * of.size)

    moments = [alive(layer), weights]
    if layer.runs > 1:
        last = layer.run if layer.runs > 2 else layer.choices - layer.run
        moments.append(weights + alive(attrs.evolve(layer, run=last)))
    return max(moments) + _biases(call) * layer.wide, results


def _of_weights_in_run(call: KernelCall, layer: Layer, how: str, alive: int) -> int:
    """The most that is alive while a run makes gradients of weights. alive: bytes that they are made of."""
    first, second = _of_weights(layer)
    moments = [alive + first.held_bytes(how), alive + first.result_bytes + second.held_bytes(how)]
    if call["gate_up_bias"] is not None or call["down_bias"] is not None:
        summed = 0 if layer.wide == layer.size else layer.wide  # of a copy that sums are made from
        terms = layer.run * max(layer.hidden, layer.d) * (layer.wide + summed)
        moments.append(alive + first.result_bytes + second.result_bytes + terms)
    return max(moments)


def _of_run(call: KernelCall, layer: Layer, how: str) -> int:
    """The most that is alive in a run of backward, gradients of weights that it makes among it."""
    run, size, d, hidden, f = layer.run, layer.size, layer.d, layer.hidden, layer.f
    up, back, to_tokens = (product.held_bytes(how) for product in _products(call, layer)[:3])
    # of copies that sums are made from
    summed, weighed = (0 if wide == size else wide for wide in (layer.wide, layer.wide_weight))
    rows = run * (2 * d + 1) * size  # of x and of the gradient
    made = rows + run * (hidden + 2 * f) * size  # and hidden units, activations, their gradient
    through = made + run * hidden * size  # and the gradient of hidden units
    moments = [
        rows + up,
        rows + run * (hidden + _activation(call) * f) * size,
        rows + run * (hidden + f) * size + back,
        made + run * f * (layer.wide_weight + 2 * weighed),
        made + run * (_activation(call) + 3 if call["gated"] else 2) * f * size,
        through + to_tokens,
        through + run * d * (size + summed),
    ]
    if call["gate_up_bias"] is not None:
        moments.append(rows + 3 * run * hidden * size)
    if call["down_bias"] is not None:
        moments.append(made + run * d * (size + layer.wide_weight + 2 * weighed))
    if _needs_weights(call):
        # the terms of the tokens, and the gradient of the results
        moments.append(_of_weights_in_run(call, layer, how, through + run * d * (size + layer.wide)))
    return max(moments)


def _activation(call: KernelCall) -> int:
    """Tensors of activated units that an activation holds while it is computed."""
    return 6 if Interleaved.of(call["act"]) is not None else 3


# ---- in float8 ----


def _cast_elements(call: KernelCall, layer: Layer) -> int:
    """Elements that one run casts: rows that are multiplied, and the weights of each product."""
    weights = layer.e * layer.d * (layer.hidden + layer.f)
    if call.target == EXPERTS:
        return layer.run * (layer.d + layer.f) + weights
    return layer.run * (2 * layer.d + layer.hidden) + weights + layer.e * layer.d * layer.hidden


def _float8_seconds(call: KernelCall, rates: Rates, how: str) -> float:
    """Products with weights at the rate of float8, by tiles at that of float32.

    A cast is a maximum and two passes over its operand.
    """
    layer = Layer.of(call)
    if layer.is_empty:
        return rates.launch_s
    plain = _experts_seconds(call, rates, how)
    of_run = sum(2 * product.s * product.i * product.o for product in _products(call, layer) if not product.of_groups)
    flops = of_run * layer.choices / layer.run
    rate = rates.flops_per_s(torch.float8_e4m3fn if how == "grouped" else torch.float32)
    changed_s = flops / SHARE * (1 / rate - 1 / rates.flops_per_s(call["gate_up"].dtype))
    casts_s = layer.runs * (
        CAST_PASSES * layer.size * _cast_elements(call, layer) / rates.bytes_per_s + 12 * rates.launch_s
    )
    return max(plain + changed_s, rates.launch_s) + casts_s


def _float8_bytes(call: KernelCall, how: str) -> int:
    """What the layer holds otherwise, and the largest product's operands as they are cast."""
    layer = Layer.of(call)
    if layer.is_empty:
        return 0
    largest = 0
    for product in _products(call, layer):
        if not product.of_groups:
            largest = max(largest, layer.run * product.i + layer.e * product.i * product.o)
    widened = 8 * layer.run * max(layer.hidden, layer.d) if how == "tiled" else 0
    return _experts_bytes(call, how) + CAST_BYTES * largest + widened


# ---- the records ----


def _kernel(target: str, guard: Any, cost_s: Any, workspace: Any, how: str, fn: Callable[..., Any]) -> Kernel:
    return Kernel(target, "cuda", guard, partial(cost_s, how=how), partial(workspace, how=how), fn)


GROUPED_KERNELS: tuple[Kernel, ...] = (
    _kernel(PRODUCT, _torch_multiplies, _product_seconds, _product_bytes, "grouped", grouped_device.grouped),
    _kernel(PRODUCT, anything, _product_seconds, _product_bytes, "tiled", grouped_device.tiled),
    _kernel(
        PRODUCT_OF_GROUPS,
        _torch_multiplies,
        _product_seconds,
        _product_bytes,
        "grouped",
        grouped_device.grouped_of_groups,
    ),
    _kernel(PRODUCT_OF_GROUPS, anything, _product_seconds, _product_bytes, "tiled", grouped_device.tiled_of_groups),
)
EXPERTS_KERNELS: tuple[Kernel, ...] = (
    _kernel(EXPERTS, _torch_computes, _experts_seconds, _experts_bytes, "grouped", experts_device.grouped_experts),
    _kernel(EXPERTS, _tiles_compute, _experts_seconds, _experts_bytes, "tiled", experts_device.tiled_experts),
    _kernel(
        EXPERTS_BACKWARD,
        _torch_computes,
        _experts_seconds,
        _experts_bytes,
        "grouped",
        experts_device.grouped_experts_backward,
    ),
    _kernel(
        EXPERTS_BACKWARD,
        _tiles_compute,
        _experts_seconds,
        _experts_bytes,
        "tiled",
        experts_device.tiled_experts_backward,
    ),
    _kernel(
        INPUT_GRADIENTS,
        _torch_computes,
        _experts_seconds,
        _experts_bytes,
        "grouped",
        experts_device.grouped_experts_input_gradients,
    ),
    _kernel(
        INPUT_GRADIENTS,
        _tiles_compute,
        _experts_seconds,
        _experts_bytes,
        "tiled",
        experts_device.tiled_experts_input_gradients,
    ),
    _kernel(
        WEIGHT_GRADIENTS,
        _torch_computes,
        _experts_seconds,
        _experts_bytes,
        "grouped",
        experts_device.grouped_experts_weight_gradients,
    ),
    _kernel(
        WEIGHT_GRADIENTS,
        _tiles_compute,
        _experts_seconds,
        _experts_bytes,
        "tiled",
        experts_device.tiled_experts_weight_gradients,
    ),
    _kernel(EXPERTS, _torch_scales, _float8_seconds, _float8_bytes, "grouped", experts_device.scaled_experts),
    _kernel(EXPERTS, _is_float8, _float8_seconds, _float8_bytes, "tiled", experts_device.emulated_experts),
    _kernel(
        EXPERTS_BACKWARD,
        _torch_scales,
        _float8_seconds,
        _float8_bytes,
        "grouped",
        experts_device.scaled_experts_backward,
    ),
    _kernel(
        EXPERTS_BACKWARD, _is_float8, _float8_seconds, _float8_bytes, "tiled", experts_device.emulated_experts_backward
    ),
)
CUDA_KERNELS: tuple[Kernel, ...] = (*GROUPED_KERNELS, *EXPERTS_KERNELS)
