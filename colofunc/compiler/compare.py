"""compare: the first value, in the order of the program, that the mesh computes differently from one device.

Problem: `cf.testing.check` says that a parameter is wrong after the step; the cause is one operator, one conversion or
one collective among thousands. Idea: run the local program on its mesh and the global program on one device side by
side, with one seed, and look at every value as it is made, in every layout that it exists in.

    print(low.compare(state, batch))
    # first: %12 (linear of fc2) f64[8, 16] as 'a b' differs by 0.83 on ranks 0, 1
    #   by all_gather(dp), which brings '(dp a) b' to 'a b'
    #   made at net.py:14 in forward, ...

Values die as in the step: the global program runs just ahead of the local one. Where all of them agree, the program
that really runs is compared too, in whatever of it still is a value of the step (`RunValue`), microbatch by microbatch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import attrs
import torch

from colofunc.compiler.differing import differing, judged
from colofunc.compiler.observation import (
    Arguments,
    PlainProgram,
    arguments_of,
    collective_text,
    history,
    plain_program,
    value_name,
    whole_value,
)
from colofunc.compiler.tolerance import Allowed, Reference
from colofunc.executors.copies import COPIER
from colofunc.executors.source import Tap, Writer
from colofunc.executors.tap import LaneValues, everyones, values_tap
from colofunc.ops import canonical
from colofunc.ops.debug import quiet
from colofunc.program.facts import is_started, written
from colofunc.program.ir import Node, Program, Value
from colofunc.program.text import columns
from colofunc.program.tracing.tree import flatten, unflatten
from colofunc.spec.layout import Dim, Layout, make_layout

if TYPE_CHECKING:
    from colofunc.compiler.lowered import Lowered

SHOWN = 8
"""At most this many values that differ are listed."""
OVERFLOW = (
    "; one of the two is not finite: float16 ends at 65504, and the mesh adds gradients of ranks in float32. Try: "
    "compare with a smaller loss scale in the state"
)
PASSES = "the passes after lowering (microbatches, order, chunks, buckets, fusion, updates in place)"


@attrs.frozen
class Difference:
    """One value that differs: what it is, where the user wrote it, how it lies, and what made this copy of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: str
    operator: str
    strategy: str  # of the operator that made the value
    made_by: str  # the conversion, or the operator with its collectives, that gave this copy
    line: str
    path: str
    phase: str
    difference: float  # max|a-b| / max(1, max|b|)
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        ranks = f" on ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        where = f"{self.line or 'no source line'}{f', module {self.path}' if self.path else ''}, {self.phase}"
        head = f"{self.name} {dtype} {self.shape} as {self.spec!r} differs by {self.difference:.3g}{ranks}"
        return f"{head}\n  by {self.made_by}\n  at {where}"


@attrs.frozen(repr=False)
class Compared:
    """What `compare` found. `equal`: nothing differs. `first` is where to look; what follows may be its consequence."""

    values: int  # copies of values that were compared
    executed: int  # of these, in the program that really runs, behind all passes; its outputs are among them
    worst: float  # largest scaled difference within tolerance
    differences: tuple[Difference, ...]  # in the order of the program

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    def table(self, most: int = SHOWN) -> str:
        """The first `most` differences, one line each."""
        rows = [("difference", "value", "spec", "phase", "line", "made by")]
        for found in self.differences[:most]:
            rows.append((f"{found.difference:.3g}", found.name, found.spec, found.phase, found.line, found.made_by))
        return columns(rows)

    def __str__(self) -> str:
        if self.equal:
            ran = f"{self.executed} of them in the program that runs" if self.executed else "all before the passes"
            return f"equal: {self.values} values as on one device, largest difference {self.worst:.3g}, {ran}"
        return f"first: {self.first}\n{len(self.differences)} of {self.values} values differ:\n{self.table()}"

    __repr__ = __str__


