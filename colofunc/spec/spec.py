"""Spec: how a tensor is split, as an einops-like pattern that fits any tensor of that rank.

    Spec("(dp b) s (tp d)")             dim 0 is dp blocks, dim 2 is tp blocks, all other mesh axes hold copies
    Spec("(tp v~) d @host")             padded to the next multiple of tp; kept in host memory
    Spec("(4 sp c) d")                  block-cyclic: four blocks in a row on each rank of sp
    Spec("... (tp d) +sp max:ep")       leading dims whole; a pending sum over sp, a pending maximum over ep
    Spec("(dp o) i @pp=1")              exists at index 1 of pp only (a pipeline stage); @pp=0,3 at two (a tied weight)

A word is one dim; a group in parentheses is one dim as a product of factors, major first. A factor that is the name of
a mesh axis (or view) places that axis; any other name is local. `_` is a local factor without a name, which no axis can
have: `(dp _) _` fits a mesh whatever its axes are called. Parsing is done once, binding once per (mesh, shape):

>>> Spec("(dp b) d").bind(Mesh(dp=2), (8, 3)).local_shape
(4, 3)

Source: the pattern language is einops' (Rogozhnikov, "Einops", ICLR 2022), with mesh axes among the factors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from string import ascii_lowercase

import attrs

from colofunc.errors import SpecError, near
from colofunc.mesh import TIERS, Mesh
from colofunc.ops.pattern_words import words
from colofunc.spec.layout import REDUCTIONS, At, Atom, Dim, Layout, at_text, make_layout

JaxEntry = str | None | Sequence[str]

NAMELESS = "_"
"""A local factor that has no name, and so as many times as need be."""
_FACTOR = re.compile(r"(?:[A-Za-z_]\w*|\d+)~?\Z")


@attrs.frozen
class Factor:
    """One factor of a dim: a name (axis or local) or a size, `pad` where `~` follows it."""

    name: str
    size: int | None = None
    pad: bool = False

    def __str__(self) -> str:
        return (self.name or str(self.size)) + ("~" if self.pad else "")


@attrs.frozen
class Parsed:
    """What a spec's text says; `dims` has None where `...` stands."""

    dims: tuple[tuple[Factor, ...] | None, ...]
    pending: tuple[tuple[str, str], ...] = ()
    tier: str = "device"
    at: At | None = None

    @property
    def names(self) -> list[str]:
        """The names of its factors, in order, as often as they stand there."""
        names: list[str] = []
        for dim in self.dims:
            names += [factor.name for factor in dim or () if factor.name]
        return names


@lru_cache(maxsize=1 << 14)
def parse(text: str) -> Parsed:
    """The parts of a spec's text; raises SpecError without knowing mesh or shape."""
    dims: list[tuple[Factor, ...] | None] = []
    pending: list[tuple[str, str]] = []
    tiers: list[str] = []
    places: list[At] = []
    for dim in words(text):
        if isinstance(dim, tuple):
            dims.append(tuple(_in_group(str(word)) for word in dim))
            continue
        token = str(dim)
        if token[0] == "@" and "=" in token:
            places.append(_at(token))
        elif token[0] == "@":
            tiers.append(_tier(token))
        elif _is_pending(token):
            pending.append(_pending(token))
        else:
            dims.append(None if token == "..." else (_factor(token),))
    if len(tiers) > 1:
        raise SpecError(f"two tiers, {' and '.join('@' + tier for tier in tiers)}; keep one")
    if len(places) > 1:
        raise SpecError(
            f"two places, {' and '.join(map(at_text, places))}; a value is at some indices of one axis, such as "
            "'@pp=0,3'"
        )
    if dims.count(None) > 1:
        raise SpecError("'...' stands twice; it can stand for the rest once")
    return Parsed(tuple(dims), tuple(pending), tiers[0] if tiers else "device", places[0] if places else None)


def _is_pending(token: str) -> bool:
    return token[0] == "+" or ":" in token


def _in_group(token: str) -> Factor:
    if token[0] == "@" or _is_pending(token):
        raise SpecError(f"{token!r} inside a group; write it after the dims")
    return _factor(token)


def _tier(token: str) -> str:
    if token[1:] not in TIERS:
        raise SpecError(f"no memory tier {token[1:]!r}{near(token[1:], TIERS, 'tiers')}")
    return token[1:]


def _at(token: str) -> At:
    axis, _, text = token[1:].partition("=")
    indices = text.split(",")
    if not axis.isidentifier() or not all(index.isdecimal() for index in indices):
        raise SpecError(f"{token!r} says no indices of an axis; write '@pp=1', or '@pp=0,3' for two")
    if len(set(indices)) != len(indices):
        raise SpecError(f"{token!r} says an index twice; keep one")
    return axis, tuple(sorted(map(int, indices)))


def _pending(token: str) -> tuple[str, str]:
    how, axis = ("sum", token[1:]) if token[0] == "+" else token.split(":", 1)
    if how not in REDUCTIONS:
        raise SpecError(f"no pending reduction {how!r} in {token!r}{near(how, REDUCTIONS, 'reductions')}")
    if not axis.isidentifier():
        raise SpecError(f"{token!r} names no axis; write {'+tp' if how == 'sum' else how + ':tp'}")
    return axis, how


