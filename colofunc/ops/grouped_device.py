"""Grouped products on a card, whose offsets the host never reads.

Problem: how many rows a group has is on the device. A loop over groups makes the host wait for it, and so does torch's
own grouped product wherever it has no kernel: for all but bfloat16, and on cards before and after Hopper. Idea: rows
are cut into tiles of one group each. A group fills its last tile up, so that s rows of e groups are at most s / T + e
tiles, however they are dealt; which group a tile is of is a tensor, and a tile's matrix is gathered by it.

    GROUPED, TILED                     by torch's kernel, which takes some calls (`torch_takes`); by tiles, which take all
    .product(x, w, offs)               [s] i, [e] i o, [e] -> [s] o       rows behind the last offset give zeros
    .of_groups(x, g, offs)             [s] i, [s] o, [e]   -> [e] i o     groups without rows give zeros

    SCALED, EMULATED                   the same of numbers in float8; products of groups, which are gradients of weights, are not

Which of them a call gets is said by records, `experts_guards`.

Cost of tiles beside one product a group: at most e (T - 1) rows of zeros, and one more matrix read and written for each
T rows, with T = 256 about half as long again where products take as long as memory allows them to. `e` tiles are worked
on at a time, so that gathered matrices take no more memory than the matrices.

Sums are taken in the order of rows, in float32 at least, and always in the same: `index_add_` would take any.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from colofunc import compat
from colofunc.ops import triton_use
from colofunc.ops.fp8 import bits_of_rows
from colofunc.ops.small_floats import E4M3

# Rows of a tile: as many as a group has if all have equally many, within these.
LEAST_ROWS, MOST_ROWS = 16, 256
SCALED_ALIGNED = 16
"""What all sizes are multiples of where torch's kernel reads numbers in float8."""
# Elements of bfloat16 that torch's kernel reads at a time: what rows have to be a multiple of.
ALIGNED = 8


@attrs.frozen(eq=False)
class Products:
    """One way to multiply. product: x (s, i), w (e, i, o), offs (e,) -> (s, o). of_groups: x (s, i), g (s, o), offs
    (e,) -> (e, i, o).
    """

    product: Callable[[Tensor, Tensor, Tensor], Tensor]
    of_groups: Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_takes(dtype: torch.dtype, capability: tuple[int, int], *sizes: int) -> bool:
    """Whether torch's grouped product takes matrices of such sizes without a look at the offsets."""
    if dtype != torch.bfloat16 or any(size % ALIGNED for size in sizes) or torch.version.hip is not None:
        return False
    major, _ = capability
    return major == 9 or (major == 10 and TorchVersion(torch.__version__) >= "2.13")


def torch_scales(dtype: torch.dtype, capability: tuple[int, int], *sizes: int) -> bool:
    """Whether torch's grouped product of numbers in float8 takes matrices of such sizes."""
    if dtype != torch.bfloat16 or any(size % SCALED_ALIGNED for size in sizes) or torch.version.hip is not None:
        return False
    return capability[0] == 9 and compat.has_scaled_grouped_mm()


