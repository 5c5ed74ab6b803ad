"""What a step captures lies in the dtype in which it is read.

Problem: under `cf.precision` frozen weights would lie as they were loaded, in float32, beside a bf16 copy of all of
them that each step makes anew. Idea: where every reader of a hidden input is a cast to one narrower dtype, the input
has that dtype; whoever places it casts it once. Parameters and their state stay as they are: they are masters.

    %7 = _to_copy(%6: f32, dtype=bf16)   linear(%x, %7)           ->     linear(%x, %6: bf16)
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from colofunc.program.editor import Editor
from colofunc.program.facts import is_cast
from colofunc.program.ir import Node, Program


def as_read(program: Program, hidden: Sequence[int]) -> Program:
    """`program` with those of its `hidden` inputs in a narrower dtype that nobody reads in their own."""
    edit = Editor(program)
    for vid in hidden:
        casts = program.readers.get(vid, ())
        dtypes = {_cast_to(program.nodes[index]) for index in casts}
        dtype = dtypes.pop() if len(dtypes) == 1 and vid not in program.outputs else None
        if dtype is None or dtype.itemsize >= program.values[vid].dtype.itemsize:
            continue
        edit.values[vid] = attrs.evolve(program.values[vid], dtype=dtype)
        for index in casts:
            (made,) = program.nodes[index].results
            edit.rename(made, vid)
            edit.drop(index)
    return edit.done()


def _cast_to(node: Node) -> torch.dtype | None:
    """The dtype of a node that casts to a float and does nothing else."""
    if not is_cast(node):
        return None
    dtype: torch.dtype = node.kwargs[0][1]
    return dtype if dtype.is_floating_point else None
