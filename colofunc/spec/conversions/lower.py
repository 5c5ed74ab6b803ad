"""From abstract steps to moves: collectives on one local tensor, with einops rearranges between them.

The local tensor is kept as a list of dims, each a list of slots, and is only rearranged where a collective needs its
chunks in front, or at the end. For `(tp b) d -> b (tp d)` on tp=2 that gives

    rearrange "a (b c) -> b a c"  ·  all_to_all ("tp",) 2  ·  rearrange "a b c -> (a b) c"
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from math import prod
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import attrs

from colofunc.spec.conversions.moves import PuzzleMove
from colofunc.spec.conversions.refine import COPY, HOW, AxisPart, Locations, Puzzle
from colofunc.spec.layout import At, Dim, Layout, make_layout

LETTERS = ascii_lowercase + ascii_uppercase

SlotForm = tuple[tuple[int, ...], ...]  # dims of a local tensor as slots


@attrs.frozen
class ConversionCall:
    """One operator call on the value so far: `colofunc.<target>(x, *args)`.

    `local_shape`: of the result. `layout`: of the result, None where it is none (a part of an axis is placed, or chunks
    stand in front). `on`: who takes part; None: all.
    """

    target: str
    args: tuple[Any, ...]
    local_shape: tuple[int, ...]
    layout: Layout | None = None
    on: At | None = None

    def __str__(self) -> str:
        return f"{self.target}({', '.join(map(repr, self.args))})"


def fuse_steps(steps: tuple[PuzzleMove, ...]) -> list[PuzzleMove]:
    """Neighbouring slices become one, neighbouring keep_firsts of one kind too."""
    fused: list[PuzzleMove] = []
    for step in steps:
        if fused and _can_fuse(fused[-1], step):
            kind, who, after = step
            fused[-1] = (kind, tuple(sorted((*fused[-1][1], *who))), after)
        else:
            fused.append(step)
    return fused


def _can_fuse(first: PuzzleMove, second: PuzzleMove) -> bool:
    """Whether two steps that follow one another are one step of all their parts."""
    kind, first_parts, _ = first
    second_kind, second_parts, after = second
    if kind != second_kind:
        return False
    if kind == "keep_first":
        return after[first_parts[0]] == after[second_parts[0]]  # the same reduction is pending
    return kind == "take_shard"


def axes_text(parts: tuple[AxisPart, ...], axis_sizes: dict[str, int]) -> tuple[str, ...]:
    """Names of parts, those of one axis that follow one another joined: dp[2:2], dp[1:2] -> dp where dp has 4."""
    runs: list[tuple[str, int, int]] = []  # axis, stride, size
    for part in parts:
        if runs and runs[-1][0] == part.axis and runs[-1][1] == part.stride * part.size:
            runs[-1] = (part.axis, part.stride, runs[-1][2] * part.size)
        else:
            runs.append((part.axis, part.stride, part.size))
    texts = []
    for axis, stride, size in runs:
        is_whole = size == axis_sizes[axis]
        texts.append(axis if is_whole else f"{axis}[{stride}:{size}]")
    return tuple(texts)


@attrs.define
class _Value:
    """The local tensor while moves are emitted."""

    puzzle: Puzzle
    axis_sizes: dict[str, int]
    src: Layout
    form: SlotForm
    where: Locations
    moves: list[ConversionCall]

    def home(self, where: Locations) -> SlotForm:
        """The local form of a layout: every dim's slots that no part holds."""
        return _without(self.puzzle.dims, where)

    def shape(self, form: SlotForm) -> tuple[int, ...]:
        """Sizes of the dims of a form."""
        return tuple([self._size(dim) for dim in form])

    def _size(self, dim: tuple[int, ...]) -> int:
        return prod([self.puzzle.sizes[slot] for slot in dim])

    def emit(self, target: str, args: tuple[Any, ...], form: SlotForm) -> None:
        """Add a move that leaves the tensor in this form. Its result has a layout where no chunks stand in front."""
        self.form = form
        layout = self.layout() if form == self.home(self.where) else None
        self.moves.append(ConversionCall(target, args, self.shape(form), layout))

    def rearrange(self, form: SlotForm) -> None:
        """Bring the tensor into a form; no move where only slots of size 1 differ."""
        ones = {slot for slot, size in enumerate(self.puzzle.sizes) if size == 1}
        old, new = _without(self.form, ones), _without(form, ones)
        if old == new:
            self.form = form
            return
        self.emit("rearrange", _pattern(old, new, self.puzzle.sizes), form)

    def carry_out(self, kind: str, who: tuple[int, ...], after: Locations) -> None:
        """Emit the moves of one step."""
        parts = tuple(self.puzzle.parts[number] for number in who)
        axes = axes_text(parts, self.axis_sizes)
        ranks = prod(part.size for part in parts)
        old = tuple(self.where[number] for number in who)
        new = tuple(after[number] for number in who)
        if kind in ("take_shard", "reduce_scatter", "all_to_all"):
            # Chunks in front, the rest already as it will be in the end.
            rest = _without(self.home(after), old)
            self.rearrange((new, *rest))
            self.where = after
            if kind == "all_to_all":
                self.emit(kind, (axes, ranks), (old, *rest))
            elif kind == "reduce_scatter":
                self.emit(kind, (axes, ranks, HOW[old[0]]), rest)
            else:
                self.emit(kind, (axes, ranks), rest)
            return
        before, self.where = self.where, after
        if kind == "all_gather":
            self.emit(kind, (axes, ranks), (old, *self.form))
        elif kind == "permute":
            self.emit(kind, (axes, ranks, _table(self.puzzle, who, before, after)), self.form)
        elif kind == "all_reduce":
            self.emit(kind, (axes, ranks, HOW[old[0]]), self.form)
        elif HOW[new[0]] == "sum":  # keep_first; copies already are a pending max or min
            self.emit(kind, (axes, ranks, "sum"), self.form)

    def layout(self) -> Layout | None:
        """The layout with parts where they are now; None if an axis is spread over separate places."""
        part_in: dict[int, AxisPart] = {}  # slot -> the part that is there
        pending: set[tuple[str, str]] = set()
        for part, where in zip(self.puzzle.parts, self.where, strict=True):
            if where >= 0:
                part_in[where] = part
            elif where < COPY:
                pending.add((part.axis, HOW[where]))
        dims: list[Dim] = []
        for slots in self.puzzle.dims:
            dim = self._dim(slots, part_in)
            if dim is None:
                return None
            dims.append(dim)
        if not self._are_whole([axis for axis, _ in pending]):
            return None
        return make_layout(tuple(dims), self.src.shape, tuple(pending), self.src.tier, self.src.scheme)

    def _dim(self, slots: tuple[int, ...], part_in: Mapping[int, AxisPart]) -> Dim | None:
        """The atoms of a dim, parts of an axis joined; None if a part has no neighbour to make its axis whole."""
        atoms: list[tuple[int, str | None, int]] = []  # size, axis, stride
        for slot in slots:
            size = self.puzzle.sizes[slot]
            part = part_in.get(slot)
            if part is None:
                atoms.append((size, None, 0))
            elif atoms and atoms[-1][1] == part.axis and atoms[-1][2] == part.stride * size:
                atoms[-1] = (atoms[-1][0] * size, part.axis, part.stride)
            else:
                atoms.append((size, part.axis, part.stride))
        for size, axis, _ in atoms:
            if axis is not None and size != self.axis_sizes[axis]:
                return None
        return tuple((size, axis) for size, axis, _ in atoms)

    def _are_whole(self, pending: list[str]) -> bool:
        """Whether of each axis in `pending`, once for each reduction, all parts are pending in one way."""
        if len(set(pending)) != len(pending):
            return False
        locations = [where for part, where in zip(self.puzzle.parts, self.where, strict=True) if part.axis in pending]
        return all(where < COPY for where in locations)