def grouped(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """By torch's kernel. x: (s, i), w: (e, i, o), offs: (e,) ends of groups -> (s, o)."""
    ends = _ends(offs, x.shape[0])
    if not x.numel() or not w.numel():
        return x.new_zeros((x.shape[0], w.shape[2]))
    out = F.grouped_mm(_rows(x), _matrices(w), offs=ends)
    # Rows of no group are not written, and hold what was in that memory before.
    if _has_zeros_kernel(out):
        from colofunc.ops.experts_triton import zero_rows  # Triton is not there everywhere

        return zero_rows(out, ends)
    return _without_nobodys(out, ends)


def grouped_of_groups(x: Tensor, g: Tensor, offs: Tensor) -> Tensor:
    """By torch's kernel. x: (s, i), g: (s, o), offs: (e,) ends of groups -> (e, i, o)."""
    ends = _ends(offs, x.shape[0])
    if not x.numel() or not g.numel() or not ends.numel():
        return x.new_zeros((offs.shape[0], x.shape[1], g.shape[1]))
    out = F.grouped_mm(_rows(x).t(), _rows(g), offs=ends)
    if _has_zeros_kernel(out):
        from colofunc.ops.experts_triton import zero_groups

        return zero_groups(out, ends)
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return out.masked_fill_(empty[:, None, None], 0)


def _without_nobodys(out: Tensor, ends: Tensor) -> Tensor:
    """Zeros in rows (s, o) behind the last end, which are of no group."""
    nobodys = torch.arange(out.shape[0], device=out.device) >= ends[-1]
    return out.masked_fill_(nobodys.unsqueeze(1), 0)


def _has_zeros_kernel(out: Tensor) -> bool:
    return out.is_contiguous() and triton_use.takes_triton(out)


def tiled(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """By tiles. x: (s, i), w: (e, i, o), offs: (e,) ends of groups -> (s, o)."""
    ends = _ends(offs, x.shape[0])
    if not x.numel() or not w.numel():
        return x.new_zeros((x.shape[0], w.shape[2]))
    tiles = RowTiles.of(ends, x.shape[0])
    made = x.new_empty((*tiles.rows.shape, w.shape[2]))
    for part in tiles.parts():
        torch.bmm(tiles.rows_of(x, part), w[tiles.group[part]], out=made[part])
    return made.flatten(0, 1)[tiles.place].masked_fill_(~tiles.owned.unsqueeze(1), 0)


def tiled_of_groups(x: Tensor, g: Tensor, offs: Tensor) -> Tensor:
    """By tiles. x: (s, i), g: (s, o), offs: (e,) ends of groups -> (e, i, o)."""
    e, i, o = offs.shape[0], x.shape[1], g.shape[1]
    ends = _ends(offs, x.shape[0])
    if not x.numel() or not g.numel() or not e:
        return x.new_zeros((e, i, o))
    tiles = RowTiles.of(ends, x.shape[0])
    total = torch.zeros((e, i, o), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for part in tiles.parts():
        total.index_put_((tiles.group[part],), _of_tiles(tiles, part, x, g).to(total.dtype), accumulate=True)
    return total.to(x.dtype)


def _of_tiles(tiles: RowTiles, part: slice, x: Tensor, g: Tensor) -> Tensor:
    """(tiles, i, o): the products of some tiles."""
    unused = ~tiles.used[part].unsqueeze(2)
    rows, grads = (tiles.rows_of(t, part).masked_fill_(unused, 0) for t in (x, g))
    return torch.bmm(rows.transpose(1, 2), grads)


# ---- in float8 ----


def scaled(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """By torch's kernel for numbers in float8, with a scale of each row of x and each column of w.

    As `grouped`; results in bfloat16.
    """
    ends = _ends(offs, x.shape[0])
    if not x.numel() or not w.numel():
        return x.new_zeros((x.shape[0], w.shape[2]))
    x_bits, x_scale = bits_of_rows(x.contiguous())
    columns = w.transpose(1, 2).contiguous()  # (e, o, i): what is summed over lies side by side
    w_bits, w_scale = bits_of_rows(columns)
    out = compat.scaled_grouped_mm(
        x_bits.view(E4M3), w_bits.view(E4M3).transpose(1, 2), x_scale.squeeze(1), w_scale.squeeze(2), ends, x.dtype
    )
    return _without_nobodys(out, ends)


def emulated(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """The same numbers by tiles, but for the order of sums: numbers in float8 are multiplied in float32 (float64 for x
    in float64).
    """
    ends = _ends(offs, x.shape[0])
    if not x.numel() or not w.numel():
        return x.new_zeros((x.shape[0], w.shape[2]))
    wide = torch.promote_types(x.dtype, torch.float32)
    x_bits, x_scale = bits_of_rows(x)
    w_bits, w_scale = bits_of_rows(w.transpose(1, 2).contiguous())
    out = tiled(x_bits.view(E4M3).to(wide), w_bits.view(E4M3).to(wide).transpose(1, 2), ends)
    owner = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=ends.dtype), right=True).clamp(
        max=w.shape[0] - 1
    )
    # Zeros times the scale of a row of nobody that is not finite would be NaN.
    return _without_nobodys(out.mul_(x_scale).mul_(w_scale.squeeze(2)[owner]).to(x.dtype), ends)


GROUPED, TILED = Products(grouped, grouped_of_groups), Products(tiled, tiled_of_groups)
SCALED, EMULATED = Products(scaled, grouped_of_groups), Products(emulated, tiled_of_groups)


def _ends(offs: Tensor, rows: int) -> Tensor:
    """Ends of groups that never go back, within the rows; int32 as torch's kernel wants them."""
    return offs.cummax(0).values.clamp(0, rows).to(torch.int32) if offs.numel() else offs.to(torch.int32)


def _rows(x: Tensor) -> Tensor:
    """As the kernel reads rows: one behind another, from a multiple of 16 bytes on."""
    aligned = x.stride(1) == 1 and x.stride(0) % ALIGNED == 0 and x.storage_offset() % ALIGNED == 0
    return x if aligned and x.stride(0) >= x.shape[1] else x.clone(memory_format=torch.contiguous_format)


def _matrices(w: Tensor) -> Tensor:
    """As the kernel reads matrices: rows or columns one behind another, from a multiple of 16 bytes on."""
    _, i, o = w.shape
    lies = (w.stride(2) == 1 and w.stride(1) >= o) or (w.stride(1) == 1 and w.stride(2) >= i)
    aligned = not any(step % ALIGNED for step in (*w.stride(), w.storage_offset()) if step != 1)
    return w if lies and aligned else w.clone(memory_format=torch.contiguous_format)


def sizes_of_tiles(s: int, e: int) -> tuple[int, int]:
    """(number, rows) of tiles for s rows of e groups, however they are dealt."""
    height = min(MOST_ROWS, max(LEAST_ROWS, 1 << (-(-s // e) - 1).bit_length()))
    return s // height + e, height


@attrs.frozen(eq=False)
class RowTiles:
    """Rows sorted by group, cut into n tiles of one group and T rows each; tensors of the device.

    `group`: (n,), of tiles that nobody needs the last. `rows`: (n, T), of each place the row that stands there. `used`:
    (n, T), false where none does. `place`: (s,), of each row its place in n * T. `owned`: (s,), false for rows of no
    group.
    """

    group: Tensor
    rows: Tensor
    used: Tensor
    place: Tensor
    owned: Tensor
    at_once: int

    @classmethod
    def of(cls, ends: Tensor, s: int) -> RowTiles:
        e, device = ends.shape[0], ends.device
        count, height = sizes_of_tiles(s, e)
        ends = ends.to(torch.int64)
        starts = ends - ends.diff(prepend=ends.new_zeros(1))
        tiles = (ends - starts + height - 1) // height
        tiles_end = tiles.cumsum(0)
        tile = torch.arange(count, device=device)
        found = torch.searchsorted(tiles_end, tile, right=True)
        group = found.clamp(max=e - 1)
        first = starts[group] + (tile - (tiles_end - tiles)[group]) * height
        rows = first.unsqueeze(1) + torch.arange(height, device=device)
        used = (rows < ends[group].unsqueeze(1)) & (found < e).unsqueeze(1)
        row = torch.arange(s, device=device)
        owner = torch.searchsorted(ends, row, right=True)
        its = owner.clamp(max=e - 1)
        owned = owner < e
        place = torch.where(owned, (tiles_end - tiles)[its] * height + row - starts[its], 0)
        return cls(group, rows.clamp(0, s - 1), used, place, owned, e)

    def parts(self) -> list[slice]:
        """Tiles that are worked on at a time."""
        return [slice(k, k + self.at_once) for k in range(0, self.group.shape[0], self.at_once)]

    def rows_of(self, x: Tensor, part: slice) -> Tensor:
        """(tiles, T, i)."""
        rows = self.rows[part]
        return x.index_select(0, rows.flatten()).unflatten(0, rows.shape)
