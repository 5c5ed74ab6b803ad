"""What was written and counted of shardings, so that one that is looked at under several budgets is written and counted
once.

Problem: a search for the least budget finishes the same few shardings under a dozen budgets, in every way to write them
and every order that is proposed. Idea: a budget decides which of these is taken. Into what is counted it enters in one
place, as the size that a bucket of collectives may have, and nearly all budgets allow the same buckets
(`buckets.BucketLimit`).

    333,116 B given: 12 orders written, completed, counted        333,115 B given: looked up
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import attrs

from colofunc.compiler.decisions import Decisions
from colofunc.compiler.passes import PassOutputs
from colofunc.compiler.transform import Rewrite
from colofunc.errors import PlanError
from colofunc.program.ir import Program
from colofunc.program.passes.buckets import BucketLimit
from colofunc.spec.layout import At

KEPT_NODES = 200_000
"""Where programs that are kept have more nodes in all, they are forgotten. Large steps have few budgets tried, and
would take gigabytes."""
Peaks = Mapping[At | None, int]


@attrs.define(eq=False)
class WrittenSharding:
    """A sharding, lowered, and what ways to write it made of that."""

    lowered: Program
    stages: PassOutputs
    ways: dict[Rewrite, tuple[Program, PassOutputs] | PlanError] = attrs.field(factory=dict, init=False)

    def by(
        self, way: Rewrite, write: Callable[[Program, Rewrite], tuple[Program, PassOutputs]]
    ) -> tuple[Program, PassOutputs]:
        """Written in one way. Raises PlanError where that cannot be gone."""
        if way not in self.ways:
            try:
                self.ways[way] = write(self.lowered, way)
            except PlanError as error:
                self.ways[way] = error
        found = self.ways[way]
        if isinstance(found, PlanError):
            raise found.with_traceback(None)  # each raise would add its own
        return found


@attrs.define(eq=False)
class PackedProgram:
    """A program with its collectives in buckets, values in place, and all that follows but copies."""

    most: BucketLimit
    program: Program
    stages: PassOutputs
    peaks: Peaks | None = None

    def counted(self, count: Callable[[Program], Peaks]) -> Peaks:
        if self.peaks is None:
            self.peaks = count(self.program)
        return self.peaks


@attrs.define(eq=False)
class KeptPrograms:
    """By sharding what was written of it, by the `id` of a program what was packed of it."""

    _written: dict[Hashable, WrittenSharding] = attrs.field(factory=dict, init=False)
    _packed: dict[int, tuple[Program, list[PackedProgram]]] = attrs.field(factory=dict, init=False)
    _nodes: int = attrs.field(default=0, init=False)

    def written(self, decided: Decisions, lower: Callable[[], tuple[Program, PassOutputs]]) -> WrittenSharding:
        if self._nodes > KEPT_NODES:
            self.clear()
        strategies = tuple(choice.strategy for choice in decided.choices)
        key = strategies, tuple(decided.input_layouts.items()), decided.output_layouts, decided.regather
        if key not in self._written:
            self._written[key] = WrittenSharding(*lower())
        return self._written[key]

    def packed(
        self, local: Program, bucket_bytes: float, pack: Callable[[BucketLimit], tuple[Program, PassOutputs]]
    ) -> PackedProgram:
        _, known = self._packed.setdefault(id(local), (local, []))
        for packed in known:
            if packed.most.decides_alike(bucket_bytes):
                return packed
        most = BucketLimit(bucket_bytes)
        known.append(PackedProgram(most, *pack(most)))
        self._nodes += sum(len(part.nodes) for part in known[-1].program.with_bodies())
        return known[-1]

    def clear(self) -> None:
        self._written.clear()
        self._packed.clear()
        self._nodes = 0