def _factor(token: str) -> Factor:
    if not _FACTOR.match(token):
        raise SpecError(f"{token!r} is no name, size, '...', '+axis', 'max:axis', '@tier' or '@axis=index'")
    word, pad = token.removesuffix("~"), token.endswith("~")
    if not word[0].isdigit():
        return Factor(word, None, pad)
    if int(word) == 0:
        raise SpecError("a factor of size 0; sizes are 1 or more")
    return Factor("", int(word), pad)


@attrs.frozen(init=False, repr=False)
class Spec:
    """An unbound pattern. Keywords give sizes of local names: `Spec("(a sp c) d", a=4)`. Equal by text and sizes."""

    pattern: str
    sizes: tuple[tuple[str, int], ...]

    def __init__(self, pattern: str, /, **sizes: int) -> None:
        if not isinstance(pattern, str):
            raise SpecError(f"a spec is text such as '(dp b) s d', not {pattern!r}; Spec.jax takes tuples")
        pattern = " ".join(pattern.split()).replace("( ", "(").replace(" )", ")")
        try:
            parsed = parse(pattern)
            names = set(parsed.names) - {NAMELESS}
            for name, size in sizes.items():
                if name not in names:
                    raise SpecError(f"size {name}={size} belongs to no factor{near(name, names, 'factors')}")
                if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                    raise SpecError(f"size {name}={size!r} is no whole number above 0")
        except SpecError as error:
            error.add_note(f"in spec {pattern!r}")
            raise
        self.__attrs_init__(pattern, tuple(sorted(sizes.items())))

    def bind(self, mesh: Mesh, shape: Sequence[int]) -> Layout:
        """The layout of a tensor of global `shape` on `mesh`; raises SpecError naming spec, shape and mesh."""
        return _bind(self, mesh, tuple(shape))

    @classmethod
    def jax(cls, entries: Sequence[JaxEntry]) -> Spec:
        """From a JAX PartitionSpec-like tuple: per dim None, an axis, or axes major first."""
        axes_of_dims: list[tuple[str, ...]] = []
        for entry in entries:
            axes_of_dims.append((entry,) if isinstance(entry, str) else tuple(entry or ()))
        taken = set().union(*axes_of_dims)
        letters = iter([letter for letter in ascii_lowercase if letter not in taken])
        words = []
        for axes in axes_of_dims:
            local = next(letters)
            words.append(f"({' '.join(axes)} {local})" if axes else local)
        return cls(" ".join(words))

    def __str__(self) -> str:
        return self.pattern

    def __repr__(self) -> str:
        sizes = "".join(f", {name}={size}" for name, size in self.sizes)
        return f"Spec({self.pattern!r}{sizes})"


def as_spec(spec: Spec | str) -> Spec:
    """A Spec from itself or from text."""
    return spec if isinstance(spec, Spec) else Spec(spec)


def bind(spec: Spec | str | Layout, mesh: Mesh, shape: Sequence[int]) -> Layout:
    """The layout of `shape` under a spec, its text, or an already bound layout (whose shape must agree)."""
    if isinstance(spec, Layout):
        if spec.shape != tuple(shape):
            raise SpecError(f"layout {spec} is of another shape than {tuple(shape)}; bind its spec to the new shape")
        return spec
    return as_spec(spec).bind(mesh, shape)


def spec_of(layout: Layout, mesh: Mesh) -> Spec:
    """The spec that binds back to `layout` on `mesh`."""
    return Spec(layout.text(names_of(mesh)))


def names_of(mesh: Mesh) -> tuple[str, ...]:
    """What a local factor cannot be called on this mesh: axes and views."""
    return (*mesh.axis_names, *mesh.views)


