"""Lists of tensors among the arguments of an operator, or as its result: `stacked(xs: list[Tensor], w: Tensor) -> list[Tensor]`.

Problem: autograd sees no tensor inside a list, and a rule has one operand per tensor, however many a call has. Idea: an
operator's arguments are spread flat where autograd looks, and a rule's operand of a list is repeated for each of its tensors.

    flat(([a, b], w, 2))                -> [a, b, w, 2]            spread((2, -1, -1), ...) is the way back
    "b* d, d -> b* d", 2 tensors        -> "b* d, b* d, d -> b* d"; a result that is a list is repeated too
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from colofunc.spec.rule import Call, Ref, Rule
from colofunc.spec.rules.pattern import RuleFn, bind, with_flops

Lengths = tuple[int, ...]  # per argument: how many tensors its list has, -1 for what is no list of tensors


def is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(isinstance(item, Tensor) for item in x)


def lengths(args: Sequence[Any]) -> Lengths:
    return tuple(len(x) if is_list(x) else -1 for x in args)


def flat(args: Iterable[Any]) -> list[Any]:
    """The arguments, each list of tensors as its tensors."""
    return [item for x in args for item in (x if is_list(x) else (x,))]


def spread(found: Lengths, items: Iterable[Any]) -> tuple[Any, ...]:
    """The way back from `flat`."""
    rest = iter(items)
    return tuple(next(rest) if n < 0 else [next(rest) for _ in range(n)] for n in found)


def all_of(results: Any) -> tuple[Any, ...]:
    """What an operator returns, as a tuple."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def truths(nested: Any) -> Iterator[bool]:
    """`needs_input_grad`, in which torch keeps the structure of lists."""
    for item in nested:
        if isinstance(item, (list, tuple)):
            yield from truths(item)
        else:
            yield bool(item)


def function(
    name: str, op: Any, save: Callable[..., None], backward: Callable[..., Any], listed: bool
) -> type[torch.autograd.Function]:
    """The operator as an autograd function of (lengths, *flat arguments). listed: it gives a list."""

    def forward(found: Lengths, *items: Any) -> Any:
        results = op(*spread(found, items))
        return tuple(results) if isinstance(results, list) else results  # autograd looks into no list

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, spread(inputs[0], inputs[1:]), list(output) if listed else output)
        ctx.leading = 1

    def pulled(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None, *backward(ctx, *grads))

    body = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(pulled),
        "generate_vmap_rule": True,
    }
    return type(name.replace(".", "_").capitalize(), (torch.autograd.Function,), body)


def repeated(text: str, *, reduce: Mapping[str, str] | None, linear: Iterable[Iterable[int]], mults: bool) -> RuleFn:
    """The rule of `text`, whose operands and `linear` sets count arguments: those of a list are repeated for its tensors."""
    left, _, right = text.partition("->")
    results = right.split(",")
    words, groups = left.split(","), [tuple(group) for group in linear]

    def rule(call: Call) -> Rule | None:
        given = (*call.args, *(value for _, value in call.kwargs))
        operands = [ids for x in given if (ids := _refs(x)) is not None]
        if len(operands) != len(words):
            return None
        every = ",".join(word for word, ids in zip(words, operands, strict=True) for _ in ids)
        sets = [{i for k in group for i in operands[k]} for group in groups]
        out = ",".join(results * len(call.outs)) if len(results) == 1 else right
        found = bind(f"{every} -> {out}", call, reduce=reduce, linear=sets)
        return with_flops(found) if mults and found is not None else found

    return rule


def _refs(x: Any) -> tuple[int, ...] | None:
    """Operands that an argument is; None where it is no tensor and no list of tensors."""
    if isinstance(x, Ref):
        return (x.id,)
    if isinstance(x, tuple) and x and all(isinstance(item, Ref) for item in x):
        return tuple(item.id for item in x)
    return None
