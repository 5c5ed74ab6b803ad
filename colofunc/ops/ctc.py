"""CTC loss, the likelihood of labels that nobody aligned with the inputs, as an operator whose sizes are known before
it runs.

Problem: torch's `_ctc_loss` returns its table of forward variables, whose size is the length of the longest target: a
value, which a program does not have; and concatenated targets of a sample lie where the lengths of those before it say.
Idea: the operator returns the loss of each sample and no table, and its gradient makes the table again; concatenated
targets are taken apart to one row a sample first. Samples know nothing of one another then, and split over ranks.

    ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)      t n c, n s, n, n -> n

Source: Graves et al., Connectionist Temporal Classification (2006), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colofunc.errors import InputError, TraceError
from colofunc.ops.define import define
from colofunc.ops.selected import Selected, padded_selection

MEAN, SUM = 1, 2  # torch's numbers of reductions
SequenceLengths = Tensor | Sequence[int]


def _tables(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Any:
    """(lengths of inputs, of targets, losses, forward variables). Torch wants lengths as numbers."""
    sizes = inputs.tolist(), lengths.tolist()
    return *sizes, *torch.ops.aten._ctc_loss.default(log_probs, targets, *sizes, blank, zero_infinity)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    if not log_probs.shape[1]:
        return log_probs.new_empty((0,))
    losses: Tensor = _tables(log_probs, targets, inputs, lengths, blank, zero_infinity)[2]
    return losses


def _ctc_loss_fake(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    samples = log_probs.shape[1]
    if (
        targets.dim() != 2
        or {targets.shape[0], *inputs.shape, *lengths.shape} != {samples}
        or inputs.dim() != 1
        or lengths.dim() != 1
    ):
        raise InputError(
            f"ctc_loss: log_probs {tuple(log_probs.shape)}, targets {tuple(targets.shape)}, input_lengths "
            f"{tuple(inputs.shape)} and target_lengths {tuple(lengths.shape)} are not (t, n, c), (n, s), (n), (n). "
            "Try: log_probs.transpose(0, 1)"
        )
    return log_probs.new_empty((samples,))


def _ctc_loss_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    if not log_probs.shape[1]:
        return torch.zeros_like(log_probs)
    *sizes, losses, table = _tables(log_probs, targets, inputs, lengths, blank, zero_infinity)
    backward = torch.ops.aten._ctc_loss_backward.default
    result: Tensor = backward(grad, log_probs, targets, *sizes, losses, table, blank, zero_infinity)
    return result


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ctc_loss_backward.apply(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), None, None, None, None, None


def _no_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    raise TraceError(
        "F.ctc_loss has no second derivative, in torch neither. Try: a gradient penalty of another loss, or without "
        "create_graph=True"
    )


_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"
)
ctc_loss = define(f"ctc_loss({_ARGUMENTS}) -> Tensor", _ctc_loss, _ctc_loss_fake, (_save, _gradient))
ctc_loss_backward = define(
    f"ctc_loss_backward(Tensor grad, {_ARGUMENTS}) -> Tensor", _ctc_loss_backward,
    lambda grad, log_probs, *more: torch.empty_like(log_probs, memory_format=torch.contiguous_format), (_save, _no_gradient),
)  # fmt: skip


def reduced_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: SequenceLengths,
    target_lengths: SequenceLengths,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> Tensor:
    """What `F.ctc_loss` returns, of `ctc_loss` and operators around it. log_probs: (t, n, c) or (t, c)."""
    batched = log_probs.dim() == 3
    scores = log_probs if batched else log_probs.unsqueeze(1)
    inputs, lengths = (_as_tensor(given, scores) for given in (input_lengths, target_lengths))
    total: Tensor | int | None = None  # of targets that are joined to one
    if isinstance(targets, Selected):
        targets, total = padded_selection(targets)
    elif targets.dim() == 1:
        total = targets.shape[0]
    if total is None:
        in_rows = lengths
    else:
        longest = None
        if not isinstance(target_lengths, Tensor):
            longest = max([0, *target_lengths])
            _check_total(total, target_lengths)
        targets, in_rows = _rows(targets, total, lengths, scores.shape[0], longest)
    losses = ctc_loss.apply(scores, targets, inputs, in_rows, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0.0, losses)
    if reduction == MEAN:
        return (losses / lengths.clamp_min(1)).mean()
    if reduction == SUM:
        return losses.sum()
    return losses if batched else losses.squeeze(0)


def _as_tensor(lengths: SequenceLengths, scores: Tensor) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths.reshape(1) if lengths.dim() == 0 else lengths
    return torch.tensor(list(lengths), dtype=torch.int64, device=scores.device)


def _check_total(total: Tensor | int, lengths: Sequence[int]) -> None:
    if isinstance(total, int) and sum(lengths) != total:
        raise InputError(
            f"ctc_loss: concatenated targets ({total},) and target_lengths that add up to {sum(lengths)}. "
            "Try: torch.cat of the targets of all samples, or targets (n, s) with a row for each"
        )


def _rows(
    targets: Tensor, total: Tensor | int, lengths: Tensor, steps: int, longest: int | None
) -> tuple[Tensor, Tensor]:
    """Concatenated targets, of which the first `total` count, as one row a sample, and how much of each row counts.

    Where `longest` is not known, rows have one place more than there are steps: of a target that is longer than the
    inputs this much is as impossible as the whole.
    """
    most = targets.shape[0]
    size = min(most, steps + 1) if longest is None else longest
    if size == 0:
        return targets.reshape(1, most)[:, :0].expand(lengths.shape[0], 0), lengths
    ends = lengths.cumsum(0)
    place = torch.arange(size, device=targets.device)
    index = torch.where(place < lengths.unsqueeze(1), place + (ends - lengths).unsqueeze(1), 0)
    # Lengths that do not add up to what is there: places that do not exist, so that the lookup fails.
    index = torch.where(ends[-1] == total, index, most)
    return targets[index], lengths.clamp_max(size)