def compare(
    low: Lowered, args: tuple[Any, ...], fn: Callable[..., Any] | None = None, tolerance: float | None = None
) -> Compared:
    """Compare every value of the local program with the global program's; collective on real ranks, consumes nothing.

    `fn`: the function itself, to be held against the global program too. Where all values agree the program that really
    runs, after the passes, is compared: its outputs, and every value of it that still is a copy of one of the step's.
    """
    arguments = arguments_of(low, args)
    plain = plain_program(low, arguments.backend)
    inputs = arguments.whole()
    allowed = Allowed(low.global_program, inputs, tuple(plain.owners.values()), tolerance)
    reference = Reference(low.global_program, inputs, Counter(plain.owners.values()), allowed.ran)
    look = _Look(low, plain, reference, allowed)
    with torch.no_grad(), quiet():
        look.inputs(arguments)
        run = arguments.backend.observe(plain.program, low.mesh, values_tap(look))
        run(arguments.computed())
        expected = [reference.value(out) for out in low.global_program.outputs]
        if not look.found:
            look.executed(arguments, inputs)
            look.outputs(arguments, expected)
    if fn is not None and not look.found:
        look.function(fn, args, expected, arguments.seed)
    return Compared(look.values, look.ran, look.worst, tuple(look.found))


class _Look:
    """Called behind every node of the local program; collects what differs."""

    def __init__(self, low: Lowered, plain: PlainProgram, reference: Reference, allowed: Allowed) -> None:
        self.low, self.plain, self.reference = low, plain, reference
        self.allowed = allowed
        self.makers = low.global_program.makers
        self.local_makers = plain.program.makers
        self.strategies = {id(n): c.strategy.name for n, c in zip(low.global_program.nodes, low.choices, strict=True)}
        self.scaled = any(value.dtype is torch.float16 for value in low.global_program.values.values())
        self.found: list[Difference] = []
        self.values, self.ran, self.worst = 0, 0, 0.0
        self.wrong: set[int] = set()  # global values of which the program that runs has a wrong copy

    def inputs(self, arguments: Arguments) -> None:
        ids = [id for id in self.plain.program.inputs if id not in self.plain.program.constants]
        for mine, shards in zip(ids, arguments.shards, strict=True):
            self.one(mine, shards, None)

    def __call__(self, index: int, results: tuple[LaneValues, ...]) -> None:
        node = self.plain.program.nodes[index]
        for out, lanes in zip(node.results, results, strict=True):
            if out in self.plain.owners:
                self.one(out, lanes, node)

    def one(self, mine: int, lanes: Sequence[torch.Tensor], node: Node | None) -> None:
        """Compare one copy of a global value."""
        layout = self.plain.program.values[mine].layout
        owner = self.plain.owners[mine]
        assert layout is not None, "a copy of a global value has a layout"
        expected = self.reference.take(owner)
        mesh, allowed = self.low.mesh, self.allowed.of(owner, expected)
        worst, ranks = differing(everyones(lanes, mesh.size), layout, mesh, expected, allowed)
        self.values += 1
        if not ranks:
            self.worst = max(self.worst, worst)
            return
        maker = self.makers.get(owner)
        made_by = "the caller: its copies or parts are not those of one tensor"
        if node is not None:
            made_by = history(self.plain, self.local_makers, mine, node)
        self.found.append(self._difference(owner, layout.text(), made_by, worst, ranks, maker, node))

    def _difference(
        self,
        owner: int,
        spec: str,
        made_by: str,
        worst: float,
        ranks: tuple[int, ...],
        maker: Node | None,
        node: Node | None = None,
    ) -> Difference:
        value = self.low.global_program.values[owner]
        source = maker or node  # a copy of an input is made for the operator that wants it
        where = (source.line, source.path, source.phase) if source is not None else ("", "", "input")
        operator = maker.target if maker is not None else "input"
        strategy = self.strategies[id(maker)] if maker is not None else ""
        if self.scaled and math.isinf(worst):
            made_by += OVERFLOW
        return Difference(
            value_name(value, maker), value.shape, value.dtype, spec, operator, strategy, made_by, *where, worst, ranks
        )

    def executed(self, arguments: Arguments, inputs: Sequence[torch.Tensor]) -> None:
        """All values agree: so must those of the program that really runs."""
        low = self.low
        self.reference = Reference(
            low.global_program, inputs, looked_at(low.program, low.global_program), self.allowed.ran
        )
        tap = program_tap(low.global_program, self.ran_value)
        arguments.backend.observe(low.program, low.mesh, tap)(arguments.copies(range(len(arguments.shards))))

    def ran_value(self, seen: RunValue, lanes: LaneValues) -> None:
        """Compare one value of the program that runs, in one trip if it stands in a loop."""
        value, mesh = seen.value, self.low.mesh
        assert value.of is not None and value.layout is not None, "only copies of global values are looked at"
        whole = self.reference.take(value.of)
        (expected, layout), allowed = seen.part(whole), self.allowed.of(value.of, whole)
        if isinstance(allowed, torch.Tensor):
            allowed, _ = seen.part(allowed)
        worst, ranks = differing(everyones(lanes, mesh.size), layout, mesh, expected, allowed)
        self.values, self.ran = self.values + 1, self.ran + 1
        if not ranks:
            self.worst = max(self.worst, worst)
        elif value.of not in self.wrong:
            self.wrong.add(value.of)
            trips = "".join(f" of microbatch {trip + 1} of {n}" for _, trip, n in seen.trips)
            note = f" ({seen.node.note})" if seen.node.note else ""
            why = f"{PASSES}: {collective_text(seen.node)}{trips}{note}; the program before them gives the right value"
            self.found.append(
                self._difference(value.of, value.layout.text(), why, worst, ranks, self.makers.get(value.of), seen.node)
            )

    def outputs(self, arguments: Arguments, expected: Sequence[torch.Tensor]) -> None:
        """And its outputs, as the executor itself runs it."""
        low = self.low
        outs = arguments.backend.compile(low.program, low.mesh)(arguments.copies(range(len(arguments.shards))))
        COPIER.arrived(chain.from_iterable(outs))
        for shards, layout, want, owner in zip(
            outs, low.output_layouts, expected, low.global_program.outputs, strict=True
        ):
            worst, ranks = differing(
                everyones(shards, low.mesh.size), layout, low.mesh, want, self.allowed.of(owner, want)
            )
            self.values, self.ran = self.values + 1, self.ran + 1
            if ranks and owner not in self.wrong:
                why = f"{PASSES}: the program before them gives the right value"
                self.found.append(self._difference(owner, layout.text(), why, worst, ranks, self.makers.get(owner)))

    def function(
        self, fn: Callable[..., Any], args: tuple[Any, ...], expected: Sequence[torch.Tensor], seed: torch.Tensor | None
    ) -> None:
        """The mesh computes the global program: does that compute the function?"""
        mine, tree = flatten(args)
        with canonical.single_device(seed), quiet(), torch.enable_grad():
            inputs = [whole_value(leaf).requires_grad_(leaf.requires_grad) for leaf in mine]
            leaves, _ = flatten(fn(*unflatten(tree, inputs)))
        order = {id(node): index for index, node in enumerate(self.low.global_program.nodes)}
        made: list[int] = []
        for got, want, owner in zip(leaves, expected, self.low.global_program.outputs, strict=True):
            worst, fine = judged(want, got.detach(), self.allowed.of(owner, want))
            if not fine:
                why = (
                    "tracing or simplifying, unless what it reads from outside (a global, an attribute) has changed "
                    "since its trace"
                )
                self.found.append(self._difference(owner, "", why, worst, (), self.makers.get(owner)))
                made.append(order.get(id(self.makers.get(owner)), -1))
        self.found = [found for _, found in sorted(zip(made, self.found, strict=True), key=lambda pair: pair[0])]


