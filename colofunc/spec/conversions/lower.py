"""From abstract steps to moves: collectives on one local tensor, with einops rearranges between them.

The local tensor is kept as a list of dims, each a list of slots, and is only rearranged where a collective needs its
chunks in front, or at the end. For `(tp b) d -> b (tp d)` on tp=2 that gives

    rearrange "a (b c) -> b a c"  ·  all_to_all ("tp",) 2  ·  rearrange "a b c -> (a b) c"
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import attrs

from colofunc.spec.conversions.moves import Step
from colofunc.spec.conversions.refine import COPY, HOW, Locations, Part, Puzzle
from colofunc.spec.layout import At, Atom, Layout, make_layout

LETTERS = ascii_lowercase + ascii_uppercase

Form = tuple[tuple[int, ...], ...]  # dims of a local tensor as slots


@attrs.frozen
class Move:
    """One operator call on the value so far: `colofunc.<target>(x, *args)`.

    `in_shape`, `local_shape`: of x and of the result. `layout`: of the result, None where it is none (a part of an
    axis is placed, or chunks stand in front). `on`: who takes part; None: all.
    """

    target: str
    args: tuple[Any, ...]
    in_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    layout: Layout | None = None
    on: At | None = None

    def __str__(self) -> str:
        return f"{self.target}({', '.join(map(repr, self.args))})"


def fuse_steps(steps: tuple[Step, ...]) -> list[Step]:
    """Neighbouring slices become one, neighbouring keep_firsts of one kind too."""
    out: list[Step] = []
    for kind, who, after in steps:
        last = out[-1] if out and out[-1][0] == kind else None
        alike = last is not None and after[who[0]] == after[last[1][0]]
        same = kind == "take_shard" or (kind == "keep_first" and alike)
        if last is not None and same:
            out[-1] = (kind, tuple(sorted((*last[1], *who))), after)
        else:
            out.append((kind, who, after))
    return out


def axes_text(parts: tuple[Part, ...], axis_sizes: dict[str, int]) -> tuple[str, ...]:
    """Names of parts, those of one axis that follow one another joined: dp[2:2], dp[1:2] -> dp where dp has 4."""
    runs: list[tuple[str, int, int]] = []
    for part in parts:
        if runs and runs[-1][0] == part.axis and runs[-1][1] == part.stride * part.size:
            runs[-1] = (part.axis, part.stride, runs[-1][2] * part.size)
        else:
            runs.append((part.axis, part.stride, part.size))
    return tuple(a if size == axis_sizes[a] else f"{a}[{stride}:{size}]" for a, stride, size in runs)


@attrs.define
class _Value:
    """The local tensor while moves are emitted."""

    puzzle: Puzzle
    axis_sizes: dict[str, int]
    src: Layout
    form: Form
    where: Locations
    moves: list[Move]

    def home(self, where: Locations) -> Form:
        """The local form of a layout: every dim's slots that no part holds."""
        held = set(where)
        return tuple(tuple(s for s in dim if s not in held) for dim in self.puzzle.dims)

    def shape(self, form: Form) -> tuple[int, ...]:
        return tuple(prod(self.puzzle.sizes[s] for s in dim) for dim in form)

    def emit(self, target: str, args: tuple[Any, ...], form: Form) -> None:
        before, after = self.shape(self.form), self.shape(form)
        self.form = form
        layout = self.layout() if form == self.home(self.where) else None
        self.moves.append(Move(target, args, before, after, layout))

    def rearrange(self, form: Form) -> None:
        real = {s for s, n in enumerate(self.puzzle.sizes) if n != 1}
        old = tuple(tuple(s for s in dim if s in real) for dim in self.form)
        new = tuple(tuple(s for s in dim if s in real) for dim in form)
        if old == new:
            self.form = form
            return
        self.emit("rearrange", _pattern(old, new, self.puzzle.sizes), form)

    def layout(self) -> Layout | None:
        """The layout with parts where they are now; None if an axis is spread over separate places."""
        holder = {loc: self.puzzle.parts[k] for k, loc in enumerate(self.where) if loc >= 0}
        pending = {(self.puzzle.parts[k].axis, HOW[loc]) for k, loc in enumerate(self.where) if loc < COPY}
        dims: list[tuple[Atom, ...]] = []
        for dim in self.puzzle.dims:
            atoms: list[tuple[int, str | None, int]] = []
            for slot in dim:
                part = holder.get(slot)
                size = self.puzzle.sizes[slot]
                if part is None:
                    atoms.append((size, None, 0))
                elif atoms and atoms[-1][1] == part.axis and atoms[-1][2] == part.stride * size:
                    atoms[-1] = (atoms[-1][0] * size, part.axis, part.stride)
                else:
                    atoms.append((size, part.axis, part.stride))
            if any(axis is not None and size != self.axis_sizes[axis] for size, axis, _ in atoms):
                return None
            dims.append(tuple((size, axis) for size, axis, _ in atoms))
        placed = [axis for dim in dims for _, axis in dim if axis is not None]
        for axis, _ in pending:
            count = sum(p.size != 1 and p.axis == axis for k, p in enumerate(self.puzzle.parts) if self.where[k] < COPY)
            if axis in placed or count != sum(p.axis == axis for p in self.puzzle.parts):
                return None
        if len({axis for axis, _ in pending}) != len(pending):
            return None
        return make_layout(tuple(dims), self.src.shape, tuple(pending), self.src.tier, self.src.scheme)


