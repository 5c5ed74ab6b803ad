"""As read: what a step captures lies in the dtype in which it is read.

Problem: under `cf.precision` frozen weights would lie as they were loaded, in float32, beside a bf16 copy of all of them that each
step makes anew. Idea: where every reader of a hidden input is a cast to one narrower dtype, the input has that dtype; whoever
places it casts it once. Parameters and their state stay as they are: they are masters.

    %7 = _to_copy(%6: f32, dtype=bf16)   linear(%x, %7)           ->     linear(%x, %6: bf16)
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from colofunc.program.ir import Node, Program
from colofunc.program.passes.reuse import renamed_refs


def as_read(program: Program, hidden: Sequence[int]) -> Program:
    """`program` with those of its `hidden` inputs in a narrower dtype that nobody reads in their own."""
    readers: dict[int, list[Node]] = {vid: [] for vid in hidden}
    for node in program.nodes:
        for ref in readers.keys() & node.refs:
            readers[ref].append(node)
    values = dict(program.values)
    renamed: dict[int, int] = {}  # the result of a cast -> the input
    for vid, nodes in readers.items():
        dtypes = {_cast_to(node) for node in nodes}
        dtype = dtypes.pop() if len(dtypes) == 1 and vid not in program.outputs else None
        if dtype is None or dtype.itemsize >= values[vid].dtype.itemsize:
            continue
        values[vid] = attrs.evolve(values[vid], dtype=dtype)
        for made in (out for node in nodes for out in node.outs if out is not None):
            renamed[made] = vid
            del values[made]
    kept = (node for node in program.nodes if not (node.outs and node.outs[0] in renamed))
    others = tuple(renamed_refs(node, renamed) for node in kept)
    outputs = tuple(renamed.get(o, o) for o in program.outputs)
    return attrs.evolve(program, nodes=others, values=values, outputs=outputs)


def _cast_to(node: Node) -> torch.dtype | None:
    """The dtype of a node that casts to a float and does nothing else."""
    if node.target != "aten._to_copy.default" or [name for name, _ in node.kwargs] != ["dtype"]:
        return None
    dtype: torch.dtype = node.kwargs[0][1]
    return dtype if dtype.is_floating_point else None
