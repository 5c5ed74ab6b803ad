"""Overflow: steps with a loss scale that one device skips and the mesh takes, or the other way round.

Problem: a float16 gradient is finite up to 65504. The mesh adds the parts of its ranks in float32 (`Policy.reduce`), so it takes a
step whose sum one device cannot hold; parts that cancel may overflow where their sum does not. Neither is a mistake, and the two
states have nothing in common. Idea: a loss scale changes nothing but what overflows and underflows. Parts that are finite on
R ranks have a sum of at most R times 65504, so with 1/(2R) of the scale one device takes the step as well, and what the mesh
made of it is compared with that. Where the mesh skips, its state has to be the old one to the last bit, and the step of both
is compared with the smaller scale.

    one device: 2 x 50272 = inf, skipped      mesh: 50272 + 50272 in float32, taken      one device at a quarter: 25136, taken
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from colofunc.compiler.staged import Staged
from colofunc.errors import CheckError
from colofunc.ops.dtypes import Policy
from colofunc.program.tracing.kept import join_kept, state_of
from colofunc.program.tracing.tree import walk_keys
from colofunc.testing.trees import compare
from colofunc.transforms.precision import KEY, next_scale, split_scale

Run = Callable[[Any], Any]  # a step of a plain state
Pair = tuple[Any, Any, Any]  # what the mesh gave, what is expected, the state that this began with


def policy_of(step: Staged) -> Policy | None:
    """The policy of a step that has a loss scale, None for other steps."""
    precision = step.transform("precision")
    policy: Policy | None = precision.options["policy"] if precision is not None else None
    return policy if policy is not None and policy.scales is not None else None


def comparable(policy: Policy, state: Any, got: Any, expected: Any, ranks: int, mesh_run: Run, device_run: Run, where: str) -> Pair:
    """`got`, `expected` and `state` where both took the step or both skipped it, else as the module says.

    state: plain, with its loss scale; mesh_run and device_run: a step of such a state. Raises CheckError where the mesh returns
    another state than the one of a step that it skipped, or where the two decide differently with the smaller scale too.
    """
    if not _returns(expected, state) or _taken(got) == _taken(expected):
        return got, expected, state
    record, bare = split_scale(state)
    small = record["scale"] / 2 ** (ranks.bit_length() + 1)
    smaller = join_kept(bare, KEY, {**record, "scale": small})
    expected = device_run(smaller)
    if _taken(got):
        mesh_took = got
    else:
        skipped = join_kept(bare, KEY, next_scale(policy, record, torch.tensor(False)))
        compare(state_of(got)[0], skipped, f"{where}the state of a step that was skipped", tolerance=0.0)
        mesh_took = mesh_run(smaller)
    if not (_taken(mesh_took) and _taken(expected)):
        raise CheckError(
            f"{where}one device and the mesh do not skip the same steps, with a loss scale of {float(record['scale']):g} nor with "
            f"{float(small):g}\nTry: step.lower(...).check_finite(...), which names the operator that overflows"
        )
    if mesh_took is not got:
        return mesh_took, expected, smaller
    # What the mesh took with the scale as it was: the numbers are those of the smaller one, the record is not.
    new, back = state_of(expected)
    after = next_scale(policy, record, torch.tensor(True))
    return got, back(join_kept(split_scale(new)[1], KEY, after)), smaller


def _returns(out: Any, state: Any) -> bool:
    """Whether a step returned a state with its loss scale."""
    return [keys for keys, _ in walk_keys(state_of(out)[0])] == [keys for keys, _ in walk_keys(state)]


def _taken(out: Any) -> bool:
    """Whether a step was taken, from the loss scale in what it returned."""
    return int(split_scale(state_of(out)[0])[0]["skipped"]) == 0
