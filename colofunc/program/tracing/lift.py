"""Lift: captured tensors of real size become inputs that the caller does not see.

Problem: a step captures tensors from outside, above all frozen weights; as constants of the program they lie whole on
every rank. Idea: they are inputs behind the caller's own. The planner chooses where they lie, the accountant counts a
rank's part, and who runs the program passes their parts. Small tables stay constants.

    inputs (state, batch, seed), constants {5: 4 B, 6: 2 GiB}     ->     inputs (state, batch, seed, 6), constants {5: 4 B}
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from colofunc.program.editor import Editor
from colofunc.program.ir import Program, Value

# Captured tensors up to this size stay constants, unless they are somebody's frozen weights.
SMALL_BYTES = 1 << 16


def lift(program: Program, captured: Mapping[int, torch.Tensor]) -> tuple[Program, tuple[torch.Tensor, ...]]:
    """(program, its hidden inputs in order). `captured`: value id -> tensor; only these are lifted."""
    chosen = [vid for vid in program.constants if vid in captured and _is_large(program.values[vid])]
    if not chosen:
        return program, ()
    constants = {vid: t for vid, t in program.constants.items() if vid not in chosen}
    edit = Editor(program)
    values = edit.values
    for k, vid in enumerate(chosen):
        values[vid] = attrs.evolve(values[vid], name=values[vid].name or f"captured.{k}", role="frozen", device_free=False)
    for node in program.nodes:
        if not all(values[r].device_free for r in node.refs):
            for o in node.outs:
                if o is not None and values[o].device_free:
                    values[o] = attrs.evolve(values[o], device_free=False)
    users = tuple(vid for vid in program.inputs if vid not in program.constants)
    lifted = edit.written(program.nodes, inputs=(*users, *chosen, *constants), constants=constants)
    return lifted, tuple(captured[vid] for vid in chosen)


def _is_large(value: Value) -> bool:
    return value.role == "frozen" or value.nbytes > SMALL_BYTES
