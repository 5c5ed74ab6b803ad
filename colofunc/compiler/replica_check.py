"""Copies that ranks compute alike: whether they still are alike.

Problem: a value that is not split along an axis is computed by every rank along it, and nobody sends it. That holds as
long as a kernel gives the same bits on all of them. One that adds in the order in which threads come (`index_add`,
`scatter_add`, the gradient of an embedding), or another kind of GPU, rounds otherwise; copies of a weight drift apart,
slowly, and nothing fails. Kernels that give the same bits each time cost speed in every step, and sending costs a
collective in every step. Idea: look, every so many steps, which takes one read of the copies and one small collective:

    sum of (bits of an element as an integer) · (an odd number by its place), modulo 2^64, per leaf and rank

Equal copies have equal sums. Copies that differ have others, unless changes of elements that lie a multiple of
`COLUMNS` apart cancel out. Padding is left out, which holds anything; what lies on disk is read for it, one leaf after
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from colofunc.errors import CollectiveError
from colofunc.executors.copies import COPIER
from colofunc.executors.disk.tensors import in_memory
from colofunc.executors.pools import in_tier
from colofunc.executors.simulated import Shards
from colofunc.executors.tap import everyones
from colofunc.executors.watch import Watch
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of
from colofunc.spec.layout import Layout
from colofunc.spec.parts import part_key
from colofunc.spec.regions import unpadded

EVERY = 100
"""Steps between two looks, where nobody says otherwise."""
COLUMNS = 1024
"""Elements in a row are weighed by different numbers, as many as these; the rows are added first, without memory for
products."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio in 64 bits (Knuth, volume 3, section 6.4), as a signed number


class ReplicaLeaves:
    """The leaves of one step's results that several ranks hold as copies."""

    def __init__(self, names: Sequence[str], layouts: Sequence[Layout], mesh: Mesh) -> None:
        self._mesh = mesh
        self._names = names
        self._layouts = layouts
        self._which = [k for k, layout in enumerate(layouts) if _copied(layout, mesh)]
        columns = [_first_holders(layouts[k], mesh) for k in self._which]
        # (ranks, leaves)
        self._first = torch.tensor(columns, dtype=torch.int64).reshape(len(columns), mesh.size).t().contiguous()

    def check(self, outs: Sequence[Shards], watch: Watch, where: str, every: int) -> None:
        """Raise CollectiveError, on all ranks, naming the leaves whose copies differ.

        Collective. where: the step, for errors.
        """
        if not self._which:
            return
        device = device_of(self._mesh)
        COPIER.arrived(outs[k][0] for k in self._which)
        sums = torch.stack([in_tier(self._sum(k, outs[k][0]), "device", device) for k in self._which])
        with watch:
            told = torch.stack(everyones([sums], self._mesh.size)).cpu()
        differs = told != told.gather(0, self._first)
        if bool(differs.any()):
            raise CollectiveError(self._text(differs, where, every))

    def _sum(self, k: int, part: torch.Tensor) -> torch.Tensor:
        return bits_sum(unpadded(in_memory(part), self._layouts[k], self._mesh, self._mesh.rank))

    def _text(self, differs: torch.Tensor, where: str, every: int) -> str:
        wrong = differs.any(0).nonzero().flatten().tolist()
        ranks = differs[:, wrong[0]].nonzero().flatten().tolist()
        first = self._which[wrong[0]]
        holders = sorted({int(self._first[rank, wrong[0]]) for rank in ranks})
        layout = self._layouts[first]
        others = f" and {len(wrong) - 1} more leaves" if len(wrong) > 1 else ""
        return (
            f"{self._names[first]!r} {layout.shape} {layout.text()!r}{others} should be the same on ranks that hold "
            f"copies, and is not: ranks {ranks} differ from {holders}, after {where}. The ranks compute it alike, and "
            f"a kernel has not given them the same bits; the numbers of the last {every} steps cannot be trusted. Try: "
            "torch.use_deterministic_algorithms(True) on GPUs of one kind, or a plan that splits it, as zero(1, axis) "
            "does, so that one rank computes and sends; then load the last checkpoint. cf.shard(..., agree_every=0) "
            "does not look"
        )


def state_names(outs: Sequence[str], inputs: Sequence[str]) -> list[str]:
    """What results are called, those of the state as it is called where it comes in: `out.0.params.w` is
    `state.params.w`.
    """
    known = {name.partition(".")[2]: name for name in reversed(inputs)}
    tails = [name.partition(".")[2].removeprefix("0.") for name in outs]
    return [known.get(tail, name) if tail else name for tail, name in zip(tails, outs, strict=True)]


def _copied(layout: Layout, mesh: Mesh) -> bool:
    """Whether some ranks hold the same part of it."""
    taken = {*layout.axes, *(axis for axis, _ in layout.pending)}
    if layout.at is not None and len(layout.at[1]) == 1:
        taken.add(layout.at[0])
    return any(size > 1 and axis not in taken for axis, size in mesh.axes)


def _first_holders(layout: Layout, mesh: Mesh) -> list[int]:
    """Per rank, the first one that holds the same part."""
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(part_key(layout, mesh, rank), rank) for rank in range(mesh.size)]


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * COLUMNS, 2, dtype=torch.int64, device=device) * _ODD


def bits_sum(x: torch.Tensor) -> torch.Tensor:
    """A checksum of the bits of a tensor, int64 of no dims, where the tensor lies; nobody waits for it."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words, weights = flat.view(_WORDS[flat.itemsize]), _weights(x.device)
    rows = words.numel() // COLUMNS
    added = words[: rows * COLUMNS].view(rows, COLUMNS).sum(0, dtype=torch.int64)
    rest = words[rows * COLUMNS :].to(torch.int64)
    return (added * weights).sum() + (rest * weights[: rest.numel()]).sum()
