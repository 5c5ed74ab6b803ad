"""A transform that keeps caches of the state in int8, a scale for each row of their last dim, with whatever else it
does.

    step = cf.quantize(cf.shard(decode, mesh), caches="*cache*")

The state has a `PackedRows` in the place of each (`grow`). The step's own code is given it widened and returns it so
(`wrap`); in the traced program what it writes is packed and written where the packed cache lies
(`program/passes/packed_rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial, wraps
from typing import Any

import attrs
from torch import Tensor

from colofunc.compiler.transform import Build, Transform, behind_hook
from colofunc.errors import InputError, near
from colofunc.ops.packed_rows import PackedRows
from colofunc.planner.plan import matches
from colofunc.planner.sharding.linked_rows import linked_rows
from colofunc.program.passes.packed_rows import write_packed
from colofunc.program.tracing.kept import state_of
from colofunc.program.tracing.tree import map_named

Globs = tuple[str, ...]
LEAVES = (Tensor, PackedRows)


def checked_globs(caches: Any) -> Globs:
    """Globs over caches' names. Raises InputError where they are something else."""
    is_several = isinstance(caches, Iterable) and not isinstance(caches, str)
    globs = tuple(caches) if is_several else (caches,)
    if not all(isinstance(glob, str) and glob for glob in globs):
        raise InputError(
            f"cf.quantize(caches={caches!r}): give a glob over names of caches, or several. Try: caches='*cache*'"
        )
    return globs


def with_caches(transform: Transform, globs: Globs) -> Transform:
    """The transform, which keeps the caches that globs match in int8, too; itself where there are no globs."""
    if not globs:
        return transform
    return attrs.evolve(
        transform,
        options={**transform.options, "caches": globs},
        grow=behind_hook(transform.grow, partial(_grown, globs)),
        wrap=behind_hook(transform.wrap, partial(_wrapped, globs)),
        rewrite_global=behind_hook(transform.rewrite_global, _rewritten),
        constrain=behind_hook(transform.constrain, partial(_linked, globs)),
        changes_numbers=True,
    )


def _is_meant(globs: Globs, name: str) -> bool:
    return any(matches(name, glob) for glob in globs)


def _grown(globs: Globs, build: Build) -> Build:
    """Argument 0 with the caches packed that are meant. Raises InputError for globs that match none."""
    met: dict[str, bool] = {}  # name -> whether it is a cache

    def pack(name: str, leaf: Any) -> Any:
        is_cache = isinstance(leaf, PackedRows) or (leaf.is_floating_point() and leaf.dim() > 1)
        met[name] = is_cache
        if isinstance(leaf, PackedRows) or not is_cache or not _is_meant(globs, name):
            return leaf
        return PackedRows.of(leaf)

    state = map_named(pack, build.state, LEAVES)
    for glob in globs:
        if not any(is_cache and matches(name, glob) for name, is_cache in met.items()):
            names = [name for name, is_cache in met.items() if is_cache]
            raise InputError(
                f"cf.quantize: caches={glob!r} matches no tensor of floating-point rows in the state{near(glob, names)}"
            )
    return build.evolve(state=state)


def _wrapped(globs: Globs, build: Build) -> Build:
    fn = build.fn

    @wraps(fn)
    def stepped(*args: Any) -> Any:
        given: dict[str, tuple[Tensor, PackedRows]] = {}

        def widen(name: str, leaf: Any) -> Any:
            if not isinstance(leaf, PackedRows):
                return leaf
            given[name] = leaf.dequantize(), leaf
            return given[name][0]

        def pack(name: str, leaf: Any) -> Any:
            if name not in given or isinstance(leaf, PackedRows):
                return leaf
            wide, packed = given[name]
            if (leaf.shape, leaf.dtype) != (wide.shape, wide.dtype):
                raise InputError(
                    f"cf.quantize: the step returns {name!r} as {tuple(leaf.shape)} in {leaf.dtype}, and was given "
                    f"{tuple(wide.shape)} in {wide.dtype}. Try: a cache of the size that it will have; globs in "
                    "caches= that leave it out"
                )
            return packed if leaf is wide else PackedRows.of(leaf)

        if not args:
            return fn()
        new, back = state_of(fn(map_named(widen, args[0], LEAVES), *args[1:]))
        return back(map_named(pack, new, LEAVES))

    return build.evolve(fn=stepped)


def _rewritten(build: Build) -> Build:
    return build.evolve(program=write_packed(build.program))


def _linked(globs: Globs, build: Build) -> Build:
    """Scales lie as numbers do along dim 0."""
    program = build.program
    by_name = {program.values[id].name: id for id in program.inputs}
    groups: list[tuple[int, int]] = []
    for name, id in by_name.items():
        scale = by_name.get(f"{name}.scale")
        if scale is not None and _is_meant(globs, name):
            groups.append((id, scale))
    return build.evolve(constraints=linked_rows(program, build.mesh, build.constraints, groups))
