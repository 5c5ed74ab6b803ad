"""What the kernels of `colofunc.ops.attention` are made of: options, blocks of rows, masks, scores.

Problem: a mask of all rows and columns, or the scores of the whole batch, need memory that attention itself does not.
Idea: rows are taken in blocks; a block knows which columns any of its rows may see, so a causal or windowed block reads
only those.

    for block in blocks(q, k, opt, rows=256):       # rows i0:i1 see columns j0:j1, where `keep` says so
        scores(take_rows(q, block), take_columns(k, block), ...)

Shapes: q (b, h, s, e), k (b, g, t, e), v (b, g, t, f), with h a multiple of g; the heads of a group share its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops.attention_bands import known_band
from colofunc.ops.indices import dim_indices
from colofunc.ops.kernels import HostRange, run_of
from colofunc.ops.random import keep_mask

# Elements of scores alive at once on the plain path (all heads of a block of rows), and of a made mask. On the CPU what
# stays in the cache; elsewhere what bounds the memory, because each block costs launches.
MAX_SCORES = 1 << 22
OTHER_MAX_SCORES = 1 << 26
MAX_MASK = 1 << 20


@attrs.frozen(eq=False)
class Options:
    """Everything but the tensors that are multiplied."""

    scale: float
    causal: bool
    window: int
    dropout: float
    seed: Tensor | None
    site: int
    q_offset: Tensor | None
    k_offset: Tensor | None
    index: Sequence[Tensor] | None  # of dropout: what each of b, h, s, t adds to the global index
    code: Tensor | None = None  # (b, n, t): row i sees the columns whose n codes lie in
    least: Tensor | None = None  # (b, n, s) ...
    most: Tensor | None = None  # (b, n, s)

    @property
    def positional(self) -> bool:
        return self.causal or self.window > 0

    @property
    def masked(self) -> bool:
        return self.positional or self.code is not None

    @property
    def shifted(self) -> bool:
        return nonzero(self.q_offset) or nonzero(self.k_offset)


@attrs.frozen(eq=False)
class Block:
    """Rows i0:i1 and the columns j0:j1 that any of them may see; `keep` (b or 1, 1, rows, columns) or None if all are
    visible.
    """

    i0: int
    i1: int
    j0: int
    j1: int
    keep: Tensor | None


def nonzero(offset: Tensor | None) -> bool:
    return offset is not None and (offset.dim() > 0 or int(offset) != 0)


def known_positions(offset: Tensor | None) -> HostRange | None:
    """Where rows or columns stand; None where the host does not know, or not at equal steps."""
    if offset is None:
        return 0, 1
    run = run_of(offset)
    return run if run is None or offset.dim() else (run[0], 1)


def positions(offset: Tensor | None, n: int, device: torch.device) -> Tensor:
    if offset is not None and offset.device != device:
        # Known on the host: made on the device, because a copy would wait for it.
        run = known_positions(offset)
        return offset.to(device) if run is None else torch.arange(n, device=device) * run[1] + run[0]
    if offset is not None and offset.dim() > 0:
        return offset
    start = torch.arange(n, device=device)
    return start if offset is None else start + offset


def blocks(q: Tensor, k: Tensor, opt: Options, rows: int) -> Iterator[Block]:
    s, t = q.shape[2], k.shape[2]
    if not opt.masked:
        yield from (Block(i, min(i + rows, s), 0, t, None) for i in range(0, s, rows))
        return
    if q.device.type != "cpu":
        yield from _blocks_unread(q, k, opt, rows)
        return
    row, column = positions(opt.q_offset, s, q.device), positions(opt.k_offset, t, q.device)
    for i in range(0, s, rows):
        keep = _visible(opt, slice(i, i + rows), row, column)
        seen = keep.flatten(0, -2).any(0).nonzero()
        if seen.numel() == 0:
            yield Block(i, min(i + rows, s), 0, 0, None)
            continue
        j0, j1 = int(seen[0]), int(seen[-1]) + 1
        keep = keep[..., j0:j1]
        yield Block(i, min(i + rows, s), j0, j1, None if bool(keep.all()) else keep)


def _blocks_unread(q: Tensor, k: Tensor, opt: Options, rows: int) -> Iterator[Block]:
    """Blocks of a mask that lies on a device and is not looked at: columns are left out where the host knows that
    nobody sees them.
    """
    s, t = q.shape[2], k.shape[2]
    band = known_band(opt.causal, opt.window, known_positions(opt.q_offset), known_positions(opt.k_offset))
    row, column = positions(opt.q_offset, s, q.device), positions(opt.k_offset, t, q.device)
    for i0 in range(0, s, rows):
        i1 = min(i0 + rows, s)
        low, high = (None, None) if band is None else (band.low, band.high)
        j0 = 0 if low is None else min(t, max(0, i0 + low))
        j1 = t if high is None else max(0, min(t, i1 + high))
        if j0 >= j1:
            yield Block(i0, i1, 0, 0, None)
            continue
        after = low is None or i1 - 1 + low <= j0  # the last row sees the first column
        before = high is None or i0 + high >= j1 - 1
        whole = band is not None and after and before and opt.code is None
        yield Block(i0, i1, j0, j1, None if whole else _visible(opt, slice(i0, i1), row, column)[..., j0:j1])


def _visible(opt: Options, rows: slice, row: Tensor, column: Tensor) -> Tensor:
    """(b or 1, 1, rows, columns): which columns some rows see. `row`, `column`: the positions of all."""
    some = row[rows].unsqueeze(1)
    parts = []
    if opt.causal:
        parts.append(column <= some)
    if opt.window > 0:
        parts.append(column > some - opt.window)
    if opt.code is not None and opt.least is not None and opt.most is not None:
        for code, least, most in zip(opt.code.unbind(1), opt.least.unbind(1), opt.most.unbind(1), strict=True):
            code = code[:, None, None, :]
            parts += [code >= least[:, None, rows, None], code <= most[:, None, rows, None]]
    keep = parts[0]
    for part in parts[1:]:
        keep = keep & part
    return keep if keep.dim() == 4 else keep[None, None]


def mask_rows(k: Tensor, opt: Options) -> int:
    masks = 1 if opt.code is None else opt.code.shape[0]
    return max(32, min(512, MAX_MASK // max(1, masks * k.shape[2])))


def score_rows(q: Tensor, k: Tensor) -> int:
    most = MAX_SCORES if q.device.type == "cpu" else OTHER_MAX_SCORES
    return max(1, most // max(1, q.shape[0] * q.shape[1] * k.shape[2]))


def take_rows(x: Tensor, block: Block) -> Tensor:
    return x[:, :, block.i0 : block.i1]


def take_columns(x: Tensor, block: Block) -> Tensor:
    return x[:, :, block.j0 : block.j1]


def cut_bias(bias: Tensor | None, block: Block) -> Tensor | None:
    """The part of a bias that belongs to a block; dims of size 1 are broadcast and stay.

    A view, so it can be written.
    """
    if bias is None:
        return None
    if bias.dim() < 4:
        bias = bias[(None,) * (4 - bias.dim())]
    if bias.shape[2] > 1:
        bias = bias[:, :, block.i0 : block.i1]
    if bias.shape[3] > 1:
        bias = bias[..., block.j0 : block.j1]
    return bias


def with_keep(bias: Tensor | None, keep: Tensor | None) -> Tensor | None:
    if keep is None:
        return bias
    if bias is None:
        return keep
    return bias & keep if bias.dtype == torch.bool else bias.masked_fill(~keep, -torch.inf)


def float_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias as the flash kernel takes it: four dims, of the dtype of q, last dim dense."""
    if bias is None:
        return None
    if bias.dim() < 4:
        bias = bias[(None,) * (4 - bias.dim())]
    if bias.dtype == torch.bool:
        return torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill_(~bias, -torch.inf)
    return bias.to(dtype)


