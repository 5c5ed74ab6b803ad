"""The planner that tells `torch.distributed.checkpoint` which parts there are. Imported only where a DCP folder is written:
torch's package takes a second.

    checkpoint.save({}, storage_writer=FileSystemWriter(folder), planner=Planner(values, simple, paths))
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from colofunc.functional.checkpoint.dcp import value_of
from colofunc.functional.checkpoint.files import Item
from colofunc.functional.checkpoint.parts import Leaf
from colofunc.functional.checkpoint.regions import Region

Values = dict[tuple[str, tuple[int, ...]], tuple[Leaf, Item, Region]]  # (name, offset) -> whose, from where, which


class Planner(SavePlanner):
    """Every box that this rank writes is a shard; numbers and strings are objects."""

    def __init__(self, values: Values, simple: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> None:
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


def _write_item(leaf: Leaf, box: Region) -> WriteItem:
    offset = torch.Size([span.start for span in box.spans])
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(box.shape)),
        properties=TensorProperties(dtype=leaf.tensor.dtype),
        size=torch.Size(leaf.tensor.shape),
    )
    return WriteItem(MetadataIndex(leaf.name, offset), WriteItemType.SHARD, tensor_data=data)


__all__ = ["Planner"]
