"""Cut: the body of a loop in parts that ranks do for one microbatch and another, as a timetable says.

Problem: in a loop over microbatches each trip goes through all stages of a pipeline before the next begins, so that one stage works and
the others wait. Idea: a trip consists of parts, and a schedule is a table that says which rank does which part for which microbatch:

    F0 F1 F2 | B2 B1 B0 [| W2 W1 W0]        forward of each stage, its backward, or input gradients (I) and weight gradients (W) apart

What part a node is in follows from three facts. Its stage is where it runs (`Node.on`), and where a rank has several stages, the one that
its operands have come to. Its phase says forward or backward. A backward node is a weight gradient if nothing but one accumulator is
reached from it: no other stage waits for it, and no other gradient.

Note [Floating]. What depends on no weight and on no other stage (masks, positions, a microbatch's rows) runs on all ranks and belongs to
no part. It is computed in each part that reads it, so that nothing of it is sent or kept. What all ranks gather of it is gathered by a
loop of its own.

Note [Sends]. What is sent belongs to the part that makes it, and is received in the part that first reads it (`places.on_rank`). A value
that is sent only to be gathered is gathered where it is, and sent once, behind the loop.

Source: the parts F, B, I and W are those of Zero Bubble Pipeline Parallelism (2401.10241), section 2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import attrs

from colofunc.errors import PlanError
from colofunc.program.editor import Editor
from colofunc.program.ir import Loop, Node, Part, Program, Ref, Timetable, map_refs
from colofunc.program.places import SEND
from colofunc.spec.layout import At

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
_OF_BATCH = frozenset({"batch", "constant", "seed"})
"""Roles of inputs of a loop that belong to no stage."""


def cut(program: Program) -> Program:
    """`program` with the body of each loop that has a timetable in parts.

    Raises PlanError where a stage needs what a later one makes, or the timetable lacks an action.
    """
    edit = Editor(program)
    for index, node in enumerate(program.nodes):
        if node.loop is not None and node.loop.timetable is not None and not node.loop.timetable.ends:
            edit.replace(index, *_cut(node, node.loop, node.loop.timetable, edit, _owned(program, node.loop.timetable)))
    return edit.done()


def _owned(program: Program, timetable: Timetable) -> dict[int, int]:
    """Value outside of the loop -> the stage that it belongs to: that of the one weight that it is made of, by casts and gathers.

    What is made of a buffer (rotary tables) may be for all layers.
    """
    found: dict[int, int] = {}
    made_of: dict[int, frozenset[int]] = {}
    for id in program.inputs:
        value = program.values[id]
        if value.name in timetable.stages:
            found[id] = timetable.stages[value.name]
            made_of[id] = frozenset({found[id]} if value.role != "buffer" else ())
    for node in program.nodes if made_of else ():
        stages = frozenset[int]().union(*(made_of[ref] for ref in node.refs if ref in made_of))
        made_of.update(dict.fromkeys(node.results, stages))
        if len(stages) == 1:
            found.update(dict.fromkeys(node.results, next(iter(stages))))
    return found


def to_be_cut(program: Program) -> bool:
    """Whether a loop has a timetable that nobody has looked at yet."""
    timetables = (node.loop.timetable for node in program.nodes if node.loop is not None)
    return any(timetable is not None and not timetable.ends for timetable in timetables)


def _cut(node: Node, loop: Loop, timetable: Timetable, edit: Editor, owned: Mapping[int, int]) -> Iterator[Node]:
    """The nodes in place of a loop: what all ranks gather, the loop in parts, and what is sent when it has ended."""
    node, sends = _sent_behind(node, loop, edit)
    assert node.loop is not None, "a loop stays a loop"
    stages = _Stages(node, node.loop, timetable, owned)
    apart = [k for k, out in enumerate(node.loop.body.outputs) if out in stages.floating or out not in node.loop.body.makers]
    if apart:
        yield _part_of_loop(node, apart, None)
        node = _part_of_loop(node, [k for k in range(len(node.outs)) if k not in apart], timetable)
        assert node.loop is not None, "a loop stays a loop"
        stages = _Stages(node, node.loop, timetable, owned)
    body, parts, ends = _Parts(stages).written()
    assert node.loop is not None, "a loop stays a loop"
    yield attrs.evolve(node, loop=attrs.evolve(node.loop, body=body, timetable=attrs.evolve(timetable, parts=parts, ends=ends)))
    yield from sends


def _sent_behind(node: Node, loop: Loop, edit: Editor) -> tuple[Node, list[Node]]:
    """The loop gathering, where they are, values that are sent only to be gathered; and the nodes that send what was gathered."""
    body, outs, outputs, sends = loop.body, list(node.outs), list(loop.body.outputs), list[Node]()
    gone = set()
    for k, out in enumerate(body.outputs):
        maker = body.makers.get(out)
        if maker is None or maker.target != SEND or out in body.readers or body.outputs.count(out) > 1:
            continue
        (source,), whole = maker.refs, node.outs[k]
        assert whole is not None, "a loop has all that it gathers"
        layout, axis = edit.values[whole].layout, maker.args[1][0]
        here = None if layout is None else layout.with_at((axis, (maker.args[3],)))
        outs[k], outputs[k] = edit.new(edit.values[whole], layout=here), source
        sends.append(attrs.evolve(maker, args=(Ref(outs[k]), *maker.args[1:]), outs=(whole,)))  # type: ignore[arg-type]
        gone.add(id(maker))
    if not gone:
        return node, []
    nodes = [inner for inner in body.nodes if id(inner) not in gone]
    body = Editor(body).written(nodes, outputs)
    return attrs.evolve(node, outs=tuple(outs), loop=attrs.evolve(loop, body=body)), sends


def _part_of_loop(node: Node, which: Collection[int], timetable: Timetable | None) -> Node:
    """The loop that gathers only some of what a loop gathers."""
    loop = node.loop
    assert loop is not None, "a part of a loop"
    outputs = tuple(loop.body.outputs[k] for k in which)
    needed, nodes = set(outputs), list[Node]()
    for inner in reversed(loop.body.nodes):
        shows = not inner.outs and timetable is not None  # once, in the loop that has all else
        if needed.intersection(inner.results) or shows:
            needed.update(inner.refs)
            nodes.append(inner)
    nodes.reverse()
    passed = [(arg, into) for arg, into in zip(node.args, loop.body.inputs, strict=True) if into in needed]
    body = Editor(loop.body).written(nodes, outputs, (into for _, into in passed))
    gathers = tuple(loop.gathers[k] for k in which)
    loop = attrs.evolve(loop, body=body, gathers=gathers, timetable=timetable)
    return attrs.evolve(node, args=tuple(arg for arg, _ in passed), outs=tuple(node.outs[k] for k in which), loop=loop)


class _Stages:
    """Which nodes of a body float, and the part of each other node on each rank that runs it. owned: value outside -> its stage."""

    def __init__(self, node: Node, loop: Loop, timetable: Timetable, owned: Mapping[int, int]) -> None:
        self.body, self.timetable = loop.body, timetable
        self.owned = {into: owned[ref] for ref, into in zip(node.refs, loop.body.inputs, strict=True) if ref in owned}
        table = timetable.table
        self.everywhere = tuple(range(len(table.rows)))
        self.stages_of = {rank: [stage for stage, on in sorted(table.rank_of.items()) if on == rank] for rank in self.everywhere}
        self.splits = any(action.kind in (INPUTS, WEIGHTS) for row in table.rows for action in row)
        self.floating: set[int] = set()
        weights = (id for id in self.body.inputs if id in self.owned or self.body.values[id].role in ("param", "frozen"))
        self.of_weights = {id for id in weights if self.body.values[id].role != "buffer"}  # and what is computed of them
        self.part: dict[tuple[int, int], Part] = {}  # (position, rank) -> part
        self.made: dict[tuple[int, int], Part] = {}  # (value, rank) -> the part that makes it, or has sent it there
        self.weight_gradients = self._weight_gradients() if self.splits else set()
        for index, node in enumerate(self.body.nodes):
            self._place(index, node)

    def ranks(self, node: Node) -> tuple[int, ...]:
        """Indices of the pipeline's axis that run a node."""
        return self.everywhere if node.on is None else node.on[1]

    def _place(self, index: int, node: Node) -> None:
        if not self.of_weights.isdisjoint(node.refs):
            self.of_weights.update(node.results)
        if node.target == SEND:
            source = node.args[3]
            part = self._of_operand(node, source)
            self.part[index, source] = part
            self.made.update({(out, rank): part for out in node.results for rank in (*node.args[4], source)})
            return
        floats = self._floats(node)
        if floats and node.outs:
            self.floating.update(node.results)
            return
        for rank in self.ranks(node)[:1] if floats else self.ranks(node):  # what shows something for all ranks does so on one
            part = self._part(index, node, rank)
            self.part[index, rank] = part
            self.made.update({(out, rank): part for out in node.results})

    def _of_operand(self, node: Node, source: int) -> Part:
        """The part that sends: the one that makes what is sent."""
        (ref,) = node.refs
        if (ref, source) in self.made:
            return self.made[ref, source]
        return self._belongs(ref, self.stages_of[source][0]), FORWARD

    def _floats(self, node: Node) -> bool:
        """See Note [Floating]. A node of one rank that reads something of that rank's is no such node."""
        if any(ref not in self.floating and ref in self.body.makers for ref in node.refs):
            return False
        if node.on is None or len(node.on[1]) > 1:
            return True
        given = [self.body.values[ref] for ref in node.refs if ref not in self.body.makers]
        return all(value.role in _OF_BATCH for value in given)

    def _belongs(self, id: int, otherwise: int) -> int:
        return self.owned.get(id, otherwise)

    def _part(self, index: int, node: Node, rank: int) -> Part:
        """The part that a node is in on a rank."""
        mine = self.stages_of[rank]
        owned = [self._belongs(ref, -1) for ref in node.refs if ref not in self.body.makers]
        owned = [stage for stage in owned if stage in mine]
        before = [self.made[ref, rank] for ref in node.refs if (ref, rank) in self.made]
        kept = [stage for stage, kind in before if kind == FORWARD]
        if node.phase == "forward":
            least = max((*kept, *owned), default=mine[0])
            later = [stage for stage in mine if stage >= least]
            if not later or len(kept) < len(before):
                raise self._backwards(node, rank)
            return later[0], FORWARD
        kind = BACKWARD
        if self.splits:
            kind = WEIGHTS if index in self.weight_gradients else INPUTS
        most = min((stage for stage, made in before if made != FORWARD), default=mine[-1])
        # What no weight has made (rotary tables, masks of all layers) says nothing of the stage whose backward reads it.
        kept = [stage for ref in node.refs if ref in self.of_weights for stage, made in self._made(ref, rank) if made == FORWARD]
        own = [stage for stage in (*kept, *owned) if stage in mine and stage <= most]
        earlier = own or [stage for stage in mine if stage <= most]
        if not earlier:
            raise self._backwards(node, rank)
        return max(earlier), kind

    def _made(self, ref: int, rank: int) -> tuple[Part, ...]:
        """The part that has made a value, or has sent it to a rank; none where it is not there."""
        return (self.made[ref, rank],) if (ref, rank) in self.made else ()

    def _backwards(self, node: Node, rank: int) -> PlanError:
        where = f" in {node.path!r}" if node.path else ""
        line = f" ({node.line})" if node.line else ""
        name = node.target.removeprefix("aten.").removeprefix("colofunc.")
        return PlanError(
            f"{name}{where}{line} runs at {self.timetable.along}={rank} and needs what a later stage makes: stages have to follow the "
            "order in which the step computes. Try: stages=None, which follows it, or other globs"
        )

    def _weight_gradients(self) -> set[int]:
        """Positions of backward nodes from which one accumulator alone is reached: nobody waits for them."""
        reached: dict[int, frozenset[object]] = {}  # value -> what is reached: accumulators, or `SEND` for another stage
        for k, out in enumerate(self.body.outputs):
            reached[out] = reached.get(out, frozenset()) | {k}
        found = set()
        for index in range(len(self.body.nodes) - 1, -1, -1):
            node = self.body.nodes[index]
            from_here = frozenset[object]().union(*(reached.get(out, frozenset()) for out in node.results))
            if node.target == SEND or not node.outs:
                from_here |= {SEND}
            elif node.phase != "forward" and len(from_here) <= 1 and SEND not in from_here:
                found.add(index)
            for ref in node.refs:
                reached[ref] = reached.get(ref, frozenset()) | from_here
        return found


