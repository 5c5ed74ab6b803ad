"""What passes through the host within a step, and the pool of buffers that holds all of it.

Problem: pinned memory is slow to allocate, so what goes to the host and comes back (activations, gradients on their
way, narrow copies) needs buffers that are there before the first step. Idea: the finished program says when each of
them begins and ends, so it says how many of each size are there at one time; that many buffers are enough, for good.

    pool = passing(program)
    pool.classes                 # (SizeClass(nbytes=1048576, count=3), SizeClass(nbytes=4096, count=2))
    pool.nbytes                  # 3 x 1 MiB + 2 x 4 KiB, of one rank

Sizes are rounded up, so that values of about the same size share buffers: to a page, or to an 8th, 4th, half or all of
the power of two below; whichever takes least in all. State that lies on the host has memory of its own, and what is
read from disk has that of its store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate

import attrs

from colofunc.mesh.sizes import size_text
from colofunc.program.facts import is_cast, kind_of
from colofunc.program.ir import Node, Program
from colofunc.program.memory import StorageMap, lies, memory_of_body

PAGE_BYTES = 4096
"""Sizes of buffers that are passed on are whole numbers of these."""
STEPS = (0, 8, 4, 2, 1)
"""In how many steps sizes double; 0: every number of pages is a class of its own."""

Outs = tuple[int | None, ...]


@attrs.frozen
class SizeClass:
    """Buffers of one size: as many as are in use at one time."""

    nbytes: int
    count: int


@attrs.frozen
class Passing:
    """The buffers that a rank needs. `peak_bytes`: the most that lies in them at one time, before sizes are rounded."""

    classes: tuple[SizeClass, ...]
    peak_bytes: int
    values: frozenset[int]  # that lie in a buffer, of the program itself
    inside: Mapping[Outs, Passing] = attrs.field(factory=dict)  # results of a loop -> of its body

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes * c.count for c in self.classes)

    def __str__(self) -> str:
        count, sizes = sum(c.count for c in self.classes), len(self.classes)
        return (
            f"pool on the host: {size_text(self.nbytes)} in {count} buffer{'s' * (count != 1)} of {sizes} "
            f"size{'s' * (sizes != 1)}, for {size_text(self.peak_bytes)} that come and go within a step"
        )


@attrs.frozen(eq=False)
class _Spans:
    """When passing values are there: (from node, to node, bytes); per loop, its position and what its body has."""

    spans: tuple[tuple[int, int, int], ...]
    values: frozenset[int]
    loops: Mapping[Outs, tuple[int, _Spans]]


def passing(program: Program) -> Passing:
    """What passes through the host in a finished program of one rank."""
    found = lies(program)
    kept = {found.home[out] for out in program.outputs}
    spans = _spans(program, found, kept)
    exact = _most(spans, lambda nbytes: nbytes, weigh=True)
    tries = [_most(spans, partial(buffer_bytes, steps=steps)) for steps in STEPS]
    return _made(spans, min(tries, key=_bytes_of), sum(exact.values()))


def buffer_bytes(nbytes: int, steps: int) -> int:
    """The size of the buffer for so many bytes, where sizes double in so many steps."""
    unit = PAGE_BYTES if not steps else max(PAGE_BYTES, (1 << (max(nbytes, 1).bit_length() - 1)) // steps)
    return -(-nbytes // unit) * unit


def _made(spans: _Spans, most: Mapping[int, int], peak_bytes: int) -> Passing:
    bodies = {outs: _made(body, {}, 0) for outs, (_, body) in spans.loops.items()}
    return Passing(tuple(SizeClass(n, most[n]) for n in sorted(most, reverse=True)), peak_bytes, spans.values, bodies)


def _bytes_of(most: Mapping[int, int]) -> int:
    return sum(nbytes * count for nbytes, count in most.items())


def _spans(program: Program, found: StorageMap, kept: set[int]) -> _Spans:
    """`kept`: storages that outlive the step."""
    spans, values, loops = [], set[int](), dict[Outs, tuple[int, _Spans]]()
    for index, node in enumerate(program.nodes):
        if node.loop is not None:
            given = {into: found.metas[ref] for into, ref in zip(node.loop.body.inputs, node.refs, strict=True)}
            loops[node.outs] = index, _spans(node.loop.body, memory_of_body(node.loop.body, given)[0], set())
        for out in node.outs:
            if (
                out is None
                or not _passes(node, program)
                or program.values[out].tier != "host"
                or not program.values[out].nbytes
            ):
                continue
            storage = found.storages[found.home[out]]
            if storage.value == out and found.home[out] not in kept:
                spans.append((index, max(storage.dies, index), program.values[out].nbytes))
                values.add(out)
    return _Spans(tuple(spans), frozenset(values), loops)


def _passes(node: Node, program: Program) -> bool:
    """Whether a node makes what may lie in a buffer: a copy from the device, a cast on the host, what a loop gathers
    there.
    """
    kind = kind_of(node)
    if kind is not None:
        return node.loop is not None or (kind[0] == "to_host" and program.values[node.refs[0]].tier == "device")
    return is_cast(node)


def _most(spans: _Spans, size_of: Callable[[int], int], weigh: bool = False) -> Counter[int]:
    """Size -> how many buffers of it are in use at one time. `weigh`: 0 -> the most bytes at one time, instead."""
    steps: dict[int, Counter[int]] = {}
    for begin, end, nbytes in spans.spans:
        size, weight = (0, nbytes) if weigh else (size_of(nbytes), 1)
        steps.setdefault(size, Counter()).update({begin: weight})
        steps[size].subtract({end + 1: weight})
    for k, body in spans.loops.values():
        for size, count in _most(body, size_of, weigh).items():
            steps.setdefault(size, Counter()).update({k: count})
            steps[size].subtract({k + 1: count})
    most: Counter[int] = Counter()
    for size, changes in steps.items():
        in_order = [changes[position] for position in sorted(changes)]
        most[size] = max(accumulate(in_order))
    return most
