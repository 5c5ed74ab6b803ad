"""In place: donated state is updated where it lies, proven safe.

Problem: a functional update holds old and new state at once, twice the parameters and moments. Idea: the last pass
replaces an update operator by its in-place twin (`colofunc.ops.update.IN_PLACE`) where each value it would write to is a
donated input of the same layout whose new value is the output it is paired with, and no node after the update reads
the old value or anything that may share memory with it.

    %9, %10, %11, _ = adamw(%p, %g, %m, %v, ...)          ->        adamw_(%p, %g, %m, %v, ...)      outputs: %p, %m, %v

Temporaries are the other case: an elementwise operator writes over an operand that dies with it (see `reuse`).

Later readers of the new value read the input's id, which holds it from then on. Updates that come together at the end
are moved up to where their gradient is ready (`schedule.updates_early`), so gradients do not wait for one another.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from colofunc.ops.update import IN_PLACE
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.loop import within
from colofunc.program.reuse import fuse, renamed_refs, reuse
from colofunc.program.schedule import Memory, updates_early


def in_place(program: Program, temporaries: bool = True) -> Program:
    """`program` with updates and temporaries in place where that is proven safe; stage "inplace".

    temporaries=False: updates of donated leaves only, for an executor that plans its own temporaries.
    """
    program = fuse(program) if temporaries else program
    memory = Memory(program)
    paired: dict[int, set[int]] = {}
    for out, into in program.aliases:
        paired.setdefault(program.outputs[out], set()).add(program.inputs[into])
    counts: dict[int, int] = {}
    for o in program.outputs:
        counts[o] = counts.get(o, 0) + 1
    renamed: dict[int, int] = {}
    nodes: list[Node] = []
    for index, original in enumerate(program.nodes):
        # Safety is judged by the original ids, whose memory groups are known; what is written down has the new ones.
        node = renamed_refs(original, renamed)
        twin = _twin(program, index, original, memory, paired, counts)
        if twin is None:
            nodes.append(node)
            continue
        target, pairs = twin
        renamed.update(pairs)
        nodes.append(attrs.evolve(node, target=target, outs=()))
    outputs = tuple(renamed.get(o, o) for o in program.outputs)
    written = updates_early(attrs.evolve(program, nodes=tuple(nodes), outputs=outputs, stage="inplace"))
    return within(reuse(written), _body) if temporaries else within(written, _stage)


def _stage(body: Program) -> Program:
    return attrs.evolve(body, stage="inplace")


def _body(body: Program) -> Program:
    """The body of a loop: nothing is donated to it, so only temporaries are written over."""
    return _stage(reuse(fuse(body)))


def _twin(
    program: Program, index: int, node: Node, memory: Memory, paired: Mapping[int, set[int]], counts: Mapping[int, int]
) -> tuple[str, list[tuple[int, int]]] | None:
    """(target, ((result, input it is written to), ...)) of the in-place form of `node`; None where it is not safe."""
    if node.target not in IN_PLACE:
        return None
    target, pairs = IN_PLACE[node.target]
    found: list[tuple[int, int]] = []
    for result, position in pairs:
        arg = node.args[position] if position < len(node.args) else None
        out = node.outs[result] if result < len(node.outs) else None
        if not isinstance(arg, Ref):
            if out is not None and program.values[out].nbytes and _is_read(program, out):
                return None  # a result that has no argument to live in
            continue
        if out is None or not _may_overwrite(program, index, node, arg.id, out, memory, paired, counts):
            return None
        found.append((out, arg.id))
    written = [into for _, into in found]
    if len({memory.group(into) for into in written}) != len(written):
        return None  # two results would be written to the same memory
    return target, found


def _is_read(program: Program, id: int) -> bool:
    return id in program.outputs or any(id in node.refs for node in program.nodes)


def _may_overwrite(
    program: Program, index: int, node: Node, into: int, out: int, memory: Memory, paired: Mapping[int, set[int]], counts: Mapping[int, int]
) -> bool:
    """Whether the new value `out` may be written over `into` at node `index`."""
    old, new = program.values[into], program.values[out]
    if into not in paired.get(out, ()) or counts.get(out, 0) != 1:
        return False
    if (old.shape, old.dtype) != (new.shape, new.dtype) or old.layout is not new.layout:
        return False
    group = memory.group(into)
    if memory.last_read(group) > index or memory.is_output(group):
        return False
    # No other operand of the update may share this memory.
    return sum(memory.group(r) == group for r in node.refs) == 1
