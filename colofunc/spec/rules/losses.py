"""Losses: reductions over the batch, and the choice of a class.

    nll_loss_forward   n c, n -> 1, 1      n and c leave pending sums; a mean divides by the *global* weight
    nll_loss_backward  1, n c, n -> n c    c split: every rank writes into the classes that it has
    mse_loss           n d, n d -> 1       sum: pending; mean: local mean, weighted by its share
    ctc_loss           [t] n [c], n [s], n, n -> n

Where classes are split (vocabulary parallel), a target belongs to the rank that has its class: `locate` reads the
class number as digits of the dim's atoms, so striped vocabularies work as well.
Source: Megatron-LM (1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.ops.collectives import all_reduce, axis_index
from colofunc.ops.targets import resolve
from colofunc.spec.layout import Dim, Layout
from colofunc.spec.rule import Call, Operand, Ref, Rule
from colofunc.spec.rules.build import Texts, bind
from colofunc.spec.rules.pattern import RuleFn, dims_of
from colofunc.spec.rules.pointwise import aligned

NONE, MEAN, SUM = 0, 1, 2
"""Numbers of torch's `reduction` of a loss (`at::Reduction`)."""
Layouts = tuple[Layout | None, ...]


def rerun(call: Call, shards: Sequence[torch.Tensor]) -> Any:
    """The call's operator on local parts."""
    return resolve(call.target)(*_fill(call.args, shards), **{k: _fill(v, shards) for k, v in call.kwargs})


def _fill(tree: Any, shards: Sequence[torch.Tensor]) -> Any:
    if isinstance(tree, Ref):
        return shards[tree.id]
    return tuple(_fill(item, shards) for item in tree) if isinstance(tree, tuple) else tree


