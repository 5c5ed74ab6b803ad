"""Rows of one's own from somebody else's loader: each process reads its part of every batch, once a plan says which.

Problem: `cf.batches` cuts a loader by a spec, and yields DTensors itself; a trainer owns its loader and walks it, and
which rows go to whom is the plan's to say, which is there only behind the first batch. Idea: the batch sampler asks for
each batch what this rank reads of it, and what it answered travels with the batch as one more tensor:

    rows = OwnRows(mesh)
    loader = DataLoader(rows.data(dataset), batch_sampler=rows.sampler(batch_sampler), collate_fn=rows.collate(collate_fn))
    batch = rows.placed(next(iter(loader)))         # whole as it is; own rows as DTensors
    rows.found(layouts, batch, pads=True)           # where the plan has put that batch: from the next on rows are cut

The order is the sampler's. A batch that does not divide is filled up with rows that count for nothing if `pads`, else
every rank reads all of it, as it does where the plan does not split rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, default_collate

from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError
from colofunc.executors.backend import backend_for
from colofunc.functional.batch_agreement import BatchPeers
from colofunc.functional.padding import Fill
from colofunc.functional.placing import Placer
from colofunc.functional.reading import ReadBatch
from colofunc.functional.row_specs import RowSpec, row_spec, row_word
from colofunc.functional.sending import Sender
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of
from colofunc.program.tracing.tree import flatten, unflatten
from colofunc.spec.layout import Dim, Layout

# A tensor in the batch: samples of the whole one, its rows with padding (0: read whole), a checksum of its indices,
# epoch, number, and for each own row whether it is padding.
KEY, FIXED = "colofunc_rows", 5


class OwnRows:
    """Which rows this process reads: all, until `found` knows how a plan splits them. Made on real ranks only."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.backend = backend_for(mesh)
        self.together = BatchPeers(self.backend.watch)
        self.rows: RowSpec | None = None
        self.pads = False
        self._placer: Placer | None = None
        self._layouts: dict[str, Layout] = {}  # of the batch that was planned for
        self._samples: set[int] = set()  # of batches that were read whole

    def data(self, dataset: Any) -> Any:
        return _Data(dataset)

    def sampler(self, inner: Any) -> OwnRowSampler:
        return OwnRowSampler(inner, self)

    def collate(self, collate_fn: Callable[[Any], Any] | None) -> Any:
        return _Collate(collate_fn or default_collate)

    def cut(self, n: int, regular: int | None) -> tuple[list[int], int] | None:
        """(positions of this rank's rows in a batch of n, rows of the padded batch); None: it reads all."""
        if self.rows is None:
            return None
        pads = self.pads and regular is not None
        rows = max(n, regular or 0) if pads else n
        rows = -(-rows // self.rows.multiple) * self.rows.multiple
        if not pads and rows != n:
            return None
        return self.rows.of_rank(rows, self.mesh.rank), rows

    def found(self, layouts: Sequence[Layout], batch: Any, pads: bool, fill: Fill | None = None) -> None:
        """How the plan has laid the whole `batch` that `placed` gave last: from now on own rows are read, where it
        splits them.
        """
        leaves, tree = flatten(batch)
        fits = all(not isinstance(x, DTensor) and (x.dim() == 0 or x.shape[0] in self._samples) for x in leaves)
        splits: list[tuple[int, int]] = []  # (elements, place) of leaves whose rows are split
        for place, (x, layout) in enumerate(zip(leaves, layouts, strict=True)):
            if x.dim() and _cuts_rows(layout):
                splits.append((x.numel(), place))
        if self.rows is not None or not splits or not fits:
            return
        spec = rows_text(layouts[max(splits)[1]].dims[0], self.mesh)
        self.rows, self.pads = row_spec(spec, self.mesh), pads
        self._placer = Placer(
            self.mesh, self.backend, spec, self.rows, "own", "pad", None, None, fill, Sender(device_of(self.mesh))
        )
        self._layouts = dict(zip(tree.names(), layouts, strict=True))

    def placed(self, batch: Any) -> Any:
        """A batch as the loader gives it: as it is where it was read whole, else the whole one as DTensors.

        Collective.
        """
        if not isinstance(batch, Mapping) or KEY not in batch:
            return batch
        told = batch[KEY].tolist()
        samples, padded, ids, epoch, number = told[:FIXED]
        data = {key: value for key, value in batch.items() if key != KEY}
        if not padded:
            self._samples.add(samples)
            return data
        assert self._placer is not None, "rows are cut once there is a placer"
        with self.together.guard():
            held = self._placer.hold(ReadBatch(data, samples, padded, tuple(map(bool, told[FIXED:])), ids), padded, ())
        assert held is not None, "no batch is dropped"
        said = self.together.meet(held.said(False, number == 0, self.together.watch is not None), epoch, number)
        return self._as_planned(self._placer.place(held, said, padded))

    def _as_planned(self, batch: Any) -> Any:
        """Each tensor where the plan has it.

        One that is used whole is gathered here, so that nothing is planned again.
        """
        leaves, tree = flatten(batch)
        out = []
        for name, x in zip(tree.names(), leaves, strict=True):
            want = self._layouts.get(name)
            if isinstance(x, DTensor) and want is not None and want.shape == tuple(x.shape):
                x = x.redistribute(want)
            out.append(x)
        return unflatten(tree, out)


class OwnRowSampler:
    """A batch sampler: the indices that this rank reads of each batch of `inner`.

    Has accelerate's names for what is inside.
    """

    def __init__(self, inner: Any, own: OwnRows) -> None:
        self.batch_sampler = inner
        self.own = own
        self.batch_size = getattr(inner, "batch_size", None)
        self.drop_last = getattr(inner, "drop_last", False)
        self._epoch = 0

    @property
    def sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        # others may yield short batches anywhere
        regular = self.batch_size if type(self.batch_sampler) is BatchSampler else None
        for number, batch in enumerate(self.batch_sampler):
            indices, n = list(batch), len(batch)
            cut = self.own.cut(n, regular)
            rows, padded = (list(range(n)), 0) if cut is None else cut
            ids = zlib.crc32(repr(indices).encode())
            mine = [indices[row % n] for row in rows]
            seed = zlib.crc32(repr((torch.initial_seed(), self._epoch, number, mine)).encode()) if padded else None
            yield _Mine(mine, [n, padded, ids, self._epoch, number, *(int(row >= n) for row in rows)], seed)


class _Mine(list[Any]):
    """Indices or samples of one batch, and what is told of them."""

    def __init__(self, items: Sequence[Any], told: list[int], seed: int | None) -> None:
        super().__init__(items)
        self.told, self.seed = told, seed

    def __reduce__(self) -> Any:
        return _Mine, (list(self), self.told, self.seed)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """What data sets and collators draw for own rows: by these rows, and shuffling, which has to stay alike, does
        not see it.
        """
        state = torch.default_generator.get_state()
        if self.seed is not None:
            torch.default_generator.manual_seed(self.seed)
        try:
            yield
        finally:
            if self.seed is not None:
                torch.default_generator.set_state(state)


class _Data:
    """A map-style data set that hands on what is told of its indices."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: _Mine) -> _Mine:
        several = getattr(self.dataset, "__getitems__", None)
        with indices.drawing():
            return _Mine(
                several(list(indices)) if several else [self.dataset[i] for i in indices], indices.told, indices.seed
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class _Collate:
    """A collate function that adds what is told to the batch, if that is a mapping."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: _Mine) -> Any:
        with samples.drawing():
            batch = self.collate_fn(list(samples))
        if isinstance(batch, Mapping):
            return {**batch, KEY: torch.tensor(samples.told)}
        if samples.seed is not None:
            raise InputError(
                f"the first batches were mappings, and now {type(batch).__name__} was collated; collate every batch "
                "alike"
            )
        return batch


class PlacedLoader:
    """A loader whose batches are placed; everything else is the loader's."""

    def __init__(self, loader: Any, own: OwnRows) -> None:
        self._loader, self._own = loader, own

    def __iter__(self) -> Iterator[Any]:
        return map(self._own.placed, self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _cuts_rows(layout: Layout) -> bool:
    plain = not layout.pending and layout.tier == "device" and layout.scheme is None and not layout.is_padded
    return plain and any(axis is not None for _, axis in layout.dims[0])


def rows_text(dim: Dim, mesh: Mesh) -> str:
    """The spec of a batch's tensors whose rows lie as `dim` does, for any number of rows: its last local factor is
    open.

    >>> rows_text(((4, None), (2, "dp"), (3, None)), Mesh(dp=2))
    '(4 dp r) ...'
    """
    free = row_word(mesh)
    local = [place for place, (_, axis) in enumerate(dim) if axis is None]
    words = [axis or (free if place == local[-1] else str(size)) for place, (size, axis) in enumerate(dim)]
    return f"({' '.join(words if local else [*words, free])}) ..."
