"""Writing a folder of `torch.distributed.checkpoint`: a planner that tells torch's writer which parts there are.

Imported only where such a folder is written: torch's package takes a second.

    write(folder, leaves, content, ranks)
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from colofunc.errors import CheckpointError
from colofunc.functional.checkpoint.dcp import boxes, value_of
from colofunc.functional.checkpoint.files import PieceToWrite
from colofunc.functional.checkpoint.parts import Ranks, StateLeaf
from colofunc.functional.checkpoint.staging import stage_ahead
from colofunc.spec.regions import Region

PlannedValues = dict[
    tuple[str, tuple[int, ...]], tuple[StateLeaf, PieceToWrite, Region]
]  # (name, offset) -> whose, from where, which


class Planner(SavePlanner):
    """Every box that this rank writes is a shard; numbers and strings are objects."""

    def __init__(self, values: PlannedValues, simple: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> None:
        self._values = values
        self._simple = simple
        self._paths = paths

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(leaf, box) for leaf, _, box in self._values.values()]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._simple]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = self._paths
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        at = write_item.index
        if at.offset is None:
            stream = io.BytesIO()
            torch.save(self._simple[at.fqn], stream)
            return stream
        _, item, box = self._values[at.fqn, tuple(at.offset)]
        # A copy of its own: torch.save writes the whole memory that a view lies in.
        return value_of(item, box).clone()


def _write_item(leaf: StateLeaf, box: Region) -> WriteItem:
    offset = torch.Size([span.start for span in box.spans])
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(box.shape)),
        properties=TensorProperties(dtype=leaf.tensor.dtype),
        size=torch.Size(leaf.tensor.shape),
    )
    return WriteItem(MetadataIndex(leaf.name, offset), WriteItemType.SHARD, tensor_data=data)


def write(folder: Path, leaves: list[StateLeaf], content: dict[str, Any], ranks: Ranks) -> None:
    """Write this rank's parts, and on rank 0 the metadata. Collective."""
    written = [(leaf, item) for leaf in leaves for item in leaf.items(ranks.rank)]
    staged = stage_ahead([item for _, item in written])
    values: PlannedValues = {}
    for (leaf, _), item in zip(written, staged, strict=True):
        for box in boxes(leaf.name, item.region):
            values[leaf.name, tuple(span.start for span in box.spans)] = (leaf, item, box)
    planner = Planner(
        values, dict(_simple(content["state"], ())) if ranks.rank == 0 else {}, _paths(content["state"], ())
    )
    # Torch's own way to copy ahead would wait for the stream, and ask in another order; what it is given lies on the
    # host.
    writer = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        # One process is what is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save({}, storage_writer=writer, planner=planner, no_dist=ranks.size == 1)
        except CheckpointException as failed:  # no Exception, so that nobody would catch it
            rank, (error, _) = next(iter(failed.failures.items()))
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__  # torch's zip writer has words of its own for a full disk
            if cause is not None:
                raise OSError(cause.errno, f"{cause.strerror} (on rank {rank})") from error
            raise CheckpointError(
                f"torch could not write {folder.name!r} on rank {rank}: {type(error).__name__}: {error}"
            ) from error


def _children(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in ("list", "tuple"):
        if key in tree:
            yield from enumerate(tree[key])
    said = tree.get("dict", tree.get("record", {}))
    yield from said.items() if isinstance(said, dict) else ((key.get("value", str(key)), child) for key, child in said)


def _simple(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Dotted name -> number, string or None."""
    if "value" in tree or "float" in tree:
        yield ".".join(map(str, path)), tree["value"] if "value" in tree else float(tree["float"])
    for key, child in _children(tree):
        yield from _simple(child, (*path, key))


def _paths(tree: Any, path: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Dotted name -> keys, with which torch's tools rebuild the nesting."""
    name = tree.get("tensor", tree.get("array"))
    if name is not None or "value" in tree or "float" in tree:
        return {name or ".".join(map(str, path)): path}
    found: dict[str, tuple[Any, ...]] = {}
    for key, child in _children(tree):
        found |= _paths(child, (*path, key))
    return found
