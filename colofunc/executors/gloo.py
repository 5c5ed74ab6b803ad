"""Gloo: collectives written with sends and receives.

Each pair of members exchanges what it needs directly, in one step; what a rank keeps never travels, received data lands
where it belongs, and sums are taken in member order as the simulated mesh does. On loopback that is 2 to 5 times faster
than gloo's own gather and reduce-scatter, which move whole buffers through a worker thread. Sends and receives of a pair
match in the order of the program, which all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from colofunc.executors.collective_starts import MAKERS, Group, Start, Started, all_reduce, bytes_of, flat_from
from colofunc.executors.kernels import reduce_members

DIRECT_BYTES = 1 << 16  # up to here an all-reduce of more than two ranks sends everything to everybody: one step


def _others(group: Group) -> tuple[int, ...]:
    """Places of the other members, beginning behind this rank's own, so that not all send to the same one first."""
    count = len(group.members)
    return tuple((group.place + distance) % count for distance in range(1, count))


def _post(
    group: Group, send: Callable[[int], torch.Tensor], receive: Callable[[int], torch.Tensor]
) -> tuple[list[Any], list[Any]]:
    """Post a receive from and a send to every other member; (works, tensors that must stay alive)."""
    others = _others(group)
    works = [dist.irecv(bytes_of(receive(place)), group.members[place], group=group.pg) for place in others]
    sent = [send(place) for place in others]
    for place, x in zip(others, sent, strict=True):
        works.append(dist.isend(bytes_of(x), group.members[place], group=group.pg))
    return works, sent


def exchange_tensors(sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
    """Send contiguous tensors to other ranks and receive into others', by global rank, all at once.

    Empty ones do not travel.
    """
    ops: list[dist.P2POp] = []
    for what, tensors in ((dist.irecv, received), (dist.isend, sent)):
        for rank, x in sorted(tensors.items()):
            if x.numel():
                ops.append(dist.P2POp(what, bytes_of(x), rank))
    if not ops:
        return
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _gather_direct(group: Group) -> Start:
    n = len(group.members)

    def start(x: torch.Tensor) -> Started:
        x = x.contiguous()
        out = torch.empty((n, *x.shape), dtype=x.dtype, device=x.device)
        if not x.numel():
            return Started((), lambda: out)
        works, sent = _post(group, lambda k: x, out.__getitem__)
        out[group.place].copy_(x)
        return Started(works, lambda: out, sent)

    return start


def _exchange_direct(group: Group) -> Start:
    def start(x: torch.Tensor) -> Started:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not x.numel():
            return Started((), lambda: out)
        works, sent = _post(group, lambda k: x[k].contiguous(), out.__getitem__)
        out[group.place].copy_(x[group.place])
        return Started(works, lambda: out, sent)

    return start


def _scatter_direct(group: Group, how: str) -> Start:
    """Every member gets its chunk of all others and reduces."""

    def start(x: torch.Tensor) -> Started:
        if not x.numel():
            return Started((), lambda: torch.empty(x.shape[1:], dtype=x.dtype, device=x.device))
        parts = _blanks(group, x[group.place])
        works, sent = _post(group, lambda k: x[k].contiguous(), parts.__getitem__)
        return Started(works, lambda: reduce_members(parts, how), sent)

    return start


def _reduce_direct(group: Group, how: str) -> Start:
    """Everybody sends everything to everybody: of two ranks these are the bytes of a ring, in one step."""
    large = all_reduce(group, how)

    def start(x: torch.Tensor) -> Started:
        if len(group.members) > 2 and x.nbytes > DIRECT_BYTES:
            return large(x)
        x = x.contiguous()
        if not x.numel():
            return Started((), x.clone)
        parts = _blanks(group, x)
        works, sent = _post(group, lambda k: x, parts.__getitem__)
        return Started(works, lambda: reduce_members(parts, how), sent)

    return start


def _blanks(group: Group, own: torch.Tensor) -> list[torch.Tensor]:
    """One tensor per member: this rank's own, and empty ones to receive into."""
    parts: list[torch.Tensor] = []
    for place in range(len(group.members)):
        if place == group.place:
            parts.append(own)
        else:
            parts.append(torch.empty(own.shape, dtype=own.dtype, device=own.device))
    return parts


GLOO: dict[str, Callable[..., Start]] = {
    **MAKERS,
    "all_gather": _gather_direct,
    "all_gather_flat": flat_from(_gather_direct),
    "all_to_all": _exchange_direct,
    "reduce_scatter": _scatter_direct,
    "all_reduce": _reduce_direct,
}


def through_host(start: Start) -> Start:
    """For tensors on a GPU that gloo carries, which sends from host memory only.

    So do ranks that share a GPU, which NCCL refuses.
    """

    def run(x: Any) -> Started:
        single = isinstance(x, torch.Tensor)
        device = (x if single else x[0]).device
        started = start(x.cpu() if single else [one.cpu() for one in x])
        return Started((), lambda: started.wait().to(device))

    return run