class _Parts:
    """The body written down part after part."""

    def __init__(self, stages: _Stages) -> None:
        self.stages, self.body = stages, stages.body
        self.edit = Editor(self.body)
        self.along = stages.timetable.along
        self.nodes: list[Node] = []
        self.there: dict[tuple[int, object], int] = {}  # (value, rank) or, of one that floats, (value, part) -> its id
        self.used: set[int] = set()
        self.sends = 0

    def written(self) -> tuple[Program, tuple[Part, ...], tuple[int, ...]]:
        """The new body, its parts in an order in which one trip can run, and the position behind each."""
        table = self.stages.timetable.table
        by_part: dict[Part, list[tuple[int, int]]] = {}
        for (index, rank), part in self.stages.part.items():
            by_part.setdefault(part, []).append((index, rank))
        parts = tuple(sorted({(action.stage, action.kind) for row in table.rows for action in row}, key=_in_trip))
        missing = sorted(set(by_part) - set(parts))
        if missing:
            stage, kind = missing[0]
            raise PlanError(f"the timetable has no action {stage}{kind}, and the step has such a part; use a schedule that has it")
        ends = []
        for part in parts:
            for index, rank in sorted(by_part.get(part, ())):
                self._write(self.body.nodes[index], part, rank)
            ends.append(len(self.nodes))
        outputs = [self._gathered(out) for out in self.body.outputs]
        return self.edit.written(self.nodes, outputs), parts, tuple(ends)

    def _gathered(self, out: int) -> int:
        """The id of an output; where several ranks make it each has its own, and all of them one name."""
        maker = self.body.makers[out]
        if maker.target == SEND:
            return out
        ids = {self.there[out, rank] for rank in self.stages.ranks(maker)}
        if len(ids) > 1:
            raise PlanError(f"{maker.target} ({maker.line}) is gathered from several stages; place its parameters on one")
        return ids.pop()

    def _write(self, node: Node, part: Part, rank: int) -> None:
        """A node as one rank runs it."""
        operands = {ref: self._operand(ref, part, rank) for ref in dict.fromkeys(node.refs)}
        args, kwargs = map_refs((node.args, node.kwargs), lambda id: Ref(operands[id]))
        if node.target == SEND:
            self.sends += 1
            self.nodes.append(attrs.evolve(node, args=args, kwargs=(("tag", self.sends),)))
            self.there.update({(out, index): out for out in node.results for index in (*node.args[4], node.args[3])})
            return
        self._instance(attrs.evolve(node, args=args, kwargs=kwargs), rank, rank)

    def _instance(self, node: Node, rank: int, key: object) -> None:
        """One copy of a node; the first keeps the ids of its results."""
        here: At = (self.along, (rank,))
        outs: list[int | None] = []
        for out in node.outs:
            if out is None:
                outs.append(None)
                continue
            value = self.edit.values[out]
            layout = None if value.layout is None else value.layout.with_at(here)
            new = self.edit.new(value, layout=layout) if out in self.used else out
            self.edit.values[new] = attrs.evolve(self.edit.values[new], layout=layout)
            self.used.add(new)
            self.there[out, key] = new
            outs.append(new)
        self.nodes.append(attrs.evolve(node, outs=tuple(outs), on=here))

    def _operand(self, id: int, part: Part, rank: int) -> int:
        maker = self.body.makers.get(id)
        if maker is None:
            return id
        if id not in self.stages.floating:
            return self.there[id, rank]
        self._float(maker, part, rank)
        return self.there[id, part]

    def _float(self, node: Node, part: Part, rank: int) -> None:
        """Have a floating node in a part, behind what it reads."""
        todo = [node]
        while todo:
            top = todo[-1]
            if all((out, part) in self.there for out in top.results):
                todo.pop()
                continue
            makers = [self.body.makers[ref] for ref in top.refs if ref in self.body.makers and (ref, part) not in self.there]
            if makers:
                todo += makers
                continue
            args, kwargs = map_refs((top.args, top.kwargs), lambda id: Ref(self.there.get((id, part), id)))
            self._instance(attrs.evolve(todo.pop(), args=args, kwargs=kwargs), rank, part)


def _in_trip(part: Part) -> tuple[int, int]:
    """Where a part stands in one trip."""
    stage, kind = part
    return (0, stage) if kind == FORWARD else (2 if kind == WEIGHTS else 1, -stage)
