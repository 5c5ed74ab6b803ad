"""Placing: from a tensor of any kind to the parts of the ranks in this process.

Problem: a step is given DTensors, plain tensors, which are global values, and lazy ones, which have no value yet; and
frozen weights are used by several steps and must lie in one place once. Idea: `place` knows the three kinds; `Shelf`
keeps the parts of captured tensors as long as the tensors live.

    shelf.parts(weight, layout, mesh, backend)        # placed at the first call, by whichever step comes first
    shelf.layout(weight, mesh)                        # where it lies, which the next step takes as given

A captured tensor that was written to since it was placed (torch counts writes) is placed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from colofunc import compat
from colofunc.dtensor.eager import convert_shards
from colofunc.dtensor.eager_dispatch import BRING_OVER
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError
from colofunc.executors.backend import Backend
from colofunc.executors.copies import COPIER
from colofunc.executors.disk.tensors import OnDisk, in_memory
from colofunc.executors.pools import in_tier, pinned_like
from colofunc.executors.simulated import Shards
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of
from colofunc.ops.flat import are_adjacent, as_adjacent
from colofunc.ops.plain import refuse_unlike
from colofunc.program.lazy import LazyTensor, make_parts
from colofunc.spec.layout import Layout
from colofunc.spec.parts import shared_parts
from colofunc.spec.transfer import part

ToDisk = Callable[[Shards, Layout], Shards]


def place(
    x: torch.Tensor,
    layout: Layout,
    mesh: Mesh,
    backend: Backend,
    copy: bool = False,
    name: str = "",
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Shards:
    """The parts of the ranks in this process; ranks that hold the same part share it.

    `name`: of `x`, for errors. `dtype`: of the parts.

    `copy`: they may be written to, so they must not be the caller's memory. `device`: what `device_of(mesh)` says, from
    who knows it. Parts lie in the memory that the layout says: that device's, or, beside a GPU, pinned on the host.
    """
    made = _placed(x, layout, mesh, backend, copy, name)
    if dtype is not None and dtype != x.dtype:
        cast = {id(s): s.to(dtype) for s in made}
        made = [cast[id(s)] for s in made]
    where = device_of(mesh) if device is None else device
    if where.type == "cpu" and not x.is_cuda:
        return made
    keep = in_tier if isinstance(x, (DTensor, LazyTensor)) or copy else _own
    settled = {id(s): keep(s, layout.tier, where) for s in made}
    return [settled[id(s)] for s in made]


def _on_their_own(converted: Shards, parts: Shards, tier: str) -> Shards:
    """Converted parts in memory of their own: a slice would keep all that it was cut from, and a step writes to its
    state in place.
    """
    lent = {mine.untyped_storage().data_ptr() for mine in parts if not isinstance(mine, OnDisk)}
    own: dict[int, torch.Tensor] = {}  # ranks that share a part go on sharing it
    for mine in converted:
        own[id(mine)] = mine if tier == "disk" else in_memory(mine)
        if isinstance(mine, OnDisk):
            continue
        memory = mine.untyped_storage()
        if memory.nbytes() != mine.nbytes or memory.data_ptr() in lent:
            own[id(mine)] = mine.clone()
    return [own[id(mine)] for mine in converted]


def _own(x: torch.Tensor, tier: str, device: torch.device) -> torch.Tensor:
    """A caller's tensor where a value of that tier lies.

    On the host it is a copy: a card may read it when the caller has gone on.
    """
    if tier != "host" or not x.is_cpu or isinstance(x, OnDisk):
        return in_tier(x, tier, device)
    return pinned_like(x).copy_(x)


def other_mesh_error(what: str, x: DTensor, mesh: Mesh) -> InputError:
    """What to say of a tensor that lies on another mesh than the step's."""
    return InputError(
        f"{what} lies on {x.mesh}, the step runs on {mesh}. Try: step.init(state, ...), which places all of a state "
        f"anew, or cf.load(path, mesh=...); a single tensor with {BRING_OVER}"
    )


def captured_mesh_error(name: str, x: DTensor, mesh: Mesh) -> InputError:
    """What to say of one that the step takes from outside: nothing places it anew but its owner."""
    return InputError(
        f"a tensor of shape {tuple(x.shape)} that the step captured from outside ({name!r}) lies on {x.mesh}, the step "
        f"runs on {mesh}. Try: {BRING_OVER} before the step, or the tensor as an argument of it, in a state that "
        "step.init(state, ...) places anew"
    )


