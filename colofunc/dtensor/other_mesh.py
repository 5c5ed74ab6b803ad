"""From one mesh to another: the parts of a tensor in a layout of a second mesh, without the whole in between.

Both meshes are of the same ranks, or all ranks of the first are in this process. Where the first is of real ranks and
the second is simulated, every process is to hold all parts, so there the whole is what has to be sent.

Every rank knows both layouts, so each finds out alone what it sends and what it gets
(`spec.transfer`); all messages of a tensor are posted at once, and what a rank keeps does not travel.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import torch

from colofunc.dtensor.eager import convert_shards, settled_parts, to_compute
from colofunc.executors.backend import Backend, backend_for
from colofunc.executors.simulated import Shards
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of
from colofunc.program.lazy import Slices
from colofunc.spec.layout import Layout, replicated
from colofunc.spec.parts import shared_parts
from colofunc.spec.transfer import Transfer, TransferPiece, part


class Laid(Protocol):
    """What lies on a mesh: a DTensor."""

    @property
    def parts(self) -> Shards: ...

    sharding: Layout
    mesh: Mesh
    _backend: Backend


def parts_on(x: Laid, target: Layout, other: Mesh) -> Shards:
    """The parts of the ranks in this process, of `x` in a layout of another mesh, in memory of their own.

    Collective on real ranks.
    """
    source = x.sharding.with_pending(())
    parts = convert_shards(x.parts, x.sharding, source, x.mesh, x._backend) if x.sharding.pending else x.parts
    plan = Transfer(source, x.mesh, target, other)
    mine, wanted = x._backend.ranks(x.mesh), backend_for(other).ranks(other)
    if target.pending or (len(mine) < x.mesh.size and wanted != mine):
        whole = convert_shards(parts, source, replicated(source.shape), x.mesh, x._backend, "a change of mesh")[0]
        made = [part(whole, target, other, rank).clone() for rank in wanted]
    elif len(mine) == x.mesh.size:  # all ranks that there were are in this process

        def value(piece: TransferPiece[int]) -> torch.Tensor:
            return plan.taken(parts[piece.source], piece)

        made = shared_parts(target, other, wanted, lambda rank: plan.made(rank, value, parts[0]))
    else:
        made = [_exchanged(plan, parts[0], mine[0], x._backend)]
    return settled_parts(made, target, other)


@attrs.frozen(eq=False)
class FromOtherMesh:
    """A source of a lazy tensor: a DTensor of another mesh, brought over when a plan has said where its parts are to
    lie.
    """

    tensor: Any  # a DTensor

    def make(self) -> torch.Tensor:
        whole: torch.Tensor = self.tensor.full()
        return whole

    def read(self, box: Slices) -> torch.Tensor | None:
        return None

    def token(self) -> int:
        return 0

    def parts(self, layout: Layout, mesh: Mesh) -> Shards:
        return parts_on(self.tensor, layout, mesh)


def _exchanged(plan: Transfer, mine: torch.Tensor, rank: int, backend: Backend) -> torch.Tensor:
    """This process is one rank of both meshes."""
    mine = to_compute([mine], device_of(plan.mesh))[0]
    sent = {target: plan.taken(mine, piece).contiguous() for target, piece in plan.sent(rank).items()}
    received = {piece.source: mine.new_empty(piece.shape) for piece in plan.received(rank) if piece.source != rank}
    what = f"a change of mesh of a DTensor {plan.source.shape} {plan.source.text()!r}"
    backend.exchange(what, sent, received)

    def value(piece: TransferPiece[int]) -> torch.Tensor:
        return plan.taken(mine, piece) if piece.source == rank else received[piece.source]

    return plan.made(rank, value, mine)
