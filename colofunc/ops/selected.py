"""What a mask selects, where nobody knows yet how much that is.

Problem: `labels.masked_select(labels != -100)` has as many elements as the mask holds, and a step that is traced has no
values. Transformers joins the targets of a CTC loss so, and the loss needs no such number: the lengths beside it say
where each sample ends. Idea: while a step is traced the call gives a `Selected`, which keeps the values and the mask.
An operator that can do without the number asks for `padded_selection()`; every other use is the error that the call itself would
have been.

    flat = labels.masked_select(mask)        # Selected
    F.ctc_loss(scores, flat, ...)            # reads flat.padded()
    flat.shape                               # TraceError: data-dependent
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colofunc import compat
from colofunc.errors import TraceError


class Selected(Tensor):
    """The elements of `source` where `mask` holds, in row-major order.

    Every function of torch but those that ask first is `refusal`.
    """

    source: Tensor
    mask: Tensor
    refusal: TraceError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _first_selected([*args, *(kwargs or {}).values()])
        assert first is not None, "torch asks a class only about its own values"
        raise first.refusal


def masked_selection(source: Tensor, mask: Tensor, refusal: TraceError) -> Selected:
    """What `source.masked_select(mask)` is where its size is not known.

    `refusal` is raised by every use that needs the size.
    """
    with compat.disable_modes(), compat.no_function_modes():
        selected = torch.empty(0).as_subclass(Selected)
    selected.source, selected.mask, selected.refusal = source, mask, refusal
    return selected


def padded_selection(selected: Selected) -> tuple[Tensor, Tensor]:
    """(elements, how many count): as many elements as source and mask have when they are broadcast.

    Behind those that count, any.
    """
    source, mask = torch.broadcast_tensors(selected.source, selected.mask)
    if mask.numel() == 0:
        return source.reshape(-1), mask.sum()
    selected_until = mask.reshape(-1).cumsum(0)
    rank = torch.arange(mask.numel(), device=mask.device)
    # The element of rank k is the first one until which more than k are selected.
    place = torch.searchsorted(selected_until, rank, right=True)
    return source.reshape(-1)[place.clamp_max(mask.numel() - 1)], selected_until[-1]


def _first_selected(values: list[Any]) -> Selected | None:
    for value in values:
        found = _first_selected(list(value)) if isinstance(value, (list, tuple)) else value
        if isinstance(found, Selected):
            return found
    return None
