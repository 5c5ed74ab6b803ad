"""What a kernel is told about a call of a random operator: one launch, and no number that the host would have to wait
for.

Problem: elements of a result lie in memory in one order, have global indices in another, and come from operands in a
third. Idea: a short list of atoms, major first in the order of the result's memory, each with three numbers: how many,
how far in the global index, how far in the operand. Neighbours that both go on evenly are one atom, so the whole of a
contiguous tensor is one.

    atoms of dropout for the right half of (4, 6), held as (4, 3):     ((4, 6, 3), (3, 1, 1))

`random_triton` makes the numbers on a GPU; it is imported at the first launch. `random_native` makes them on the CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from math import prod

import attrs
import torch
from torch import Tensor

from colofunc.ops import random_native, triton_use
from colofunc.ops.draws import UNIFORM_BITS, Threshold
from colofunc.ops.indices import Index, atoms, atoms_of_dims
from colofunc.ops.kernels import Kernel, KernelCall, Rates

ALWAYS = Threshold(256, 0)
# (count, stride in the global index, stride in the operand)
IndexAtom = tuple[int, int, int]
# Where in the numbers of the whole tensor an operand stands: (sizes, strides, offset).
StridedPlace = tuple[Sequence[int], Sequence[int], Tensor | None]


@attrs.frozen
class Draw:
    """One launch. kind: bits, uniform, normal, or keep: zeros and ones of probability `threshold`, times an operand and
    `scale` where there is one. `tables`: the element at (r, c) has the index rows[r] + columns[c], whatever the atoms.
    """

    kind: str
    site: int
    atoms: tuple[IndexAtom, ...]
    threshold: Threshold = ALWAYS
    scale: float = 1.0
    tables: tuple[Tensor, Tensor] | None = None

    @property
    def shared(self) -> bool:
        """Whether eight elements that lie side by side from a multiple of eight on are a run of indices: they share a
        word.
        """
        if self.tables is not None:
            return False
        *lead, (count, stride, _) = self.atoms
        return stride == 1 and (not lead or count % 8 == 0) and all(far % 8 == 0 for _, far, _ in lead)

    @property
    def byte(self) -> int:
        """Bytes of words below it say yes."""
        return self.threshold.byte + (self.threshold.bound is None)

    @property
    def ties(self) -> bool:
        """Whether further bits decide where the byte is equal."""
        return 0 < self.threshold.rest < 1 << 31

    @property
    def bound(self) -> int:
        return self.threshold.bound or 0

    @property
    def scale_bits(self) -> int:
        """A kernel would be given a Python float in 32 bits."""
        return int(struct.unpack("<q", struct.pack("<d", self.scale))[0])


def has_kernel(like: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel makes numbers of `dtype` that come to lie beside `like`."""
    if like.device.type == "cpu":
        return random_native.kernel_makes(dtype)
    return like.device.type == "cuda" and triton_use.launches_on(like.device)


# ---- where elements lie ----


def atoms_of(shape: Sequence[int], place: StridedPlace) -> tuple[IndexAtom, ...]:
    """Of a contiguous result."""
    sizes, strides, _ = place
    pairs = zip(*atoms(shape, sizes, strides), strict=True)
    return _merged([(n, far, 0) for n, far in pairs], operand=False)


def atoms_like(out: Tensor, x: Tensor, place: StridedPlace) -> tuple[IndexAtom, ...]:
    """Of a dense result, made from x element by element."""
    sizes, strides, _ = place
    found: list[IndexAtom] = []
    per_dim = atoms_of_dims(x.shape, sizes, strides)
    for dim in sorted(range(x.dim()), key=out.stride, reverse=True):
        inner = x.shape[dim]
        for n, far in per_dim[dim]:
            inner //= n
            found.append((n, far, x.stride(dim) * inner))
    return _merged(found, operand=True)


def _merged(given: Sequence[IndexAtom], operand: bool) -> tuple[IndexAtom, ...]:
    """The same by as few atoms as possible, at least one."""
    found: list[IndexAtom] = []
    for n, far, x_far in given:
        if n == 1:
            continue
        if found and found[-1][1] == n * far and (not operand or found[-1][2] == n * x_far):
            found[-1] = (found[-1][0] * n, far, x_far)
        else:
            found.append((n, far, x_far))
    return tuple(found) or ((1, 1, 1),)


