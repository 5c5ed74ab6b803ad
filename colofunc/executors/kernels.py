"""Kernels: the quickest Python callable of each target, and facts about targets that executors need.

Problem: a dispatcher call through a wrapper costs microseconds, thousands of times a step. Idea: look everything up
once, when a program is compiled: our own operators become their plain kernels, `rearrange` becomes at most a reshape,
a permute and a reshape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from colofunc.errors import ProgramError, near
from colofunc.ops.define import KERNELS
from colofunc.ops.linear import FOR_MATRICES
from colofunc.ops.targets import argument_names, overload, resolve
from colofunc.program.facts import Steps
from colofunc.program.ir import GATHERS, Node


def _contiguous(fn: Callable[..., Any], first: int, last: int) -> Callable[..., Any]:
    """A kernel of torch that reads operands `first` to `last` as if they were contiguous, which a rank's part may not
    be.
    """

    def kernel(*args: Any) -> Any:
        return fn(*args[:first], *(x.contiguous() for x in args[first : last + 1]), *args[last + 1 :])

    return kernel


# Torch functions that are an operator of torch without its overload's own way to be called, which takes a microsecond
# longer; and kernels that read operands without strides: the statistics of a layer norm everywhere, what a group norm
# is of on a card; and one that refuses them: logarithms may have been written over what a convolution made, which lies
# as that lays it.
_FAST: dict[str, Callable[..., Any]] = {
    "aten.add.Tensor": torch.add,
    "aten.add.out": torch.add,
    "aten.gelu.default": F.gelu,
    "aten.mul.Tensor": torch.mul,
    "aten.mul.out": torch.mul,
    "aten.native_layer_norm.default": torch.native_layer_norm,
    "aten.permute.default": torch.permute,
    "aten.relu.default": torch.relu,
    "aten.select.int": torch.select,
    "aten.squeeze.dim": torch.squeeze,
    "aten.sum.dim_IntList": torch.sum,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
    "aten.view.default": torch.reshape,
    "aten.native_layer_norm_backward.default": _contiguous(torch.ops.aten.native_layer_norm_backward.default, 3, 4),
    "aten.native_group_norm.default": _contiguous(torch.ops.aten.native_group_norm.default, 0, 0),
    "aten.native_group_norm_backward.default": _contiguous(torch.ops.aten.native_group_norm_backward.default, 0, 1),
    "aten.nll_loss2d_backward.default": _contiguous(torch.ops.aten.nll_loss2d_backward.default, 1, 1),
}


def callable_of(target: str, dims: int | None = None) -> Callable[..., Any]:
    """What executors call for `target`, whose first operand has so many dims.

    Not kept: `cf.operator` may give another kernel.
    """
    found = _FAST.get(target) or KERNELS.get(target) or resolve(target)
    return FOR_MATRICES.get(found, found) if dims == 2 else found


def check_words(node: Node) -> None:
    """What becomes part of written source is an id, or the name of an argument that the operator has.

    Raises ProgramError.

    A program that was read from a file may say anything, and need not have been checked.
    """
    ids = [id for id in (*node.refs, *node.outs) if id is not None]
    if any(type(id) is not int for id in ids):
        raise ProgramError(f"{node.target}: {ids!r:.80} are no ids of values")
    for name, _ in node.kwargs:
        known = argument_names(node.target)
        if name not in known:
            raise ProgramError(f"{node.target} has no argument {name!r:.80}{near(str(name), known, 'arguments')}")
    loop = node.loop
    if loop is None:
        return
    words_fit = type(loop.axis) is str and set(loop.gathers) <= set(GATHERS)
    if type(loop.trips) is not int or not words_fit:
        raise ProgramError(
            f"{node.target}: {loop.trips!r:.80} trips over {loop.axis!r:.80}, gathered as {loop.gathers!r:.80}"
        )


@cache
def result_kind(target: str) -> str:
    """How the results of a target come: "one" tensor, "flat" sequence, "nested" sequence of sequences, or "none"."""
    returns = overload(target)._schema.returns
    lists = [isinstance(returned.type, torch.ListType) for returned in returns]
    if not returns:
        return "none"
    if len(returns) == 1:
        return "flat" if lists[0] else "one"
    return "nested" if any(lists) else "flat"


def rearrange_text(name: str, steps: Steps) -> str:
    """The expression that applies `rearrange_steps` to a variable."""
    first, order, last = steps
    text = name
    if first is not None:
        text += f".reshape({first!r})"
    if order is not None:
        text += f".permute({order!r})"
    if last is not None:
        text += f".reshape({last!r})"
    return text


def in_its_memory(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where it is a part of larger memory, which would stay as long as the part."""
    return x if x.untyped_storage().nbytes() <= x.nbytes else x.clone()


def reduce_members(members: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    """The reduction of the members' tensors in member order, in a contiguous buffer of its own."""
    fns: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    fn = fns[how]
    first = members[0]
    total = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    if len(members) == 1:
        return total.copy_(first)
    fn(first, members[1], out=total)
    for member in members[2:]:
        fn(total, member, out=total)
    return total


class HostCount:
    """The number of rows that travel in an all-to-all, on the host. rows: (c,) equal integers; `None` where c is 0.

    Sizes of messages are the host's, and how many tokens go where is data: here the host has to wait for the device. It
    is told by a copy to pinned memory that begins as soon as the number is there, and waits for it when the first
    exchange begins.
    """

    __slots__ = ("_arrived", "_number")

    def __init__(self, rows: torch.Tensor) -> None:
        self._arrived: Any = None
        self._number = rows[:1]
        if rows.is_cuda:
            host = torch.empty(self._number.shape, dtype=rows.dtype, pin_memory=True)
            self._number = host.copy_(self._number, non_blocking=True)
            self._arrived = torch.cuda.current_stream(rows.device).record_event()

    def value(self) -> int | None:
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return int(self._number[0]) if self._number.numel() else None


def first_rows(x: torch.Tensor, count: int | None) -> torch.Tensor:
    """The rows of each chunk that travel in an all-to-all. x: (n, c, *s) -> (n, count, *s)."""
    return x if count is None else x[:, :count]


def without_rest(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What came in an all-to-all with zeros behind as many rows as `rows` says.

    The host does not learn how many. x: (n, c, *s).
    """
    rest = torch.arange(x.shape[1], device=x.device) >= rows
    return x.masked_fill_(rest.reshape(1, -1, *(1,) * (x.dim() - 2)), 0)


def with_zeros(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What came in an all-to-all, and zeros behind it, of the shape of `like`."""
    if x.shape == like.shape:
        return x
    out = torch.zeros(like.shape, dtype=x.dtype, device=x.device)
    out[:, : x.shape[1]] = x
    return out
