"""Layout: where every element of one global tensor lives, as frozen data.

A dim of a tensor is an ordered product of *atoms* `(size, axis)`. An atom with a mesh axis is spread over that axis; an
atom without one (axis None) stays in a rank's memory. `(dp b) s (tp d)` of a (8, 4, 6) tensor on dp=2, tp=3 is

    dims = (((2, "dp"), (4, None)), ((4, None),), ((3, "tp"), (2, None)))

and the part of rank (i, j) is `rearrange(x, "(dp b) s (tp d) -> dp tp b s d")[i, j]`. Striped, block-cyclic and
composite layouts are other orders of atoms, nothing else. Mesh axes that appear nowhere hold copies. `pending` lists
axes over which the parts still have to be reduced (+, max, min). Adjacent local atoms are merged and size-1 atoms are
dropped, so that equal layouts are equal objects.

`at`: a value need not be everywhere. `a b @pp=1` exists on the ranks at index 1 of `pp` only, where the pattern says
how it is split over the other axes; elsewhere its part is an empty tensor. `@pp=0,3`: at two indices, each with a copy.

Padding: the atoms of a dim may multiply to more than the dim's global size; the elements past the end are zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property, lru_cache
from math import prod
from string import ascii_lowercase

import attrs

from colofunc.errors import SpecError

Atom = tuple[int, str | None]
Dim = tuple[Atom, ...]
At = tuple[str, tuple[int, ...]]
"""Some indices of a mesh axis, ascending: where a value exists, or who runs an operator. None in its place: all
ranks."""

REDUCTIONS = ("sum", "max", "min")


def axes_of(dim: Dim) -> tuple[str, ...]:
    """The mesh axes on a dim, major first."""
    return tuple(axis for _, axis in dim if axis is not None)


def _size(dim: Dim) -> int:
    """What the atoms of a dim multiply to."""
    return prod(size for size, _ in dim)


def _gathered(dim: Dim, axes: Collection[str]) -> Dim:
    """A dim that is not split over `axes`."""
    return tuple((size, None if axis in axes else axis) for size, axis in dim)


@lru_cache(maxsize=1 << 16)
def canonical_dim(atoms: Dim) -> Dim:
    """Merge adjacent local atoms and drop atoms of size 1: `((2,a),(1,b),(3,None),(4,None))` -> `((2,a),(12,None))`."""
    out: list[Atom] = []
    for size, axis in atoms:
        if size == 1:
            continue
        if axis is None and out and out[-1][1] is None:
            out[-1] = (out[-1][0] * size, None)
        else:
            out.append((size, axis))
    return tuple(out)


@attrs.frozen(eq=False, repr=False, slots=False)
class Layout:
    """How one global tensor of `shape` is split. Build with `make_layout` (canonical, interned) or `Spec.bind`."""

    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    pending: tuple[tuple[str, str], ...] = ()  # ((axis, "sum" | "max" | "min"), ...), sorted by axis
    tier: str = "device"
    scheme: str | None = None  # quantisation scheme, None: stored as computed
    at: At | None = None  # where it exists
    local_shape: tuple[int, ...] = attrs.field(init=False, default=())  # shape of one rank's part

    # Layouts are interned by `make_layout`, so identity is equality and hashing is free; and what is asked of one is
    # worked out once.

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """Global shape with padding: what the atoms multiply to."""
        return tuple(_size(dim) for dim in self.dims)

    @cached_property
    def is_padded(self) -> bool:
        """Whether some dim is filled up so that it divides."""
        return self.padded_shape != self.shape

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split this tensor (not the pending ones), in order of appearance."""
        axes: list[str] = []
        for dim in self.dims:
            axes += axes_of(dim)
        return tuple(axes)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return not self.axes and not self.pending and self.at is None

    @cached_property
    def local_numel(self) -> int:
        """Elements that one rank holds."""
        return prod(self.local_shape)

    def __attrs_post_init__(self) -> None:
        local = []
        for dim in self.dims:
            local.append(prod(size for size, axis in dim if axis is None))
        object.__setattr__(self, "local_shape", tuple(local))

    def with_pending(self, pending: tuple[tuple[str, str], ...]) -> Layout:
        """The same split with these axes, (axis, how they are reduced), pending."""
        return make_layout(self.dims, self.shape, pending, self.tier, self.scheme, self.at)

    def without(self, axes: Collection[str]) -> Layout:
        """What an all-gather over `axes` makes of it: nothing is split over these any more."""
        dims = tuple(_gathered(dim, axes) for dim in self.dims)
        return make_layout(dims, self.shape, self.pending, self.tier, self.scheme, self.at)

    def with_tier(self, tier: str) -> Layout:
        """The same split in another memory."""
        return make_layout(self.dims, self.shape, self.pending, tier, self.scheme, self.at)

    def with_at(self, at: At | None) -> Layout:
        """The same split on other ranks; None: on all."""
        if at == self.at:
            return self
        return make_layout(self.dims, self.shape, self.pending, self.tier, self.scheme, at)

    def lies_along(self, axis: str) -> bool:
        """Whether the parts of ranks differ along an axis."""
        return axis in self.axes or any(axis == pending for pending, _ in self.pending)

    def where_free(self, at: At | None) -> Layout:
        """The same split on the ranks `at`; on all ranks where it is split along the axis of `at`."""
        return self.with_at(None if at is not None and self.lies_along(at[0]) else at)

    def whole_along(self, axis: str) -> Layout:
        """The layout in which no parts differ along an axis, and all else lies as it does here."""
        if not self.lies_along(axis):
            return self
        pending = tuple((other, how) for other, how in self.pending if other != axis)
        whole = self.without((axis,)).with_pending(pending)
        return replicated(self.shape, self.tier) if whole.is_padded else whole

    def __repr__(self) -> str:
        return f"Layout({self.text()!r}, shape={self.shape})"

    def __reduce__(self) -> tuple[object, ...]:
        return make_layout, (self.dims, self.shape, self.pending, self.tier, self.scheme, self.at)

    def text(self, taken: tuple[str, ...] = ()) -> str:
        """The spec that binds to this layout, with letters for the local factors: `(dp a) b (tp c)`.

        `taken`: names that are no local factor's, such as all axes of the mesh it is to be bound on.
        """
        return layout_text(self, taken)


