"""Reuse: an operator writes its result over an operand that dies with it, proven safe.

Problem: a functional program makes a tensor per operator. On a CPU every large one costs page faults, dearer than the
arithmetic (about 3 times, for elementwise operators), and operand and result are alive together. Idea: near the end of
all passes, an operator whose operand nobody reads again writes over it, in the form that torch's schemas have for that
(`ops.twins`):

    %9 = mul.Tensor(%8, 0.5)               ->     %9 = mul.out(%8, 0.5, out=%8)
    %9 = masked_fill.Scalar(%8, %7, 0.0)   ->     %9 = masked_fill_.Scalar(%8, %7, 0.0)
    %3 = _log_softmax(%2, 1, False)        ->     log_softmax_(%2, 1)                       later readers read %2
    %5 = nll_loss_backward(%g, %3, ...)    ->     (nothing)
    %6 = _log_softmax_backward_data(%5, %3, ...)  cross_entropy_dx_(%3, %g, ...)
    %8 = add(%6, embedding_dense_backward(...))   embedding_add_(%6, ...)

Note [What may be written over]. An operand x of node k, where
    - x's memory was made by an operator that is known to make memory of its own (`facts.makes_memory`), never by an
      input;
    - x covers that memory once: between maker and x are only views that keep every element (`WHOLE`), no expand, no
      part;
    - no node after k and no output reads x or anything that may share its memory;
    - no other operand of node k shares it, and shape and dtype are those of the result.
After node k the result alone lives in that memory, so what holds for a fresh result holds for it too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import attrs

from colofunc.ops.fused import has_adder
from colofunc.ops.targets import KEEP_ORDER
from colofunc.ops.twins import functional_of, out_twin, twin_of
from colofunc.program.aliases import aliases
from colofunc.program.editor import Editor
from colofunc.program.facts import is_pointwise, makes_memory
from colofunc.program.ir import Loop, Node, Program, Ref
from colofunc.program.passes.loop import parts_that_read

# Views that keep every element once (in any order).
WHOLE = KEEP_ORDER.union(
    """aten.permute.default aten.transpose.int aten.t.default aten.alias.default aten.detach.default
    colofunc.rearrange colofunc.wait""".split()
)


def reuse(program: Program, own: Collection[int] = ()) -> Program:
    """Results written over dying operands.

    The last pass, because it depends on the final order. own: inputs that are the program's own.
    """
    facts = ReuseFacts(program, own)
    nodes = (_over_what_dies(facts, index, node) or node for index, node in enumerate(program.nodes))
    return Editor(program).written(nodes, stage="inplace")


def _over_what_dies(facts: ReuseFacts, index: int, node: Node) -> Node | None:
    """A node with its result written over an operand that dies with it; None where none does."""
    if not _has_forms(node.target):
        return None
    for id in dict.fromkeys(node.refs):
        written = written_over(node, id) if facts.holds(id, index, node) else None
        if written is not None:
            return written
    return None


@cache
def _has_forms(target: str) -> bool:
    return (is_pointwise(target) and out_twin(target) is not None) or twin_of(target) is not None


def written_over(node: Node, id: int) -> Node | None:
    """A node with a single result, which it writes over its operand `id`.

    None where the operator has no form that does.

    Elementwise operators read an element before they write it, so any operand will do, however often it stands there.
    Others write over the one that their in-place form changes, and read the rest meanwhile.
    """
    if len(node.outs) != 1 or node.loop is not None:
        return None
    out = out_twin(node.target) if is_pointwise(node.target) else None
    if out is not None:
        target, argument = out
        return attrs.evolve(node, target=target, kwargs=(*node.kwargs, (argument, Ref(id))))
    twin = twin_of(node.target)
    if twin is None or node.refs.count(id) != 1:
        return None
    ((_, position),) = twin.places
    return attrs.evolve(node, target=twin.target) if node.args[position : position + 1] == (Ref(id),) else None


def own_outputs(program: Program) -> set[int]:
    """Positions of outputs whose memory is made by the program, holds nothing else and leaves it once."""
    facts = ReuseFacts(program)
    groups = [facts.memory.group(out) for out in program.outputs]
    return {place for place, out in enumerate(program.outputs) if groups.count(groups[place]) == 1 and facts.whole(out)}


def own_outputs_of_parts(loop: Loop) -> set[int]:
    """Positions of a loop's outputs whose first result becomes what they are gathered in: memory of their own
    (`own_outputs`), which in a body that is cut no later part reads, since other microbatches may be added to it
    before."""
    body, timetable = loop.body, loop.cut_by
    own = own_outputs(body)
    if timetable is None:
        return own
    memory = aliases(body)
    found = set()
    for k in own:
        out = body.outputs[k]
        end = timetable.ends[timetable.part_at(body.made_at[out])]
        if memory.last_read(memory.group(out)) < end:
            found.add(k)
    return found


def kept_for_one_part(loop: Loop) -> list[set[int]]:
    """Of each part of a body that is cut, what an earlier part has made and kept for it alone: it may be written over
    there, each microbatch having its own. As in the whole of a step, the gradient of a loss lies where the logits
    lay."""
    body, timetable = loop.body, loop.cut_by
    assert timetable is not None, "a body in parts"
    facts = ReuseFacts(body)
    crossing: dict[int, set[tuple[int, int]]] = {}  # memory -> (value, another part than its own that reads it)
    for id, parts in parts_that_read(body, timetable).items():
        if id in body.made_at:
            others = parts - {timetable.part_at(body.made_at[id])}
            crossing.setdefault(facts.memory.group(id), set()).update((id, part) for part in others)
    found: list[set[int]] = [set() for _ in timetable.ends]
    for group, reads in crossing.items():
        if len(reads) == 1 and not facts.memory.is_output(group):
            ((id, part),) = reads
            if facts.whole(id):
                found[part].add(id)
    return found


def added_in_place(loop: Loop) -> dict[int, int]:
    """Position of a node of a loop's body -> the output that it makes, where each trip but the first adds that to the
    sum at once.

    Nobody but the sum reads what such a node makes (or adds the gradient of an embedding to it), so that the gradient
    of one microbatch never lies beside that of all.
    """
    body, found = loop.body, {}
    for k in own_outputs_of_parts(loop):
        out = body.outputs[k]
        maker, made_at = body.makers[out], body.made_at[out]
        plain = len(maker.outs) == 1 and maker.kernel is None and not maker.kwargs and body.values[out].tier == "device"
        only_added_to = all(_adds_rows(loop, index, out, made_at) for index in body.readers.get(out, ()))
        if loop.gathers[k] == "sum" and plain and only_added_to and has_adder(maker.target, maker.args):
            found[made_at] = k
    return found


def _adds_rows(loop: Loop, index: int, into: int, made_at: int) -> bool:
    """Whether a node adds the gradient of an embedding to a value, in the part that makes it: before another microbatch
    comes.
    """
    node, timetable = loop.body.nodes[index], loop.cut_by
    same_part = timetable is None or timetable.part_at(index) == timetable.part_at(made_at)
    return (
        same_part
        and node.target == "colofunc.embedding_add_"
        and node.args[0] == Ref(into)
        and node.refs.count(into) == 1
    )


def functional(node: Node) -> Node | None:
    """The operator that `reuse` wrote over an operand, with a result of its own; None for other operators."""
    found = functional_of(node.target)
    if found is None or not node.results:
        return None
    target, argument = found
    return attrs.evolve(node, target=target, kwargs=tuple(pair for pair in node.kwargs if pair[0] != argument))


def fuse(program: Program, own: Collection[int] = ()) -> Program:
    """Large gradients that are mostly zero are never made (see `colofunc.ops.fused`).

    `program` is still functional. own: as in `reuse`.
    """
    facts, edit = ReuseFacts(program, own), Editor(program)
    changed = False
    for index, node in enumerate(program.nodes):
        found = None
        for pattern in PATTERNS.get(node.target, ()):
            found = found or pattern(facts, index, node)
        if found is None or node.outs[0] is None:
            continue
        into, target, args, unread = found
        changed = True
        edit.rename(node.outs[0], into)
        facts.written.add(facts.memory.group(into))
        edit.replace(index, attrs.evolve(node, target=target, args=args, kwargs=(), outs=()))
        for id in unread:
            edit.drop(program.made_at[id])
    return edit.done(stage="inplace") if changed else program


class ReuseFacts:
    """Who made what and who reads it last, of one program; see Note [What may be written over]."""

    def __init__(self, program: Program, own: Collection[int] = ()) -> None:
        self.program = program
        self.own = own  # inputs that nobody else has
        self.memory = aliases(program)
        self.makers = program.makers
        self.readers = program.readers
        self.written: set[int] = set()  # memory groups that a pattern has written over
        self._whole: dict[int, bool] = {}

    def whole(self, id: int) -> bool:
        """Whether `id` covers memory of the program's own exactly once."""
        found = self._whole.get(id)
        if found is None:
            node = self.makers.get(id)
            if node is None:
                found = id in self.own
            elif node.target in WHOLE:
                found = self.whole(node.refs[0])
            else:
                found = makes_memory(node.target) or functional_of(node.target) is not None
            self._whole[id] = found
        return found

    def holds(self, id: int, index: int, node: Node, others: tuple[int, ...] | None = None) -> bool:
        """Whether the single result of node `index` may be written over `id`; `others`: what is read for it."""
        out = node.outs[0]
        if out is None or not self.whole(id) or not self._alike(id, out):
            return False
        group = self.memory.group(id)
        if self.memory.last_read(group) > index or self.memory.is_output(group):
            return False
        return all(r == id or self.memory.group(r) != group for r in (node.refs if others is None else others))

    def _alike(self, a: int, b: int) -> bool:
        x, y = self.program.values[a], self.program.values[b]
        tiers = [None if v.layout is None else v.layout.tier for v in (x, y)]
        return x.shape == y.shape and x.dtype == y.dtype and tiers[0] == tiers[1]

    def only_for(self, id: int, index: int) -> bool:
        """Whether node `index` alone reads `id`."""
        return self.readers.get(id) == (index,) and id not in self.program.outputs

    def moves(self, ids: tuple[int, ...]) -> bool:
        """Whether these values can be read later than the program does: nothing has been written over them."""
        return not any(self.memory.group(id) in self.written for id in ids)


