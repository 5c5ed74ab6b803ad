"""How the rows of a batch lie on a mesh: dim 0 of the specs that `cf.batches` was given.

    row_spec({"ids": "(dp b) s", "mask": "(dp b) s"}, cf.Mesh(dp=2))     # RowSpec: `(dp b)`, row counts are multiples of 2

Where all tensors' rows lie alike, a rank can read its own rows.
"""

from __future__ import annotations

from math import lcm
from typing import Any

import attrs

from colofunc.errors import InputError
from colofunc.mesh import Mesh
from colofunc.spec.layout import Layout
from colofunc.spec.parts import holds
from colofunc.spec.regions import region_of
from colofunc.spec.spec import Spec, as_spec, parse


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
        layout = self.spec.bind(self.mesh, (rows,))
        if not holds(layout.at, self.mesh, rank):
            return []
        return region_of(layout, self.mesh, rank).spans[0].indices().tolist()

    def whole(self, local: int) -> int:
        """How many rows there are where each rank has `local`."""
        layout = self.spec.bind(self.mesh, (self.multiple,))
        return local * self.multiple // layout.local_shape[0]


def usual_rows(mesh: Mesh) -> str:
    """Where nobody gives a spec: rows on the axis called dp, if there is one, else whole on every rank until a plan
    lays them.
    """
    return f"(dp {row_word(mesh)}) ..." if "dp" in mesh else "..."


def row_word(mesh: Mesh) -> str:
    """A name for the rows of one rank that is no axis or view of the mesh."""
    return next(name for name in ("r", "rows", "its_rows", "rows_of_one_rank") if name not in mesh)


def row_spec(specs: Any, mesh: Mesh) -> RowSpec:
    """How rows lie under a tree of specs; raises SpecError where a spec does not fit the mesh."""
    firsts = [first_dim(spec) for spec in _leaves(specs)]
    splitting: list[tuple[Spec, int]] = []  # those that split rows, and into how many parts
    for first in firsts:
        if first is not None:
            multiple = row_multiple(first, mesh)
            if multiple > 1:
                splitting.append((first, multiple))
    if not splitting:
        return RowSpec(Spec(row_word(mesh)), mesh, 1, True)
    spec, multiple = splitting[0]
    alike = len(splitting) == len(firsts)
    for other, multiple_of_other in splitting:
        # So many rows both can split; equal layouts are one object.
        rows = multiple * multiple_of_other
        if spec.bind(mesh, (rows,)) is not other.bind(mesh, (rows,)):
            alike = False
    return RowSpec(spec, mesh, multiple, alike)


def _leaves(specs: Any) -> list[Any]:
    """The specs of a tree, in order."""
    if isinstance(specs, (str, Spec, Layout)) or specs is None:
        return [specs]
    leaves: list[Any] = []
    for below in specs.values() if hasattr(specs, "values") else specs:
        leaves += _leaves(below)
    return leaves


def first_dim(spec: Any) -> Spec | None:
    """The spec of dim 0 alone; None where it is not named."""
    if spec is None:
        return None
    if isinstance(spec, Layout):
        raise InputError("cf.batches takes specs as text or cf.Spec, which fit batches of any size, not a bound layout")
    parsed = parse(str(as_spec(spec)))
    pads = any(factor.pad for dim in parsed.dims if dim is not None for factor in dim)
    if parsed.pending or parsed.tier != "device" or pads:
        raise InputError(
            f"cf.batches: {str(spec)!r} pads, reduces or names a tier; write how the dims are split only, e.g. '(dp b) "
            "...'"
        )
    if not parsed.dims or parsed.dims[0] is None:
        return None
    return shortened(as_spec(spec), 1)


def shortened(spec: Spec, dims: int) -> Spec:
    """`spec` for a tensor of fewer dims: its leading ones."""
    named = [dim for dim in parse(spec.pattern).dims if dim is not None]  # None stands for `...`
    if len(named) <= dims:
        return spec
    kept = named[:dims]
    groups = ["(" + " ".join(map(str, dim)) + ")" for dim in kept]
    names = {factor.name for dim in kept for factor in dim}
    sizes = {name: size for name, size in spec.sizes if name in names}
    return Spec(" ".join(groups), **sizes)


def row_multiple(spec: Spec, mesh: Mesh) -> int:
    """What a row count must be a multiple of: everything in the group that has a size."""
    sizes, multiple = dict(spec.sizes), 1
    for factor in parse(spec.pattern).dims[0] or ():
        if factor.size:
            multiple *= factor.size
        elif factor.name in mesh.axis_names or factor.name in mesh.views:
            multiple *= mesh.axis_size(factor.name)
        else:
            multiple *= sizes.get(factor.name, 1)
    spec.bind(mesh, (multiple,))  # a misspelt axis is an error here
    return multiple
