"""What each of a device's kernels of attention reaches, forward and backward, by the size of a head and the keys of a
row.

Problem: torch has several kernels of attention on a card, the planner takes the one that is fastest by what is known of
it, and how they stand to one another differs from card to card: on Hopper cuDNN's is twice flash's, elsewhere it is
behind. Idea: measure each kernel that the device runs, by its own name, with the operators that steps call. One that
the device or this torch has not is left out.

    attention_rates(device, deadline)       # {("flash", 64): ((256.0, 1.4e14, 1.1e14), ...), ("cudnn", 64): ...}

Lengths are outermost: when time is up, all kernels have been measured at the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from colofunc.mesh.curves import HOST_KERNEL, AttentionRate
from colofunc.mesh.stopwatch import TimedCall, least_run_s

HEADS, LENGTHS, CARD_LENGTHS = (64, 128), (128, 256, 512, 1024), (512, 1024, 2048, 4096, 8192, 16384)
"""As in the published tables, heads have 2,048 elements together, and sequences 16,384 rows; on a CPU an 8th of
both."""
CARD_WIDTH, CARD_ROWS, WIDTH, ROWS = 2048, 16384, 256, 2048
BACKWARD_TIMES = 2.5
"""Operations of backward, beside those of forward: five products in place of two."""

AttentionRates = dict[tuple[str, int], tuple[tuple[float, ...], ...]]
"""(kernel, elements of a head) -> (keys of a row, operations a second forward, backward), fewest keys first."""
Calls = tuple[TimedCall, TimedCall]
"""Forward, and backward."""

aten = torch.ops.aten


def attention_rates(device: torch.device, deadline: float) -> AttentionRates:
    """Of causal attention by each kernel that the device runs. Empty where none takes it, or time is up."""
    is_card = device.type == "cuda"
    width, rows = (CARD_WIDTH, CARD_ROWS) if is_card else (WIDTH, ROWS)
    absent, found = set[str](), AttentionRates()
    for length in CARD_LENGTHS if is_card else LENGTHS:
        for kernel, make in KERNELS[device.type].items():
            for head in HEADS:
                if kernel in absent:
                    break
                if time.perf_counter() > deadline:
                    return found
                batch = max(1, rows // length)
                try:
                    forward, backward = make(batch, width // head, length, head, device)
                    forward_s, backward_s = least_run_s(forward, device), least_run_s(backward, device)
                except (RuntimeError, NotImplementedError):  # this device, or this build of torch, has no such kernel
                    absent.add(kernel)
                    break
                flops = 4.0 * length * length / 2 * width * batch
                point = (length / 2, flops / forward_s, BACKWARD_TIMES * flops / backward_s)
                found[kernel, head] = (*found.get((kernel, head), ()), point)
    return found


def attention_curves(rates: AttentionRates, source: str) -> Iterator[AttentionRate]:
    """The same as records of a device."""
    for (kernel, head), points in rates.items():
        yield AttentionRate(
            kernel, head, tuple((keys, forward, backward) for keys, forward, backward in points), source
        )


def beside_known(measured: tuple[AttentionRate, ...], known: tuple[AttentionRate, ...]) -> tuple[AttentionRate, ...]:
    """What was measured, and what was known before of kernels that were not."""
    kernels = {one.kernel for one in measured}
    return (*measured, *(one for one in known if one.kernel not in kernels))


# ---- kernels; operands are (b, h, s, e)


def _operands(batch: int, heads: int, length: int, head: int, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the result, with memory order (b, s, h, e)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = (torch.randn(batch, length, heads, head, device=device).to(dtype) for _ in range(4))
    return tuple(x.transpose(1, 2) for x in made)


def _flash(batch: int, heads: int, length: int, head: int, device: torch.device) -> Calls:
    q, k, v, grad = (x.transpose(1, 2) for x in _operands(batch, heads, length, head, device))
    sizes = (None, None, q.shape[1], k.shape[1])
    out, lse = aten._flash_attention_forward(q, k, v, *sizes, 0.0, True, False)[:2]
    # the state of dropout, which is 0
    unused = (q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64))
    return (
        lambda: aten._flash_attention_forward(q, k, v, *sizes, 0.0, True, False),
        lambda: aten._flash_attention_backward(grad, q, k, v, out, lse, *sizes, 0.0, True, *unused),
    )


def _cudnn(batch: int, heads: int, length: int, head: int, device: torch.device) -> Calls:
    q, k, v, grad = _operands(batch, heads, length, head, device)
    out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)[:2]
    unused = (q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64))
    sizes = (None, None, None, q.shape[2], k.shape[2])
    return (
        lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False),
        lambda: aten._scaled_dot_product_cudnn_attention_backward(grad, q, k, v, out, lse, *unused, *sizes, 0.0, True),
    )


def _efficient(batch: int, heads: int, length: int, head: int, device: torch.device) -> Calls:
    q, k, v, grad = _operands(batch, heads, length, head, device)
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[:2]
    unused = (q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64))
    wanted = [True, True, True, False]
    return (
        lambda: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True),
        lambda: aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, *unused, 0.0, wanted, True
        ),
    )


def _of_host(batch: int, heads: int, length: int, head: int, device: torch.device) -> Calls:
    q, k, v, grad = _operands(batch, heads, length, head, device)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return (
        lambda: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True),
        lambda: aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True),
    )


MakeCalls = Callable[[int, int, int, int, torch.device], Calls]
KERNELS: dict[str, dict[str, MakeCalls]] = {
    "cuda": {"flash": _flash, "cudnn": _cudnn, "efficient": _efficient}, "cpu": {HOST_KERNEL: _of_host},
}  # fmt: skip
"""Of a kind of devices, by the names that `Device.attention` has; the first counts most where there is little time."""
