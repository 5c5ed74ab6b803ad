"""Flat buffers of several tensors: packed by one copy, or gathered where they lie.

    pack((x, y), 0, dtype)               (x.numel() + y.numel(),)       both flattened, one behind the other, in `dtype`
    pack((x, y), 1, dtype)               (n, ...): dim 0 stays, the others are flattened; x and y are (n, ...)
    all_gather_flat((x, y), axes, n)     (n, total): row i is member i's pack((x, y), 0)
    write_(into, x)                      into <- the elements of x in their order, whatever shape they lie in

Tensors that lie one behind the other in one buffer already (`together` puts them there) are gathered from that buffer,
and converted by one kernel: nothing is copied to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from colofunc.errors import CollectiveError
from colofunc.ops.define import define
from colofunc.ops.facts import Facts


def are_adjacent(xs: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors lie one behind the other in one buffer."""
    full = [x for x in xs if x.numel()]
    if not full:
        return True
    at, storage = full[0].data_ptr(), full[0].untyped_storage().data_ptr()
    for x in full:
        if x.data_ptr() != at or not x.is_contiguous() or x.untyped_storage().data_ptr() != storage:
            return False
        at += x.nbytes
    return True


def flat_of(xs: Sequence[Tensor]) -> Tensor:
    """All elements of tensors of one dtype, one behind the other: the buffer that they lie in, else a copy."""
    if not are_adjacent(xs):
        return torch.cat([x.reshape(-1) for x in xs])
    first = next((x for x in xs if x.numel()), xs[0])
    return first.as_strided((sum(x.numel() for x in xs),), (1,))


def as_adjacent(xs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, as they are if they are adjacent, else copied to one buffer."""
    if are_adjacent(xs):
        return list(xs)
    flat, start, out = torch.cat([x.reshape(-1) for x in xs]), 0, []
    for x in xs:
        out.append(flat[start : start + x.numel()].view(x.shape))
        start += x.numel()
    return out


def _pack(xs: Sequence[Tensor], lead: int, dtype: torch.dtype) -> Tensor:
    if lead == 0 and len({x.dtype for x in xs}) == 1 and are_adjacent(xs):
        return flat_of(xs).to(dtype, copy=True)
    rows = xs[0].shape[:lead]
    if all(x.dtype == dtype and x.is_contiguous() for x in xs):  # views, and one call for all copies
        return torch.cat([x.view(*rows, -1) if x.numel() else x.new_empty((*rows, 0)) for x in xs], lead)
    out, start = _pack_fake(xs, lead, dtype), 0
    for x in xs:
        size = prod(x.shape[lead:])
        out.narrow(lead, start, size).view((*rows, *x.shape[lead:])).copy_(x)
        start += size
    return out


def _pack_fake(xs: Sequence[Tensor], lead: int, dtype: torch.dtype) -> Tensor:
    rows = tuple(xs[0].shape[:lead])
    if any(tuple(x.shape[:lead]) != rows for x in xs):
        raise CollectiveError(f"colofunc.pack: the first {lead} dims of {[tuple(x.shape) for x in xs]} differ")
    return xs[0].new_empty((*rows, sum(prod(x.shape[lead:]) for x in xs)), dtype=dtype)


def _pack_of_parts(xs: Sequence[Tensor], lead: int, dtype: torch.dtype) -> Tensor:
    """`pack` without a look at where the tensors lie."""
    return torch.cat([x.reshape((*x.shape[:lead], prod(x.shape[lead:]))).to(dtype) for x in xs], lead)


def _gather_eager(xs: Sequence[Tensor], axes: Sequence[str], n: int) -> Tensor:
    raise CollectiveError("colofunc.all_gather_flat was called outside a program: tensors alone have no peers")


def _gather_fake(xs: Sequence[Tensor], axes: Sequence[str], n: int) -> Tensor:
    if len({x.dtype for x in xs}) > 1:
        raise CollectiveError(
            f"colofunc.all_gather_flat: one buffer has one dtype, not {sorted({str(x.dtype) for x in xs})}"
        )
    return xs[0].new_empty((n, sum(x.numel() for x in xs)))


def _write_(into: Tensor, x: Tensor) -> None:
    if into.is_contiguous():
        into.view(x.shape).copy_(x)
    else:
        into.copy_(x.reshape(into.shape))


def _write_fake(into: Tensor, x: Tensor) -> None:
    if into.numel() != x.numel():
        raise CollectiveError(f"colofunc.write_: {tuple(x.shape)} does not fill {tuple(into.shape)}")


PACK = define(
    "pack(Tensor[] xs, int lead, ScalarType dtype) -> Tensor",
    _pack,
    _pack_fake,
    for_compilers=_pack_of_parts,
    facts=Facts(own_memory=True),
)
define(
    "all_gather_flat(Tensor[] xs, str[] axes, int n) -> Tensor",
    _gather_eager,
    _gather_fake,
    facts=Facts(own_memory=True),
    kind="wire",
)
define("write_(Tensor(a!) into, Tensor x) -> ()", _write_, _write_fake, for_compilers=_write_)
