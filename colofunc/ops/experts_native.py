"""Choices of experts sorted on a GPU, and what experts gave summed for each token, by kernels in CUDA
(`ext/cuda/cuda/experts.cu`).

Problem: torch sorts 64-bit keys bit by bit where there are a few dozen experts, and a sum over choices in a fixed order
sorts once more, after each row was multiplied by its weight and written in float32. Idea: counting sorts, which says
where each choice went; a token then gathers its rows from there.

    order, key, ends, place = sorted_choices(index, experts)
    add_choices(total, rows, place, weight, first)       # total[n] += sum_k weight[n, k] rows[place[n, k] - first]

Both are as `experts_device` has them without the library, where `place` is None: rows are added in the order of
experts, products and sums round to float32 one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops import native
from colofunc.ops.define import define, nothing

MOST_EXPERTS = 4096
MOST_CHOICES = 64
"""Of a token: they are put in order by the threads of a block."""
TILE = 256
"""Choices that one warp sorts, as `experts.cu` has it."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def sorted_choices(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """index (..., k) -> choices sorted by expert, those of no expert last; the expert of each place; ends of experts;
    places of choices.

    An expert outside of 0 .. experts - 1 is none, key `experts` and place -1.
    """
    flat = index.reshape(-1)
    if _has_kernel(index, experts):
        order, key, place = (torch.empty(flat.shape, dtype=torch.int64, device=flat.device) for _ in range(3))
        ends = torch.empty((experts,), dtype=torch.int64, device=flat.device)
        counts = torch.empty(((experts + 1) * (-(-flat.numel() // TILE) + 1),), dtype=torch.int32, device=flat.device)
        sort_choices_(order, key, place, ends, counts, flat.contiguous())
        return order, key, ends, place.view(-1, max(index.shape[-1], 1))
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    key, order = torch.sort(key, stable=True)
    return (
        order,
        key,
        torch.searchsorted(key, torch.arange(experts, device=key.device, dtype=key.dtype), right=True),
        None,
    )


def adds(total: Tensor, weight: Tensor | None, rows: torch.dtype) -> bool:
    """Whether `add_choices` takes rows of such a dtype."""
    return total.dtype == torch.float32 and rows in DTYPES and (weight is None or weight.dtype in DTYPES)


def add_choices(total: Tensor, rows: Tensor, place: Tensor, weight: Tensor | None, first: int) -> None:
    """Add rows (s, d) times weights (tokens * k) to `total` (tokens, d), those of places first .. first + s - 1."""
    shaped = None if weight is None else weight.reshape(place.shape).contiguous()
    add_choices_(total, rows.contiguous(), place, shaped, first)


def _has_kernel(index: Tensor, experts: int) -> bool:
    if index.device.type != "cuda" or index.dtype not in (torch.int64, torch.int32):
        return False
    return (
        0 < experts <= MOST_EXPERTS
        and 0 < index.shape[-1] <= MOST_CHOICES
        and 0 < index.numel() < 2**31 - 1
        and native.ready("cuda")
    )


# ---- the operators ----


def _sort_choices_(order: Tensor, key: Tensor, place: Tensor, ends: Tensor, counts: Tensor, index: Tensor) -> None:
    experts = ends.numel()
    expert = torch.where((index >= 0) & (index < experts), index, experts).to(torch.int64)
    sorted_key, found = torch.sort(expert, stable=True)
    order.copy_(found)
    key.copy_(sorted_key)
    place[found] = torch.arange(index.numel(), device=index.device)
    place.masked_fill_(expert == experts, -1)
    ends.copy_(torch.searchsorted(sorted_key, torch.arange(experts, device=index.device), right=True))


def _add_choices_(total: Tensor, rows: Tensor, place: Tensor, weight: Tensor | None, first: int) -> None:
    if total.dim() != 2 or rows.dim() != 2 or place.dim() != 2 or total.shape != (place.shape[0], rows.shape[1]):
        shapes = ", ".join(str(tuple(x.shape)) for x in (total, rows, place))
        raise InputError(f"add_choices_: total, rows and place are {shapes}. Try: (tokens, d), (s, d) and (tokens, k)")
    at = (place - first).reshape(-1)
    order = torch.argsort(at, stable=True)
    order = order[(at[order] >= 0) & (at[order] < rows.shape[0])]
    terms = rows[at[order]].to(total.dtype)
    if weight is not None:
        terms = terms * weight.reshape(-1)[order, None].to(total.dtype)
    total.index_put_((torch.div(order, place.shape[1], rounding_mode="floor"),), terms, accumulate=True)


sort_choices_ = define(
    "sort_choices_(Tensor(a!) order, Tensor(b!) key, Tensor(c!) place, Tensor(d!) ends, Tensor(e!) counts, Tensor "
    "index) -> ()",
    _sort_choices_, nothing,
)  # fmt: skip
add_choices_ = define(
    "add_choices_(Tensor(a!) total, Tensor rows, Tensor place, Tensor? weight, int first) -> ()",
    _add_choices_,
    nothing,
)
