"""Kept: of a step that is prepared again, its plan where the same program comes out; where only sizes differ, where to search from.

Problem: a longer batch, or state that is placed now and was plain before, is another signature, which is traced and was planned
from the start, for seconds. Idea: a plan says of each operator how it works, and that can be said of another length, too.

    is_again      the very program that was planned before, and everything lies as it was planned: nothing is planned
    nearest       the step of a like size: what its plan decides is where the search for this one begins (`budget.nearby`)

What it decides need not be best here (weights that are gathered for each use cost as much for a long batch as for a short one), so it is
compared with what a search from there finds. State that is placed stays: where it lies is a constraint of every search. A plan that was
found for a batch of another order of size is no guide: what was too small to split may be worth it now. What was found from another
length goes into no file: another start of the script may come to this length first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import attrs
import torch

from colofunc.compiler.lowered import Lowered
from colofunc.executors.distributed import program_hash
from colofunc.mesh import Mesh
from colofunc.program.ir import Program
from colofunc.spec.layout import Layout

LIKE = 2.0
"""Batches whose numbers of elements differ by at most this factor are of a like size."""

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


def nearest(before: Sequence[Lowered], program: Program) -> Lowered | None:
    """The step whose batch is nearest in size to the program's, if it is of a like size."""
    best, least = None, LIKE
    for low in before:
        ratio = _ratio(low.global_program, program)
        if ratio < least or (best is None and ratio == least):
            best, least = low, ratio
    return best


def _ratio(one: Program, other: Program) -> float:
    """How many times more elements the larger batch of two programs has."""
    sizes = sorted((_batch_elements(one), _batch_elements(other)))
    return sizes[1] / sizes[0]


def _batch_elements(program: Program) -> int:
    values = (program.values[id] for id in program.inputs)
    return max(1, sum(prod(value.shape) for value in values if value.role == "batch"))


__all__ = ["is_again", "nearest"]
