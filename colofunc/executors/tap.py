"""Taps: looking at a program while it runs, node by node, on the executor that runs it.

Problem: a wrong number shows at the end of a step and was made somewhere inside it. Idea: the program is written down
as source (see `source`), so a tap is one more line behind each node's own. What it sees is what the executor has: the
same kernels, the same collectives, the same sharing between lanes.

    v4 = linear(v2, v0, v1)
    look(7, ((v4, v4),))            # node 7, one result, its tensor on each of two lanes
    del v2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from colofunc.executors.source import Tap, Writer
from colofunc.mesh.device import gpu_of_process
from colofunc.mesh.transport import carriers
from colofunc.program.ir import Node

LaneValues = tuple[torch.Tensor, ...]


def values_tap(look: Callable[[int, tuple[LaneValues, ...]], None]) -> Tap:
    """A tap that hands the results of every node to `look(index, per result: its tensor on each lane)`."""

    def tap(writer: Writer, index: int, node: Node) -> None:
        lanes = [f"({', '.join(writer.everywhere(out))},)" for out in node.results]
        if lanes:
            writer.line(f"{writer.bind(look, 'look')}({index}, ({', '.join(lanes)},))")

    return tap


def everyones(lanes: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """Every rank's tensor in rank order: the lanes themselves, or gathered where each rank has a process of its own."""
    if len(lanes) == ranks:
        return list(lanes)
    (mine,) = lanes
    if not mine.numel():
        return [mine] * ranks
    flat = mine.contiguous().reshape(-1).view(torch.uint8)
    if "cpu" not in carriers():  # NCCL alone takes tensors on a GPU only
        flat = flat.to(gpu_of_process())
    found = torch.empty((ranks, flat.numel()), dtype=torch.uint8, device=flat.device)
    dist.all_gather_into_tensor(found.view(-1), flat)
    return [x.view(mine.dtype).reshape(mine.shape).to(mine.device) for x in found]
