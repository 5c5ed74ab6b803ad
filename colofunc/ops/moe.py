"""Mixtures of experts for models of your own: routing, experts, losses. Public as `cf.moe`.

    index, weight, scores = cf.moe.route(x @ router.T, k=2)                  # (n, e) -> (n, k), (n, k), (n, e)
    y = cf.moe.experts(x, index, weight, gate_up, down)                      # (n, d); one operator in a step
    loss = loss + 0.01 * cf.moe.balance_loss(scores, index) + 1e-3 * cf.moe.z_loss(logits)

Everything but `experts` is plain tensor code, and so are shared experts: a dense layer that is added. On a plain tensor
outside of a step all of it runs as it is.

Sources: Shazeer et al. (1701.06538) and GShard (2006.16668) for top-k routing and capacity; Switch (2101.03961),
equation 4, for the balance loss; ST-MoE (2202.08906), equation 5, for the z loss; DeepSeek-V3 (2412.19437), section
2.1.2, for sigmoid scores, bias-corrected choice and groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops.experts import ACTS, capped, in_float8
from colofunc.ops.experts import experts as _experts

__all__ = ["ACTS", "balance_loss", "experts", "route", "z_loss"]

SCORES = ("softmax", "sigmoid")


def route(
    logits: Tensor,
    k: int,
    *,
    scores: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k routing. logits: (*, e) -> index (*, k), weight (*, k), scores (*, e) in float32 at least.

    scores: "softmax" over experts, or "sigmoid" of each. normalize: the k weights add up to `scale`. bias: (e,), added
    for the choice alone, not for the weights (balancing without a loss). groups: experts stand in so many equal groups,
    of which the `top_groups` with the largest sum of their two best scores are chosen from. A NaN among the logits
    makes the token's weights NaN, which `low.check_finite` names; its index stays in range.
    """
    experts = logits.shape[-1]
    if scores not in SCORES:
        raise InputError(f"scores={scores!r} is none of {', '.join(SCORES)}")
    if not 1 <= k <= experts:
        raise InputError(f"k={k} experts per token of {experts}; choose 1 to {experts}")
    top_groups = groups if top_groups is None else top_groups
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups or k > top_groups * (experts // groups):
        raise InputError(
            f"{experts} experts in groups={groups}, top_groups={top_groups}, k={k}: use equal groups that hold k "
            "experts"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = wide.softmax(-1) if scores == "softmax" else wide.sigmoid()
    choice = found if bias is None else found + bias
    if top_groups < groups:
        choice = _of_best_groups(choice, groups, top_groups)
    index = choice.topk(k, -1).indices
    weight = found.gather(-1, index)
    if normalize:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    return index, weight * scale, found


def _of_best_groups(choice: Tensor, groups: int, top: int) -> Tensor:
    """-inf for the experts of all but the best groups."""
    each = choice.unflatten(-1, (groups, -1))
    best = each.topk(min(2, each.shape[-1]), -1).values.sum(-1).topk(top, -1).indices  # (*, top)
    kept = (best.unsqueeze(-1) == torch.arange(groups, device=choice.device)).any(-2)  # (*, groups)
    return each.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    act: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gated: bool = True,
    transposed: bool = False,
    capacity_factor: float | None = None,
) -> Tensor:
    """sum_k weight[..., k] expert[index[..., k]](x), where expert(x) = down @ (act(gate @ x) * (up @ x)).

    x: (*, d), index and weight: (*, k), gate_up: (e, 2f, d) with gate before up, down: (e, d, f) -> (*, d).
    gated=False: gate_up is up alone, (e, f, d), and expert(x) = down @ act(up @ x). transposed: the last two dims of
    both are swapped. An index outside of 0 .. e-1 adds nothing. Without capacity_factor no token is dropped; with it an
    expert takes ceil(factor * choices / e) of them, the first in the order of all tokens, whatever the mesh, and drops
    the rest.
    """
    float8 = in_float8(gate_up, down)
    index = capped(index, gate_up.shape[0], capacity_factor)
    y: Tensor = _experts.apply(
        x, index, weight, gate_up, down, gate_up_bias, down_bias, act, gated, transposed, 1.0, float8
    )
    return y


def balance_loss(scores: Tensor, index: Tensor) -> Tensor:
    """e * sum_e (share of the choices that went to e) * (mean score of e): 1 where both are even, e at worst.

    scores: (*, e), rows that add up to 1; index: (*, k). The gradient goes through the scores.
    """
    experts = scores.shape[-1]
    chosen = (index.reshape(-1, 1) == torch.arange(experts, device=index.device)).to(scores.dtype)
    return experts * (chosen.mean(0) * scores.reshape(-1, experts).mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The mean square of the log of the sum of exponentials: keeps router logits small. logits: (*, e)."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square().mean()
