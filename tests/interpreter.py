"""Reference interpreter: run a global program on one device, node by node.

Problem: every executor needs something simple to be compared with. Idea: resolve each target to its operator, keep
values in a dict, drop each after its last use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from colofunc.errors import InputError
from colofunc.ops.targets import resolve
from colofunc.program.ir import Program, map_refs
from colofunc.program.tracing.record import flat_results


def run_reference(program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a global program. `inputs` are the program's inputs without its constants; none is changed."""
    ids = [i for i in program.inputs if i not in program.constants]
    if len(ids) != len(inputs):
        raise InputError(f"the program takes {len(ids)} tensors, {len(inputs)} were given")
    env = dict(zip(ids, inputs, strict=True)) | dict(program.constants)
    last = program.last_uses
    with torch.no_grad():
        for index, node in enumerate(program.nodes):
            args = map_refs(node.args, env.__getitem__)
            kwargs = {k: map_refs(v, env.__getitem__) for k, v in node.kwargs}
            result = resolve(node.target)(*args, **kwargs)
            results = flat_results(result) if node.outs else []
            for ref in {r for r in node.refs if last[r] == index}:
                del env[ref]
            for out, result in zip(node.outs, results, strict=True):
                if out is not None and out in last:
                    env[out] = result
    return [env[i] for i in program.outputs]