@lru_cache(maxsize=1 << 16)
def _bind(spec: Spec, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    try:
        parsed = parse(spec.pattern)
        _check_names(spec, parsed, mesh)
        dims = _spread(parsed.dims, len(shape))
        sizes = dict(spec.sizes)
        bound = tuple(_bind_dim(dim, size, mesh, sizes) for dim, size in zip(dims, shape, strict=True))
        pending: list[tuple[str, str]] = []
        for name, how in parsed.pending:
            pending += [(axis, how) for axis in mesh.expand(name) if mesh.shape[axis] > 1]
        return make_layout(bound, shape, tuple(pending), parsed.tier, at=_bind_at(parsed.at, mesh))
    except SpecError as error:
        error.add_note(f"in spec {spec.pattern!r} for a tensor of shape {shape} on {mesh!r}")
        raise


def _check_names(spec: Spec, parsed: Parsed, mesh: Mesh) -> None:
    """Unknown pending axes, and axes used twice (also through a view, also when of size 1)."""
    for axis, how in parsed.pending:
        if axis not in mesh:
            word = f"+{axis}" if how == "sum" else f"{how}:{axis}"
            raise SpecError(f"{word!r} names no mesh axis{near(axis, (*mesh.shape, *mesh.views), 'axes')}")
    if parsed.at is not None and parsed.at[0] not in mesh.shape:
        raise SpecError(f"{at_text(parsed.at)!r} names no mesh axis{near(parsed.at[0], mesh.shape, 'axes')}")
    for name, _ in spec.sizes:
        if name in mesh:
            raise SpecError(f"size {name}=... is given, but {name!r} is a mesh axis; its size is the mesh's")
    placed = [name for name in parsed.names if name in mesh] + [axis for axis, _ in parsed.pending]
    if parsed.at is not None:
        placed.append(parsed.at[0])
    atoms: list[str] = []
    for name in placed:
        atoms += mesh.expand(name)
    for atom in atoms:
        if atoms.count(atom) > 1:
            times = f"mesh axis {atom!r} is used {atoms.count(atom)} times"
            raise SpecError(f"{times}; place an axis once per tensor, and write _ for a factor that is no axis")
    # Names of different dims may repeat no more than in einops: `b b` is a slip, not an equality.
    local = [name for name in parsed.names if name not in mesh]
    for name in local:
        if local.count(name) > 1 and name != NAMELESS:
            raise SpecError(f"factor {name!r} is used {local.count(name)} times; give each dim its own names")


def _bind_at(at: At | None, mesh: Mesh) -> At | None:
    """None where it names all indices of its axis."""
    if at is None:
        return None
    size = mesh.axis_size(at[0])
    if at[1][-1] >= size:
        raise SpecError(f"{at_text(at)!r}: index {at[1][-1]} of axis {at[0]!r} is not in 0..{size - 1}")
    return None if len(at[1]) == size else at


def _spread(dims: tuple[tuple[Factor, ...] | None, ...], rank: int) -> list[tuple[Factor, ...] | None]:
    """One entry per dim: `...` becomes as many None (whole) as the rank leaves."""
    if None in dims:
        at = dims.index(None)
        rest = rank - (len(dims) - 1)
        if rest < 0:
            raise SpecError(f"spec has {len(dims) - 1} dims besides '...', the tensor has {rank}")
        return [*dims[:at], *[None] * rest, *dims[at + 1 :]]
    if len(dims) != rank:
        raise SpecError(f"spec has {len(dims)} dims, the tensor has {rank}; write one word or group per dim (or '...')")
    return list(dims)


def _bind_dim(factors: tuple[Factor, ...] | None, size: int, mesh: Mesh, sizes: Mapping[str, int]) -> Dim:
    """Atoms of one dim of global `size`."""
    if factors is None:
        return ((size, None),)
    atoms: list[Atom | None] = []  # None: the local name whose size is to be found
    unknown: list[str] = []
    for factor in factors:
        if factor.name in mesh and factor.name:
            atoms += [(mesh.shape[axis], axis) for axis in mesh.expand(factor.name)]
        elif factor.size is not None:
            atoms.append((factor.size, None))
        elif factor.name in sizes:
            atoms.append((sizes[factor.name], None))
        else:
            unknown.append(factor.name)
            atoms.append(None)
    word = factors[0] if len(factors) == 1 else "(" + " ".join(map(str, factors)) + ")"
    if len(unknown) > 1:
        raise SpecError(_two_unknown(str(word), unknown, mesh))
    padded = any(factor.pad for factor in factors)
    known = prod(atom[0] for atom in atoms if atom is not None)
    if unknown:
        if size % known and not padded:
            raise SpecError(_uneven(str(word), size, known, unknown[0]))
        inferred = -(-size // known)
        # An empty dim has nothing to split; its factors are as they are and its local size is 0.
        return tuple((inferred, None) if atom is None else atom for atom in atoms)
    if known != size and not (padded and known > size):
        raise SpecError(_unequal(str(word), size, known))
    return tuple(atom for atom in atoms if atom is not None)


def _two_unknown(word: str, unknown: list[str], mesh: Mesh) -> str:
    axes = (*mesh.shape, *mesh.views)
    misspelt = [name for name in unknown if near(name, axes).startswith("; did")]
    first = misspelt[0] if misspelt else unknown[0]
    return (
        f"{word} has {len(unknown)} factors of unknown size, {', '.join(map(repr, unknown))}, so it has no cut; "
        f"if all are local, give sizes as in Spec(..., {unknown[0]}=4); "
        f"{first!r} is no mesh axis{near(first, axes, 'axes')}"
    )


def _uneven(word: str, size: int, known: int, name: str) -> str:
    return (
        f"{word} splits a dim of size {size} by {known}, which does not divide it; pad with '{name}~', "
        f"or place an axis whose size divides {size}"
    )


def _unequal(word: str, size: int, known: int) -> str:
    if known < size:
        more = f"({word.strip('()')} _)"
        return f"{word} multiplies to {known} but the dim has size {size}; add a local factor such as '{more}'"
    return f"{word} multiplies to {known}, more than the dim's {size}; pad with '~' or use another axis"
