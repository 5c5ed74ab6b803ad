"""Segments: which operators of a local program are compiled as one function, and which segments are the same function.

Problem: a compiler takes about 10 ms an operator, and a model of 32 layers has the same operators 32 times. Idea: the
program is cut where the compiler has nothing to do (collectives, copies between tiers, operators with kernels of their
own, updates, which are called for many parameters at once). Of what lies between, two pieces that are equal but for the
names of their values are one function, and pieces with nothing to fuse are left as they are. A long piece without such
a cut (a model on one device) is cut where it repeats itself.

    rearrange linear add layer_norm | all_gather | rearrange linear add layer_norm | attention | view
        ->  segment.0 | all_gather | segment.0 | attention | view
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from colofunc.ops.define import FOR_COMPILERS, NUMBERED
from colofunc.ops.targets import is_view, may_copy
from colofunc.program.facts import is_product, kind_of, lifetimes, rearrange_steps, written
from colofunc.program.ir import Node, Program, Ref, Value, map_refs
from colofunc.program.layout_copies import only_describes

LONGEST = 256
"""Operators of a piece that is compiled as a whole; a longer one is cut where it repeats itself."""
SHORTEST = 48
"""A piece that repeats itself is cut into segments of at least so many operators: each of them is a call of some
microseconds."""
PERIODS = 64
"""Distances at which a piece may repeat itself, the most frequent ones, that are tried."""
REARRANGE = "colofunc.rearrange"


@attrs.frozen(eq=False)
class SegmentPiece:
    """Neighbouring nodes of a program, `count` from number `first` on, most of which are compiled as one function."""

    first: int
    count: int
    ahead: Sequence[Node]  # views of what comes from outside, which stay as they are in front of it
    nodes: Sequence[Node]  # the function
    ins: tuple[int, ...]  # values that it reads, in order of their first use
    outs: tuple[int, ...]  # values that it makes and that are read behind it
    changed: tuple[int, ...]  # which of `ins` it writes to

    @property
    def numbers(self) -> tuple[int, ...]:
        """The integers that it is given behind `ins`: those in which calls of equal layers differ."""
        return tuple(node.args[NUMBERED[node.target]] for node in self.nodes if node.target in NUMBERED)

    def text(self, values: Mapping[int, Value]) -> str:
        """Equal for two pieces if and only if one function can stand for both."""
        names: dict[int, int] = {}

        def name(id: int) -> Ref:
            return Ref(names.setdefault(id, len(names)))

        given = [(name(id), values[id].shape, values[id].dtype) for id in self.ins]
        calls = []
        for node in self.nodes:
            operands = map_refs((unnumbered(node), node.kwargs), name)
            calls.append((node.target, operands, [None if out is None else name(out) for out in node.outs]))
        return repr((given, calls, [name(out) for out in self.outs]))


def unnumbered(node: Node, number: Any = None) -> tuple[Any, ...]:
    """The arguments of a node, `number` in place of the integer that it alone has."""
    at = NUMBERED.get(node.target)
    return node.args if at is None else (*node.args[:at], number, *node.args[at + 1 :])


def pieces(program: Program, uncompiled: tuple[str, ...] = ()) -> list[SegmentPiece]:
    """What of a program is to be compiled, in order. uncompiled: modules that other software leaves as they are."""
    last = lifetimes(program)
    found = []
    for first, nodes in _runs(program, uncompiled):
        for begin, end in _cuts(nodes, program.values):
            piece = _piece(first + begin, nodes[begin:end], last)
            if piece is not None and _can_fuse(piece):
                found.append(piece)
    return found


def _runs(program: Program, uncompiled: tuple[str, ...]) -> Iterator[tuple[int, Sequence[Node]]]:
    """Maximal runs of nodes that a compiler can look into, with the index of their first node."""
    begin = 0
    for index, node in enumerate(program.nodes):
        if not _is_open(node, program.values) or _is_in(node.path, uncompiled):
            if index > begin:
                yield begin, program.nodes[begin:index]
            begin = index + 1
        elif node.on != program.nodes[begin].on:  # other ranks run it
            yield begin, program.nodes[begin:index]
            begin = index
    if begin < len(program.nodes):
        yield begin, program.nodes[begin:]


def _is_in(path: str, modules: tuple[str, ...]) -> bool:
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def _is_open(node: Node, values: Mapping[int, Value]) -> bool:
    """Whether a compiler sees what a node computes on the device.

    It does of operators of torch, and of those of ours that are said in torch's.
    """
    if any(values[id].tier != "device" for id in (*node.refs, *node.results)):
        return False
    kind = kind_of(node)
    if kind is not None:
        return kind[0] == "rearrange"
    return node.target.startswith("aten.") or node.target in FOR_COMPILERS


# ---- pieces that repeat themselves ----


def _cuts(nodes: Sequence[Node], values: Mapping[int, Value]) -> list[tuple[int, int]]:
    """Begin and end of the segments of a run: itself, or equal parts of it where it is long and repeats itself."""
    if len(nodes) <= LONGEST:
        return [(0, len(nodes))]
    numbers: dict[str, int] = {}
    kinds = np.array([numbers.setdefault(_kind_text(node, values), len(numbers)) for node in nodes])
    reach = _reach(nodes)
    return list(_parts(kinds, reach, 0, len(nodes)))


def _kind_text(node: Node, values: Mapping[int, Value]) -> str:
    """What is equal of nodes at the same place of two layers."""
    of = [(values[id].shape, values[id].dtype) for id in (*node.refs, *node.results)]
    return repr((node.target, map_refs((unnumbered(node), node.kwargs), lambda id: None), of))


def _reach(nodes: Sequence[Node]) -> list[int]:
    """Per node, the node of the run that reads its results last; itself where none does."""
    maker: dict[int, int] = {}
    for position, node in enumerate(nodes):
        maker.update(dict.fromkeys(node.results, position))
    reach = list(range(len(nodes)))
    for position, node in enumerate(nodes):
        for id in node.refs:
            if id in maker:
                reach[maker[id]] = position
    return reach


def _parts(kinds: np.ndarray, reach: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Parts of `kinds[begin:end]`.

    The longest stretch that repeats itself is cut in equal parts, and so on with what lies around it.
    """
    found = _stretch(kinds[begin:end]) if end - begin > LONGEST else None
    if found is None:
        if end > begin:
            yield begin, end
        return
    first, period, times = found
    stop = begin + first + period * times
    first = _best_offset(reach, begin + first, period)
    size = period * -(-SHORTEST // period)
    stop = first + (stop - first) // size * size
    yield from _parts(kinds, reach, begin, first)
    for at in range(first, stop, size):
        yield at, at + size
    yield from _parts(kinds, reach, stop, end)


def _stretch(kinds: np.ndarray) -> tuple[int, int, int] | None:
    """(first, period, times) of the longest stretch that repeats itself.

    None where none does so in at least three parts of SHORTEST.
    """
    distances: Counter[int] = Counter()
    seen: dict[int, int] = {}
    for position, kind in enumerate(kinds.tolist()):
        if kind in seen:
            distances[position - seen[kind]] += 1
        seen[kind] = position
    best: tuple[int, int, int] | None = None
    for period, _ in distances.most_common(PERIODS):
        first, length = _longest_true(kinds[:-period] == kinds[period:])
        times = (length + period) // period
        if times * period < 3 * max(period, SHORTEST):
            continue
        if best is None or (times * period, -period) > (best[2] * best[1], -best[1]):
            best = first, period, times
    return best


def _longest_true(flags: np.ndarray) -> tuple[int, int]:
    """First place and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    at = int(np.argmax(ends - starts))
    return int(starts[at]), int(ends[at] - starts[at])


def _best_offset(reach: Sequence[int], first: int, period: int) -> int:
    """Where within the period that begins at `first` to cut.

    That is before the node where the fewest values wait for a reader that comes soon, as between two layers.
    """
    waiting = [0] * period
    for made in range(max(0, first - period), first + period):
        if reach[made] - made > period:  # what a backward pass reads later crosses every cut
            continue
        for at in range(max(made + 1, first), min(reach[made] + 1, first + period)):
            waiting[at - first] += 1
    return first + waiting.index(min(waiting))


# ---- what is worth it ----


def _piece(first: int, nodes: Sequence[Node], last: Mapping[int, int]) -> SegmentPiece | None:
    """The piece of these nodes; None where there is nothing to compile.

    Views of what comes from outside stand in front of it: two layers that lie at different places of one buffer are one
    function. Views at the end stand behind it, where they cost less than as its results.
    """
    nodes, behind = _without_views_at_the_end(nodes)
    made = {out for node in nodes for out in node.results}
    ahead: list[Node] = []
    inner: list[Node] = []
    for node in nodes:
        if _never_copies(node) and made.isdisjoint(node.refs):
            ahead.append(node)
            made.difference_update(node.results)
        else:
            inner.append(node)
    read: dict[int, None] = {}  # from outside, in order
    outs: list[int] = []
    changed: set[int] = set()
    later = {id for node in behind for id in node.refs}
    for node in inner:
        read.update(dict.fromkeys(id for id in node.refs if id not in made))
        changed.update(written(node))
        for out in node.results:
            if out in later or last.get(out, -1) >= first + len(nodes):
                outs.append(out)
    if not read:  # where results without operands lie is known to who runs the program
        return None
    places = tuple(place for place, id in enumerate(read) if id in changed)
    return SegmentPiece(first, len(nodes), ahead, inner, tuple(read), tuple(outs), places)


def _without_views_at_the_end(nodes: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
    """(nodes up to the last operator that computes, views behind it)."""
    makers = {out: node for node in nodes for out in node.results}
    end = len(nodes)
    while end and only_describes(nodes[end - 1].target):
        maker = makers.get(nodes[end - 1].refs[0])
        if not _never_copies(nodes[end - 1]) and maker is not None and _permutes(maker):
            break  # a copy, which the compiler may make together with what it copies
        end -= 1
    return nodes[:end], nodes[end:]


def _never_copies(node: Node) -> bool:
    """Whether the result of a node is a view of its operand, however that lies in memory."""
    return is_view(node.target) and not may_copy(node.target)


def _permutes(node: Node) -> bool:
    return node.target == REARRANGE or node.target.rsplit(".", 1)[0] in ("aten.permute", "aten.transpose", "aten.t")


def _can_fuse(piece: SegmentPiece) -> bool:
    """Whether some operator, no product of matrices, reads what another one in the piece has computed.

    Views may stand between them.
    """
    computed: set[int] = set()
    for node in piece.nodes:
        reads = not computed.isdisjoint(node.refs)
        if reads and not only_describes(node.target) and not is_product(node.target):
            return True
        if reads or not only_describes(node.target):
            computed.update(node.results)
            computed.update(written(node))
    return False


def rearranged(x: torch.Tensor, pattern: str, names: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
    """`colofunc.rearrange` in torch's operators."""
    first, order, last = rearrange_steps(pattern, tuple(names), tuple(sizes), tuple(x.shape))
    if first is not None:
        x = x.reshape(first)
    if order is not None:
        x = x.permute(order)
    return x if last is None else x.reshape(last)