# ---- what a plan counts ----

# Integer operations of a thread for one element, as compiled for compute capability 9.0; normal numbers are float64 for
# the most part.
OPERATIONS = {
    "colofunc.random_bits": 39, "colofunc.random_uniform": 37, "colofunc.random_normal": 325, "colofunc.random_bernoulli": 30,
    "colofunc.dropout": 36,
}  # fmt: skip


def records(implementations: Mapping[str, Callable[..., Tensor]]) -> tuple[Kernel, ...]:
    """The operators' own implementations, each of which is one launch on a card, as what a plan counts on."""
    kernels: list[Kernel] = []
    for target, implementation in implementations.items():
        kernels.append(Kernel(target, "cuda", _is_float, _seconds, lambda call: 0, implementation, ("offset",)))
    return tuple(kernels)


def _is_float(call: KernelCall) -> bool:
    return call.target != "colofunc.dropout" or call["x"].dtype in UNIFORM_BITS


def _seconds(call: KernelCall, rates: Rates) -> float:
    """Memory once, or the integer operations, half as many a second as multiplications and additions together."""
    if call.target == "colofunc.dropout":
        n, nbytes = call["x"].numel, 2 * call["x"].nbytes
    else:
        n = prod(call["shape"])
        nbytes = n * (torch.int64 if call.target == "colofunc.random_bits" else call["dtype"]).itemsize
    operations = n * OPERATIONS[call.target] / (rates.flops_per_s(torch.float32) / 2)
    return rates.launch_s + max(nbytes / rates.bytes_per_s, operations)


# ---- launches ----


def launch(out: Tensor, x: Tensor | None, seed: Tensor | int, offset: Tensor | int, draw: Draw) -> None:
    """The only place where a kernel is started."""
    if out.device.type == "cpu" and isinstance(seed, int) and isinstance(offset, int):
        random_native.fill(out, x, seed, offset, draw)
        return
    from colofunc.ops.random_triton import fill  # Triton is not there everywhere

    fill(out, x, seed, offset, draw)


def _known(value: Tensor | None) -> Tensor | int:
    """A number as a kernel is given it: the host reads its own memory alone."""
    if value is None:
        return 0
    return int(value) if value.device.type == "cpu" else value


def _start(out: Tensor, x: Tensor | None, seed: Tensor, offset: Tensor | None, draw: Draw) -> Tensor:
    if out.numel():
        launch(out, x, _known(seed), _known(offset), draw)
    return out


def numbers(
    kind: str, seed: Tensor, site: int, shape: Sequence[int], dtype: torch.dtype, place: StridedPlace
) -> Tensor:
    """Bits, uniform or normal numbers."""
    out = torch.empty(tuple(shape), dtype=dtype, device=seed.device)
    return _start(out, None, seed, place[2], Draw(kind, site, atoms_of(shape, place)))


def bernoulli(
    seed: Tensor, site: int, shape: Sequence[int], dtype: torch.dtype, q: float, place: StridedPlace
) -> Tensor:
    out = torch.empty(tuple(shape), dtype=dtype, device=seed.device)
    return _start(out, None, seed, place[2], Draw("keep", site, atoms_of(shape, place), Threshold.of(q)))


def keep_table(seed: Tensor, site: int, index: Index, q: float, dtype: torch.dtype) -> Tensor:
    """(rows, columns) of draws, where both are tables."""
    columns = index.listed()
    out = torch.empty((index.rows.numel(), columns.numel()), dtype=dtype, device=seed.device)
    draw = Draw(
        "keep",
        site,
        ((columns.numel(), 0, 0),),
        Threshold.of(q),
        tables=(index.rows.contiguous(), columns.contiguous()),
    )
    return _start(out, None, seed, None, draw)


def dropout(x: Tensor, seed: Tensor, site: int, p: float, place: StridedPlace) -> Tensor:
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    draw = Draw("keep", site, atoms_like(out, x, place), Threshold.of(1.0 - p), 1.0 / (1.0 - p))
    return _start(out, x, seed, place[2], draw)
