"""Kept: of a step that is prepared again, its plan where the same program comes out, its decisions where only sizes differ.

Problem: a longer batch, or state that is placed now and was plain before, is another signature, which is traced and was planned
from the start, for seconds. Idea: a plan says of each operator how it works, and that does not depend on how long a sequence is.

    is_again      the very program that was planned before, and everything lies as it was planned: nothing is planned
    as_before     decide as the plan of a like size did, operator by operator; only where that cannot be, search from the start

A plan that was found for a batch of another order of size is no guide: what was too small to split may be worth it now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeVar

import attrs
import torch

from colofunc.compiler.lowered import Lowered
from colofunc.errors import PlanError
from colofunc.executors.distributed import program_hash
from colofunc.mesh import Mesh
from colofunc.planner.sharding.constraints import Constraints
from colofunc.planner.sharding.explain import constraints_from
from colofunc.program.ir import Program
from colofunc.spec.layout import Layout

LIKE = 2.0
"""Batches whose numbers of elements differ by at most this factor are of a like size."""

T = TypeVar("T")


def is_again(low: Lowered, program: Program, donated: tuple[int, ...], given: Mapping[int, Layout]) -> bool:
    """Whether `low` is the plan of this very program, for arguments that lie as they do now. `given`: input -> where it lies."""
    planned = low.global_program
    if low.donated != donated or len(program.nodes) != len(planned.nodes):
        return False
    lies = dict(zip(planned.inputs, low.input_layouts, strict=False))
    if any(lies.get(id) is not layout for id, layout in given.items()):
        return False
    return _described(program, low.mesh) == _described(planned, low.mesh) and _same_constants(program, planned)


def _described(program: Program, mesh: Mesh) -> tuple[object, ...]:
    """All that decides a plan, of a global program."""
    inputs = [(program.values[id].name, program.values[id].role) for id in program.inputs]
    nodes = [(node.path, node.phase) for node in program.nodes]
    # Which outputs share memory with which inputs follows from the plan.
    return program_hash(attrs.evolve(program, aliases=()), mesh), inputs, nodes


def _same_constants(one: Program, other: Program) -> bool:
    """Whether numbers that the programs carry are equal; the hash does not look at those of large ones."""
    for id, tensor in one.constants.items():
        there = other.constants.get(id)
        if there is None or there.dtype != tensor.dtype or not torch.equal(there, tensor):
            return False
    return True


def as_before(
    before: Sequence[Lowered], program: Program, plan: Callable[[Constraints], T], constraints: Constraints, search: Callable[[], T]
) -> T:
    """`plan(constraints)` deciding as the plan of the nearest batch did, of a like size; `search()` where that cannot be.

    What is kept goes into no file: another start of the script may come to this length first.
    """
    ratios = [_ratio(low.global_program, program) for low in before]
    nearest = min(range(len(ratios)), key=lambda k: ratios[k], default=None)
    if nearest is not None and ratios[nearest] <= LIKE:
        try:
            return plan(constraints | constraints_from(before[nearest].plan, program, before[nearest].mesh))
        except PlanError:
            pass  # what it decided cannot be done with these sizes, or not within the budget
    return search()


def _ratio(one: Program, other: Program) -> float:
    """How many times more elements the larger batch of two programs has."""
    sizes = sorted((_batch_elements(one), _batch_elements(other)))
    return sizes[1] / sizes[0]


def _batch_elements(program: Program) -> int:
    values = (program.values[id] for id in program.inputs)
    return max(1, sum(prod(value.shape) for value in values if value.role == "batch"))


__all__ = ["as_before", "is_again"]
