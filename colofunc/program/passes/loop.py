"""Loops: the ranks of a time axis run one after another.

Problem: a program over a time axis (see `time`) computes all microbatches at once. Idea: nodes that depend on the
microbatch become the body of a loop; a reduction over time becomes an accumulator, a gather becomes a buffer that each
trip writes one chunk of, and everything else runs once, before or after.

    %7 = linear(%5, %w)                     loop 4 times over time:
    %9 = linear_dw(%8, %5)           ->         %7 = linear(%5, %w)
    %10 = all_reduce(%9, time)                  %9 = linear_dw(%8, %5)
                                                %10 += %9

Note [Levels]. What a loop accumulates is known only behind it, so a microbatch's node that needs it runs in a later
loop: the number of labels of the batch, which every microbatch's loss is divided by, is one. The level of a value is
the number of accumulations that have to end one after another before it is known. Accumulations run in the *latest*
loop that is early enough for who reads them, so most steps have one loop that does the work and, before it, one that
counts labels. What two loops need is computed in both: labels and masks cost nothing. Where that would compute a matrix
product twice, an operator mixes the samples of the batch, and the step cannot be split without computing its forward
again: that is an error that names the operator, or an estimate.

Note [Estimates]. With mixing="per-microbatch" a statistic of the batch (a sum that mixes samples) is estimated from the
microbatch: the sum is `trips` times its own. A mean over the batch becomes the microbatch's, and where one value per
trip reaches the update or an output (a running mean, an auxiliary loss), it is averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import attrs

from colofunc.errors import PlanError
from colofunc.ops.quantized import DEQUANTIZE
from colofunc.program.aliases import aliases
from colofunc.program.editor import Editor
from colofunc.program.facts import LOCAL, WIRE, is_product, is_wire, kind_of, lifetimes, written
from colofunc.program.ir import LOOP, Loop, Node, Program, Ref, Timetable, Value, map_refs, reading
from colofunc.program.passes.packed_reads import goes_on
from colofunc.program.passes.time import is_reduction

MIXING = ("error", "per-microbatch")
LARGE_BYTES = 1 << 12  # what is made in each trip rather than held all the time
# Roles of inputs that a microbatch's own values may be computed from twice, whatever that costs.
_BATCH = frozenset({"batch", "constant", "seed"})


def fold(program: Program, axis: str, trips: int, mixing: str = "error", lean: bool = False) -> Program:
    """The program of `time.over_time` as loops over its axis. Raises PlanError where an operator mixes samples.

    lean: what is gathered for the microbatches alone, parameters that lie sharded, is gathered in each trip anew: less
    is held and more is sent. Otherwise it is gathered once and held.
    """
    program, plan = unmixed(program, axis, trips, mixing, lean)
    return _folded(program, plan, axis, trips)


def unmixed(
    program: Program, axis: str, trips: int, mixing: str = "error", lean: bool = False
) -> tuple[Program, _Plan]:
    """The program in which no operator mixes samples, or PlanError that names the first which does."""
    estimated = False
    while True:
        plan = _Plan(program, axis, lean)
        culprits = plan.mixers()
        if not culprits:
            return program, plan
        estimates = [k for k in culprits if _kind(program.nodes[k]) == "all_reduce"]
        if mixing != "per-microbatch" or not estimates:
            raise _mixes(program.nodes[culprits[0]], trips, mixing)
        program = _estimated(program, set(estimates), axis, trips, first=not estimated)
        estimated = True


Owned = Callable[[Loop], Sequence[Collection[int]]]
"""Of a loop in parts, the values from other parts that each part alone reads and may write over."""


def within(program: Program, change: Callable[..., Program], owned: Owned | None = None) -> Program:
    """`program` with the body of every loop changed. owned: `change` is told as well what a part may write over of what
    it is given.
    """
    if not any(node.loop for node in program.nodes):
        return program
    edit = Editor(program)
    for index, node in enumerate(program.nodes):
        if node.loop is not None:
            edit.change(
                index, loop=changed(node.loop, lambda body, *own: within(change(body, *own), change, owned), owned)
            )
    return edit.done()


def changed(loop: Loop, change: Callable[..., Program], owned: Owned | None = None) -> Loop:
    """A loop with its body changed, part by part where it is cut (`passes.cut`): nothing moves between parts. owned:
    see `within`.
    """
    timetable = loop.cut_by
    if timetable is None:
        return attrs.evolve(loop, body=change(loop.body))
    body, nodes, ends = loop.body, list[Node](), list[int]()
    values, names = dict(body.values), dict[int, int]()
    own = owned(loop) if owned is not None else None
    last_read = dict.fromkeys(body.outputs, len(body.nodes))  # value -> the last position at which it is read
    for index, node in enumerate(body.nodes):
        for ref in node.refs:
            last_read[ref] = max(last_read.get(ref, index), index)
    for number, (first, end) in enumerate(timetable.spans()):
        mine = [reading(node, names) for node in body.nodes[first:end]]
        made = {out for node in mine for out in node.results}
        inputs = dict.fromkeys(ref for node in mine for ref in node.refs if ref not in made)
        outputs = tuple(dict.fromkeys(out for node in mine for out in node.results if last_read.get(out, -1) >= end))
        part = Program(tuple(inputs), tuple(mine), outputs, values, stage=body.stage, kernels=body.kernels)
        done = change(part) if own is None else change(part, frozenset(names.get(id, id) for id in own[number]))
        names |= dict(zip(outputs, done.outputs, strict=True))
        values |= done.values
        nodes += done.nodes
        ends.append(len(nodes))
    edit = Editor(body)
    edit.values.update(values)
    body = edit.written(nodes, (names.get(out, out) for out in body.outputs), stage=done.stage)
    return attrs.evolve(loop, body=body, timetable=attrs.evolve(timetable, ends=tuple(ends)))


def gathered_at(body: Program) -> dict[int, list[int]]:
    """Index of a node of a body -> the outputs that are ready right behind it (-1: inputs, before any node)."""
    memory = aliases(body)
    groups = {memory.group(o) for o in body.outputs}
    ready: dict[int, int] = {}  # memory -> the last node that makes or writes a value in it
    made: dict[int, int] = {}
    for index, node in enumerate(body.nodes):
        made.update(dict.fromkeys(node.results, index))
        ready.update({g: index for i in written(node) if (g := memory.group(i)) in groups})
    at: dict[int, list[int]] = {}
    for k, id in enumerate(body.outputs):
        at.setdefault(max(made.get(id, -1), ready.get(memory.group(id), -1)), []).append(k)
    return at


def last_uses(body: Program) -> dict[int, int]:
    """Value of a body -> index of the last node that needs it (see `lifetimes`); an output is needed until it is
    gathered.
    """
    last = dict(lifetimes(attrs.evolve(body, outputs=())))
    for index, outputs in gathered_at(body).items():
        for k in outputs:
            last[body.outputs[k]] = max(last.get(body.outputs[k], 0), index)
    return last


def parts_that_read(body: Program, timetable: Timetable) -> dict[int, set[int]]:
    """Value of a body in parts -> numbers of the parts that read it."""
    found: dict[int, set[int]] = {}
    for index, node in enumerate(body.nodes):
        for ref in node.refs:
            found.setdefault(ref, set()).add(timetable.part_at(index))
    return found


def _kind(node: Node) -> str:
    kind = kind_of(node)
    return "" if kind is None else kind[0]


def _over(node: Node, axis: str) -> bool:
    """Whether a node is about the time axis."""
    kind = _kind(node)
    if kind == "axis_index":
        return tuple(node.args[0]) == (axis,)
    return kind not in ("", "rearrange", "wait", "loop") and tuple(node.args[1]) == (axis,)


class RowsMove(PlanError):
    """The plan moves rows of the batch between ranks where microbatches cannot follow; another plan may not."""


class Mixes(PlanError):
    """An operator of the step mixes samples that are in different microbatches."""


OTHERWISE = {
    "fp8_scale": 'give cf.fp8 scaling="delayed" or "rowwise_with_gw_hp" to keep the numbers of the whole batch, or ',
}
"""Operator that mixes samples -> what to write in its place."""


def _mixes(node: Node, trips: int, mixing: str) -> PlanError:
    who = node.note.split(" needs ")[0].split(": ")[-1] if " needs " in node.note else node.note.split(" {")[0]
    where = f" in {node.path!r}" if node.path else ""
    line = f" ({node.line})" if node.line else ""
    if who.removeprefix("colofunc.") in WIRE | LOCAL:
        return RowsMove(
            f"the plan moves rows of the batch between ranks ({who.removeprefix('colofunc.')}{where}{line}), which "
            f"{trips} microbatches "
            "of so few rows cannot follow; use fewer microbatches or a larger batch, or name the batch's axes in "
            "in_specs"
        )
    name = who.removeprefix("aten.").removeprefix("colofunc.")
    if node.phase == "update":
        return Mixes(
            f"the step reads the batch again behind the update {name}{where}{line}, which needs the gradients of all "
            "microbatches, so "
            f"{trips} microbatches cannot be computed one after another; make a step of each update (what reads new "
            "parameters belongs in "
            "the next one), or take one microbatch"
        )
    said = f"{name}{where}{line} mixes the samples of the batch"
    if not who.startswith(("aten.", "colofunc.")):
        said += ", as far as is known without a rule that keeps them apart (cf.operator(rule=...), or the hook colofunc_rules of a plugin)"
    if mixing == "per-microbatch":
        return Mixes(
            f"{said}: it needs all rows at once, so it cannot be computed per microbatch; take it out of the "
            "accumulated step"
        )
    return Mixes(
        f"{said}, so {trips} microbatches cannot be computed one after another; {OTHERWISE.get(name, '')}"
        f'write mixing="per-microbatch" to treat each microbatch by itself (the numbers change), or take one microbatch'
    )


class _Plan:
    """Which node runs in which loop; see Note [Levels]."""

    def __init__(self, program: Program, axis: str, lean: bool = False) -> None:
        self.program = program
        self.axis = axis
        self.varies: set[int] = set()
        self.level: dict[int, int] = {}
        self._dear: set[int] = set()  # values of a microbatch that are not to be computed twice
        self._of_batch: set[int] = {i for i in program.inputs if program.values[i].role in _BATCH}
        self.reductions: list[int] = []
        for index, node in enumerate(program.nodes):
            self._see(index, node, axis)
        self._take_in(lean)
        self.last = max((self.level[node.outs[0]] for node in self._reducing()), default=0) - 1  # type: ignore[index]
        self.loop_of: dict[int, int] = {}  # index of a reduction -> its loop
        self.loops: dict[int, set[int]] = {}  # index of another varying node -> the loops that compute it
        self.alive: set[int] = set()  # indices of nodes that run outside
        self._due()

    def _reducing(self) -> Iterable[Node]:
        return (self.program.nodes[k] for k in self.reductions)

    def _see(self, index: int, node: Node, axis: str) -> None:
        outs = node.results
        level = max((self.level.get(r, 0) for r in node.refs), default=0)
        if all(r in self._of_batch for r in node.refs):
            self._of_batch.update(outs)
        if is_reduction(node, axis):
            self.reductions.append(index)
            self.level.update(dict.fromkeys(outs, level + 1))
            return
        self.level.update(dict.fromkeys(outs, level))
        if any(r in self.varies for r in node.refs) or _over(node, axis):
            self.varies.update(outs)
            mine = is_product(node.target) or is_wire(node)
            if any(r in self._dear for r in node.refs) or (mine and not all(o in self._of_batch for o in outs)):
                self._dear.update(outs)

    def _take_in(self, lean: bool) -> None:
        """Large tensors that are made from nothing, and read by microbatches only, are made in each trip; so are
        quantized weights widened, of which all would lie beside the loop otherwise, and what only turns or casts them.

        lean: so is what is moved over the mesh, from a shard that is there anyway.
        """
        reducing, outside = set(self.reductions), set(self.program.outputs)
        widened = _widened(self.program)
        for index in range(len(self.program.nodes) - 1, -1, -1):
            node = self.program.nodes[index]
            outs = node.results
            if index in reducing:
                outside.update(node.refs)
            elif not any(o in self.varies for o in outs):
                large = (
                    sum(self.program.values[o].nbytes for o in outs) > LARGE_BYTES and not node.refs and not _kind(node)
                )
                moved = (
                    lean
                    and _kind(node) not in ("", "axis_index", "loop")
                    and not all(r in self._of_batch for r in node.refs)
                )
                moved = moved and not any(self.level.get(r, 0) for r in node.refs)
                if outs and (large or moved or not widened.isdisjoint(outs)) and not outside.intersection(outs):
                    self.varies.update(outs)
                else:
                    outside.update(node.refs)

    def _due(self) -> None:
        """From the outputs back: when each value is needed, and so where each node runs."""
        never = self.last + 1
        due: dict[int, int] = dict.fromkeys(self.program.outputs, never)  # value -> the first loop that reads it
        uses: dict[int, set[int]] = {}  # value of a microbatch -> the loops that read it
        reducing = set(self.reductions)

        def need(ids: Iterable[int], loops: set[int]) -> None:
            for i in ids:
                if i in self.varies:
                    uses.setdefault(i, set()).update(loops)
                else:
                    due[i] = min(due.get(i, never), min(loops))

        for index in range(len(self.program.nodes) - 1, -1, -1):
            node = self.program.nodes[index]
            outs = node.results
            if index in reducing:
                if outs[0] in due:
                    self.loop_of[index] = min(self.last, due[outs[0]] - 1)
                    need(node.refs, {self.loop_of[index]})
            elif any(o in self.varies for o in outs):
                loops = {k for o in outs for k in uses.get(o, ())}
                if loops:
                    self.loops[index] = loops
                    need(node.refs, loops)
            elif not outs or any(o in due for o in outs):  # without results: it has an effect
                self.alive.add(index)
                need(node.refs, {min((due[o] for o in outs if o in due), default=never)})

    def mixers(self) -> list[int]:
        """Reductions that have to end before a later loop computes again what they were computed from."""
        twice = {
            o
            for k, loops in self.loops.items()
            if len(loops) > 1
            for o in self.program.nodes[k].outs
            if o in self._dear
        }
        if not twice:
            return []
        reads: dict[int, bool] = dict.fromkeys((o for o in twice if o is not None), True)
        for index, node in enumerate(self.program.nodes):
            if index in self.loops and any(reads.get(r) for r in node.refs):
                reads.update((o, True) for o in node.results)
        last = max(self.loop_of.values())
        return [
            k
            for k in self.reductions
            if self.loop_of.get(k, last) < last and any(reads.get(r) for r in self.program.nodes[k].refs)
        ]


def _widened(program: Program) -> set[int]:
    """Values that are widened weights, in whatever shape and dtype."""
    found: set[int] = set()
    for node in program.nodes:
        if node.target in DEQUANTIZE or (node.refs and node.refs[0] in found and goes_on(program, node)):
            found.update(node.results)
    return found


def _folded(program: Program, plan: _Plan, axis: str, trips: int) -> Program:
    loops = {loop: _loop_node(program, plan, loop, axis, trips) for loop in sorted(set(plan.loop_of.values()))}
    return _ordered(program, plan, loops)


def _loop_node(program: Program, plan: _Plan, loop: int, axis: str, trips: int) -> Node:
    """One loop: its body, what it reads from outside and what it gathers."""
    nodes = [node for index, node in enumerate(program.nodes) if loop in plan.loops.get(index, ())]
    reductions = [program.nodes[k] for k in plan.reductions if plan.loop_of.get(k) == loop]
    read = [r for node in nodes for r in node.refs] + [node.refs[0] for node in reductions]
    inputs = tuple(dict.fromkeys(r for r in read if r not in plan.varies))
    mine = (*inputs, *(o for node in nodes for o in node.results))
    outputs = tuple(node.refs[0] for node in reductions)
    body = Program(inputs, tuple(nodes), outputs, {i: program.values[i] for i in mine}, stage=program.stage)
    gathers = tuple("stack" if _kind(node) == "all_gather" else str(node.args[3]) for node in reductions)
    outs = tuple(node.outs[0] for node in reductions)
    phase = reductions[-1].phase
    return Node(
        LOOP,
        tuple(map(Ref, inputs)),
        (),
        outs,
        phase,
        note=f"{trips} microbatches",
        loop=Loop(body, trips, axis, gathers),
    )


def _ordered(program: Program, plan: _Plan, loops: Mapping[int, Node]) -> Program:
    """The outer nodes in their order, each loop just before the first node that reads what it gathers."""
    maker: dict[int, Node] = {}
    for index, node in enumerate(program.nodes):
        if index in plan.alive:
            maker.update(dict.fromkeys(node.results, node))
    for node in loops.values():
        maker.update(dict.fromkeys(node.results, node))
    done: set[int] = set()
    nodes: list[Node] = []

    def emit(node: Node) -> None:
        stack = [node]
        while stack:
            top = stack[-1]
            if id(top) in done:
                stack.pop()
                continue
            missing = [m for r in dict.fromkeys(top.refs) if (m := maker.get(r)) is not None and id(m) not in done]
            if missing:
                stack.extend(reversed(missing))
                continue
            done.add(id(top))
            nodes.append(stack.pop())

    for index, node in enumerate(program.nodes):
        if index in plan.alive:
            emit(node)
    for node in loops.values():  # what only the outputs read
        emit(node)
    edit = Editor(program)
    edit.values.update({id: _without(value, plan.axis) for id, value in program.values.items()})
    return edit.written(nodes)


def _without(value: Value, axis: str) -> Value:
    """A value outside of the loop: what is split over time there is of the size of a microbatch, and no part of a
    whole.
    """
    layout = value.layout
    if layout is None or (axis not in layout.axes and all(a != axis for a, _ in layout.pending)):
        return value
    return attrs.evolve(value, layout=None)


# ---- estimates ----


def _estimated(program: Program, which: set[int], axis: str, trips: int, first: bool) -> Program:
    """Reductions `which` become estimates from the microbatch alone; see Note [Estimates]."""
    before = _Plan(program, axis).varies
    edit, sources = Editor(program), set[int]()
    for index, node in enumerate(program.nodes):
        if index in which:
            edit.replace(index, _scaled(node, "aten.mul.Scalar", trips) if node.args[3] == "sum" else _alias(node))
        elif first and _over(node, axis) and _kind(node) == "keep_first":
            edit.replace(
                index, _scaled(node, "aten.div.Scalar", trips)
            )  # one value per trip is no longer the first trip's
        else:
            continue
        sources.update(node.results)
    changed = edit.done()
    each = _Plan(changed, axis).varies - before
    return _averaged(changed, each, sources, axis, trips)


def _scaled(node: Node, target: str, by: int) -> Node:
    return attrs.evolve(node, target=target, args=(node.args[0], by), kwargs=())


def _alias(node: Node) -> Node:
    return attrs.evolve(node, target="aten.alias.default", args=(node.args[0],), kwargs=())


def _averaged(program: Program, each: set[int], sources: set[int], axis: str, trips: int) -> Program:
    """Where a value that each trip has its own of leaves the loop, its mean over the trips leaves it. sources: the
    first of `each`.
    """
    edit = Editor(program)
    means: dict[int, int] = {}
    nodes: list[Node] = []

    def mean(id: int, node: Node | None) -> int:
        if id not in each:
            return id
        if id not in means:
            part, whole = edit.new(program.values[id]), edit.new(program.values[id])
            origin = node or Node("", (), (), (), "forward")
            where = (origin.phase, origin.path, origin.line, "mean over the microbatches")
            layout = program.values[id].layout
            on = None if layout is None else layout.at
            nodes.append(Node("aten.div.Scalar", (Ref(id), trips), (), (part,), *where, on=on))
            nodes.append(Node("colofunc.all_reduce", (Ref(part), (axis,), trips, "sum"), (), (whole,), *where, on=on))
            means[id] = whole
        return means[id]

    mine = set(each)
    for node in program.nodes:
        if node.phase == "update" and not is_reduction(node, axis):
            args, kwargs = map_refs((node.args, node.kwargs), lambda i: Ref(mean(i, node)))  # noqa: B023
            node = attrs.evolve(node, args=args, kwargs=kwargs)
            each -= set(node.results)
        elif not each.intersection(node.refs):  # made of what an update made of a mean, as where it is gathered
            each -= set(node.results) - sources
        nodes.append(node)
    outputs = [mean(out, None) if out in mine and out in each else out for out in program.outputs]
    return edit.written(nodes, outputs)
