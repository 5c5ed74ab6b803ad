"""What steps send of gradients: the transforms of `cf.quantize(wire=...)`.

    quantize_wire     what sums gradients in one rank's program sends 8 or 4 bits (`passes.wire`); the planner is told what that costs
    error_feedback    what a rank has not sent is kept in the state and added to its next gradient

Problem: a residual is a rank's own, and a state is one of all ranks. Idea: it is a term of a sum. A residual has the
shape of its parameter and lies as a pending sum (`a b +dp`): together the ranks' residuals are what the mesh has not
sent. So it lies like its parameter over the axes that split it, is saved as that one sum, and goes on on any other
mesh.

    state["error_feedback"] = {"residual": {"params.0.weight.residual": zeros like the weight, ...}}

A state that is a tuple or list has it as one more item at its end, a record in a field `error_feedback`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial, wraps
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from colofunc.compiler.transform import Build, Transform
from colofunc.dtensor.roles import give_role, role_of
from colofunc.dtensor.tensor import DTensor
from colofunc.mesh import Mesh
from colofunc.mesh.sizes import size_text
from colofunc.ops.wire import CARRY, Scheme, residual
from colofunc.planner.sharding.constraints import Constraint, Constraints, leaf_strategy
from colofunc.program.ir import Program
from colofunc.program.lazy import zeros_like
from colofunc.program.passes.wide_sums import gradients_of, toward
from colofunc.program.passes.wire import LEAST, narrow_sums, saved_bytes, sums_in_full, with_residuals
from colofunc.program.tracing.kept import KeptRecord, state_of
from colofunc.program.tracing.roles import mark_role
from colofunc.program.tracing.tree import flatten, walk
from colofunc.spec.layout import Layout
from colofunc.spec.strategies import enumerate_layouts

WIRE = "quantize_wire"
KEY = "error_feedback"
FIELD = "residual"
RESIDUALS = KeptRecord(KEY, (FIELD,), "cf.quantize(error_feedback=True) keeps what was not sent")
LAST_RESORT_BYTES = 1 << 10
"""What an element counts on the wire where a gradient would be summed before what was left is added to it."""


def narrow_wire(scheme: Scheme) -> Transform:
    """Sums of gradients are sent in a scheme."""
    return Transform(
        WIRE,
        {"scheme": scheme.name},
        constrain=partial(_priced, scheme),
        rewrite_local=partial(_narrowed, scheme),
        # Which writes the sums in the dtype that they are made in.
        behind=("precision",),
        says=partial(_saved, scheme),
    )


def error_feedback() -> Transform:
    """Residuals of gradients are kept.

    By its name it is in front of `precision`, inside of which it so runs: a step that a loss scale skips keeps its
    residuals, too.
    """
    return Transform(KEY, wrap=_wrapped, grow=_grown, rewrite_global=_carried, constrain=_pending)


def _narrowed(scheme: Scheme, build: Build) -> Build:
    return build.evolve(program=narrow_sums(build.program, scheme))


def _priced(scheme: Scheme, build: Build) -> Build:
    """The planner pays for sums of gradients what `narrow_sums` makes of them: whole bytes of a number."""
    program = build.program
    sums = dict.fromkeys(_large(program, gradients_of(program)), max(1, round(scheme.bytes_a_number)))
    # Where a gradient carries a residual, its terms are to reach that.
    raw = [node.refs[0] for node in program.nodes if node.target == CARRY]
    sums |= dict.fromkeys(_large(program, raw), LAST_RESORT_BYTES)
    return build.evolve(constraints=build.constraints | Constraints(sums=sums))


def _large(program: Program, ids: Iterable[int]) -> list[int]:
    """Those of what becomes some values that are sent narrow."""
    values = ((id, program.values[id]) for id in sorted(toward(program, ids)))
    return [id for id, value in values if value.dtype.is_floating_point and torch.Size(value.shape).numel() >= LEAST]


def _saved(scheme: Scheme, program: Program, local: Program) -> Sequence[str]:
    after, before = saved_bytes(local)
    if not before and sums_in_full(local) and any(node.target == CARRY for node in program.nodes):
        return (
            f"gradients are summed in full before residuals are added, and not sent as {scheme.name}: of the plans "
            "that were counted this one is the best. Nothing is left over in it",
        )
    if not before:
        return ("no gradient is summed over the mesh in a message that is worth packing, so wire= changes nothing",)
    return (
        f"gradients on the wire as {scheme.name}: {size_text(after)} a step of each rank, {size_text(before)} as they "
        "are summed",
    )


# ---- residuals in the state ----


def _split(state: Any) -> tuple[Any, Any]:
    """(the residuals, None where there are none yet; the state without them)."""
    record, bare = RESIDUALS.split(state)
    return (None if record is None else record[FIELD]), bare


def _grown(build: Build) -> Build:
    """Argument 0 with a residual of each leaf that is sent narrow.

    That is one that may be trained and whose gradient is large enough.
    """
    known, bare = _split(build.state)
    found = dict(known or {})
    for path, leaf in walk(bare):
        if isinstance(leaf, Tensor) and _may_be_trained(leaf) and _key(path) not in found:
            # Of a leaf on ranks too it is zeros of nobody yet: they are made where a plan wants them.
            plain = (
                torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta") if isinstance(leaf, DTensor) else leaf
            )
            found[_key(path)] = zeros_like(plain)
    if known is not None and found.keys() == known.keys():
        return build
    give_role("buffer", found.values())  # plans for optimizer state do not speak of it
    return build.evolve(state=RESIDUALS.join(bare, {FIELD: found}))


def _may_be_trained(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.numel() >= LEAST and role_of(leaf) not in ("state", "buffer", "frozen")


def _key(path: str) -> str:
    return f"{path}.residual"  # which no glob for the leaf's own name matches


def _wrapped(build: Build) -> Build:
    fn = build.fn

    @wraps(fn)
    def stepped(*args: Any) -> Any:
        if not args:
            return fn(*args)
        known, state = _split(args[0])
        if known is None:
            return fn(*args)
        mark_role("buffer", known.values())
        out = fn(state, *args[1:])
        new, back = state_of(out)
        if flatten(new)[1].key() != flatten(state)[1].key():
            return out  # evaluates, and returns no state
        left = {key: residual(leaf, key.removesuffix(".residual")) for key, leaf in known.items()}
        return back(RESIDUALS.join(new, {FIELD: left}))

    return build.evolve(fn=stepped)


def _carried(build: Build) -> Build:
    return build.evolve(program=with_residuals(build.program))


# ---- where residuals lie ----


def _pending(build: Build) -> Build:
    """Residuals may lie as sums that are pending over any axes, and stay so."""
    program, mesh = build.program, build.mesh
    items: dict[int, tuple[Constraint, ...]] = {}
    for position, id in enumerate(program.inputs):
        value = program.values[id]
        if value.role == "buffer" and value.name.endswith(".residual"):
            offers = tuple(leaf_strategy(layout) for layout in _terms(value.shape, mesh))
            key = ("residual", value.shape)
            items[position] = (Constraint(key, lambda strategy: True, f"the residual {value.name!r}", offers),)
    return build.evolve(constraints=build.constraints | Constraints(items, terms=frozenset(items)))


def _terms(shape: tuple[int, ...], mesh: Mesh) -> Iterator[Layout]:
    """Every layout of a tensor that is a pending sum over some axes, and lies somehow over the others."""
    axes = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1]
    for count in range(1, len(axes) + 1):
        for over in combinations(axes, count):
            rest = [axis for axis in axes if axis not in over]
            for layout in enumerate_layouts(shape, mesh, rest):
                yield layout.with_pending(tuple((axis, "sum") for axis in over))