def lower(puzzle: Puzzle, steps: tuple[Step, ...], src: Layout, axis_sizes: dict[str, int]) -> list[Move]:
    """Moves that carry out the steps, from a part of `src` to a part of the puzzle's goal."""
    value = _Value(puzzle, axis_sizes, src, (), puzzle.start, [])
    value.form = value.home(puzzle.start)
    for kind, who, after in fuse_steps(steps):
        n = prod(puzzle.parts[k].size for k in who)
        axes = axes_text(tuple(puzzle.parts[k] for k in who), axis_sizes)
        before, value.where = value.where, after
        old, new = tuple(before[k] for k in who), tuple(after[k] for k in who)
        if kind == "all_gather":
            value.emit(kind, (axes, n), (old, *value.form))
        elif kind in ("take_shard", "reduce_scatter", "all_to_all"):
            # Chunks in front, the rest already as it will be in the end.
            rest = tuple(tuple(s for s in dim if s not in old) for dim in value.home(after))
            value.where = before
            value.rearrange((new, *rest))
            value.where = after
            extra = (HOW[old[0]],) if kind == "reduce_scatter" else ()
            value.emit(kind, (axes, n, *extra), (old, *rest) if kind == "all_to_all" else rest)
        elif kind == "permute":
            value.emit(kind, (axes, n, _table(puzzle, who, before, after)), value.form)
        else:  # all_reduce, keep_first
            how = HOW[old[0]] if kind == "all_reduce" else HOW[new[0]]
            if kind == "all_reduce" or how == "sum":  # copies already are a pending max or min
                value.emit(kind, (axes, n, how), value.form)
    value.rearrange(value.home(puzzle.goal))
    if steps and not value.moves:
        # The same tensor in another layout is a value of its own: the one that was there keeps its layout.
        value.emit("rearrange", _pattern(value.form, value.form, puzzle.sizes), value.form)
    return value.moves


def _table(puzzle: Puzzle, who: tuple[int, ...], before: Locations, after: Locations) -> tuple[int, ...]:
    """Per group member, the member whose data it gets: part k takes over the role that part giver[k] had."""
    left = list(who)
    giver = {}
    for k in who:
        giver[k] = next(o for o in left if before[o] == after[k])
        left.remove(giver[k])
    sizes = [puzzle.parts[k].size for k in who]
    table = []
    for member in range(prod(sizes)):
        index, rest = {}, member
        for k, size in zip(reversed(who), reversed(sizes)):
            rest, index[k] = divmod(rest, size)
        there = {giver[k]: index[k] for k in who}
        source = 0
        for k, size in zip(who, sizes):
            source = source * size + there[k]
        table.append(source)
    return tuple(table)


def _pattern(old: Form, new: Form, sizes: tuple[int, ...]) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """einops pattern, names and sizes; slots that stay together become one name."""
    after = {}  # slot -> the slot that follows it in the same dim on both sides
    for dim in old:
        for a, b in pairwise(dim):
            if any((a, b) in pairwise(other) for other in new):
                after[a] = b
    inner = set(after.values())
    names: dict[int, str] = {}
    total: dict[int, int] = {}
    for dim in old:
        for slot in dim:
            if slot in inner:
                continue
            names[slot] = LETTERS[len(names)]
            run, total[slot] = slot, sizes[slot]
            while run in after:
                run = after[run]
                total[slot] *= sizes[run]

    def side(form: Form) -> str:
        groups = []
        for dim in form:
            words = [names[s] for s in dim if s in names]
            if len(words) == 1:
                groups.append(words[0])
            else:
                groups.append(f"({' '.join(words)})" if words else "1")
        return " ".join(groups)

    grouped = [s for dim in old for s in dim if s in names and sum(t in names for t in dim) > 1]
    text = f"{side(old)} -> {side(new)}"
    return text, tuple(names[s] for s in grouped), tuple(total[s] for s in grouped)
