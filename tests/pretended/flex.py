"""FlexAttention's operators, as plain functions on CPU tensors, and on the pretended card.

Problem: these are operators of higher order, which are given Python functions and lists of blocks; on a card they are a kernel that
inductor writes. Idea: compute what that kernel computes, in float64: blocks that are not listed show nothing, in blocks that are
listed as full no pair is asked about, in others the mask's function is; rows go by the lists of rows' blocks, columns by those of columns'.
Eager torch asks about every pair and looks at no list.

Conventions (torch's `flex_attention.py.jinja` and `flex_backwards.py.jinja`): exponents of base 2, so lse is that of scores / ln 2; a row
that sees nothing gives out 0 and lse -inf, which backward counts as 0; results lie in the order of the dims of q, k, v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pretended import attention
from pretended.attention import refuse
from pretended.tensors import OnCard

LN2 = math.log(2.0)
NAMES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks",
         "full_q_indices")  # fmt: skip


def _checks(q: Tensor, k: Tensor, v: Tensor, block_mask: Sequence[Any], buffers: Sequence[Tensor], what: str) -> None:
    attention._check((q, k, v), attention.HALVES, what)
    refuse(min(q.shape[3], v.shape[3]) < 16, f"{what}: heads of at least 16")
    refuse(q.shape[1] % k.shape[1] != 0 or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3], f"{what}: shapes do not fit")
    refuse(tuple(block_mask[:2]) != (q.shape[2], k.shape[2]), f"{what}: the mask is of other lengths")
    lists = [x for x in block_mask[2:10] if x is not None]
    refuse(any(x.dtype != torch.int32 for x in lists), f"{what}: lists of blocks are int32")
    refuse(any(x.shape[0] not in (1, q.shape[0]) or x.shape[1] not in (1, q.shape[1]) for x in lists), f"{what}: lists of other batches")
    refuse(any(x.dim() == 0 for x in buffers), f"{what}: buffers of no dims")


def _listed(block_mask: Sequence[Any], first: str, rows: int, columns: int) -> Tensor:
    """Which blocks a list holds: (b, h, rows, columns) bool."""
    at = 2 + NAMES.index(first)
    count, index = block_mask[at].long(), block_mask[at + 1].long()
    refuse(index.shape[-2:] != (rows, columns), f"{first}: lists of {tuple(index.shape)} for {rows} x {columns} blocks")
    shown = torch.arange(columns) < count[..., None]
    return torch.zeros(index.shape, dtype=torch.bool).scatter_(-1, index, shown)


def _keep(q: Tensor, k: Tensor, block_mask: Sequence[Any], buffers: Sequence[Tensor], by_columns: bool) -> Tensor:
    """Which pairs the kernel computes, by lists of rows' blocks or of columns'."""
    (s, t), (rows_each, columns_each) = (q.shape[2], k.shape[2]), block_mask[-3:-1]
    rows, columns = -(-s // rows_each), -(-t // columns_each)
    if by_columns:
        some, full = (_listed(block_mask, name, columns, rows).mT for name in ("q_num_blocks", "full_q_num_blocks"))
    else:
        some, full = (_listed(block_mask, name, rows, columns) for name in ("kv_num_blocks", "full_kv_num_blocks"))
    refuse(bool((some & full).any()), "a block is listed twice")

    def pairs(blocks: Tensor) -> Tensor:
        return blocks.repeat_interleave(rows_each, 2).repeat_interleave(columns_each, 3)[:, :, :s, :t]

    return pairs(full) | (pairs(some) & block_mask[-1](*_indices(q, k), *buffers))


def _indices(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """b, h, i, j of every pair, which broadcast."""
    sizes = (*q.shape[:3], k.shape[2])
    return tuple(torch.arange(n, dtype=torch.int32).view([n if d == dim else 1 for d in range(4)]) for dim, n in enumerate(sizes))


def _bias(score: Callable[..., Tensor], q: Tensor, k: Tensor, buffers: Sequence[Tensor]) -> Tensor:
    """What a function of scores adds to them."""
    return score(torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64), *_indices(q, k), *buffers)


def forward(
    q: Tensor, k: Tensor, v: Tensor, score: Any, block_mask: Any, scale: float, options: Any, scores: Any = (), masks: Any = ()
) -> tuple[Tensor, ...]:
    _checks(q, k, v, block_mask, (*scores, *masks), "flex forward")
    out, lse = attention._attend(q, k, v, _bias(score, q, k, scores), _keep(q, k, block_mask, masks, False), scale)
    wide = attention._wide(q)
    return attention._filled(_like(q, v.shape[3]), out), (lse / LN2).to(wide), torch.zeros(lse.shape, dtype=wide)


def _like(x: Tensor, width: int) -> Tensor:
    """Room for heads of so many elements whose dims lie as those of x."""
    return attention._like_dims(x, (*x.shape[:3], width))


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None, score: Any, joint: Any,
    block_mask: Any, scale: float, options: Any, scores: Any = (), masks: Any = (),
) -> tuple[Any, ...]:  # fmt: skip
    _checks(q, k, v, block_mask, (*scores, *masks), "flex backward")
    refuse(lse.shape != q.shape[:3] or lse.dtype != attention._wide(q), "flex backward: lse (b, h, s), float32")
    refuse(not lse.is_contiguous(), "flex backward: lse is read as contiguous")
    refuse(out.shape != (*q.shape[:3], v.shape[3]) or grad.shape != out.shape, "flex backward: out and its gradient fit")
    refuse(out.dtype != q.dtype or grad.dtype != q.dtype, "flex backward: operands of one dtype")
    score_gradients = joint(torch.zeros(()), *[torch.zeros((), dtype=torch.int32)] * 4, torch.full((), 3.0), *scores)
    refuse(float(score_gradients[0]) != 3.0 or any(x is not None for x in score_gradients[1:]), "flex backward: a bias is added, no more")
    finite = (lse.double() * LN2).masked_fill(lse == -torch.inf, 0.0)
    # The kernel takes the gradient of lse off the row sums of grad * out.
    weighed = None if grad_lse is None else grad_lse.double() / LN2
    found = []
    for by_columns in (False, True):
        keep = _keep(q, k, block_mask, masks, by_columns)
        found.append(_gradients(grad, q, k, v, _bias(score, q, k, scores), out, finite, keep, scale, weighed))
    dq, dk, dv = found[0][0], *found[1][1:]
    results = tuple(attention._filled(_like(x, x.shape[3]), slope) for x, slope in ((q, dq), (k, dk), (v, dv)))
    return *results, tuple(None for _ in scores)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor, keep: Tensor, scale: float,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    *plain, weights_of = attention._gradients(grad, q, k, v, bias, out, lse, keep, scale)
    if grad_lse is None:
        return tuple(plain)  # type: ignore[return-value]
    weights = (attention._weights(q, k, bias, keep, scale) - lse.unsqueeze(-1)).exp()
    dscores = weights_of + weights * grad_lse.unsqueeze(-1)
    dq = dscores @ attention._repeated(k, q.shape[1]) * scale
    dk = (dscores.mT @ q.double() * scale).unflatten(1, (k.shape[1], -1)).sum(2)
    return dq, dk, plain[2]


# ---- on the card ----


def _on_card(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """One launch: what is given is read, and results are there, when the stream gets to it."""

    def launched(*args: Any) -> Any:
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        machine, device = args[0].machine, args[0].device
        refuse(any(x.device != device for x in tensors), f"{name}: tensors of {sorted({str(x.device) for x in tensors})}")
        stream = machine.current_stream(device)
        reals = tree_map_only(OnCard, lambda x: x.cpu_view, args)
        results = tree_map_only(Tensor, lambda x: machine.room(x.shape, x.stride(), x.dtype, device, stream), _shapes(name, reals))

        def kernel() -> None:
            for room, made in zip(tree_leaves(results), tree_leaves(run(*reals)), strict=True):
                if made is not None:
                    room.cpu_view.copy_(made)

        machine.launches[f"higher_order.{name}"] += 1
        stream.launch(kernel)
        return results

    return launched


def _shapes(name: str, args: Sequence[Any]) -> Any:
    """Empty results."""
    q, k, v = args[:3]
    if name == "flex_attention":
        lse = torch.empty(q.shape[:3], dtype=attention._wide(q))
        return _like(q, v.shape[3]), lse, torch.empty_like(lse)
    return *(_like(x, x.shape[3]) for x in (q, k, v)), tuple(None for _ in args[12])


FLEX: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.flex_attention: forward,
    torch.ops.higher_order.flex_attention_backward: backward,
}
for operator, run in FLEX.items():
    operator.py_impl(OnCard)(_on_card(operator.__name__, run))


def as_written(function: Callable[..., Any], kind: Any, results: int, operands: Sequence[Tensor]) -> Any:
    """In place of `attention_flex.launch`: the function as it stands, which would be compiled for a card."""
    return function(kind, *operands)
