"""Putting stored pieces where they are wanted: which layout each tensor gets, and its parts from the pieces.

Problem: the pieces of a tensor were cut for other ranks than those that load it. Idea: for each part that this process
needs, take the overlap with every piece, and read no more; a part that all ranks of a simulated mesh share is read
once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import attrs
import torch

from colofunc.dtensor.tensor import DTensor
from colofunc.errors import CheckpointError, InputError, SpecError, near
from colofunc.executors.backend import backend_for
from colofunc.executors.disk.tensors import unread
from colofunc.functional.checkpoint.tree import tensor_names
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of, gpu_of_process
from colofunc.planner.plan import matches
from colofunc.program.lazy_packed import PackedSource
from colofunc.spec.layout import At, Atom, Layout, make_layout, replicated
from colofunc.spec.parts import holds, shared_parts
from colofunc.spec.regions import Pick, Region, padded, region_of
from colofunc.spec.spec import Spec, bind
from colofunc.spec.transfer import TransferPiece, assembled, pieces_of

SpecLike = str | Spec | Layout
ReadPicks = Callable[[Any, Sequence[Pick]], torch.Tensor]


@attrs.frozen
class Entry:
    """A stored tensor: what it is, its pieces with their regions, and how to read from one.

    `packed`: where a weight lies in a quantized format, its parts; the entry itself is then what they stand for.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Region, Any], ...]
    read: ReadPicks
    dims: tuple[tuple[Atom, ...], ...] | None = None  # of the layout it was saved in
    tier: str = "device"
    at: At | None = None
    packed: PackedSource | None = None

    def region(self, wanted: Region) -> torch.Tensor:
        """These elements, in order. Raises CheckpointError where the pieces do not hold all of them."""
        pieces = pieces_of(wanted, self.pieces)
        left = wanted.numel - sum(prod(piece.shape) for piece in pieces)
        if left:
            raise CheckpointError(
                f"{self.name!r}: {left} of {wanted.numel} elements {wanted.text()} are in no file; it is incomplete"
            )
        if len(pieces) == 1 and pieces[0].in_order:
            return _own(self._read(pieces[0]).reshape(wanted.shape))
        return assembled(torch.empty(wanted.shape, dtype=self.dtype), pieces, self._read)

    def part(self, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
        """A rank's part: no more of the files is read."""
        return padded(self.region(region_of(layout, mesh, rank)), layout, mesh, rank)

    def _read(self, piece: TransferPiece[Any]) -> torch.Tensor:
        return self.read(piece.source, piece.there)


def cast_entry(entry: Entry, dtype: torch.dtype) -> Entry:
    """The entry with its values in another dtype."""
    if entry.dtype == dtype:
        return entry
    read = entry.read
    return attrs.evolve(entry, dtype=dtype, read=lambda piece, picks: read(piece, picks).to(dtype))


def _own(x: torch.Tensor) -> torch.Tensor:
    """In memory of its own size: a slice of what was read would keep all of it."""
    if x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def whole_tensor(entry: Entry, device: torch.device | str | None = None) -> torch.Tensor:
    """The whole tensor."""
    value = entry.region(Region.whole(entry.shape))
    return value if device is None else value.to(device)


def placed_entry(entry: Entry, layout: Layout, mesh: Mesh, device: torch.device, asked: bool) -> DTensor:
    """The tensor in a layout: only what this process's ranks hold is read. device: where the tier of that name is.

    asked: whether the caller gave the layout. One that only comes from the folder gives way to the plans of a step.
    """
    backend = backend_for(mesh)
    where = device if layout.tier == "device" else torch.device("cpu")

    def made(rank: int) -> torch.Tensor:
        if not holds(layout.at, mesh, rank):
            return torch.empty(0, dtype=entry.dtype, device=where)
        if layout.tier == "disk":  # too large for memory: read when a step puts it on its own disk
            return unread(layout.local_shape, entry.dtype, partial(entry.part, layout, mesh, rank))
        return entry.part(layout, mesh, rank).to(where)

    parts = shared_parts(layout, mesh, backend.ranks(mesh), made)
    return DTensor(parts, layout, mesh, backend, owned=True, movable=not asked)


def device_for(mesh: Mesh | None, device: torch.device | str | None) -> torch.device:
    """Where what is read goes. To be asked in the caller's thread: in others torch's current GPU is the first."""
    if device is None:
        return torch.device("cpu") if mesh is None else device_of(mesh)
    asked = torch.device(device)
    return gpu_of_process() if asked.type == "cuda" and asked.index is None else asked


# ---- which layout ----


def layout_for(entry: Entry, mesh: Mesh, spec: SpecLike | None) -> Layout:
    """The asked layout; without one, the layout it was saved in as far as this mesh has its axes."""
    if spec is not None:
        try:
            layout = bind(spec, mesh, entry.shape)
        except SpecError as error:
            error.add_note(f"for {entry.name!r} of the checkpoint")
            raise
        if layout.pending:
            raise InputError(
                f"{entry.name}: {str(spec)!r} is a pending sum, and a checkpoint holds values; leave out the '+'"
            )
        return layout
    if entry.dims is None:
        return replicated(entry.shape, entry.tier)
    dims = tuple(_dim(dim, size, mesh) for dim, size in zip(entry.dims, entry.shape))
    return make_layout(dims, entry.shape, (), entry.tier, at=_at(entry.at, dims, mesh))


def _at(at: At | None, dims: Sequence[tuple[Atom, ...]], mesh: Mesh) -> At | None:
    """Where it was saved from, if this mesh has those indices of that axis and more; else everywhere."""
    if at is None:
        return None
    size = mesh.shape.get(at[0], 0)
    fits = bool(at[1]) and all(0 <= index < size for index in at[1]) and len(at[1]) < size
    return at if fits and at[0] not in {axis for dim in dims for _, axis in dim} else None


def _dim(dim: tuple[Atom, ...], size: int, mesh: Mesh) -> tuple[Atom, ...]:
    """A dim with the sizes that its axes have on this mesh; axes that it lacks, or that do not divide, hold copies."""
    sizes = {axis: mesh.shape.get(axis, 1) for _, axis in dim if axis is not None}
    if all(axis is None or sizes[axis] == n for n, axis in dim):
        return dim
    axes = [(sizes[axis], axis) for _, axis in dim if axis is not None and sizes[axis] > 1]
    while axes and size % prod(n for n, _ in axes):
        axes.pop()
    return (*axes, (size // prod(n for n, _ in axes), None))


def specs_by_name(specs: Any, tree: Any, entries: Mapping[str, Entry]) -> dict[str, SpecLike]:
    """Name -> spec from one spec, a prefix of the state's tree, or globs over names. Scalars are whole everywhere."""
    found: dict[str, SpecLike] = {}
    _spread(specs, tree, "specs", entries, found)
    return found


def _spread(specs: Any, tree: Any, path: str, entries: Mapping[str, Entry], found: dict[str, SpecLike]) -> None:
    if specs is None:
        return
    if isinstance(specs, (str, Spec, Layout)):
        found |= {name: specs for name in tensor_names(tree) if entries[name].shape}
        return
    sequence = tree.get("list", tree.get("tuple"))
    if isinstance(specs, (list, tuple)) and sequence is not None and len(specs) == len(sequence):
        for place, (spec, child) in enumerate(zip(specs, sequence)):
            _spread(spec, child, f"{path}.{place}", entries, found)
        return
    if not isinstance(specs, Mapping):
        raise InputError(
            f"{path}: {specs!r} is no spec of what was saved there; write a string such as '(dp b) ...' or a dict"
        )
    said = tree.get("dict", tree.get("record", {}))
    children = said if isinstance(said, dict) else {str(key.get("value", key)): child for key, child in said}
    if all(str(key) in children for key in specs):
        for key, spec in specs.items():
            _spread(spec, children[str(key)], f"{path}.{key}", entries, found)
        return
    below = list(tensor_names(tree))
    for glob, spec in specs.items():
        hit = [name for name in below if matches(name, str(glob))]
        if not hit:
            raise InputError(f"{path}: {glob!r} matches no tensor of the checkpoint{near(str(glob), below, 'tensor')}")
        if spec is not None:
            found |= {name: spec for name in hit if entries[name].shape}
