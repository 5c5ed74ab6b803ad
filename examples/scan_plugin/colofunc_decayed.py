"""An operator of a plugin with a kernel for GPUs, in one file: a sum that forgets.

    y[t] = decay * y[t - 1] + x[t]            along the last dim

The reference is one product with a triangle, (t, t), of powers of `decay`. The kernel adds to each element what stands
1, 2, 4, ... places before it: log2(t) passes over memory, and no triangle (Hillis and Steele, "Data parallel
algorithms", 1986). A kernel that is written in Triton, or comes from a library of your own, takes its place in the
same way.
"""

import torch
from torch import Tensor

import colofunc as cf

LONG = 512
"""Shorter rows are left to the reference: its product is one launch, a kernel's passes would be many."""


def backward(inputs, outputs, grad):
    """Of x, the one tensor argument: the same sum from the other end, so that it gets the kernel, too."""
    _, decay = inputs
    return decayed_sum(grad.flip(-1), decay).flip(-1)


@cf.operator("scan.decayed_sum", rule="b* [t] -> b* [t]", linear=[(0,)], backward=backward)
def decayed_sum(x: Tensor, decay: float) -> Tensor:
    """x: (b*, t) -> (b*, t)."""
    place = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
    apart = place.unsqueeze(1) - place  # (t, t): how far an element stands before a sum
    powers = torch.pow(decay, apart.clamp(min=0)).tril()
    return x @ powers.mT


def doubled(x: Tensor, decay: float) -> Tensor:
    """The kernel: after a pass an element is the sum of twice as many."""
    total, apart = x, 1
    while apart < x.shape[-1]:
        longer = total.clone(memory_format=torch.contiguous_format)
        longer[..., apart:].add_(total[..., :-apart], alpha=decay**apart)
        total, apart = longer, 2 * apart
    return total


def fits(call):
    """Whether the kernel may take a call; narrower dtypes would round each pass."""
    x = call["x"]
    return x.dtype in (torch.float32, torch.float64) and x.shape[-1] >= LONG


def seconds(call, rates):
    """A pass copies (one read, one write) and adds (two reads, one write)."""
    x = call["x"]
    passes = (x.shape[-1] - 1).bit_length()
    return passes * (5 * x.nbytes / rates.bytes_per_s + 2 * rates.launch_s)


def workspace_bytes(call):
    """Beside x and the result there is the sum of the pass before."""
    return call["x"].nbytes


@cf.hookimpl
def colofunc_kernels():
    return [cf.ext.Kernel("scan.decayed_sum", "cuda", fits, seconds, workspace_bytes, doubled)]
