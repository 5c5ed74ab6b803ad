"""From what a loader yields to DTensors: clean the tree, make rows and lengths fit, cut.

    item -> hold: text dropped, sequences padded, rows counted -> [ranks compare] -> place: lengths and rows equal, DTensors

`hold` looks at this process alone, `place` at what all ranks said, so whatever `place` refuses is refused on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import lcm
from typing import Any

import attrs
import torch

from colofunc.compiler.prepare import say
from colofunc.compiler.rank_agreement import checksum
from colofunc.compiler.user_constraints import specs_of
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError
from colofunc.executors.backend import Backend
from colofunc.functional.batch_agreement import Said
from colofunc.functional.padding import (
    POSITIONS,
    ROWS,
    Fill,
    dead_rows,
    decides,
    lengthened,
    more_rows,
    pad,
    position_fill,
    usual,
    with_weight,
)
from colofunc.functional.reading import Item
from colofunc.functional.sending import Sender
from colofunc.mesh import Mesh
from colofunc.program.tracing.tree import Tree, flatten, unflatten
from colofunc.spec.layout import Layout, make_layout
from colofunc.spec.parts import part
from colofunc.spec.spec import Spec, as_spec, bind, parse

COMPARED_BYTES = 1 << 20  # tensors of batches up to this size are compared between ranks in every batch, which takes less than 1 ms

# ---- how rows lie ----


@attrs.frozen
class RowSpec:
    """How dim 0 of a batch lies. `one`: all tensors' alike, so that a rank can read its own rows."""

    spec: Spec  # of dim 0 alone
    mesh: Mesh
    multiple: int  # row counts must be a multiple of this
    one: bool
    rows: int = 1  # and of this, as microbatches of every rank's rows want

    @property
    def whole_multiple(self) -> int:
        """What the rows of every batch are a multiple of."""
        return lcm(self.multiple, self.rows)

    def of_rank(self, rows: int, rank: int) -> list[int]:
        """The positions of a rank's rows among `rows`."""
        return part(torch.arange(rows), self.spec.bind(self.mesh, (rows,)), self.mesh, rank).tolist()

    def whole(self, local: int) -> int:
        """How many rows there are where each rank has `local`."""
        layout = self.spec.bind(self.mesh, (self.multiple,))
        return local * self.multiple // layout.local_shape[0]


def usual_rows(mesh: Mesh) -> str:
    """Where nobody gives a spec: rows on the axis called dp, if there is one, else whole on every rank until a plan lays them."""
    return f"(dp {row_word(mesh)}) ..." if "dp" in mesh else "..."


def row_word(mesh: Mesh) -> str:
    """A name for the rows of one rank that is no axis or view of the mesh."""
    return next(name for name in ("r", "rows", "its_rows", "rows_of_one_rank") if name not in mesh)


def row_spec(specs: Any, mesh: Mesh) -> RowSpec:
    """How rows lie under a tree of specs; raises SpecError where a spec does not fit the mesh."""
    found = [_first(spec) for spec in _leaves(specs)]
    splits = [(spec, m) for spec in found if spec is not None and (m := _multiple(spec, mesh)) > 1]
    if not splits:
        return RowSpec(Spec(row_word(mesh)), mesh, 1, True)
    spec, multiple = splits[0]
    both = [spec.bind(mesh, (multiple * m,)) is other.bind(mesh, (multiple * m,)) for other, m in splits]
    return RowSpec(spec, mesh, multiple, len(splits) == len(found) and all(both))


def _leaves(specs: Any) -> list[Any]:
    if isinstance(specs, (str, Spec, Layout)) or specs is None:
        return [specs]
    return [leaf for below in (specs.values() if hasattr(specs, "values") else specs) for leaf in _leaves(below)]


def _first(spec: Any) -> Spec | None:
    """The spec of dim 0 alone; None where it is not named."""
    if spec is None:
        return None
    if isinstance(spec, Layout):
        raise InputError("cf.batches takes specs as text or cf.Spec, which fit batches of any size, not a bound layout")
    parsed = parse(str(as_spec(spec)))
    if parsed.pending or parsed.tier != "device" or any(f.pad for dim in parsed.dims for f in dim or ()):
        raise InputError(f"cf.batches: {str(spec)!r} pads, reduces or names a tier; write how the dims are split only, e.g. '(dp b) ...'")
    return shortened(as_spec(spec), 1) if parsed.dims and parsed.dims[0] is not None else None