def scores_of(q: Tensor, k: Tensor, bias: Tensor | None, opt: Options) -> Tensor:
    """(b, h, s, t) in at least float32, -inf where not visible."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = outer(q.to(wide), k.to(wide)) * opt.scale
    if bias is None:
        return scores
    return scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.to(wide)


def group(x: Tensor, g: int) -> Tensor:
    """(b, h, s, e) -> (b, g, h/g * s, e): the heads of a group become rows, so no key is repeated."""
    b, h, s, e = x.shape
    return x.reshape(b, g, h // g * s, e)


def outer(q: Tensor, k: Tensor) -> Tensor:
    """q (b, h, s, e), k (b, g, t, e) -> (b, h, s, t)."""
    b, h, s, _ = q.shape
    return torch.matmul(group(q, k.shape[1]), k.mT).reshape(b, h, s, k.shape[2])


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """weights (b, h, s, t), v (b, g, t, f) -> (b, h, s, f)."""
    b, h, s, _ = weights.shape
    return torch.matmul(group(weights, v.shape[1]), v).reshape(b, h, s, v.shape[3])


def transposed(weights: Tensor, x: Tensor, g: int) -> Tensor:
    """weights (b, h, s, t), x (b, h, s, e) -> (b, g, t, e), summed over rows and the heads of a group."""
    return torch.matmul(group(weights, g).mT, group(x, g))


def repeat(k: Tensor, h: int) -> Tensor:
    """(b, g, t, e) -> (b, h, t, e): no copy where one group serves all heads."""
    b, g, t, e = k.shape
    if g == h:
        return k
    return k.expand(b, h, t, e) if g == 1 else k.unsqueeze(2).expand(b, g, h // g, t, e).reshape(b, h, t, e)


def fold(dk: Tensor, g: int) -> Tensor:
    b, h, t, e = dk.shape
    return dk if g == h else dk.reshape(b, g, h // g, t, e).sum(2)


def kept_factor(opt: Options, block: Block, dtype: torch.dtype) -> Tensor:
    """Dropout's factor of each weight of the block: 1 / (1 - p) where kept, else 0."""
    assert opt.seed is not None and opt.index is not None
    b, h, s, t = opt.index
    keep = keep_mask(opt.seed, opt.site, opt.dropout, (b, h, s[block.i0 : block.i1], t[block.j0 : block.j1]), dtype)
    return keep.mul_(0.0 if opt.dropout >= 1.0 else 1.0 / (1.0 - opt.dropout))