def _without(form: SlotForm, slots: Collection[int]) -> SlotForm:
    dims = []
    for dim in form:
        dims.append(tuple([slot for slot in dim if slot not in slots]))
    return tuple(dims)


def lower(
    puzzle: Puzzle, steps: tuple[PuzzleMove, ...], src: Layout, axis_sizes: dict[str, int]
) -> list[ConversionCall]:
    """Moves that carry out the steps, from a part of `src` to a part of the puzzle's goal."""
    value = _Value(puzzle, axis_sizes, src, (), puzzle.start, [])
    value.form = value.home(puzzle.start)
    for kind, who, after in fuse_steps(steps):
        value.carry_out(kind, who, after)
    value.rearrange(value.home(puzzle.goal))
    if steps and not value.moves:
        # The same tensor in another layout is a value of its own: the one that was there keeps its layout.
        value.emit("rearrange", _pattern(value.form, value.form, puzzle.sizes), value.form)
    return value.moves


def _table(puzzle: Puzzle, who: tuple[int, ...], before: Locations, after: Locations) -> tuple[int, ...]:
    """Per group member, the member whose data it gets: a part takes over the role that its giver had."""
    givers_left = list(who)
    giver: dict[int, int] = {}
    for number in who:
        giver[number] = next(other for other in givers_left if before[other] == after[number])
        givers_left.remove(giver[number])
    sizes = [puzzle.parts[number].size for number in who]
    table = []
    for member in range(prod(sizes)):
        # The member's index along each part, the last one varying fastest; what it gets is at the same index of the
        # giver.
        index_of_giver: dict[int, int] = {}
        rest = member
        for number, size in zip(reversed(who), reversed(sizes), strict=True):
            rest, index_of_giver[giver[number]] = divmod(rest, size)
        source = 0
        for number, size in zip(who, sizes, strict=True):
            source = source * size + index_of_giver[number]
        table.append(source)
    return tuple(table)


