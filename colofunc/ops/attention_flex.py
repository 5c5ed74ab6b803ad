"""Attention by FlexAttention, torch's generator of attention kernels, behind `colofunc.attention` and its backward.

Problem: of documents that are packed, padding, positions that only the device knows, and masks that are tensors,
torch's fused kernels know nothing: they take a bias of all rows and columns and look at every pair. Idea: whatever is
masked is a conjunction of comparisons of a number per column with two per row, and a tensor of bool at most.
FlexAttention compiles that into a kernel of flash's kind, and leaves out blocks of which it is told that they show
nothing:

    row i sees column j where  least[i] <= code[j] <= most[i]  for every bound, and the mask is True there
    causal, window               code: the column's position;  least: the row's - window + 1;  most: the row's
    128 rows, 128 columns        show nothing where the largest code is below the smallest `least`, or the smallest above the largest `most`
                                 show all where the smallest is not below the largest `least`, and so on: no pair is
                                 compared

So blocks are told from vectors, on the device, by operators that are compiled with the kernel; nobody waits. The
function is compiled at its first call, for the kind of mask and for shapes, strides and dtypes: positions and documents
are operands, so that all ranks compile the same, whatever stands in their rows. Backward takes `out` and `lse` as they
are given, merged ones of a ring too, and the gradient of `lse`; a bias has none here.

Sources: Dong et al., Flex Attention (2412.05496); `torch.nn.attention.flex_attention`, whose operators count exponents
in base 2.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.fx
from torch import Tensor

from colofunc import compat
from colofunc.ops.attention_parts import positions, rows_major

BLOCK = 128
LN2 = math.log(2.0)
NAMES = (
    "q", "k", "v", "bias", "scale", "causal", "window", "dropout", "seed", "site", "q_offset", "k_offset", "sizes", "strides", "offset",
    "code", "least", "most",
)  # fmt: skip
OF_BACKWARD = ("grad_out", "q", "k", "v", "bias", "out", "lse", *NAMES[4:], "need_dbias", "grad_lse")


@attrs.frozen
class FlexKind:
    """What a function is compiled for, beside how its operands lie. `names`: of its operands, in order."""

    names: tuple[str, ...]
    scale: float
    causal: bool
    window: int


# ---- what is seen; all tensors have the dims (b, h, s, t), some of size 1 ----


@attrs.frozen(eq=False)
class CodeRange:
    """Rows see columns whose code is at least and at most so much; None is no bound."""

    code: Tensor
    least: Tensor | None
    most: Tensor | None


def _bounds(x: dict[str, Tensor], kind: FlexKind) -> list[CodeRange]:
    found = []
    if kind.causal or kind.window:
        row, column = _positions(x, "row", "q"), _positions(x, "column", "k")
        least = row - (kind.window - 1) if kind.window else None
        found.append(CodeRange(_of_columns(column), _of_rows(least), _of_rows(row if kind.causal else None)))
    if "code" in x:
        for code, least, most in zip(x["code"].unbind(1), x["least"].unbind(1), x["most"].unbind(1), strict=True):
            found.append(CodeRange(_of_columns(code), _of_rows(least), _of_rows(most)))
    return found


def _positions(x: dict[str, Tensor], name: str, of: str) -> Tensor:
    """(1, n) of rows or columns; from 0 on where none are given."""
    return (x[name] if name in x else torch.arange(x[of].shape[2], device=x[of].device))[None]


def _of_columns(vector: Tensor) -> Tensor:
    """(b, t) -> (b, 1, 1, t)."""
    return vector.to(torch.int64)[:, None, None, :]


def _of_rows(vector: Tensor | None) -> Tensor | None:
    """(b, s) -> (b, 1, s, 1)."""
    return None if vector is None else vector.to(torch.int64)[:, None, :, None]


# ---- blocks ----


def _in_blocks(x: Tensor, dim: int, n: int) -> Tensor:
    """Dim `dim` of n elements (or one for all) as (blocks, BLOCK).

    The last element is repeated to fill the last block.
    """
    blocks = -(-n // BLOCK)
    at = torch.arange(blocks * BLOCK, device=x.device).clamp(max=x.shape[dim] - 1)
    return x.index_select(dim, at).unflatten(dim, (blocks, BLOCK))


def _extremes(vector: Tensor, dim: int, n: int) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number of each block."""
    blocks = _in_blocks(vector, dim, n)
    return blocks.amin(dim + 1), blocks.amax(dim + 1)


