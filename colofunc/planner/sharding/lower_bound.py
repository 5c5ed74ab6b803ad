"""What a step needs however it is sharded: its arguments, and the bytes that some operator makes under every one of its
options.

Problem: where a budget is far too small, hundreds of shardings are searched for nothing. Idea: what an operator makes
has to lie somewhere when it is made, whatever is moved or made again, so the least of it over the operator's options
bounds every plan. Arguments that are not moved lie there all the time, at best split evenly.

    linear, 256 x 64 floats on two ranks: 32768 bytes a rank, or 65536       no plan below 32768
    4 MiB of parameters and 8 MiB of moments on four ranks                   no plan below 3 MiB
"""

from __future__ import annotations

from collections.abc import Mapping

from colofunc.planner.sharding.classes import Ties
from colofunc.planner.sharding.model import PairwiseModel
from colofunc.program.facts import may_alias, written
from colofunc.program.ir import Program
from colofunc.spec.rule import Strategy


def at_least_any(program: Program, model: PairwiseModel, ties: Ties) -> int:
    """Bytes that some operator makes at least.

    Views, what is written over, constants and updates (on the host, maybe) do not count.
    """
    most = 0
    for number, options in enumerate(model.options):
        most = max(most, min(_makes(program, ties, number, strategy) for strategy in options))
    return most


def arguments_at_least(program: Program, ranks: int, tiers: Mapping[int, str]) -> int:
    """Bytes of the device that arguments take on the rank that has most of them, at least.

    `tiers`: position -> where one lies.
    """
    nbytes = 0
    for position, id in enumerate(program.inputs):
        if tiers.get(position, "device") == "device" and id not in program.constants:
            nbytes += program.values[id].nbytes
    return nbytes // ranks


def _makes(program: Program, ties: Ties, number: int, strategy: Strategy) -> int:
    """Bytes that an operator of a class makes under a strategy."""
    item = ties.members[number][0]
    if item < ties.n_inputs:
        return 0
    node = program.nodes[item - ties.n_inputs]
    if node.phase == "update" or may_alias(node) or written(node) or not node.refs:
        return 0
    nbytes = 0
    for out, layout in zip(node.outs, strategy.outs, strict=True):
        if out is not None and layout is not None:
            nbytes += layout.local_numel * program.values[out].dtype.itemsize
    return nbytes
