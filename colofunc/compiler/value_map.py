"""The program that really runs, value by value: what of it is still a copy of a value of the step.

Problem: behind the lowering come passes (microbatches, order, chunks, buckets, fusion, updates in place), and a mistake in one of
them shows at the end only. Idea: a local value remembers which global one it is a copy of (`Value.of`), through every pass
that keeps it; where it still has a layout it can be compared. In a loop over microbatches the layout has the time axis as
well, so that a trip's value is the part of the whole at that index:

    (dp time a) b, trip 1        ->        the rows of microbatch 1, lying as (dp a) b

Not comparable are values inside of fused operators and buckets, and sums over microbatches before they are complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod

import attrs
import torch

from colofunc.executors.source import Tap, Writer
from colofunc.executors.tap import Lanes
from colofunc.mesh import Mesh
from colofunc.program.facts import written
from colofunc.program.ir import Node, Program, Value
from colofunc.spec.layout import Layout, make_layout


@attrs.frozen(eq=False)
class Seen:
    """One comparable value of the program that runs, in one trip of the loops around it."""

    value: Value
    node: Node
    trips: tuple[tuple[str, int, int], ...]  # per loop, outermost first: axis, trip, of how many

    def part(self, x: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, Layout]:
        """(what this trip has of the whole value, how that lies on the mesh)."""
        layout, at = self.value.layout, {axis: trip for axis, trip, _ in self.trips}
        assert layout is not None, "only values with layouts are looked at"
        if not at.keys() & set(layout.axes):
            return x, layout
        atoms = [atom for dim in layout.dims for atom in dim]
        cut = x.reshape([size for size, _ in atoms])[tuple(at[a] if a in at else slice(None) for _, a in atoms)]
        dims = tuple(tuple((size, a) for size, a in dim if a not in at) for dim in layout.dims)
        shape = tuple(prod(size for size, _ in dim) for dim in dims)
        return cut.reshape(shape), make_layout(dims, shape, layout.pending, layout.tier, layout.scheme, layout.at)


CLONE = "aten.clone.default"
Look = Callable[[Seen, Lanes], None]


def program_tap(program: Program, whole: Program, look: Look) -> Tap:
    """A tap that hands every comparable value of `program` to `look`. `whole`: the global program."""

    def tap(writer: Writer, index: int, node: Node) -> None:
        axes = [(loop.axis, loop.trips) for loop, _ in writer.loops]
        counters = "".join(f"{counter}, " for _, counter in writer.loops)
        for value in comparable(node, writer.program, whole, [axis for axis, _ in axes]):
            writer.settle([name for lane in range(writer.lanes) for name in writer.on_host([value.id], lane)], [])
            seen = partial(_told, look, value, node, tuple(axes))
            writer.line(f"{writer.bind(seen, 'look')}(({counters}), ({', '.join(writer.everywhere(value.id))},))")

    return tap


def _told(look: Look, value: Value, node: Node, axes: tuple[tuple[str, int], ...], trips: tuple[int, ...], lanes: Lanes) -> None:
    look(Seen(value, node, tuple((axis, trip, n) for (axis, n), trip in zip(axes, trips, strict=True))), lanes)


def comparable(node: Node, program: Program, whole: Program, times: list[str]) -> Iterator[Value]:
    """What is a copy of a global value, as its layout says, when a node has run: its results, and what it has written to a copy."""
    ids = [o for o in node.results if not _is_written_later(o, program, whole)]
    ids += [i for i in written(node) if _is_written_later(i, program, whole)]
    for value in map(program.value, ids):
        layout = value.layout
        if value.of is None or layout is None or layout.shape != whole.values[value.of].shape:
            continue
        if any(axis in times for axis, _ in layout.pending) or (times and (layout.is_padded or 0 in layout.shape)):
            continue
        if layout.local_shape == value.shape:
            yield value


def _is_written_later(id: int, program: Program, whole: Program) -> bool:
    """Whether a value is a copy of what an update reads until that has been written into it: then it is what the update makes."""
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
        for value in comparable(node, program, whole, list(times)):
            assert value.of is not None, "comparable values are copies"
            found[value.of] += prod(times.values())
    return found