def make_options(
    q: Tensor, k: Tensor, scale: float, causal: bool, window: int, dropout: float, seed: Tensor | None, site: int,
    q_offset: Tensor | None, k_offset: Tensor | None, sizes: Sequence[int], strides: Sequence[int],
    offset: Tensor | None, code: Tensor | None, least: Tensor | None, most: Tensor | None,
) -> Options:  # fmt: skip
    index = None
    if dropout > 0.0:
        if seed is None:
            raise InputError("attention with dropout needs a seed. Try: seed=torch.tensor(0)")
        index = dim_indices((*q.shape[:3], k.shape[2]), sizes, strides, q.device)
        if offset is not None:
            index[0] = index[0] + offset
    return Options(scale, causal, window, dropout, seed, site, q_offset, k_offset, index, code, least, most)


# Results are (b, h, s, ...) with memory order (b, s, h, ...) whatever the inputs have. Merging heads is then a view, and
# a view that was traced stays one on a rank whose inputs lie otherwise.


def like_rows(q: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    b, h, s, e = q.shape
    return q.new_empty((b, s, h, e), dtype=dtype).transpose(1, 2)


def rows_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    out = q.new_empty((b, s, h, v.shape[3])).transpose(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    if q.device.type == "cuda":  # what torch's kernels give there, and ask for
        return out, q.new_empty((b, h, s), dtype=wide)
    return out, q.new_empty((b, s, h), dtype=wide).transpose(1, 2)


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention over several blocks of keys from its parts: outs (b, h, s, f), lses (b, h, s)."""
    stacked = torch.stack(tuple(lses))
    lse = torch.logsumexp(stacked, 0)
    # A row that no block sees has lse -inf; any finite number there gives weight 0.
    weights = torch.exp(stacked - lse.nan_to_num(neginf=0.0))
    total = torch.zeros_like(outs[0], dtype=lse.dtype)
    for weight, out in zip(weights, outs, strict=True):
        total = total + weight.unsqueeze(-1) * out
    return total.to(outs[0].dtype), lse