# What a pattern finds: (value to write over, target, arguments, results that are not needed any more).
WriteOver = tuple[int, str, tuple[Any, ...], set[int]]


def _log_softmax(facts: ReuseFacts, index: int, node: Node) -> WriteOver | None:
    x, dim, widen = node.args
    if widen or not facts.holds(x.id, index, node):
        return None
    return x.id, "colofunc.log_softmax_", (x, dim), set()


def _cross_entropy(facts: ReuseFacts, index: int, node: Node) -> WriteOver | None:
    """The gradients of log_softmax and nll_loss as one operator over the log probabilities."""
    grad, log_p, dim, dtype = node.args
    maker = facts.makers.get(grad.id)
    if maker is None or maker.target != "aten.nll_loss_backward.default" or not facts.only_for(grad.id, index):
        return None
    value = facts.program.values[log_p.id]
    seed, same, target, weight, reduction, ignore, total = maker.args
    if weight is not None or same != log_p or dtype != value.dtype or len(value.shape) != 2 or dim not in (1, -1):
        return None
    if not facts.moves((seed.id, target.id, total.id)) or not facts.holds(
        log_p.id, index, node, (seed.id, target.id, total.id)
    ):
        return None
    return log_p.id, "colofunc.cross_entropy_dx_", (log_p, seed, target, reduction, ignore, total), {grad.id}


def _embedding(facts: ReuseFacts, index: int, node: Node) -> WriteOver | None:
    """A sum with the gradient of an embedding: only the rows that were looked up are touched."""
    if node.kwargs or not all(isinstance(arg, Ref) for arg in node.args):
        return None
    for into, other in (node.args, node.args[::-1]):
        maker = facts.makers.get(other.id)
        if maker is None or maker.target != "aten.embedding_dense_backward.default" or maker.args[4]:
            continue
        grad, indices, _, padding, _ = maker.args
        read = (grad.id, indices.id)
        if facts.only_for(other.id, index) and facts.moves(read) and facts.holds(into.id, index, node, read):
            return into.id, "colofunc.embedding_add_", (into, grad, indices, padding), {other.id}
    return None


PATTERNS: dict[str, tuple[Callable[[ReuseFacts, int, Node], WriteOver | None], ...]] = {
    "aten._log_softmax.default": (_log_softmax,),
    "aten._log_softmax_backward_data.default": (_cross_entropy,),
    "aten.add.Tensor": (_embedding,),
}
