"""In place: donated state is updated where it lies, proven safe.

Problem: a functional update holds old and new state at once, twice the parameters and moments. Idea: the last pass
replaces an update operator by its in-place twin (`colofunc.ops.update.IN_PLACE`) where each value it would write to is a
donated input of the same layout whose new value is the output it is paired with, and no node after the update reads
the old value or anything that may share memory with it.

    %9, %10, %11, _ = adamw(%p, %g, %m, %v, ...)          ->        adamw_(%p, %g, %m, %v, ...)      outputs: %p, %m, %v

Where a parameter is whole and its moments are shards (ZeRO-1 and 2), the update makes new shards of the parameter alone, and
what is gathered of them is written over the old parameter (`_written_over`):

    adamw(take_shard(%p), %g, %m, %v, ...)          ->        %c = clone(take_shard(%p))  adamw_(%c, %g, %m, %v, ...)
    %n = all_gather(...)                                      write_(%p, all_gather(%c))                outputs: %p, %m, %v

Where state may lie in another tier (`every_state`), so is every other new value of state, as an update that was written in aten
makes them: else all of them would be held until the step is over.

Temporaries are the other case: an elementwise operator writes over an operand that dies with it (see `reuse`).

Later readers of the new value read the input's id, which holds it from then on. Updates that come together at the end
are moved up to where their gradient is ready (`schedule.updates_early`), so gradients do not wait for one another.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from colofunc.ops import flat as _operators  # noqa: F401  registers write_
from colofunc.ops.update import IN_PLACE
from colofunc.program.aliases import Aliases, aliases
from colofunc.program.editor import Editor
from colofunc.program.facts import is_wire, rearrange_steps
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.passes.loop import within
from colofunc.program.passes.reuse import fuse, reuse
from colofunc.program.passes.schedule import updates_early
from colofunc.program.places import made_at

MOVES = frozenset(("colofunc.rearrange", "colofunc.fit", "aten.slice.Tensor", "aten.view.default", "aten.alias.default"))


def in_place(program: Program, temporaries: bool = True, every_state: bool = False) -> Program:
    """`program` with updates and temporaries in place where that is proven safe; stage "inplace".

    temporaries=False: updates of donated leaves only, for an executor that plans its own temporaries. every_state: updates
    without a twin are copied over the old values too, which takes a copy and holds less.
    """
    program = fuse(program) if temporaries else program
    memory = aliases(program)
    paired: dict[int, set[int]] = {}
    for out, into in program.aliases:
        paired.setdefault(program.outputs[out], set()).add(program.inputs[into])
    counts: dict[int, int] = {}
    for o in program.outputs:
        counts[o] = counts.get(o, 0) + 1
    edit = Editor(program)
    for index, node in enumerate(program.nodes):
        twin = _twin(program, index, node, memory, paired, counts)
        if twin is None:
            continue
        target, pairs, kept = twin
        args = list(node.args)
        for out, position in kept:  # the old value stays: what is written over is a copy
            copy = edit.new(program.values[out])
            edit.insert(index, attrs.evolve(node, target="aten.clone.default", args=(args[position],), kwargs=(), outs=(copy,)))
            args[position] = Ref(copy)
            edit.rename(out, copy)
        for out, into in pairs:
            edit.rename(out, into)
        edit.replace(index, attrs.evolve(node, target=target, args=tuple(args), outs=()))
    changed = edit.done(stage="inplace")
    written = updates_early(_written_over(changed, every_state))
    return within(reuse(written), _body) if temporaries else within(written, _stage)


def _stage(body: Program) -> Program:
    return attrs.evolve(body, stage="inplace")


def _body(body: Program) -> Program:
    """The body of a loop: nothing is donated to it, so only temporaries are written over."""
    return _stage(reuse(fuse(body)))


Pairs = list[tuple[int, int]]


def _twin(
    program: Program, index: int, node: Node, memory: Aliases, paired: Mapping[int, set[int]], counts: Mapping[int, int]
) -> tuple[str, Pairs, Pairs] | None:
    """The in-place form of `node`: (target, (result, input it is written to), (result, argument it needs a copy of)).

    None where nothing can be written over.
    """
    if node.target not in IN_PLACE:
        return None
    target, pairs = IN_PLACE[node.target]
    found: Pairs = []
    kept: Pairs = []
    for result, position in pairs:
        arg = node.args[position] if position < len(node.args) else None
        out = node.outs[result] if result < len(node.outs) else None
        if not isinstance(arg, Ref):
            if out is not None and program.values[out].nbytes and _is_read(program, out):
                return None  # a result that has no argument to live in
            continue
        if out is None:
            return None
        if _may_overwrite(program, index, node, arg.id, out, memory, paired, counts):
            found.append((out, arg.id))
        else:
            kept.append((out, position))
    written = [into for _, into in found]
    if not found or len({memory.group(into) for into in written}) != len(written):
        return None  # two results would be written to the same memory
    return target, found, kept


def _written_over(program: Program, every_state: bool) -> Program:
    """What is gathered of a donated input's new value, or `every_state`, is written over the old one, behind its last reader."""
    memory, makers = aliases(program), program.makers
    read = {i for node in program.nodes for i in node.refs}
    outputs, writes, gone = list(program.outputs), list[Node](), set[int]()
    for out, position in program.aliases:
        new, old = program.outputs[out], program.inputs[position]
        a, b = program.values[new], program.values[old]
        alike = (a.shape, a.dtype) == (b.shape, b.dtype) and a.layout is b.layout and program.outputs.count(new) == 1
        if new == old or not alike or memory.is_output(memory.group(old)):
            continue
        if not _from_wire(new, makers) and not (every_state and a.shape and _is_fresh(new, memory, program)):
            continue
        maker, source = makers[new], new
        if maker.target == "colofunc.rearrange" and new not in read and _only_reshapes(maker, program):
            gone.add(new)  # writing is copying, in any shape
            source = maker.refs[0]
        write = Node("colofunc.write_", (Ref(old), Ref(source)), (), (), "update", maker.path, maker.line, maker.note, on=made_at(maker))
        writes.append(write)
        outputs[out] = old
    nodes = [node for node in program.nodes if not (node.outs and node.outs[0] in gone)]
    return attrs.evolve(program, nodes=(*nodes, *writes), outputs=tuple(outputs))


def _from_wire(id: int, makers: Mapping[int, Node]) -> bool:
    """Whether moves alone make a value of what a collective delivers."""
    while (node := makers.get(id)) is not None and not is_wire(node):
        if node.target not in MOVES:
            return False
        id = node.refs[0]
    return node is not None


def _is_fresh(id: int, memory: Aliases, program: Program) -> bool:
    """Whether no input shares memory with a value: what is written over inputs cannot change it."""
    return memory.group(id) not in {memory.group(i) for i in program.inputs}


def _only_reshapes(node: Node, program: Program) -> bool:
    ref, pattern, names, sizes = node.args
    return rearrange_steps(pattern, tuple(names), tuple(sizes), program.values[ref.id].shape)[1] is None


def _is_read(program: Program, id: int) -> bool:
    return id in program.outputs or any(id in node.refs for node in program.nodes)


def _may_overwrite(
    program: Program,
    index: int,
    node: Node,
    into: int,
    out: int,
    memory: Aliases,
    paired: Mapping[int, set[int]],
    counts: Mapping[int, int],
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