def _placed(x: torch.Tensor, layout: Layout, mesh: Mesh, backend: Backend, copy: bool, name: str) -> Shards:
    """The parts, wherever the tensor lies."""
    what = f"argument {name!r}" if name else "an argument"
    if isinstance(x, DTensor):
        if x.mesh != mesh:
            raise other_mesh_error(what, x, mesh)
        if x.sharding is layout:
            return [part.clone() for part in x.parts] if copy else x.parts_in_flight
        converted = convert_shards(x.parts, x.sharding, layout, mesh, backend)
        return _on_their_own(converted, x.parts, layout.tier) if copy or x.owned else converted
    if x.is_meta:
        raise InputError(
            f"{what} of shape {tuple(x.shape)} has no data (meta tensor); give real values to run, cf.lazy(...) to "
            "have them made, or use step.lower"
        )
    if isinstance(x, LazyTensor):
        return make_parts(x, layout, mesh, backend.ranks(mesh))
    refuse_unlike(x, what, InputError)
    plain = x.detach().resolve_conj().resolve_neg()
    if mesh.size == 1 and not layout.is_padded and layout.local_shape == layout.shape and not layout.pending:
        return [plain.clone() if copy or not plain.is_contiguous() else plain]

    def made(rank: int) -> torch.Tensor:
        piece = part(plain, layout, mesh, rank)
        return piece.clone() if copy or not piece.is_contiguous() else piece

    return shared_parts(layout, mesh, backend.ranks(mesh), made)


def side_by_side(inputs: Sequence[Shards], buffers: Sequence[Sequence[int]]) -> list[Shards]:
    """The inputs, those of each buffer (positions) one behind the other in memory on every rank: copied if they are not
    yet.
    """
    out = list(inputs)
    for run in buffers:
        done: dict[tuple[int, ...], list[torch.Tensor]] = {}
        lanes = []
        for mine in zip(*(inputs[k] for k in run), strict=True):
            key = tuple(map(id, mine))  # ranks that hold the same parts go on sharing them
            if key not in done:
                if not are_adjacent(mine):
                    COPIER.arrived(mine)
                done[key] = as_adjacent(mine)
            lanes.append(done[key])
        for place_in_run, k in enumerate(run):
            out[k] = [lane[place_in_run] for lane in lanes]
    return out


@attrs.frozen(eq=False)
class PlacedParts:
    """The parts of one tensor in one layout, and how often the tensor had been written to."""

    version: int
    layout: Layout
    dtype: torch.dtype
    shards: Shards


class Shelf:
    """Where captured tensors lie. An entry lives as long as its tensor."""

    def __init__(self) -> None:
        self._kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def layout(self, x: torch.Tensor, mesh: Mesh) -> Layout | None:
        """Where the tensor was placed last on this mesh; None if nowhere."""
        if isinstance(x, DTensor):
            return x.sharding if x.mesh == mesh else None
        found = [some[-1] for (on, _), some in self._kept.get(x, {}).items() if on == mesh and some]
        return found[-1].layout if found else None

    def has(
        self, x: torch.Tensor, layout: Layout, mesh: Mesh, backend: Backend, dtype: torch.dtype | None = None
    ) -> Shards | None:
        """The tensor's parts, if it lies there in this layout and dtype and was not written to since."""
        wanted = compat.version(x), layout, dtype or x.dtype
        same = (one for one in self._of(x, mesh, backend) if (one.version, one.layout, one.dtype) == wanted)
        return next((one.shards for one in same), None)

    def parts(
        self,
        x: torch.Tensor,
        layout: Layout,
        mesh: Mesh,
        backend: Backend,
        name: str = "",
        to_disk: ToDisk | None = None,
        dtype: torch.dtype | None = None,
    ) -> Shards:
        """The tensor's parts; placed now if it is not there in this layout and dtype, or was written to since.

        to_disk: takes parts there, where the layout says disk; without it those are the caller's alone, in memory.
        """
        if isinstance(x, DTensor):
            if x.mesh != mesh:
                raise captured_mesh_error(name, x, mesh)
            return place(x, layout, mesh, backend, name=name, dtype=dtype)
        if (there := self.has(x, layout, mesh, backend, dtype)) is not None:
            return there
        shards = place(x, layout, mesh, backend, name=name, dtype=dtype)
        if layout.tier == "disk":
            if to_disk is None:
                return shards
            shards = to_disk(shards, layout)
        elif len(shards) < mesh.size:  # a real rank keeps only its part
            shards = [s.clone() if s.untyped_storage().nbytes() > s.numel() * s.itemsize else s for s in shards]
        found, version = self._of(x, mesh, backend), compat.version(x)
        new = PlacedParts(version, layout, dtype or x.dtype, shards)
        others = [one for one in found if one.version == version and (one.layout, one.dtype) != (new.layout, new.dtype)]
        found[:] = [*others, new]
        return shards

    def _of(self, x: torch.Tensor, mesh: Mesh, backend: Backend) -> list[PlacedParts]:
        by_mesh = self._kept.setdefault(x, {})
        found: list[PlacedParts] = by_mesh.setdefault((mesh, backend.ranks(mesh)), [])
        return found


SHELF = Shelf()
"""One for the process, as tensors are: steps that share a model share its frozen weights' parts."""
