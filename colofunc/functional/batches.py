"""Batches: a loader of one device feeds a step on a mesh.

Problem: on a mesh each data-parallel coordinate wants rows of its own, tensor-parallel peers want the same ones, the
last batch does not divide, and a run that was interrupted wants to go on where it stood. Idea: the loader stays the one
of a single device and says what the global batches are; `batches` reads this process's rows of each and yields trees of
DTensors, so that the numbers are those of one device over the same loader.

    data = cf.batches(DataLoader(dataset, 32, shuffle=True, collate_fn=collate), mesh)
    for batch in data:                        # one epoch
        state, metrics = step(state, batch)
    data.peek()                               # the batch that comes next, without moving: for step.init, step.lower
    data.state_dict()                         # saved with the state: epoch, batch, generators

A short last batch is filled up with rows that count for nothing; see `colofunc.functional.padding` and docs/data.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import attrs
import torch

from colofunc.env import say
from colofunc.errors import InputError, near
from colofunc.executors.backend import backend_for
from colofunc.functional import reading
from colofunc.functional.batch_agreement import BatchPeers, Said
from colofunc.functional.padding import Fill
from colofunc.functional.placing import Placer
from colofunc.functional.prefetch import Prefetcher
from colofunc.functional.reading import ReadBatch
from colofunc.functional.row_specs import RowSpec, row_spec, usual_rows
from colofunc.functional.sending import Sender
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of
from colofunc.ops.seeds import random_state, set_random_state
from colofunc.spec.spec import Spec

Specs = str | Spec | Mapping[str, Any] | tuple[Any, ...] | list[Any]
SHORT = ("pad", "keep", "drop")
READ = ("own", "all", "local")


def batches(
    loader: Iterable[Any],
    mesh: Mesh,
    spec: Specs | None = None,
    *,
    short: str = "pad",
    weights: str | None = None,
    multiple: int | None = None,
    fill: Fill | None = None,
    read: str | None = None,
    prefetch: int | None = None,
    rows: int = 1,
) -> Batches:
    """The loader's batches as trees of DTensors on `mesh`; iterate once per epoch.

    `spec`: one spec for all tensors, or a tree of them (a prefix speaks for what is below, None: whole on every rank).
    Left out, rows lie on the axis `dp` if the mesh has one, else whole on every rank, and a step whose plans want them
    otherwise lays them so. `short`: a batch with fewer rows than the first is filled with rows without weight ("pad"),
    keeps its size, which is another trace ("keep"), or is left out ("drop"). Rows never fail to divide: where they
    would, some are added. `weights`: name of a leaf to add, 1 for real rows and 0 for added ones; needed where nothing
    named labels tells. `rows`: every batch gets a multiple of so many rows, as `cf.accumulate(step, microbatches=4)` on
    2 ranks wants 8. `multiple`: lengthen sequences as `cf.pad` does. `fill`: what added positions and rows hold, by
    name or glob. `read`: "own" reads only this rank's rows (a DataLoader over a map-style data set can), "all" reads
    every row on every rank, "local" takes what the loader yields as this rank's rows; by default "own" where it can be,
    else "all". `prefetch`: batches read ahead by a thread; by default 2 where the loader has worker processes, else 0,
    because reading in this process may draw from the generators that steps draw from.
    """
    if not isinstance(mesh, Mesh):
        raise InputError(
            f"cf.batches takes a cf.Mesh as its second argument, not {mesh!r}; write cf.batches(loader, cf.Mesh(dp=2))"
        )
    if not isinstance(loader, Iterable):
        raise InputError(f"cf.batches reads a DataLoader or another iterable of batches, not {type(loader).__name__}")
    for name, value, known in (("short", short, SHORT), ("read", read or "own", READ)):
        if value not in known:
            raise InputError(f"cf.batches: {name}={value!r}{near(str(value), known, 'ways')}")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise InputError(f"cf.batches: rows={rows!r}; give 1 or more, such as 8 for 4 microbatches on 2 ranks")
    return Batches(loader, mesh, spec, short, weights, multiple, fill, read, prefetch, rows)


class Batches:
    """An iterable over epochs of batches on a mesh, with a position that can be saved. Made by `batches`."""

    def __init__(
        self, loader: Any, mesh: Mesh, spec: Specs | None, short: str, weights: str | None, multiple: int | None, fill: Fill | None,
        read: str | None, prefetch: int | None, rows: int = 1,
    ) -> None:  # fmt: skip
        backend = backend_for(mesh)
        self.loader = loader
        self.mesh = mesh
        specs = usual_rows(mesh) if spec is None else spec
        self._rows: RowSpec = attrs.evolve(row_spec(specs, mesh), rows=rows)
        self._together = BatchPeers(backend.watch)
        self._read = self._how(read)
        self._regular = reading.regular_rows(loader)
        sender = Sender(device_of(mesh))
        self._on_card = sender.device.type != "cpu"
        self._placer = Placer(
            mesh, backend, specs, self._rows, self._read, short, weights, multiple, fill, sender, movable=spec is None
        )
        self._sampler: reading.RowSampler | None = None
        self._source: Any = loader
        if reading.can_rebuild(loader):
            self._sampler = reading.RowSampler(loader.batch_sampler, self._cut if self._read == "own" else None)
            self._source = reading.rebuilt(loader, self._sampler)
        workers = int(getattr(loader, "num_workers", 0) or 0)
        if prefetch is None:
            prefetch = 2 if workers else 0
        self._prefetch = prefetch
        self._epoch, self._batch, self._fresh = 0, 0, True
        self._start: dict[str, torch.Tensor] = {}  # generators at the start of the epoch
        self._position: Any = None  # of a loader that keeps its own
        self._pending: Mapping[str, Any] | None = None  # a loaded state whose epoch has not begun
        self._ahead: Prefetcher | None = None
        # of an iterator that cannot begin again: (batch, what comes from there)
        self._seen: tuple[int, Iterator[ReadBatch]] | None = None
        self._told = False
        short_rows = reading.short_rows(loader)
        self._expected = (short_rows,) if short_rows else ()

    # ---- where it stands ----

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or that is read next."""
        return self._epoch

    @property
    def batch(self) -> int:
        """How many batches of this epoch have been yielded."""
        return self._batch

    def __len__(self) -> int:
        """Batches of an epoch, where the loader has a length."""
        return len(self.loader) - int(self._placer.short == "drop" and reading.short_rows(self.loader) > 0)

    def set_epoch(self, epoch: int) -> None:
        """What is iterated next is this epoch from its start (or from where it was loaded, if it is that epoch)."""
        if epoch != self._epoch or not self._fresh:
            self._go_to(int(epoch))
        self._fresh = True
        for place in (self.loader, *reading.samplers(self.loader), getattr(self.loader, "dataset", None)):
            if callable(getattr(place, "set_epoch", None)):
                place.set_epoch(int(epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position: plain numbers and tensors (and the loader's own state, if it keeps one).

        The batch yielded last counts as used. What data sets draw in this process is `cf.random_state`'s.
        """
        states = dict(self._start) or self._states()
        if self._pending is not None:
            states = dict(self._pending["generators"])
        state: dict[str, Any] = {
            "epoch": self._epoch,
            "batch": self._batch,
            "rows": self._regular or 0,
            "generators": states,
        }
        state["length"] = reading.length(self.loader)[0]
        if reading.keeps_position(self.loader):
            state["loader"] = self._position if self._position is not None else self.loader.state_dict()
        return state

    state = state_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; the next iteration continues there."""
        for name in ("epoch", "batch", "rows", "generators"):
            if name not in state:
                raise InputError(f"the state of cf.batches has epoch, batch, rows and generators; {name!r} is missing")
        self._check_length(state)
        self.close()
        known = self._states()
        for name in state["generators"]:
            if name not in known:
                raise InputError(
                    f"the saved position has the state of a generator {name!r}, the loader has {sorted(known)}; build "
                    "the loader as it was when it was saved"
                )
        self._go_to(int(state["epoch"]))
        self._batch, self._fresh = int(state["batch"]), True
        self._regular = reading.regular_rows(self.loader) or int(state["rows"]) or None
        self._pending = dict(state)
        self._set_generators(state["generators"])
        if reading.keeps_position(self.loader) and "loader" in state:
            self.loader.load_state_dict(state["loader"])

    def _check_length(self, state: Mapping[str, Any]) -> None:
        """The rest of an epoch over other data is not the rest of that epoch."""
        (now, unit), then = reading.length(self.loader), int(state.get("length", 0))
        if int(state["batch"]) and now and then and now != then:
            epoch, batch = int(state["epoch"]), int(state["batch"])
            raise InputError(
                f"the position is behind batch {batch} of epoch {epoch} over {then} {unit}, the loader now has {now}: "
                "the rest of that epoch is not to be found; give cf.batches the same data, or begin the next epoch: "
                f"leave batches= out of cf.load and write data.set_epoch({epoch + 1})"
            )

    # ---- reading ----

    def peek(self) -> Any:
        """The batch that the next loop begins with; position and random numbers stay where they are.

        For `step.init`, `step.lower` and a first look. It is read once more when its turn comes (an iterator that
        cannot begin again is not). Collective on real ranks. Raises InputError between the batches of an epoch: use one
        that was yielded.
        """
        if not self._fresh:
            raise InputError(
                f"cf.batches: peek() looks at the batch that the next loop begins with, and epoch {self._epoch} has "
                f"yielded {self._batch} already; use one of them, or go to an epoch with data.set_epoch(n)"
            )
        random, states = random_state(), self._states()
        epoch, batch, pending, regular = self._epoch, self._batch, self._pending, self._regular
        place = self.loader.state_dict() if reading.keeps_position(self.loader) else None
        try:
            found = self._first()
            if found is None and self._batch:  # a position at the end of an epoch
                self._go_to(self._epoch + 1)
                found = self._first()
        finally:
            self._regular = regular
            self._go_to(epoch, batch, pending)
            set_random_state(random)
            self._set_generators(states)
            if place is not None:
                self.loader.load_state_dict(place)
        if found is None:
            raise InputError("cf.batches: the loader yields no batch to peek at; give one that does")
        return found[0]

    def _first(self) -> tuple[Any] | None:
        """The batch at the current position, read."""
        read: list[ReadBatch] = []
        items = self._begin()
        try:
            return self._next(reading.noted_items(items, read))
        finally:
            if isinstance(self.loader, Iterator) and not reading.keeps_position(self.loader):
                self._seen = self._batch, chain(read, items)

    def __iter__(self) -> Iterator[Any]:
        self.close()
        if not self._fresh:  # the last epoch was left in the middle
            self._tell_left()
            self._go_to(self._epoch + 1)
        self._fresh = False
        items: Iterator[ReadBatch] = self._begin()
        if self._prefetch:
            items = self._ahead = Prefetcher(items, self._prefetch)
        try:
            while (found := self._next(items)) is not None:
                self._batch += 1
                yield found[0]
            self._go_to(self._epoch + 1)
            self._fresh = True
        finally:
            if isinstance(items, Prefetcher):
                items.close()

    def close(self) -> None:
        """End the thread that reads ahead, if there is one. Leaving the loop does so too."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _tell_left(self) -> None:
        """Once: that a loop that was left has ended its epoch, which who wanted to look at a batch does not expect."""
        if not self._told and self.mesh.is_main:
            self._told = True
            say(
                f"cf.batches goes to epoch {self._epoch + 1}: the loop over epoch {self._epoch} was left after "
                f"{self._batch} batches; to look at a batch without that, write data.peek()"
            )

    def _go_to(self, epoch: int, batch: int = 0, pending: Mapping[str, Any] | None = None) -> None:
        self._epoch, self._batch, self._start, self._pending, self._position = epoch, batch, {}, pending, None

    def _begin(self) -> Iterator[ReadBatch]:
        """Items of the epoch from the current batch on, shuffled as when it was first begun."""
        pending, self._pending = self._pending, None
        resumed = pending is not None and self._batch > 0 and not reading.keeps_position(self.loader)
        now = torch.get_rng_state()
        if pending is not None and resumed:
            torch.set_rng_state(_bytes(pending["generators"]["torch"]))
        elif self._read != "local":
            self._together.same_generators({"torch": torch.default_generator, **reading.generators(self.loader)})
        self._start = self._states()

        def on_first() -> None:  # shuffled again: what the data set draws goes on from where it was
            if resumed:
                torch.set_rng_state(now)

        if self._seen is not None and self._seen[0] <= self._batch:
            (first, items), self._seen = self._seen, None
            reading.pass_over(items, self._batch - first)
            return items
        items = reading.read_epoch(self._source, self._sampler, self._batch, on_first)
        return reading.pinned(items) if self._on_card else items

    def _next(self, items: Iterator[ReadBatch]) -> tuple[Any] | None:
        """The next batch, or None on every rank."""
        while True:
            held = None
            with self._together.guard():
                item = next(items, None)
                if item is not None:
                    held = self._placer.hold(item, self._regular, self._expected)
                    self._position = item.position
            if item is not None and held is None:
                continue
            if held is None:
                own = Said(True)
            else:
                own = held.said(
                    whole=self._read == "all", first=self._batch == 0, compared=self._together.watch is not None
                )
            said = self._together.meet(own, self._epoch, self._batch)
            if held is None:
                return None
            self._regular = self._regular or held.samples
            placed = self._placer.place(held, said, self._regular)
            if placed is not None:
                return (placed,)

    def _states(self) -> dict[str, torch.Tensor]:
        own = {name: g.get_state() for name, g in reading.generators(self.loader).items()}
        return {"torch": torch.get_rng_state(), **own}

    def _set_generators(self, states: Mapping[str, Any]) -> None:
        """The loader's own generators as they were."""
        for name, generator in reading.generators(self.loader).items():
            if name in states:
                generator.set_state(_bytes(states[name]))

    def _how(self, read: str | None) -> str:
        """How this process reads: own rows only where it is one of several and the loader can."""
        alone = self._together.watch is None
        if not alone and read != "local":
            reading.refuse_sharded(self.loader)
        can = reading.can_rebuild(self.loader) and self._rows.one
        if read == "own" and not can:
            raise InputError(
                'cf.batches: read="own" needs a torch DataLoader over a map-style data set, and one spec of dim 0 for '
                f'all tensors, not {type(self.loader).__name__}; leave read= out, or write read="all"'
            )
        if alone:
            return "all"
        return read or ("own" if can else "all")

    def _cut(self, n: int) -> tuple[list[int], int] | None:
        """This rank's rows of a global batch of n."""
        self._regular = self._regular or n
        rows = self._placer.target(n, self._regular)
        return None if rows is None else (self._rows.of_rank(rows, self.mesh.rank), rows)


def _bytes(x: Any) -> torch.Tensor:
    """A generator's state as saved: a byte tensor, whatever kind of tensor it was loaded as."""
    return torch.tensor(torch.as_tensor(x).tolist(), dtype=torch.uint8)