def shortened(spec: Spec, dims: int) -> Spec:
    """`spec` for a tensor of fewer dims: its leading ones."""
    parsed = parse(spec.pattern).dims
    if sum(dim is not None for dim in parsed) <= dims:
        return spec
    kept = [dim for dim in parsed if dim is not None][:dims]
    names = {f.name for dim in kept for f in dim}
    text = " ".join("(" + " ".join(map(str, dim)) + ")" for dim in kept)
    return Spec(text, **{name: size for name, size in spec.sizes if name in names})


def _multiple(spec: Spec, mesh: Mesh) -> int:
    """What a row count must be a multiple of: everything in the group that has a size."""
    sizes, product = dict(spec.sizes), 1
    for factor in parse(spec.pattern).dims[0] or ():
        in_mesh = factor.name in mesh.axis_names or factor.name in mesh.views
        product *= factor.size or (mesh.axis_size(factor.name) if in_mesh else sizes.get(factor.name, 1))
    spec.bind(mesh, (product,))  # a misspelt axis is an error here
    return product


# ---- one batch ----


@attrs.define(eq=False)
class Held:
    """A batch as this process holds it before it is placed."""

    tree: Tree
    leaves: list[torch.Tensor]
    specs: list[Spec | None]
    by_row: list[bool]  # leaves whose dim 0 are the rows
    rows: int  # that it holds, all of which are real but the `dead` ones
    padded: int | None  # rows of the whole padded batch, where only own rows are held
    dead: torch.Tensor
    samples: int  # that the loader gave for the whole batch
    ids: int = 0

    def said(self, whole: bool, first: bool, compared: bool) -> Said:
        """`whole`: every rank holds every row. Then tensors are compared, large ones on the first batch only; else those without rows.

        `compared`: somebody else will look at the checksums. They are of what the host holds, before it is sent to a card.
        """
        described = []
        for name, leaf, by_row in zip(self.tree.names(), self.leaves, self.by_row, strict=True):
            if by_row and whole:
                of_interest = first or leaf.nbytes <= COMPARED_BYTES
            else:
                of_interest = not by_row
            number = checksum(leaf) + 1 if compared and of_interest else 0  # 0: not compared
            described.append((name, str(leaf.dtype), tuple(leaf.shape), number))
        return Said(False, self.ids, tuple(described))


