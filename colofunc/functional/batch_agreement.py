"""What the ranks tell one another before each batch, so that they never wait for a rank that has none.

Problem: a loader that ends early, fails, or shuffles otherwise on one rank gives wrong rows or a hang. Idea: before a
batch is used every rank says whether it has one, of which rows, and of which shapes; whatever does not fit is an error
on all of them. One small message per rank and batch, none where all ranks are in this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from colofunc.compiler.rank_agreement import value_checksum
from colofunc.errors import InputError
from colofunc.executors.distributed import broadcast_object
from colofunc.executors.watch import Watch

WHAT = "the next batch of cf.batches"


@attrs.frozen
class Said:
    """What one rank says of its next batch. `leaves`: (name, dtype, shape, checksum or 0)."""

    ended: bool
    ids: int = 0
    leaves: tuple[tuple[str, str, tuple[int, ...], int], ...] = ()

    def text(self) -> str:
        return json.dumps([self.ended, self.ids, self.leaves])

    @staticmethod
    def of(text: str) -> Said:
        ended, ids, leaves = json.loads(text)
        return Said(ended, ids, tuple((n, d, tuple(s), c) for n, d, s, c in leaves))


@attrs.frozen(eq=False)
class BatchPeers:
    """This rank among those that read the same batches; `watch` is None where it is alone."""

    watch: Watch | None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What fails inside, before the ranks meet, is told to the others."""
        try:
            yield
        except Exception as error:
            if self.watch is not None:
                self.watch.give_up(WHAT, error, self.watch.deadline_s)
            raise

    def meet(self, mine: Said, epoch: int, batch: int) -> list[Said]:
        """What every rank says, in rank order. Raises InputError on all ranks unless all have a batch, or none."""
        if self.watch is None:
            return [mine]
        said = [Said.of(text) for text in self.watch.exchange(WHAT, mine.text(), self.watch.deadline_s, mine.ended)]
        _compare(said, epoch, batch)
        return said

    def same_generators(self, generators: Mapping[str, torch.Generator]) -> None:
        """Rank 0's generators on every rank, so that all shuffle alike. Collective."""
        if self.watch is None:
            return
        sums = ",".join(f"{name} {value_checksum(g.get_state())}" for name, g in generators.items())
        if len(set(self.watch.exchange("the start of an epoch of cf.batches", sums, self.watch.deadline_s))) == 1:
            return
        with self.watch:
            states = broadcast_object({name: g.get_state().tolist() for name, g in generators.items()})
        for name, generator in generators.items():
            if name in states:
                generator.set_state(torch.tensor(states[name], dtype=torch.uint8))


def _compare(said: Sequence[Said], epoch: int, batch: int) -> None:
    ended = [rank for rank, each in enumerate(said) if each.ended]
    where = f"batch {batch} of epoch {epoch}"
    if ended and len(ended) < len(said):
        others = [rank for rank, each in enumerate(said) if not each.ended]
        raise InputError(
            f"the loader of ranks {ended} ended after {batch} batches of epoch {epoch}, that of ranks {others} goes "
            "on; give every rank the same data, or let cf.batches cut it (a DataLoader over the whole map-style data set on every rank)"
        )
    ids = [each.ids for each in said]
    if len(set(ids)) > 1:
        raise InputError(
            f"{where} has other rows on ranks {_odd(ids)}: their samplers shuffle otherwise or their data sets differ; "
            "give every rank the same data, and shuffle with torch's generators only, which cf.batches keeps equal"
        )
    kinds = [_kinds(each) for each in said]
    if len(set(kinds)) > 1:
        raise InputError(
            f"{where} has other tensors on ranks {_odd(kinds)}: {kinds[0]} on rank 0; collate every row alike"
        )
    for place, (name, _, shape, _) in enumerate(said[0].leaves):
        sums = [each.leaves[place][3] for each in said]
        if len(set(sums)) > 1:
            raise InputError(
                f"{name!r} {shape} of {where} must be equal on all ranks, but ranks {_odd(sums)} hold other numbers; "
                'let every rank read the same rows in the same order, or write read="local" if each loader yields rows '
                "of its own"
            )


def _kinds(said: Said) -> tuple[tuple[str, str, int], ...]:
    """(name, dtype, number of dims) of each leaf of a batch."""
    return tuple((name, dtype, len(shape)) for name, dtype, shape, _ in said.leaves)


def _odd(values: Sequence[Any]) -> list[int]:
    """Ranks that differ from most."""
    common = max(values, key=values.count)
    return [place for place, value in enumerate(values) if value != common]
