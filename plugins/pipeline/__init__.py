"""Pipelines: layers on ranks of their own.

    step = cf.shard(step_fn, mesh, stages("pp", {"embed.*": 0, "layers.0.*": 0, "layers.1.*": 1, "head.*": 1}), zero(3,
    "dp"))

Problem: a model is too large for the ranks that share a layer. Idea: a parameter exists at one index of the axis `pp`
(`@pp=1`), and the rest follows: an operator runs where its parameters are, its moments lie there, and where activations
and gradients leave a stage the plan has a send. Nothing is cut by hand, and no stage is a module of its own.

Source: GPipe (1811.06965).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import attrs
from colofunc_plugins.pipeline.schedules import colofunc_schedules

import colofunc as cf

__all__ = ["Stages", "colofunc_schedules", "stages"]

STATE = ("param", "state", "buffer", "frozen")


def stages(axis: str, where: Mapping[str, int | Sequence[int]]) -> Stages:
    """Parameters at indices of an axis: `stages("pp", {"layers.0.*": 0, "layers.1.*": 1})`.

    where: glob over the names of parameters -> the index at which they exist, or several, each with a copy (a tied
    weight). The first glob that matches counts. Moments follow their parameters. What no glob matches exists on all
    ranks.
    """
    if not where:
        raise cf.PlanError(
            f"stages({axis!r}, {{}}) places nothing; write stages({axis!r}, {{'layers.0.*': 0, 'layers.1.*': 1}})"
        )
    places = []
    for glob, index in where.items():
        indices = (index,) if isinstance(index, int) else tuple(index)
        if not indices or not all(isinstance(k, int) and k >= 0 for k in indices):
            raise cf.PlanError(
                f"stages: {glob!r} is to be at {index!r}; give an index of {axis!r}, or several such as (0, 3)"
            )
        places.append((glob, tuple(sorted(set(indices)))))
    return Stages(axis, tuple(places))


@attrs.frozen
class Stages:
    """See `stages`."""

    axis: str
    where: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    @property
    def name(self) -> str:
        return f"stages({self.axis})"

    def wishes(self, program: cf.ext.Program, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        """One for each parameter. Raises PlanError where a glob matches none, or the axis has no such index."""
        size = mesh.axis_size(self.axis)
        for glob, indices in self.where:
            if indices[-1] >= size:
                raise cf.PlanError(
                    f"{self.name}: {glob!r} is to be at index {indices[-1]}, and {mesh!r} has {size} along "
                    f"{self.axis!r}"
                )
        inputs = [program.values[id] for id in program.inputs]
        leaves = [value for value in inputs if value.role in STATE]
        self._check_globs(leaves)
        wishes = []
        for leaf in leaves:
            places = [indices for glob, indices in self.where if matches(leaf.name, glob)]
            if places:
                spec = f"... @{self.axis}={','.join(map(str, places[0]))}"
                wishes.append(cf.ext.Wish(leaf.name, spec, self.axes, (leaf.role,), self.name))
        return wishes

    def _check_globs(self, leaves: Sequence[cf.ext.Value]) -> None:
        for glob, _ in self.where:
            if not any(matches(leaf.name, glob) for leaf in leaves):
                names = ", ".join(leaf.name for leaf in leaves[:3])
                raise cf.PlanError(f"{self.name}: {glob!r} matches no parameter; the first are {names}")


def matches(name: str, glob: str) -> bool:
    """Whether a dotted name, or its end from some dot on, matches."""
    return fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")