# ---- the program that runs, value by value ----
#
# Problem: behind the lowering come passes (microbatches, order, chunks, buckets, fusion, updates in place), and a
# mistake in one of them shows at the end only. Idea: a local value remembers which global one it is a copy of
# (`Value.of`), through every pass that keeps it; where it still has a layout it can be compared. In a loop over
# microbatches the layout has the time axis as well, so that a trip's value is the part of the whole at that index:
#
#     (dp time a) b, trip 1        ->        the rows of microbatch 1, lying as (dp a) b
#
# Not comparable are values inside of fused operators and buckets, and sums over microbatches before they are complete.


@attrs.frozen(eq=False)
class RunValue:
    """One comparable value of the program that runs, in one trip of the loops around it."""

    value: Value
    node: Node
    trips: tuple[tuple[str, int, int], ...]  # per loop, outermost first: axis, trip, of how many

    def part(self, x: torch.Tensor) -> tuple[torch.Tensor, Layout]:
        """(what this trip has of the whole value, how that lies on the mesh)."""
        layout, at = self.value.layout, {axis: trip for axis, trip, _ in self.trips}
        assert layout is not None, "only values with layouts are looked at"
        if not at.keys() & set(layout.axes):
            return x, layout
        # One dim for each atom: those of time are indexed by the trip, and what is left of each dim is put together.
        sizes: list[int] = []
        index: list[int | slice] = []
        dims: list[Dim] = []
        shape: list[int] = []
        for dim in layout.dims:
            left = []
            for size, axis in dim:
                sizes.append(size)
                if axis in at:
                    index.append(at[axis])
                else:
                    index.append(slice(None))
                    left.append((size, axis))
            dims.append(tuple(left))
            shape.append(prod(size for size, _ in left))
        part_layout = make_layout(tuple(dims), tuple(shape), layout.pending, layout.tier, layout.scheme, layout.at)
        return x.reshape(sizes)[tuple(index)].reshape(shape), part_layout


