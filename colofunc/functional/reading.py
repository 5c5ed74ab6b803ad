"""What a process reads of a loader: whole batches, or only the rows of its own mesh coordinate.

Problem: on real ranks each process should read a part of every batch, yet the batches must be those of one device: same
order, same numbers. Idea: a DataLoader over a map-style data set is built again with a batch sampler that walks the
same global batches and hands on this coordinate's indices; where reading goes on in the middle of an epoch, it walks
past the first batches without reading them.

    rows = RowSampler(loader.batch_sampler, rows_of_rank)
    again = rebuilt(loader, rows)          # yields this rank's rows of each global batch
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader, IterableDataset

from colofunc.errors import InputError
from colofunc.program.tracing.tree import flatten, unflatten

# How a rank cuts a batch of n rows: (positions of its rows among the padded batch's, rows of that); None drops the
# batch.
RowsOfRank = Callable[[int], tuple[Sequence[int], int] | None]


@attrs.frozen
class ReadBatch:
    """What was read for one global batch."""

    data: Any
    rows: int | None = None  # of the global batch before padding; None: to be seen from its tensors
    padded: int | None = None  # rows of the padded global batch, where only own rows were read
    dead: tuple[bool, ...] = ()  # own rows that are padding
    ids: int = 0  # a checksum of the global batch's indices
    position: Any = None  # the loader's own state after this batch


class RowSampler:
    """A batch sampler: for each global batch of `inner` the indices that this rank reads."""

    def __init__(self, inner: Any, cut: RowsOfRank | None) -> None:
        self.inner = inner
        self.cut = cut
        self.skip = 0
        self.on_first: Callable[[], None] = lambda: None  # called once `skip` batches have been walked past
        self.told: deque[ReadBatch] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.inner)
        pass_over(batches, self.skip)
        self.on_first()  # also where none is left of the epoch
        for batch in batches:
            indices = list(batch)
            n = len(indices)
            cut = (range(n), n) if self.cut is None else self.cut(n)
            if cut is None:
                continue
            rows, padded = cut
            ids = zlib.crc32(repr(indices).encode())
            self.told.append(
                ReadBatch(None, n, None if self.cut is None else padded, tuple(row >= n for row in rows), ids)
            )
            yield [indices[row % n] for row in rows]

    def __len__(self) -> int:
        return len(self.inner)


def can_rebuild(loader: Any) -> bool:
    """Whether `loader` is torch's own DataLoader over a map-style data set, with batches made by a batch sampler."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
        and not keeps_position(loader)
    )


def keeps_position(loader: Any) -> bool:
    """Whether the loader saves its own position (the protocol of torchdata's StatefulDataLoader)."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def rebuilt(loader: DataLoader[Any], sampler: RowSampler) -> DataLoader[Any]:
    """The same loader over other batches of indices."""
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def refuse_sharded(loader: Any) -> None:
    """A sampler that cuts by rank itself would cut twice."""
    for sampler in samplers(loader):
        for rank, size in (("rank", "num_replicas"), ("process_index", "num_processes")):
            if getattr(sampler, size, 1) > 1 and hasattr(sampler, rank):
                raise InputError(
                    f"the loader's {type(sampler).__name__} gives each rank rows of its own already; give cf.batches "
                    'the loader without it (cf.batches reads rank-disjoint rows itself), or write read="local"'
                )


def samplers(loader: Any) -> list[Any]:
    """The batch sampler and the sampler of a loader, as far as it has them."""
    batch = getattr(loader, "batch_sampler", None)
    found: dict[int, Any] = {}  # by identity: one may be both
    for sampler in (batch, getattr(batch, "sampler", None), getattr(loader, "sampler", None)):
        if sampler is not None:
            found.setdefault(id(sampler), sampler)
    return list(found.values())


def generators(loader: Any) -> dict[str, torch.Generator]:
    """Generators of the loader's own, by where they are."""
    places = {"loader": loader, **{f"sampler{place}": s for place, s in enumerate(samplers(loader))}}
    found: dict[str, torch.Generator] = {}
    for name, place in places.items():
        generator = getattr(place, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in found.values()):
            found[name] = generator
    return found


def regular_rows(loader: Any) -> int | None:
    """How many rows a whole batch has, where the loader says so."""
    for place in (getattr(loader, "batch_sampler", None), loader):
        size = getattr(place, "batch_size", None)
        if isinstance(size, int) and not isinstance(size, bool):
            return size
    return None


def short_rows(loader: Any) -> int:
    """Rows of the last batch where it is known to be short; 0 where it is whole or unknown."""
    batch = getattr(loader, "batch_sampler", None)
    size, sampler = getattr(batch, "batch_size", None), getattr(batch, "sampler", None)
    if not isinstance(size, int) or sampler is None or getattr(batch, "drop_last", True):
        return 0
    try:
        return len(sampler) % size
    except TypeError:
        return 0


def length(loader: Any) -> tuple[int, str]:
    """(samples of the data set, or batches of a loader without one; which of them). 0 where neither is known."""
    dataset = getattr(loader, "dataset", None)
    for place, unit in ((dataset, "samples"), (None if dataset is not None else loader, "batches")):
        try:
            if place is not None:
                return len(place), unit
        except TypeError:  # a stream
            continue
    return 0, "batches"


def pass_over(batches: Iterator[Any], skip: int) -> None:
    """Leave the first `skip` batches unread. Raises InputError where there are fewer."""
    passed = sum(1 for _ in islice(batches, skip))
    if passed < skip:
        raise InputError(
            f"the position to go on from is behind {skip} batches of an epoch, but the loader ended after {passed}: it "
            "is not the one that was saved; give cf.batches the same data and batch size, or begin an epoch with "
            "data.set_epoch(n)"
        )


def read_epoch(loader: Any, sampler: RowSampler | None, skip: int, on_first: Callable[[], None]) -> Iterator[ReadBatch]:
    """Items of one epoch from batch `skip` on; `on_first` is called when those before it have been passed.

    Making the iterator shuffles, or the first item does; nothing is drawn before.
    """
    if sampler is None:
        keeps = loader if keeps_position(loader) else None
        return _read_all(iter(loader), 0 if keeps is not None else skip, keeps, on_first)
    sampler.skip, sampler.on_first = skip, on_first
    sampler.told.clear()
    return _read_rows(iter(loader), sampler)


def _read_rows(batches: Iterator[Any], sampler: RowSampler) -> Iterator[ReadBatch]:
    for data in batches:
        yield attrs.evolve(sampler.told.popleft(), data=data)


def _read_all(batches: Iterator[Any], skip: int, loader: Any, on_first: Callable[[], None]) -> Iterator[ReadBatch]:
    pass_over(batches, skip)
    on_first()
    for data in batches:
        yield ReadBatch(data, position=None if loader is None else loader.state_dict())


def noted_items(items: Iterator[ReadBatch], read: list[ReadBatch]) -> Iterator[ReadBatch]:
    """`items`, each put into `read` as it is read."""
    for item in items:
        read.append(item)
        yield item


# ---- for a CUDA device ----


def pinned(items: Iterator[ReadBatch]) -> Iterator[ReadBatch]:
    """The items with their tensors of the host in pinned memory, so that whoever reads ahead makes that copy too."""
    for item in items:
        leaves, tree = flatten(item.data)
        yield attrs.evolve(
            item, data=unflatten(tree, [x.pin_memory() if x.device.type == "cpu" else x for x in leaves])
        )