def _shown(
    bounds: Sequence[CodeRange], mask: Tensor | None, s: int, t: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(b or 1, h or 1, blocks of rows, blocks of columns), twice.

    The first says which may show something, the second which show all, for certain.
    """
    rows, columns = -(-s // BLOCK), -(-t // BLOCK)
    some = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=device)
    # Blocks that stand over the edge are compared element by element, as torch's own block masks have it.
    full = _whole(rows, s, device)[:, None] & _whole(columns, t, device)
    for bound in bounds:
        lowest, highest = _extremes(bound.code, 3, t)
        if bound.least is not None:
            first, last = _extremes(bound.least, 2, s)
            some, full = some & (highest >= first), full & (lowest >= last)
        if bound.most is not None:
            first, last = _extremes(bound.most, 2, s)
            some, full = some & (lowest <= last), full & (highest <= first)
    if mask is not None:
        tiles = _in_blocks(_in_blocks(mask, 3, t), 2, s)
        some, full = some & tiles.any(-1).any(3), full & tiles.all(-1).all(3)
    return some, full.expand_as(some & full)


def _whole(blocks: int, n: int, device: torch.device) -> Tensor:
    return torch.arange(blocks, device=device) < n // BLOCK


def _listed(shown: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of columns each block of rows has, and which: those first."""
    order = torch.argsort(shown.to(torch.int32), dim=-1, descending=True, stable=True)
    return shown.sum(-1).to(torch.int32), order.to(torch.int32)


# ---- functions of one pair of a row and a column ----


@attrs.frozen(eq=False)
class Buffer:
    """A tensor without its dims of size 1, and which dims the others are."""

    values: Tensor
    dims: tuple[int, ...]


def _buffer(x: Tensor) -> Buffer:
    return Buffer(x.squeeze(), tuple(d for d in range(4) if x.shape[d] != 1))


def _taken(values: Tensor, dims: Sequence[int], pair: Sequence[Tensor]) -> Tensor:
    return values[tuple([pair[dim] for dim in dims])] if dims else values


def _mask_function(
    bounds: Sequence[CodeRange], mask: Tensor | None
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """(function of b, h, i, j and buffers, these buffers)."""
    buffers: list[Buffer] = []

    def held(x: Tensor | None) -> int | None:
        if x is None:
            return None
        buffers.append(_buffer(x))
        return len(buffers) - 1

    places = [(held(bound.code), held(bound.least), held(bound.most)) for bound in bounds]
    masked = held(mask)
    dims = [buffer.dims for buffer in buffers]
    if not buffers:
        return _everything, ()

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *values: Tensor) -> Tensor:
        def taken(place: int) -> Tensor:
            return _taken(values[place], dims[place], (b, h, i, j))

        parts = [] if masked is None else [taken(masked)]
        for code, least, most in places:
            assert code is not None
            if least is not None:
                parts.append(taken(code) >= taken(least))
            if most is not None:
                parts.append(taken(code) <= taken(most))
        keep = parts[0]
        for part in parts[1:]:
            keep = keep & part
        return keep

    return visible, tuple([buffer.values for buffer in buffers])


def _everything(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return b.new_ones((), dtype=torch.bool)


def _score_function(bias: Tensor | None) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The same for what becomes of a score."""
    if bias is None:
        return _unchanged, ()
    buffer = _buffer(bias)

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, values: Tensor) -> Tensor:
        return score + _taken(values, buffer.dims, (b, h, i, j))

    return biased, (buffer.values,)


def _unchanged(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score


def _score_gradients(
    score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, grad: Tensor, *buffers: Tensor
) -> list[Tensor | None]:
    """Of the score, of the four indices and of the buffers: a bias is added, and has no gradient here."""
    return [grad, *[None] * (4 + len(buffers))]


# ---- what is compiled ----


@attrs.frozen(eq=False)
class Told:
    """What FlexAttention's operators are told about scores."""

    block_mask: tuple[Any, ...]
    score: Callable[..., Tensor]
    score_buffers: tuple[Tensor, ...]
    mask_buffers: tuple[Tensor, ...]


def _told(x: dict[str, Tensor], kind: FlexKind, backward: bool) -> Told:
    from torch.nn.attention.flex_attention import BlockMask  # to import it takes a quarter of a second

    s, t = x["q"].shape[2], x["k"].shape[2]
    bias = x.get("bias")
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    mask, bias = (bias, None) if bias is not None and bias.dtype == torch.bool else (None, bias)
    bounds = _bounds(x, kind)
    some, full = _shown(bounds, mask, s, t, x["q"].device)
    visible, buffers = _mask_function(bounds, mask)
    lists = (*_listed(some & ~full), *_listed(full))
    blocks = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(s, t), compute_q_blocks=backward
    )
    score, score_buffers = _score_function(bias)
    return Told(blocks.as_tuple(), score, score_buffers, buffers)


def forward_function(kind: FlexKind, *operands: Tensor) -> tuple[Tensor, Tensor]:
    x = dict(zip(kind.names, operands, strict=True))
    told = _told(x, kind, False)
    more = (told.block_mask, kind.scale, told.score_buffers, told.mask_buffers)
    out, lse = compat.flex_attention(x["q"], x["k"], x["v"], told.score, *more)
    return rows_major(out), lse * LN2


def backward_function(kind: FlexKind, *operands: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = dict(zip(kind.names, operands, strict=True))
    told = _told(x, kind, True)
    grad_lse = x["grad_lse"] * LN2 if "grad_lse" in x else None
    # The kernel reads the numbers of rows as contiguous.
    results = (x["out"], (x["lse"] / LN2).contiguous(), x["grad_out"], grad_lse)
    more = (told.block_mask, kind.scale, told.score_buffers, told.mask_buffers)
    dq, dk, dv = compat.flex_attention_backward(x["q"], x["k"], x["v"], *results, told.score, _score_gradients, *more)
    return rows_major(dq), rows_major(dk), rows_major(dv)


def graph_of(function: Callable[..., Any], kind: FlexKind, results: int) -> torch.fx.GraphModule:
    """One call, whose operators the compiler finds itself."""

    def attention(*operands: Tensor) -> Any:
        return function(kind, *operands)

    graph = torch.fx.Graph()
    call = graph.call_function(attention, tuple([graph.placeholder(name) for name in kind.names]))
    graph.output(tuple([graph.call_function(operator.getitem, (call, k)) for k in range(results)]))
    return torch.fx.GraphModule({}, graph)


INSTEAD = (
    "while attention was compiled by torch's FlexAttention. Try: run the step inside `with "
    "torch.nn.attention.sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION])`, which takes a dense mask"
)
_compiled: dict[Any, Callable[..., Any]] = {}


def launch(function: Callable[..., Any], kind: FlexKind, results: int, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """The compiled function on operands of a card."""
    lie = tuple([(x.shape, x.stride(), x.dtype) for x in operands])
    key = (function, kind, operands[0].device, lie)
    if key not in _compiled:
        try:
            _compiled[key] = compat.compile_graph(graph_of(function, kind, results), operands, "inductor")
        except Exception as error:
            error.add_note(INSTEAD)
            raise
    made: Sequence[Tensor] = _compiled[key](*operands)
    return made


# ---- the kernels, with the arguments of the operators ----


def _prepared(call: dict[str, Any], of: Sequence[str]) -> tuple[FlexKind, list[Tensor]]:
    """What to compile, and its operands: those `of` these names that are given, and where rows and columns stand."""
    given = {name: call[name] for name in of if call[name] is not None}
    if call["causal"] or call["window"]:
        for name, offset, x in (("row", call["q_offset"], call["q"]), ("column", call["k_offset"], call["k"])):
            if offset is not None:
                given[name] = positions(offset, x.shape[2], x.device)
    kind = FlexKind(tuple(given), float(call["scale"]), bool(call["causal"]), int(call["window"]))
    return kind, list(given.values())


OPERANDS = ("q", "k", "v", "bias", "code", "least", "most")


def flex(*args: Any) -> tuple[Tensor, Tensor]:
    call = dict(zip(NAMES, args, strict=True))
    kind, operands = _prepared(call, OPERANDS)
    out, lse = launch(forward_function, kind, 2, operands)
    return out, lse


def flex_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = dict(zip(OF_BACKWARD, args, strict=True))
    kind, operands = _prepared(call, (*OPERANDS, "out", "lse", "grad_out", "grad_lse"))
    dq, dk, dv = launch(backward_function, kind, 3, operands)
    return dq, dk, dv, call["q"].new_empty(0)