CLONE = "aten.clone.default"
VisitValue = Callable[[RunValue, LaneValues], None]


def program_tap(whole: Program, look: VisitValue) -> Tap:
    """A tap that hands every comparable value of the program that runs to `look`. `whole`: the global program."""

    def tap(writer: Writer, index: int, node: Node) -> None:
        axes = [(loop.axis, loop.trips) for loop, _ in writer.loops]
        counters = "".join(f"{counter}, " for _, counter in writer.loops)
        for value in comparable_values(node, writer.program, whole, [axis for axis, _ in axes]):
            names = list[str]()
            for lane in range(writer.lanes):
                names += writer.on_host([value.id], lane)
            writer.settle(names, [])
            seen = partial(_told, look, value, node, tuple(axes))
            writer.line(f"{writer.bind(seen, 'look')}(({counters}), ({', '.join(writer.everywhere(value.id))},))")

    return tap


def _told(
    look: VisitValue,
    value: Value,
    node: Node,
    axes: tuple[tuple[str, int], ...],
    trips: tuple[int, ...],
    lanes: LaneValues,
) -> None:
    here = [(axis, trip, count) for (axis, count), trip in zip(axes, trips, strict=True)]
    look(RunValue(value, node, tuple(here)), lanes)


def comparable_values(node: Node, program: Program, whole: Program, times: list[str]) -> Iterator[Value]:
    """What is a copy of a global value, as its layout says, when a node has run: its results, and what it has written
    to a copy. What was started is there once it has been waited for."""
    if is_started(node.target):
        return
    ids = [id for id in node.results if not _is_written_later(id, program, whole)]
    ids += [id for id in written(node) if _is_written_later(id, program, whole)]
    for value in map(program.value, ids):
        layout = value.layout
        if value.of is None or layout is None or layout.shape != whole.values[value.of].shape:
            continue
        if any(axis in times for axis, _ in layout.pending) or (times and (layout.is_padded or 0 in layout.shape)):
            continue
        if layout.local_shape == value.shape:
            yield value


def _is_written_later(id: int, program: Program, whole: Program) -> bool:
    """Whether a value is a copy of what an update reads until that has been written into it: then it is what the update
    makes.
    """
    maker, of = program.makers.get(id), program.values[id].of
    if maker is None or of is None or maker.target != CLONE:
        return False
    theirs = whole.makers.get(of)
    return theirs is not None and theirs.target != CLONE


def looked_at(program: Program, whole: Program, times: Mapping[str, int] | None = None) -> Counter[int]:
    """Global value -> how often `program_tap` will ask for it."""
    times = times or {}
    found: Counter[int] = Counter()
    for node in program.nodes:
        if node.loop is not None:
            found += looked_at(node.loop.body, whole, {**times, node.loop.axis: node.loop.trips})
        for value in comparable_values(node, program, whole, list(times)):
            assert value.of is not None, "comparable values are copies"
            found[value.of] += prod(times.values())
    return found