def _pattern(old: SlotForm, new: SlotForm, sizes: tuple[int, ...]) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """einops pattern, names and sizes; slots that stay together become one name.

    Sizes are given of names that stand in a group of several on the left: einops knows the others from the shape.
    """
    following = _followers(old, new)
    inner = set(following.values())
    names: dict[int, str] = {}  # first slot of a run -> its name
    run_sizes: dict[int, int] = {}
    for dim in old:
        for slot in dim:
            if slot not in inner:
                names[slot] = LETTERS[len(names)]
                run_sizes[slot] = _run_size(slot, following, sizes)
    grouped: list[int] = []
    for dim in old:
        named = [slot for slot in dim if slot in names]
        if len(named) > 1:
            grouped += named
    text = f"{_side(old, names)} -> {_side(new, names)}"
    return text, tuple(names[slot] for slot in grouped), tuple(run_sizes[slot] for slot in grouped)


def _followers(old: SlotForm, new: SlotForm) -> dict[int, int]:
    """Slot -> the slot that follows it in the same dim on both sides."""
    pairs_in_new = {pair for dim in new for pair in pairwise(dim)}
    return {slot: behind for dim in old for slot, behind in pairwise(dim) if (slot, behind) in pairs_in_new}


def _run_size(slot: int, following: Mapping[int, int], sizes: tuple[int, ...]) -> int:
    """Size of a slot and of those that follow it."""
    size = sizes[slot]
    while slot in following:
        slot = following[slot]
        size *= sizes[slot]
    return size


def _side(form: SlotForm, names: Mapping[int, str]) -> str:
    """One side of a pattern."""
    groups = []
    for dim in form:
        words = [names[slot] for slot in dim if slot in names]
        if not words:
            groups.append("1")
        elif len(words) == 1:
            groups.append(words[0])
        else:
            groups.append(f"({' '.join(words)})")
    return " ".join(groups)
