"""Collectives on real ranks as a backend has them (NCCL, or MPI): each is one function that starts it.

    started = MAKERS["all_gather"](group)(x)
    started.wait()                                       # (n, *x.shape)

Process groups are sorted by rank, a group of ranks along mesh axes has an order of its own: chunks are reordered where
the orders differ. What only moves data moves bytes, so that backends need not know its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from colofunc.ops.flat import flat_of

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# What gloo can add; anything else is reduced in a wider type and comes back.
_GLOO_SUMS = (
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.float16,
    torch.bfloat16,
)


class Started:
    """A collective in flight: what it waits for, what must stay alive meanwhile, and how its result is made."""

    __slots__ = ("_finish", "_keep", "_works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], torch.Tensor], keep: Any = None) -> None:
        self._works = works
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._keep = keep

    @property
    def works(self) -> Sequence[Any]:
        """What it waits for."""
        return self._works

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        assert self._finish is not None, "a collective is waited for once"
        out = self._finish()
        self._finish = self._keep = None  # the buffers that it received into
        return out


Start = Callable[[Any], Started]  # of a tensor; of several for `all_gather_flat`


@attrs.frozen
class Group:
    """This rank's group along some axes. `members`: global ranks in mesh order; `place`: of this rank among them."""

    pg: Any
    members: tuple[int, ...]
    place: int
    order: tuple[int, ...] | None  # member k stands at order[k] in the process group; None: same order
    inverse: tuple[int, ...] | None


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one flat run of bytes."""
    return x.view(-1).view(torch.uint8) if x.dtype != torch.uint8 else x.view(-1)


def rows_in_order(x: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Chunks of dim 0 in another order, contiguous."""
    return x.contiguous() if order is None else torch.stack([x[place] for place in order])


def _all_gather(group: Group) -> Start:
    n = len(group.members)

    def start(x: torch.Tensor) -> Started:
        x = x.contiguous()
        out = torch.empty((n, *x.shape), dtype=x.dtype, device=x.device)
        if not x.numel():
            return Started((), lambda: out)
        work = dist.all_gather_into_tensor(bytes_of(out), bytes_of(x), group=group.pg, async_op=True)
        return Started((work,), lambda: out if group.order is None else rows_in_order(out, group.order), x)

    return start


def _all_to_all(group: Group) -> Start:
    def start(x: torch.Tensor) -> Started:
        sent = rows_in_order(x, group.inverse)
        out = torch.empty_like(sent)
        if not x.numel():
            return Started((), lambda: out)
        work = dist.all_to_all_single(bytes_of(out), bytes_of(sent), group=group.pg, async_op=True)
        return Started((work,), lambda: out if group.order is None else rows_in_order(out, group.order), sent)

    return start


def _reduce_scatter(group: Group, how: str) -> Start:
    def start(x: torch.Tensor) -> Started:
        sent = rows_in_order(x, group.inverse)
        out = torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)
        if not x.numel():
            return Started((), lambda: out)
        work = dist.reduce_scatter_tensor(out.view(-1), sent.view(-1), op=_OPS[how], group=group.pg, async_op=True)
        return Started((work,), lambda: out, sent)

    return start


def all_reduce(group: Group, how: str) -> Start:
    def start(x: torch.Tensor) -> Started:
        if x.dtype.is_complex:
            total = torch.view_as_real(x.clone(memory_format=torch.contiguous_format))
        elif x.dtype in _GLOO_SUMS:
            total = x.to(x.dtype, copy=True, memory_format=torch.contiguous_format)
        elif x.dtype == torch.bool:
            total = x.to(torch.uint8, copy=True, memory_format=torch.contiguous_format)
        else:
            wider = torch.float32 if x.dtype.is_floating_point else torch.int32
            total = x.to(wider, copy=True).contiguous()
        if not x.numel():
            return Started((), lambda: total)
        work = dist.all_reduce(total, op=_OPS[how], group=group.pg, async_op=True)
        if x.dtype.is_complex:
            return Started((work,), lambda: torch.view_as_complex(total))
        return Started((work,), lambda: total.to(x.dtype))

    return start


def _permute(group: Group, table: Sequence[int]) -> Start:
    source = table[group.place]
    receivers = [place for place, sender in enumerate(table) if sender == group.place]

    def start(x: torch.Tensor) -> Started:
        if source == group.place and receivers == [group.place]:
            return Started((), lambda: x.clone(memory_format=torch.contiguous_format))
        x = x.contiguous()
        out = torch.empty_like(x)
        if not x.numel():
            return Started((), lambda: out)
        # Tensors travel as bytes; each rank posts its receive and its sends at once, so no order can deadlock.
        ops: list[dist.P2POp] = []
        for place in receivers:
            if place != group.place:
                ops.append(dist.P2POp(dist.isend, bytes_of(x), group.members[place], group.pg))
        if source == group.place:
            out.copy_(x)
        else:
            ops.append(dist.P2POp(dist.irecv, bytes_of(out), group.members[source], group.pg))
        return Started(dist.batch_isend_irecv(ops) if ops else (), lambda: out, x)

    return start


def flat_from(make: Callable[[Group], Start]) -> Callable[[Group], Start]:
    """The gather of several tensors from the gather of one."""

    def made(group: Group) -> Start:
        start = make(group)
        return lambda xs: start(flat_of(xs))

    return made


MAKERS: dict[str, Callable[..., Start]] = {
    "all_gather": _all_gather,
    "all_gather_flat": flat_from(_all_gather),
    "reduce_scatter": _reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
