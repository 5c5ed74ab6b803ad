"""In place: donated state is updated where it lies, proven safe.

Problem: a functional update holds old and new state at once, twice the parameters and moments, or a second key-value
cache. Idea: the last pass replaces an operator by its in-place twin, as schemas have it (`colofunc.ops.twins`), where
each value that it would write to is a donated input of the same layout whose new value is the result that is written
over it, and no node after it reads the old value or anything that may share its memory.

    %9, %10, %11, _ = adamw(%p, %g, %m, %v, ...)    ->    adamw_(%p, %g, %m, %v, ...)              outputs: %p, %m, %v
    %4 = index_copy(%cache, 2, %at, %keys)          ->    index_copy_(%cache, 2, %at, %keys)       output: %cache
    %5 = mul(%mean, 0.9)   %6 = add(%5, %x)         ->    mul.out(%mean, 0.9, out=%mean)   add.out(%mean, %x, out=%mean)

The last of these is how `_Overwrite` goes back from the new value: over a temporary that dies there and lies in the old
value's memory itself, or over the old value; and what is written into a part of a copy of the old value
(`slice_scatter` and its like) is computed in that part. Writes follow one another: layers of a stacked cache, each of
which reads what the one before it has left.

    %3 = select(%cache, 0, 0)   %4 = index_copy(%3, ...)   %5 = select_scatter(%cache, %4, 0, 0)
    %6 = select(%5, 0, 1)       %7 = index_copy(%6, ...)   %8 = select_scatter(%5, %7, 0, 1)
    ->  %3 = select(%cache, 0, 0)   index_copy_(%3, ...)   %6 = select(%cache, 0, 1)   index_copy_(%6, ...)

Where a parameter is whole and its moments are shards (ZeRO-1 and 2), the update makes new shards of the parameter
alone, and what is gathered of them is written over the old parameter (`_written_over`):

    adamw(take_shard(%p), %g, %m, %v, ...)          ->        %c = clone(take_shard(%p))  adamw_(%c, %g, %m, %v, ...)
    %n = all_gather(...)                                      write_(%p, all_gather(%c))                outputs: %p, %m, %v

Where state may lie in another tier (`every_state`), so is every other new value of state, as an update that was written
in aten makes them: else all of them would be held until the step is over.

What leaves the step beside a new value of state and shares its memory (the value itself, or a view of it) leaves as a
copy: the next step writes over the state. So does what shares memory with an argument: a step to which that is donated
may write over it. Values without dims stay as they are: to write over a counter saves nothing.

Temporaries are the other case: an operator writes over an operand that dies with it (see `reuse`).

Later readers of the new value read the input's id, which holds it from then on. Updates that come together at the end
are moved up to where their gradient is ready (`schedule.updates_early`), so gradients do not wait for one another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from colofunc.ops import flat as _operators  # noqa: F401  registers write_
from colofunc.ops.scatter import VIEWS
from colofunc.ops.twins import Twin, out_twin, twin_of
from colofunc.program.aliases import Aliases, aliases
from colofunc.program.editor import Editor
from colofunc.program.facts import is_pointwise, is_wire, kind_of, rearrange_steps
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.passes.loop import change_bodies
from colofunc.program.passes.reuse import fuse, kept_for_one_part, reuse, written_over
from colofunc.program.passes.schedule import updates_early
from colofunc.program.places import made_at

MOVES = frozenset(
    ("colofunc.rearrange", "colofunc.fit", "aten.slice.Tensor", "aten.view.default", "aten.alias.default")
)


def in_place(program: Program, temporaries: bool = True, every_state: bool = False) -> Program:
    """`program` with updates and temporaries in place where that is proven safe; stage "inplace".

    temporaries=False: updates of donated leaves only, for an executor that plans its own temporaries. every_state:
    updates without a twin are copied over the old values too, which takes a copy and holds less.
    """
    program = _leaving_apart(program)
    program = fuse(program) if temporaries else program
    written = updates_early(_written_over(_over_donated(program, every_state), every_state))
    return change_bodies(reuse(written), _body, kept_for_one_part) if temporaries else change_bodies(written, _stage)


def _leaving_apart(program: Program) -> Program:
    """Results that share memory with the new value of a donated leaf, or with an argument that stays the caller's,
    leave as copies.
    """
    memory, edit, end = aliases(program), Editor(program), len(program.nodes)
    donated = {out for out, _ in program.aliases}
    mine = set(map(memory.group, program.inputs))
    groups = mine | {memory.group(program.outputs[out]) for out in donated}
    outputs = list(program.outputs)
    for place, id in enumerate(program.outputs):
        if place in donated or memory.group(id) not in groups:
            continue
        outputs[place] = edit.new(program.values[id])
        layout = program.values[id].layout
        argument = memory.group(id) in mine
        note = "the argument stays the caller's" if argument else "the next step writes over the state"
        on = None if layout is None else layout.at
        copy = Node("aten.clone.default", (Ref(id),), (), (outputs[place],), note=note, on=on)
        maker = program.makers.get(id)
        edit.insert(
            end, copy if maker is None else attrs.evolve(copy, phase=maker.phase, path=maker.path, line=maker.line)
        )
    return edit.done(outputs=outputs) if outputs != list(program.outputs) else program


def _over_donated(program: Program, every_state: bool) -> Program:
    """New values of donated leaves written over the old ones, where an operator can do that and nobody reads the old
    one later.

    Where copies between tiers are planned (`every_state`), elementwise work stays functional: a search that moves
    updates to the host takes what ends in one `write_` as one of them.
    """
    edit, overwrite = Editor(program), _Overwrite(program)
    for index, node in enumerate(program.nodes):
        twin = twin_of(node.target)
        if twin is None or len(node.outs) == 1:
            continue
        pairs = overwrite.pairs(index, node, twin)
        if pairs is None:
            continue
        found, kept = pairs
        args = list(node.args)
        for out, position in kept:  # the old value stays: what is written over is a copy
            copy = edit.new(program.values[out])
            edit.insert(
                index, attrs.evolve(node, target="aten.clone.default", args=(args[position],), kwargs=(), outs=(copy,))
            )
            args[position] = Ref(copy)
            edit.rename(out, copy)
        for out, into in found:
            edit.rename(out, into)
        edit.replace(index, attrs.evolve(node, target=twin.target, args=tuple(args), outs=twin.outs(node.outs)))
    for out, position in program.aliases:
        maker = program.makers.get(program.outputs[out])
        if maker is None or (every_state and is_pointwise(maker.target)):
            continue
        for change in overwrite.changes(program.outputs[out], program.inputs[position]):
            edit.replace(change.index, *change.nodes)
            edit.rename(change.value, change.into)
    return edit.done(stage="inplace")


def _stage(body: Program) -> Program:
    return attrs.evolve(body, stage="inplace")


def _body(body: Program, own: frozenset[int] = frozenset()) -> Program:
    """The body of a loop, or a part of it: nothing is donated to it, so only temporaries are written over. own: inputs
    that are, too.
    """
    return _stage(reuse(fuse(body, own), own))


WritePairs = list[tuple[int, int]]


@attrs.frozen
class _Change:
    """What comes in place of node `index`, so that what it made, `value`, is made in the memory of `into`."""

    index: int
    nodes: tuple[Node, ...]
    value: int
    into: int


@attrs.frozen
class _Written:
    """The changes by which a value is made in the memory of another, the earliest first.

    `parts`: groups of values that lie in parts of it, which may be read until the next change writes there.
    """

    changes: tuple[_Change, ...] = ()
    parts: frozenset[int] = frozenset()


class _Overwrite:
    """How new values of donated leaves can be made where the old ones lie, in one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.memory = aliases(program)
        self.paired: dict[int, set[int]] = {}
        for out, into in program.aliases:
            self.paired.setdefault(program.outputs[out], set()).add(program.inputs[into])
        self._changed: set[int] = set()  # nodes of the changes that were given
        self._known: dict[tuple[int, int, frozenset[int]], _Written | None] = {}
        self._group_readers: dict[int, list[int]] = {}
        for index, node in enumerate(program.nodes):
            kind = kind_of(node)
            ends = [index]
            if kind is not None and kind[1]:  # a started collective reads until it is waited for
                ends += [program.last_uses.get(out, index) for out in node.results]
            for group in {self.memory.group(ref) for ref in node.refs}:
                self._group_readers.setdefault(group, []).extend(ends)

    # ---- operators with several results ----

    def pairs(self, index: int, node: Node, twin: Twin) -> tuple[WritePairs, WritePairs] | None:
        """(result, input it is written to) and (result, argument it needs a copy of).

        None where nothing can be written over.
        """
        found: WritePairs = []
        kept: WritePairs = []
        for result, position in twin.places:
            arg = node.args[position] if position < len(node.args) else None
            out = node.outs[result] if result < len(node.outs) else None
            if not isinstance(arg, Ref):
                if out is not None and self.program.values[out].nbytes and _is_read(self.program, out):
                    return None  # a result that has no argument to live in
                continue
            if out is None:
                return None
            if self._may_overwrite(index, node, arg.id, out):
                found.append((out, arg.id))
            else:
                kept.append((out, position))
        written = [into for _, into in found]
        if not found or len({self.memory.group(into) for into in written}) != len(written):
            return None  # two results would be written to the same memory
        return found, kept

    def _may_overwrite(self, index: int, node: Node, into: int, out: int) -> bool:
        """Whether the new value `out` may be written over `into` at node `index`."""
        if into not in self.paired.get(out, ()) or self.program.times_returned[out] != 1 or not self._alike(out, into):
            return False
        if not self._is_free(into, index):
            return False
        # No other operand of the update may share this memory.
        return sum(self.memory.group(ref) == self.memory.group(into) for ref in node.refs) == 1

    # ---- one result ----

    def changes(self, new: int, old: int) -> tuple[_Change, ...]:
        """What makes `new` in the memory of `old`; nothing where that cannot be."""
        if (
            new == old
            or not self.program.values[new].shape
            or self.program.times_returned[new] != 1
            or not self._alike(new, old)
        ):
            return ()
        written = self._made_in(new, old, frozenset())
        if written is None:
            return ()
        self._changed.update(change.index for change in written.changes)
        self._known.clear()
        return written.changes

    def _made_in(self, id: int, into: int, through: frozenset[int]) -> _Written | None:
        """How `id` is made in the memory of `into`, an input or a view of one that the nodes `through` write it back
        to.

        None where it cannot be. What comes before it is settled first: a chain may have more links than Python calls.
        """
        for earlier in self._chain(id, into, through):
            self._known[earlier, into, through] = self._link(earlier, into, through)
        return self._known.get((id, into, through))

    def _chain(self, id: int, into: int, through: frozenset[int]) -> list[int]:
        """`id` and what may be made in the memory of `into` before it, the earliest first; without what is known."""
        found = set[int]()
        rest = [id]
        while rest:
            each = rest.pop()
            index = self.program.made_at.get(each)
            if index is None or each in found or (each, into, through) in self._known:
                continue
            found.add(each)
            if self._is_free(into, index, through):
                rest += [operand for operand, _ in self._operands(index, self.program.nodes[index], into)]
        return sorted(found, key=self.program.made_at.__getitem__)

    def _link(self, id: int, into: int, through: frozenset[int]) -> _Written | None:
        """`_made_in`, where it is known of all values before `id`."""
        index = self.program.made_at[id]
        node = self.program.nodes[index]
        if len(node.outs) != 1 or node.loop is not None or index in self._changed:
            return None
        if not self._is_free(into, index, through):
            return None
        for way in (self._in_its_part, self._over_operand, self._given):
            written = way(index, node, into, through)
            if written is not None:
                return written
        return None

    def _operands(self, index: int, node: Node, into: int) -> list[tuple[int, Node]]:
        """What node `index` may write over to make its result in the memory of `into`, and the form that does: `into`,
        or a temporary that dies here."""
        found = []
        for operand in dict.fromkeys(node.refs):
            form = written_over(node, operand)
            if form is not None and (operand == into or self._dies(operand, index, into)):
                found.append((operand, form))
        return found

    def _before(self, operand: int, into: int, through: frozenset[int]) -> _Written | None:
        return _Written() if operand == into else self._made_in(operand, into, through)

    def _over_operand(self, index: int, node: Node, into: int, through: frozenset[int]) -> _Written | None:
        """Over the old value itself, or over a temporary that dies here and can be made in its memory."""
        for operand, form in self._operands(index, node, into):
            shared = {self.memory.group(into), self.memory.group(operand)}
            if any(ref != operand and self.memory.group(ref) in shared for ref in node.refs):
                continue
            before = self._before(operand, into, through)
            if before is not None and not self._are_read(before.parts, index):
                change = _Change(index, (attrs.evolve(form, outs=(None,)),), node.results[0], into)
                return attrs.evolve(before, changes=(*before.changes, change))
        return None

    def _in_its_part(self, index: int, node: Node, into: int, through: frozenset[int]) -> _Written | None:
        """Of `slice_scatter` and its like: what is written into a part is made there, of what was in it."""
        view = VIEWS.get(node.target)
        if view is None or node.kwargs or not all(isinstance(arg, Ref) for arg in node.args[:2]):
            return None
        whole, part = node.args[0].id, node.args[1].id
        memory_of_part = self.memory.group(part)
        if self.memory.is_output(memory_of_part) or (whole != into and not self._dies(whole, index, into)):
            return None
        before = self._before(whole, into, through)
        if before is None:
            return None
        made_at = self.program.made_at.get(part, -1)
        for position in self.program.readers[whole]:
            looks = self.program.nodes[position]
            if position >= made_at or looks.target != view or not looks.results:
                continue
            if looks.args != (Ref(whole), *node.args[2:]) or not self._alike(part, looks.results[0]):
                continue
            inside = self._made_in(part, looks.results[0], through | {index})
            if inside is not None and not self._are_read(before.parts, inside.changes[0].index):
                changes = *before.changes, *inside.changes, _Change(index, (), node.results[0], into)
                return _Written(changes, before.parts | inside.parts | {memory_of_part})
        return None

    def _given(self, index: int, node: Node, into: int, through: frozenset[int]) -> _Written | None:
        """The old value's memory given to an operator that does not read it any more."""
        out = out_twin(node.target)
        if out is None or any(self.memory.group(ref) == self.memory.group(into) for ref in node.refs):
            return None
        target, argument = out
        form = attrs.evolve(node, target=target, kwargs=(*node.kwargs, (argument, Ref(into))), outs=(None,))
        return _Written((_Change(index, (form,), node.results[0], into),))

    def _dies(self, id: int, index: int, into: int) -> bool:
        """Whether nobody reads a temporary behind node `index`, and it is as large as `into`."""
        group = self.memory.group(id)
        return self._alike(id, into) and self.memory.last_read(group) <= index and not self.memory.is_output(group)

    def _is_free(self, into: int, index: int, through: Collection[int] = ()) -> bool:
        """Whether nobody behind node `index` reads memory that `into` lies in, but for the nodes `through`."""
        group = self.memory.group(into)
        return not self.memory.is_output(group) and all(
            k <= index or k in through for k in self._group_readers.get(group, ())
        )

    def _are_read(self, groups: Collection[int], index: int) -> bool:
        """Whether node `index`, or one behind it, reads memory of these groups."""
        return any(k >= index for group in groups for k in self._group_readers.get(group, ()))

    def _alike(self, a: int, b: int) -> bool:
        """Whether two values are of one shape, dtype and layout."""
        x, y = self.program.values[a], self.program.values[b]
        return (x.shape, x.dtype, x.tier) == (y.shape, y.dtype, y.tier) and x.layout is y.layout


