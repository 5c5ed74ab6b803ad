"""Lists of tensors among the arguments and results of a plugin's operator.

Problem: autograd sees no tensor inside a list, and a rule has one operand per tensor, however many a call has. Idea: an
operator's arguments are spread flat where autograd looks, and a rule's operand of a list is repeated for each of its
tensors.

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

Lengths = tuple[int, ...]
"""Per argument: how many tensors its list has, -1 for what is no list of tensors."""


def is_list(x: Any) -> bool:
    """Whether an argument is a list of tensors; an empty list is one."""
    return isinstance(x, (list, tuple)) and all(isinstance(item, Tensor) for item in x)


def lengths(args: Sequence[Any]) -> Lengths:
    return tuple(len(arg) if is_list(arg) else -1 for arg in args)


def flat(args: Iterable[Any]) -> list[Any]:
    """The arguments, each list of tensors as its tensors."""
    items: list[Any] = []
    for arg in args:
        if is_list(arg):
            items += arg
        else:
            items.append(arg)
    return items


def spread(counts: Lengths, items: Iterable[Any]) -> tuple[Any, ...]:
    """The way back from `flat`."""
    rest = iter(items)
    args: list[Any] = []
    for count in counts:
        if count < 0:
            args.append(next(rest))
        else:
            args.append([next(rest) for _ in range(count)])
    return tuple(args)


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


def flat_function(
    name: str, op: Any, save: Callable[..., None], backward: Callable[..., Any], listed: bool
) -> type[torch.autograd.Function]:
    """The operator as an autograd function of (lengths, *flat arguments). listed: it gives a list."""

    def forward(counts: Lengths, *items: Any) -> Any:
        results = op(*spread(counts, items))
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
    """The rule of `text`, whose operands and `linear` sets count arguments: those of a list are repeated for its
    tensors.
    """
    left, _, right = text.partition("->")
    results = right.split(",")
    words, groups = left.split(","), [tuple(group) for group in linear]

    def rule(call: Call) -> Rule | None:
        operands = _operands(call)
        if len(operands) != len(words):
            return None
        repeated_words: list[str] = []
        for word, ids in zip(words, operands, strict=True):
            repeated_words += [word] * len(ids)
        sets: list[set[int]] = []
        for group in groups:
            sets.append(set().union(*(operands[position] for position in group)))
        outs = ",".join(results * len(call.outs)) if len(results) == 1 else right
        bound = bind(f"{','.join(repeated_words)} -> {outs}", call, reduce=reduce, linear=sets)
        if bound is None or not mults:
            return bound
        return with_flops(bound)

    return rule


def _operands(call: Call) -> list[tuple[int, ...]]:
    """Per argument that is a tensor, or a list of tensors: its operands."""
    operands = []
    for arg in (*call.args, *(value for _, value in call.kwargs)):
        ids = _refs(arg)
        if ids is not None:
            operands.append(ids)
    return operands


def _refs(x: Any) -> tuple[int, ...] | None:
    """Operands that an argument is; None where it is no tensor and no list of tensors."""
    if isinstance(x, Ref):
        return (x.id,)
    if isinstance(x, tuple) and x and all(isinstance(item, Ref) for item in x):
        return tuple(item.id for item in x)
    return None
