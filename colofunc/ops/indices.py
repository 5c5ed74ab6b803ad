"""Global indices of the elements of a local tensor.

Problem: a random number belongs to a position in the global tensor, and a rank holds some positions of it: blocks,
stripes, or both. Idea: list the local atoms of all dims, major first, with their strides in the global row-major order;
local coordinate c has index `offset + sum(c_k * strides_k)`.

    index_of((4, 3), (4, 3), (6, 1), tensor(3), device)        # the right half of a (4, 6) tensor

Empty sizes and strides mean row-major over the shape. The atoms of a dim multiply to its local size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError

# Elements of a tile away from the CPU: what bounds the memory.
TILE = 1 << 24


@attrs.frozen(eq=False)
class Index:
    """The global indices of a local tensor: element (r, c) has rows[r] + columns[c], where `columns` is a tensor, or
    the pair (count, stride) of columns that are equally spaced from 0 on.
    """

    rows: Tensor
    columns: Tensor | tuple[int, int]

    @property
    def count(self) -> int:
        return self.columns[0] if isinstance(self.columns, tuple) else self.columns.numel()

    def listed(self) -> Tensor:
        """The columns as a tensor."""
        if not isinstance(self.columns, tuple):
            return self.columns
        count, stride = self.columns
        return torch.arange(count, device=self.rows.device) * stride

    def tiles(self, tile: int = TILE) -> Iterator[tuple[slice, slice, Tensor]]:
        """(rows, columns, indices) of at most `tile` elements each."""
        columns = self.listed()
        width = max(1, min(self.count, tile))
        height = max(1, tile // width)
        for r in range(0, self.rows.numel(), height):
            for c in range(0, self.count, width):
                found = self.rows[r : r + height].unsqueeze(1) + columns[c : c + width]
                yield slice(r, r + height), slice(c, c + width), found


def index_of(
    shape: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: Tensor | int | None,
    device: torch.device,
) -> Index:
    *lead, last = merged(zip(*atoms(shape, sizes, strides), strict=True)) or [(1, 1)]
    rows = _outer_sum(lead, device)
    return Index(rows if offset is None else rows + offset, last)


def atoms(shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The given sizes and strides, checked; where there are none, those of the whole tensor."""
    if len(sizes) == 0 and len(strides) == 0:
        return shape, [prod(shape[k + 1 :]) for k in range(len(shape))]
    if len(sizes) != len(strides) or prod(sizes) != prod(shape):
        raise InputError(f"sizes {tuple(sizes)}, strides {tuple(strides)} and shape {tuple(shape)} do not fit together")
    return sizes, strides


def merged(pairs: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same indices by as few (size, stride) as possible."""
    found: list[tuple[int, int]] = []
    for size, stride in pairs:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


def atoms_of_dims(shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> list[list[tuple[int, int]]]:
    """(size, stride) of the atoms of each dim of `shape`."""
    rest = [atom for atom in zip(*atoms(shape, sizes, strides), strict=True) if atom[0] != 1]
    found: list[list[tuple[int, int]]] = []
    for n in shape:
        inside: list[tuple[int, int]] = []
        size = 1
        while size < n and rest:
            inside.append(rest.pop(0))
            size *= inside[-1][0]
        if size != n:
            raise InputError(
                f"sizes {tuple(sizes)} do not group to the dims of shape {tuple(shape)}. Try: one atom per dim"
            )
        found.append(inside)
    return found


def dim_indices(
    shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int], device: torch.device
) -> list[Tensor]:
    """Per dim of `shape`, the contribution (n,) int64 of each of its coordinates to the global index,
    without offset.
    """
    return [_outer_sum(inside, device) for inside in atoms_of_dims(shape, sizes, strides)]


def index_tensor(
    shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int], offset: Tensor | None, device: torch.device
) -> Tensor:
    """The global index of every element, as one expression that a compiler does not keep in memory."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    pairs = merged(zip(*atoms(shape, sizes, strides), strict=True))
    for dim, (size, stride) in enumerate(pairs):
        # Inductor multiplies bare positions as it does offsets in memory, in 32 bits where the local tensor is small
        # enough: global indices, and products with 64 bits, would overflow. Behind a bitwise operator they are numbers
        # of 64 bits.
        far = (torch.arange(size, device=device) | 0) * stride
        index = index + far.view([size if k == dim else 1 for k in range(len(pairs))])
    return (index if offset is None else index + offset).reshape(tuple(shape))


def _outer_sum(pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """(prod of sizes,) of sum(c_k * stride_k), row-major over the atoms."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for size, stride in pairs:
        total = (total.unsqueeze(1) + torch.arange(size, device=device) * stride).flatten()
    return total