def _written_over(program: Program, every_state: bool) -> Program:
    """What is gathered of a donated input's new value, or `every_state`, is written over the old one, behind its last
    reader.
    """
    memory, makers, edit = aliases(program), program.makers, Editor(program)
    outputs, end = list(program.outputs), len(program.nodes)
    for out, position in program.aliases:
        new, old = program.outputs[out], program.inputs[position]
        a, b = program.values[new], program.values[old]
        alike = (a.shape, a.dtype) == (b.shape, b.dtype) and a.layout is b.layout and program.times_returned[new] == 1
        if new == old or not alike or memory.is_output(memory.group(old)):
            continue
        if not _from_wire(new, makers) and not (every_state and a.shape and _is_fresh(new, memory, program)):
            continue
        maker, source = makers[new], new
        if maker.target == "colofunc.rearrange" and new not in program.readers and _only_reshapes(maker, program):
            edit.drop(program.made_at[new])  # writing is copying, in any shape
            source = maker.refs[0]
        where = ("update", maker.path, maker.line, maker.note)
        edit.insert(end, Node("colofunc.write_", (Ref(old), Ref(source)), (), (), *where, on=made_at(maker)))
        outputs[out] = old
    return edit.done(outputs=outputs)


def _from_wire(id: int, makers: Mapping[int, Node]) -> bool:
    """Whether moves alone make a value of what a collective delivers."""
    while (node := makers.get(id)) is not None and not is_wire(node):
        if node.target not in MOVES:
            return False
        id = node.refs[0]
    return node is not None


def _is_fresh(id: int, memory: Aliases, program: Program) -> bool:
    """Whether no input shares memory with a value: what is written over inputs cannot change it."""
    return memory.group(id) not in {memory.group(input_id) for input_id in program.inputs}


def _only_reshapes(node: Node, program: Program) -> bool:
    ref, pattern, names, sizes = node.args
    return rearrange_steps(pattern, tuple(names), tuple(sizes), program.values[ref.id].shape)[1] is None


def _is_read(program: Program, id: int) -> bool:
    return id in program.times_returned or any(id in node.refs for node in program.nodes)