@attrs.define(eq=False)
class Placer:
    """How batches of one loader are placed."""

    mesh: Mesh
    backend: Backend
    specs: Any
    rows: RowSpec
    read: str
    short: str
    weights: str | None
    multiple: int | None
    fill: Fill | None
    sender: Sender
    movable: bool = False  # nobody gave a spec: a step's plan may lay them otherwise
    _told: set[str] = attrs.field(factory=set, init=False)

    def target(self, n: int, regular: int) -> int | None:
        """Rows that a batch of n gets; None: it is left out."""
        if self.short == "drop" and n < regular:
            return None
        n = max(n, regular) if self.short == "pad" else n
        return -(-n // self.rows.whole_multiple) * self.rows.whole_multiple

    def hold(self, item: Item, regular: int | None, expected: Sequence[int]) -> Held | None:
        """The batch made ready as far as this process can alone; None: it is left out.

        `regular`: samples of a whole batch, None: of this one; `expected`: other counts that this loader is known to come to.
        """
        data = item.data if self.multiple is None else pad(item.data, self.multiple, fill=self.fill)
        leaves, tree = flatten(data)
        tree = self._clean(tree)
        specs = self._specs(tree)
        n, by_row = self._count(tree, leaves, specs)
        if n == 0:
            raise InputError(f"a batch of this loader has no rows: {', '.join(tree.names())}; leave it out in the loader")
        samples = item.rows or n
        regular = regular or samples
        held = Held(tree, leaves, specs, by_row, n, item.padded, torch.zeros(n, dtype=torch.bool), samples)
        held.ids = item.ids if self.read != "local" else 0
        tells = self.weights is not None or decides(tree, leaves, self.fill)
        # A short batch stays short where no rank needs more rows, and nothing could tell a loss to leave them out.
        keeps = self.rows.multiple == 1 and self.short == "pad" and not tells
        counts = {k: self.target(k, k if keeps else regular) for k in (samples, *expected)}
        if self.read != "local" and any((rows or k) > k for k, rows in counts.items()):
            self._check_weightless(tree, leaves)
        regular = samples if keeps else regular
        if self.read == "own":
            if n != len(item.dead):
                raise InputError(
                    f"{len(item.dead)} samples became {n} rows by collating, so rows cannot be read apart; write read=\"all\""
                )
            held.dead = torch.tensor(item.dead, dtype=torch.bool)
        elif self.read == "all":
            # Collating may make several rows of a sample.
            rows = self.target(n, regular * (n // samples if n % samples == 0 else 1))
            if rows is None:
                return None
            self._grow(held, rows)
        return held

    def place(self, held: Held, said: Sequence[Said], regular: int) -> Any:
        """The batch as a tree of DTensors, given what all ranks said of theirs; None: it is left out."""
        if self.read == "local":
            counts = [next((leaf[2][0] for leaf, by_row in zip(s.leaves, held.by_row) if by_row), 0) for s in said]
            if self.short == "drop" and min(counts) < regular:
                return None
            rows = max(counts) if self.short != "pad" else max(*counts, regular)
            while self.rows.whole(rows) % self.rows.rows:
                rows += 1
            if min(counts) < rows:
                self._check_weightless(held.tree, held.leaves)
            self._grow(held, rows)
        fills = usual(POSITIONS, fill=self.fill)
        for k, (name, x) in enumerate(zip(held.tree.names(), held.leaves, strict=True)):
            shapes = [s.leaves[k][2] for s in said]
            held.leaves[k] = self._as_long(name, x, shapes, fills) if x.dim() > 1 else x
        dead = usual(ROWS, fill=self.fill)
        if bool(held.dead.any()):
            held.leaves = [
                dead_rows(name, x, held.dead, dead) if by_row else x
                for name, x, by_row in zip(held.tree.names(), held.leaves, held.by_row, strict=True)
            ]
        if self.weights is not None:
            _add_weights(held, self.weights, self.rows.spec)
        return unflatten(held.tree, [self._dtensor(held, k) for k in range(len(held.leaves))])

    # ---- its parts ----

    def _specs(self, tree: Tree) -> list[Spec | None]:
        found: list[Spec | None] = [None] * len(tree.names())
        for position, _, spec in specs_of(self.specs, tree, "spec of cf.batches"):
            assert not isinstance(spec, Layout), "row_spec refuses layouts"
            found[position] = as_spec(spec)
        return found

    def _count(self, tree: Tree, leaves: Sequence[torch.Tensor], specs: Sequence[Spec | None]) -> tuple[int, list[bool]]:
        """(rows, which leaves have them)."""
        sizes = Counter(x.shape[0] for x, spec in zip(leaves, specs) if x.dim() and spec is not None)
        if not sizes:
            raise InputError(f"a batch has no tensor with rows: {tree.names() or type(tree).__name__}; collate samples to tensors")
        n = sizes.most_common(1)[0][0]
        if any(isinstance(x, DTensor) for x in leaves):
            raise InputError("cf.batches: the loader yields DTensors already; give their step the batches as they are")
        by_row = [x.dim() > 0 and x.shape[0] == n for x in leaves]
        for name, x, spec, fits in zip(tree.names(), leaves, specs, by_row, strict=True):
            first = _first(spec)
            splits = first is not None and (self.rows.multiple == 1 or _multiple(first, self.mesh) > 1)
            if x.dim() and not fits and (splits or self.read != "all"):
                raise InputError(
                    f"{name!r} {tuple(x.shape)} has not the {n} rows of its batch; give it a spec of its own in a tree of specs "
                    "(None: whole on every rank)" + ('' if self.read == "all" else ' and write read="all"')
                )
        return n, by_row

    def _check_weightless(self, tree: Tree, leaves: Sequence[torch.Tensor]) -> None:
        if self.weights is not None or decides(tree, leaves, self.fill):
            return
        whole = [name for name, x in zip(tree.names(), leaves, strict=True) if not x.dtype.is_floating_point]
        labels = [*tree.names(), *whole][-1]
        raise InputError(
            f"a batch of this loader needs added rows (a short one, or one that {self.rows.whole_multiple} does not divide), and none of "
            f"{', '.join(tree.names())} tells a loss to leave them out; write weights=\"weight\" and weigh the loss with that leaf, "
            f'fill={{{labels!r}: -100}} if these are labels, short="drop", or a batch size that divides (short="keep")'
        )

    def _grow(self, held: Held, rows: int) -> None:
        """Rows up to `rows`, the added ones without weight."""
        if rows == held.rows:
            return
        held.dead = torch.arange(rows) >= held.rows
        held.leaves = [more_rows(x, rows) if by_row else x for x, by_row in zip(held.leaves, held.by_row, strict=True)]
        held.rows = rows

    def _as_long(self, name: str, x: torch.Tensor, shapes: Sequence[tuple[int, ...]], fills: dict[str, float | None]) -> torch.Tensor:
        """`x` as long in every dim as the longest of all ranks."""
        for dim in range(1, x.dim()):
            sizes = {shape[dim] for shape in shapes}
            if len(sizes) == 1:
                continue
            value = position_fill(name, x, 1, fills)
            if value is None or (name.rsplit(".", 1)[-1] in POSITIONS and dim > 1):
                raise InputError(
                    f"{name!r} has sizes {sorted(sizes)} in dim {dim} on the ranks, and nothing says how to pad it; write "
                    f'fill={{{name!r}: 0}}, pad it to a fixed size in collate_fn, or read="all"'
                )
            x = lengthened(x, dim, max(sizes), value)
        return x

    def _dtensor(self, held: Held, k: int) -> torch.Tensor:
        x, spec, by_row = held.leaves[k], held.specs[k], held.by_row[k]
        apart = by_row and self.read != "all"
        rows = (held.padded or self.rows.whole(held.rows)) if apart else 0
        shape = (rows, *x.shape[1:]) if apart else tuple(x.shape)
        layout = bind(shortened(spec or Spec("..."), x.dim()), self.mesh, shape) if shape else make_layout((), ())
        here = layout
        if apart:  # dim 0 is cut already
            here = make_layout((((x.shape[0], None),), *layout.dims[1:]), tuple(x.shape))
        done: dict[tuple[int, ...], torch.Tensor] = {}
        shards = []
        for rank in self.backend.ranks(self.mesh):
            where = self.mesh.coordinates(rank)
            key = tuple(where[a] for a in here.axes)
            if key not in done:
                done[key] = self.sender.send(part(x.detach(), here, self.mesh, rank).contiguous())
            shards.append(done[key])
        return DTensor(shards, layout, self.mesh, self.backend, movable=self.movable)

    def _clean(self, tree: Tree) -> Tree:
        """The tree without text and other things that are no tensors and would mean another trace for every batch."""
        if tree.kind in ("tensor", "static"):
            return tree
        named = tree.kind in ("dict", "mapping")
        kept = []
        for key, child in zip(tree.keys, tree.children, strict=True):
            if not self._is_text(child):
                kept.append((key, self._clean(child)))
            elif not named:  # places in a sequence keep their numbers
                kept.append((key, Tree("static", child.name)))
        return attrs.evolve(tree, keys=tuple(key for key, _ in kept), children=tuple(child for _, child in kept))

    def _is_text(self, tree: Tree) -> bool:
        """A branch without tensors that is more than None, a bool or a whole number. Says so once."""
        if any(True for _ in tree.leaves()) or (tree.kind == "static" and isinstance(tree.value, (bool, int, type(None)))):
            return False
        if tree.kind != "static" and not tree.children:
            return False
        if tree.name not in self._told:
            self._told.add(tree.name)
            say(f"cf.batches leaves out {tree.name!r}, which holds no tensor; make it one in collate_fn if the step needs it")
        return True


def _add_weights(held: Held, name: str, spec: Spec) -> None:
    """A leaf with 1 for real rows and 0 for added ones."""
    held.tree = with_weight(held.tree, name)
    held.leaves.append((~held.dead).to(held.leaves[0].device, torch.get_default_dtype()))
    held.specs.append(spec)
    held.by_row.append(True)
