"""From what a loader yields to DTensors: clean the tree, make rows and lengths fit, cut.

    item -> hold: text dropped, sequences padded, rows counted -> [ranks compare] -> place: lengths and rows equal,
    DTensors

`hold` looks at this process alone, `place` at what all ranks said, so whatever `place` refuses is refused on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from colofunc.compiler.rank_agreement import value_checksum
from colofunc.compiler.user_constraints import specs_of
from colofunc.dtensor.tensor import DTensor
from colofunc.env import say
from colofunc.errors import InputError
from colofunc.executors.backend import Backend
from colofunc.functional.batch_agreement import Said
from colofunc.functional.padding import (
    POSITIONS,
    ROWS,
    Fill,
    dead_rows,
    decides,
    filled_table,
    lengthened,
    more_rows,
    pad,
    position_fill,
    with_weight,
)
from colofunc.functional.reading import ReadBatch
from colofunc.functional.row_specs import RowSpec, first_dim, row_multiple, shortened
from colofunc.functional.sending import Sender
from colofunc.mesh import Mesh
from colofunc.program.tracing.tree import Tree, flatten, unflatten
from colofunc.spec.layout import Layout, make_layout
from colofunc.spec.spec import Spec, as_spec, bind
from colofunc.spec.transfer import part

COMPARED_BYTES = 1 << 20
"""Ranks compare tensors up to this size in every batch, which takes less than 1 ms, and larger ones in the first."""


@attrs.define(eq=False)
class UnplacedBatch:
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
        """`whole`: every rank holds every row.

        Then tensors are compared, large ones on the first batch only; else those without rows.

        `compared`: somebody else will look at the checksums. They are of what the host holds, before it is sent to a
        card.
        """
        described = []
        for name, leaf, by_row in zip(self.tree.names(), self.leaves, self.by_row, strict=True):
            if by_row and whole:
                of_interest = first or leaf.nbytes <= COMPARED_BYTES
            else:
                of_interest = not by_row
            number = value_checksum(leaf) + 1 if compared and of_interest else 0  # 0: not compared
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
        if self.short == "pad":
            n = max(n, regular)
        missing = -n % self.rows.whole_multiple
        return n + missing

    def hold(self, item: ReadBatch, regular: int | None, expected: Sequence[int]) -> UnplacedBatch | None:
        """The batch made ready as far as this process can alone; None: it is left out.

        `regular`: samples of a whole batch, None: of this one; `expected`: other counts that this loader is known to
        come to.
        """
        data = item.data if self.multiple is None else pad(item.data, self.multiple, fill=self.fill)
        leaves, tree = flatten(data)
        tree = self._clean(tree)
        specs = self._specs(tree)
        n, by_row = self._count(tree, leaves, specs)
        if n == 0:
            raise InputError(
                f"a batch of this loader has no rows: {', '.join(tree.names())}; leave it out in the loader"
            )
        samples = item.rows or n
        regular = regular or samples
        held = UnplacedBatch(tree, leaves, specs, by_row, n, item.padded, torch.zeros(n, dtype=torch.bool), samples)
        held.ids = item.ids if self.read != "local" else 0
        tells = self.weights is not None or decides(tree, leaves, self.fill)
        # A short batch stays short where no rank needs more rows, and nothing could tell a loss to leave them out.
        keeps = self.rows.multiple == 1 and self.short == "pad" and not tells
        if self.read != "local":
            for count in (samples, *expected):
                rows = self.target(count, count if keeps else regular)
                if rows is not None and rows > count:
                    self._check_weightless(tree, leaves)
        if keeps:
            regular = samples
        if self.read == "own":
            if n != len(item.dead):
                raise InputError(
                    f"{len(item.dead)} samples became {n} rows by collating, so rows cannot be read apart; write "
                    'read="all"'
                )
            held.dead = torch.tensor(item.dead, dtype=torch.bool)
        elif self.read == "all":
            # Collating may make several rows of a sample.
            rows_of_sample = n // samples if n % samples == 0 else 1
            rows = self.target(n, regular * rows_of_sample)
            if rows is None:
                return None
            self._grow(held, rows)
        return held

    def place(self, held: UnplacedBatch, said: Sequence[Said], regular: int) -> Any:
        """The batch as a tree of DTensors, given what all ranks said of theirs; None: it is left out."""
        if self.read == "local":
            counts = [_rows_said(of_rank, held.by_row) for of_rank in said]
            if self.short == "drop" and min(counts) < regular:
                return None
            rows = max(counts)
            if self.short == "pad":
                rows = max(rows, regular)
            while self.rows.whole(rows) % self.rows.rows:
                rows += 1
            if min(counts) < rows:
                self._check_weightless(held.tree, held.leaves)
            self._grow(held, rows)
        names = held.tree.names()
        fills = filled_table(POSITIONS, fill=self.fill)
        for position, (name, x) in enumerate(zip(names, held.leaves, strict=True)):
            if x.dim() > 1:
                leaf_on_ranks = [of_rank.leaves[position] for of_rank in said]
                shapes = [shape for _, _, shape, _ in leaf_on_ranks]
                held.leaves[position] = self._as_long(name, x, shapes, fills)
        if bool(held.dead.any()):
            fills_of_rows = filled_table(ROWS, fill=self.fill)
            for position, (name, by_row) in enumerate(zip(names, held.by_row, strict=True)):
                if by_row:
                    held.leaves[position] = dead_rows(name, held.leaves[position], held.dead, fills_of_rows)
        if self.weights is not None:
            _add_weights(held, self.weights, self.rows.spec)
        return unflatten(held.tree, [self._dtensor(held, position) for position in range(len(held.leaves))])

    # ---- its parts ----

    def _specs(self, tree: Tree) -> list[Spec | None]:
        """Of each leaf; None: nobody gave it one."""
        specs: list[Spec | None] = [None] * len(tree.names())
        for position, _, spec in specs_of(self.specs, tree, "spec of cf.batches"):
            assert not isinstance(spec, Layout), "row_spec refuses layouts"
            specs[position] = as_spec(spec)
        return specs

    def _count(
        self, tree: Tree, leaves: Sequence[torch.Tensor], specs: Sequence[Spec | None]
    ) -> tuple[int, list[bool]]:
        """(rows, which leaves have them). Raises InputError for a leaf that should have as many and has not."""
        sizes = Counter(x.shape[0] for x, spec in zip(leaves, specs) if x.dim() and spec is not None)
        if not sizes:
            raise InputError(
                f"a batch has no tensor with rows: {tree.names() or type(tree).__name__}; collate samples to tensors"
            )
        [(rows, _)] = sizes.most_common(1)
        if any(isinstance(x, DTensor) for x in leaves):
            raise InputError("cf.batches: the loader yields DTensors already; give their step the batches as they are")
        by_row = [x.dim() > 0 and x.shape[0] == rows for x in leaves]
        for name, x, spec, fits in zip(tree.names(), leaves, specs, by_row, strict=True):
            first = first_dim(spec)
            splits = first is not None and (self.rows.multiple == 1 or row_multiple(first, self.mesh) > 1)
            if x.dim() and not fits and (splits or self.read != "all"):
                also = "" if self.read == "all" else ' and write read="all"'
                raise InputError(
                    f"{name!r} {tuple(x.shape)} has not the {rows} rows of its batch; give it a spec of its own in a "
                    f"tree of specs (None: whole on every rank){also}"
                )
        return rows, by_row

    def _check_weightless(self, tree: Tree, leaves: Sequence[torch.Tensor]) -> None:
        """Raises InputError where rows are added and no leaf tells a loss to leave them out."""
        if self.weights is not None or decides(tree, leaves, self.fill):
            return
        names = tree.names()
        if names == ("",):
            raise InputError(
                "a batch of this loader needs added rows (a short one, or one that "
                f"{self.rows.whole_multiple} does not divide), and one tensor alone has nothing that tells a loss to "
                'leave them out. Try: batches that are dicts, such as {"x": x}, with weights="weight"; short="drop"; or a '
                'batch size that divides (short="keep")'
            )
        integers = [name for name, x in zip(names, leaves, strict=True) if not x.dtype.is_floating_point]
        labels = integers[-1] if integers else names[-1]  # most likely
        raise InputError(
            f"a batch of this loader needs added rows (a short one, or one that {self.rows.whole_multiple} does not "
            f'divide), and none of {", ".join(tree.names())} tells a loss to leave them out; write weights="weight" '
            f'and weigh the loss with that leaf, fill={{{labels!r}: -100}} if these are labels, short="drop", or a '
            'batch size that divides (short="keep")'
        )

    def _grow(self, held: UnplacedBatch, rows: int) -> None:
        """Rows up to `rows`, the added ones without weight."""
        if rows == held.rows:
            return
        held.dead = torch.arange(rows) >= held.rows
        for position, by_row in enumerate(held.by_row):
            if by_row:
                held.leaves[position] = more_rows(held.leaves[position], rows)
        held.rows = rows

    def _as_long(
        self, name: str, x: torch.Tensor, shapes: Sequence[tuple[int, ...]], fills: dict[str, float | None]
    ) -> torch.Tensor:
        """`x` as long in every dim as the longest of all ranks."""
        for dim in range(1, x.dim()):
            sizes = {shape[dim] for shape in shapes}
            if len(sizes) == 1:
                continue
            value = position_fill(name, x, 1, fills)
            if value is None or (name.rsplit(".", 1)[-1] in POSITIONS and dim > 1):
                raise InputError(
                    f"{name!r} has sizes {sorted(sizes)} in dim {dim} on the ranks, and nothing says how to pad it; "
                    f'write fill={{{name!r}: 0}}, pad it to a fixed size in collate_fn, or read="all"'
                )
            x = lengthened(x, dim, max(sizes), value)
        return x

    def _dtensor(self, held: UnplacedBatch, position: int) -> torch.Tensor:
        """One leaf, cut as its spec says; ranks with equal parts share one tensor."""
        x, spec = held.leaves[position], held.specs[position]
        own_rows = held.by_row[position] and self.read != "all"  # dim 0 is cut already
        shape = tuple(x.shape)
        if own_rows:
            shape = (held.padded or self.rows.whole(held.rows), *shape[1:])
        if shape:
            layout = bind(shortened(spec or Spec("..."), x.dim()), self.mesh, shape)
        else:
            layout = make_layout((), ())
        cut = layout  # how what this process holds falls into parts
        if own_rows:
            cut = make_layout((((x.shape[0], None),), *layout.dims[1:]), tuple(x.shape))
        parts: dict[tuple[int, ...], torch.Tensor] = {}
        shards = []
        for rank in self.backend.ranks(self.mesh):
            coordinates = self.mesh.coordinates(rank)
            key = tuple(coordinates[axis] for axis in cut.axes)
            if key not in parts:
                parts[key] = self.sender.send(part(x.detach(), cut, self.mesh, rank).contiguous())
            shards.append(parts[key])
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
        has_tensors = next(iter(tree.leaves()), None) is not None
        is_number = tree.kind == "static" and isinstance(tree.value, (bool, int, type(None)))
        is_empty = tree.kind != "static" and not tree.children
        if has_tensors or is_number or is_empty:
            return False
        if tree.name not in self._told:
            self._told.add(tree.name)
            say(
                f"cf.batches leaves out {tree.name!r}, which holds no tensor; make it one in collate_fn if the step "
                "needs it"
            )
        return True


def _rows_said(said: Said, by_row: Sequence[bool]) -> int:
    """How many rows a rank holds: those of its first leaf that has rows."""
    for (_, _, shape, _), has_rows in zip(said.leaves, by_row):
        if has_rows:
            return shape[0]
    return 0


def _add_weights(held: UnplacedBatch, name: str, spec: Spec) -> None:
    """A leaf with 1 for real rows and 0 for added ones."""
    held.tree = with_weight(held.tree, name)
    held.leaves.append((~held.dead).to(held.leaves[0].device, torch.get_default_dtype()))
    held.specs.append(spec)
    held.by_row.append(True)