def locate(index: torch.Tensor, atoms: Dim, size: int, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Where global indices of a dim of `size` lie in this rank's part of it, and the mask of those that it has.

    An index outside of the dim is every rank's, at a place that does not exist: the lookup fails as on one device.
    """
    local = torch.zeros_like(index)
    mine = torch.ones_like(index, dtype=torch.bool)
    rest = prod(n for n, _ in atoms)
    for n, axis in atoms:
        rest //= n
        digit = torch.div(index, rest, rounding_mode="floor") % n
        if axis is None:
            local = local * n + digit
        else:
            mine = mine & (digit == axis_index((axis,), mesh).to(digit.device))
    outside = (index < 0) | (index >= size)
    return torch.where(outside, index, local), mine | outside


# --- negative log likelihood


@attrs.frozen
class Nll:
    """The arguments of nll_loss and nll_loss2d, forward (at=0) or backward (at=1, after the gradient)."""

    scores: int
    target: int
    weight: int | None
    reduction: int
    ignore: int


def nll_args(call: Call) -> Nll:
    at = 1 if "backward" in call.target else 0
    scores, target, weight, reduction, ignore = call.args[at : at + 5]
    return Nll(scores.id, target.id, weight.id if isinstance(weight, Ref) else None, reduction, ignore)


def _class_dim(shape: tuple[int, ...]) -> int:
    return 0 if len(shape) == 1 else 1


def _nll_operands(call: Call, nll: Nll) -> tuple[dict[int, Operand], dict[str, int], Operand] | None:
    """Operand -> dims, sizes, and the dims of the target: (n, c, *s) and (n, *s) and (c)."""
    shape = call.ins[nll.scores].shape
    if len(shape) not in (1, 2, 4):
        return None
    scores, sizes = dims_of(shape)
    c = _class_dim(shape)
    target = (*scores[:c], *scores[c + 1 :])
    if len(shape) == 1 and call.ins[nll.target].shape == (1,):
        target = ((),)
    found = {nll.scores: scores, nll.target: target}
    if nll.weight is not None:
        found[nll.weight] = (scores[c],)
    return found, sizes, target


def nll_forward(call: Call) -> Rule | None:
    nll = nll_args(call)
    found = _nll_operands(call, nll)
    out, total = call.outs
    if found is None or out is None or total is None:
        return None
    operands, sizes, target = found
    result = () if not out.shape else target
    # Of a sum the total weight is a sum like the loss; for a mean it is needed whole, and so is reduced at once; else
    # it is 0.
    complete = frozenset((1, f) for f in sizes) if nll.reduction != SUM else frozenset()
    return Rule(
        tuple(operands[k] for k in range(len(call.ins))),
        (result, ()),
        sizes,
        dict.fromkeys(sizes, "sum"),
        copied=complete,
        local=_nll_forward_local,
    )


def _nll_forward_local(call: Call, ins: tuple[Layout, ...], outs: Layouts) -> Callable[..., Any] | None:
    nll = nll_args(call)
    scores = ins[nll.scores]
    c = _class_dim(scores.shape)
    classes, everywhere = scores.dims[c], scores.axes
    if not everywhere or (nll.reduction != MEAN and not any(axis for _, axis in classes)):
        return None

    def local(*shards: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = shards[nll.scores], shards[nll.target]
        here, mine = locate(target, classes, scores.shape[c], mesh)
        mine = mine & (target != nll.ignore)
        here = torch.where(mine, here, 0)
        picked = torch.gather(x, c, here.unsqueeze(c) if here.dim() < x.dim() else here)
        picked = picked.reshape(target.shape)
        weight = shards[nll.weight][here] if nll.weight is not None else torch.ones_like(picked)
        weight = torch.where(mine, weight, 0)
        loss = torch.where(mine, -picked * weight, 0)
        if nll.reduction == NONE and x.dim() > 1:
            return loss, torch.zeros((), dtype=x.dtype)
        if nll.reduction == SUM:
            return loss.sum(), weight.sum()
        total = all_reduce(weight.sum(), everywhere, mesh)
        if nll.reduction == NONE:  # of one row torch keeps the weight although nothing is divided by it
            return loss, total
        return loss.sum() / total, total

    return local


def nll_backward(call: Call) -> Rule | None:
    nll = nll_args(call)
    found = _nll_operands(call, nll)
    if found is None:
        return None
    operands, sizes, target = found
    grad = call.args[0].id
    operands[grad] = () if not call.ins[grad].shape else target
    operands[call.args[6].id] = ()
    ins = tuple(operands[k] for k in range(len(call.ins)))
    return Rule(ins, (operands[nll.scores],), sizes, linear=(frozenset({grad}),), local=_nll_backward_local)


def _nll_backward_local(call: Call, ins: tuple[Layout, ...], outs: Layouts) -> Callable[..., Any] | None:
    nll = nll_args(call)
    scores = ins[nll.scores]
    c = _class_dim(scores.shape)
    classes = scores.dims[c]
    if not any(axis for _, axis in classes):
        return None
    grad_at, total_at = call.args[0].id, call.args[6].id

    def local(*shards: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        x, target, grad = shards[nll.scores], shards[nll.target], shards[grad_at]
        here, mine = locate(target, classes, scores.shape[c], mesh)
        mine = mine & (target != nll.ignore)
        here = torch.where(mine, here, 0)
        value = -grad * torch.ones_like(here, dtype=grad.dtype)
        if nll.weight is not None:
            value = value * shards[nll.weight][here]
        if nll.reduction == MEAN:
            value = value / shards[total_at]
        value = torch.where(mine, value, 0).to(x.dtype)
        at = here.reshape(value.shape).unsqueeze(c) if value.dim() < x.dim() else here
        return torch.zeros_like(x).scatter(c, at, value.reshape(at.shape))

    return local


# --- elementwise losses with a reduction argument

# operator -> (position of `reduction`, its default)
ELEMENTWISE: dict[str, int] = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "soft_margin_loss": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "mse_loss_backward": 3,
    "smooth_l1_loss_backward": 3,
    "huber_loss_backward": 3,
    "soft_margin_loss_backward": 3,
    "binary_cross_entropy_backward": 4,
}


def elementwise_loss(position: int, call: Call) -> Rule | None:
    reduction = call.arg(position, "reduction", MEAN)
    out = call.outs[0]
    backward = "backward" in call.target
    if out is None:
        return None
    full = tuple(torch.broadcast_shapes(*(t.shape for t in call.ins)))
    dims, sizes = dims_of(full)
    ins = tuple(aligned(t.shape, dims, full) for t in call.ins)
    result = aligned(out.shape, dims, full)
    if any(op is None for op in ins) or result is None or not sizes:
        return None
    if reduction == NONE or backward:
        summed = {}
    else:
        summed = dict.fromkeys(sizes, "sum")
    if (reduction == NONE or backward) and out.shape != full:
        return None
    return Rule(
        tuple(op for op in ins if op is not None),
        (result,),
        sizes,
        summed,
        linear=(frozenset({0}),) if backward else (),
        local=partial(_share, full) if reduction == MEAN else None,
    )


def _share(full: tuple[int, ...], call: Call, ins: tuple[Layout, ...], outs: Layouts) -> Callable[..., Any] | None:
    """A local mean counts for its share of all elements."""
    here = tuple(torch.broadcast_shapes(*(layout.local_shape for layout in ins)))
    split = prod(full) // max(1, prod(here))
    return None if split <= 1 else lambda *shards, mesh: rerun(call, shards) / split


def ctc_loss(call: Call) -> Rule:
    """Samples are free; the lattice of one is whole.

    Of each sample (t, 2 s + 1) forward variables are made, of three others each.
    """
    at = 1 if "backward" in call.target else 0
    texts: Texts = {at: "[t] n [c]", at + 1: "n [s]", at + 2: "n", at + 3: "n"}
    (steps, samples, _), (_, longest) = call.ins[at].shape, call.ins[at + 1].shape
    flops = 3 * steps * samples * (2 * longest + 1)
    if not at:
        return bind(call, texts, ["n"], flops=flops)
    return bind(call, {0: "n", **texts}, ["[t] n [c]"], linear=[{0}], flops=3 * flops)


RULES: dict[str, RuleFn] = {
    "colofunc.ctc_loss": ctc_loss,
    "colofunc.ctc_loss_backward": ctc_loss,
    "aten.nll_loss_forward": nll_forward,
    "aten.nll_loss_backward": nll_backward,
    "aten.nll_loss2d_forward": nll_forward,
    "aten.nll_loss2d_backward": nll_backward,
    **{f"aten.{name}": partial(elementwise_loss, position) for name, position in ELEMENTWISE.items()},
}