_INTERNED: dict[tuple[object, ...], Layout] = {}


def make_layout(
    dims: tuple[Dim, ...],
    shape: tuple[int, ...],
    pending: tuple[tuple[str, str], ...] = (),
    tier: str = "device",
    scheme: str | None = None,
    at: At | None = None,
) -> Layout:
    """The canonical, interned layout; raises SpecError where an axis is used twice or sizes cannot fit."""
    dims = tuple(canonical_dim(dim) for dim in dims)
    # equal layouts are one object, whatever the order in which reductions were named
    pending = tuple(sorted(pending)) if len(pending) > 1 else tuple(pending)
    key = (dims, shape, pending, tier, scheme, at)
    found = _INTERNED.get(key)
    if found is None:
        _check(dims, shape, pending, at)
        found = _INTERNED.setdefault(key, Layout(dims, shape, pending, tier, scheme, at))
    return found


def _check(dims: tuple[Dim, ...], shape: tuple[int, ...], pending: tuple[tuple[str, str], ...], at: At | None) -> None:
    if len(dims) != len(shape):
        raise SpecError(f"layout has {len(dims)} dims but the tensor has {len(shape)} (shape {shape})")
    used: list[str] = []
    for dim in dims:
        used += axes_of(dim)
    used += [axis for axis, _ in pending]
    if at is not None:
        used.append(at[0])
    for axis in used:
        if used.count(axis) > 1:
            raise SpecError(f"mesh axis {axis!r} is used {used.count(axis)} times in one spec; use it once")
    for position, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        if _size(dim) < size:
            raise SpecError(f"dim {position} of size {size} does not fit its factors {dim}")
    for axis, how in pending:
        if how not in REDUCTIONS:
            raise SpecError(f"pending reduction {how!r} over {axis!r} is none of {REDUCTIONS}")


def covers(have: At | None, want: At | None) -> bool:
    """Whether who is at `want` is at `have`, too."""
    # None is everywhere: it covers all, and only it covers everywhere.
    if have is None or want is None:
        return have is None
    return have[0] == want[0] and set(want[1]) <= set(have[1])


def at_text(at: At) -> str:
    """`@pp=0,3`"""
    return f"@{at[0]}={','.join(map(str, at[1]))}"


@lru_cache(maxsize=1 << 16)
def is_major(layout: Layout) -> bool:
    """Whether in every dim all mesh axes stand before the local factor, without padding: `(dp tp b)`, not `(b dp)`."""
    if layout.is_padded:
        return False
    # Adjacent local atoms are merged, so only the last of a dim may be local.
    leading: list[Atom] = []
    for dim in layout.dims:
        leading += dim[:-1]
    return all(axis is not None for _, axis in leading)


def replicated(shape: tuple[int, ...], tier: str = "device") -> Layout:
    """The layout in which every rank holds the whole tensor."""
    return make_layout(tuple(((size, None),) for size in shape), shape, (), tier)


@lru_cache(maxsize=1 << 14)
def layout_text(layout: Layout, taken: tuple[str, ...] = ()) -> str:
    """A spec string that binds back to `layout` on a mesh whose other axes and views are `taken` (or not letters)."""
    placed = {*taken, *layout.axes}
    placed.update(axis for axis, _ in layout.pending)
    if layout.at is not None:
        placed.add(layout.at[0])
    letters = iter([letter for letter in ascii_lowercase if letter not in placed])
    words: list[str] = []
    for dim, size, padded_size in zip(layout.dims, layout.shape, layout.padded_shape, strict=True):
        words.append(_dim_text(dim, size, padded_size, letters))
    for axis, how in layout.pending:
        words.append(f"+{axis}" if how == "sum" else f"{how}:{axis}")
    if layout.tier != "device":
        words.append(f"@{layout.tier}")
    if layout.at is not None:
        words.append(at_text(layout.at))
    return " ".join(words)


def _dim_text(dim: Dim, size: int, padded_size: int, letters: Iterator[str]) -> str:
    """`(dp a)`, `b`, `(tp c~)`: one dim of a spec."""
    parts: list[str] = []
    local_places = [place for place, (_, axis) in enumerate(dim) if axis is None]
    for place, (atom_size, axis) in enumerate(dim):
        if axis is not None:
            parts.append(axis)
        elif place != local_places[0]:
            parts.append(str(atom_size))  # a second local factor needs its size said
        else:
            parts.append(next(letters, "z"))
    if not parts:
        parts = ["1"] if size == 1 else [next(letters, "z")]
    # The pad is of the last local factor; without one an extra factor carries it.
    if padded_size != size:
        if local_places:
            parts[local_places[-1]] += "~"
        else:
            parts.append("1~")
    return parts[0] if len(parts) == 1 else "(" + " ".join(parts) + ")"
