"""Fold: the ranks of a time axis run one after another.

Problem: a program over a time axis (see `time`) computes all microbatches at once. Idea: nodes that depend on the
microbatch become the body of a loop; a reduction over time becomes an accumulator, a gather becomes a buffer that each
trip writes one chunk of, and everything else runs once, before or after.

    %7 = linear(%5, %w)                     loop 4 times over time:
    %9 = linear_dw(%8, %5)           ->         %7 = linear(%5, %w)
    %10 = all_reduce(%9, time)                  %9 = linear_dw(%8, %5)
                                                %10 += %9

Which node runs in which loop: see Note [Loop levels] in `levels`.

Note [Estimates]. With mixing="per-microbatch" a statistic of the batch (a sum that mixes samples) is estimated from the
microbatch: the sum is `trips` times its own. A mean over the batch becomes the microbatch's, and where one value per
trip reaches the update or an output (a running mean, an auxiliary loss), it is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from colofunc.program.editor import Editor
from colofunc.program.ir import LOOP, Loop, Node, Program, Ref, Value, map_refs
from colofunc.program.passes.levels import Levels, is_over, kind
from colofunc.program.passes.mixing import mixing_error
from colofunc.program.passes.time import reduces_over_time


def fold(program: Program, axis: str, trips: int, mixing: str = "error", lean: bool = False) -> Program:
    """The program of `time.over_time` as loops over its axis. Raises PlanError where an operator mixes samples.

    lean: what is gathered for the microbatches alone, parameters that lie sharded, is gathered in each trip anew: less
    is held and more is sent. Otherwise it is gathered once and held.
    """
    program, plan = unmixed(program, axis, trips, mixing, lean)
    return _folded(program, plan, axis, trips)


def unmixed(
    program: Program, axis: str, trips: int, mixing: str = "error", lean: bool = False
) -> tuple[Program, Levels]:
    """The program in which no operator mixes samples, or PlanError that names the first which does."""
    estimated = False
    while True:
        plan = Levels(program, axis, lean)
        culprits = plan.mixers()
        if not culprits:
            return program, plan
        estimates = [index for index in culprits if kind(program.nodes[index]) == "all_reduce"]
        if mixing != "per-microbatch" or not estimates:
            raise mixing_error(program.nodes[culprits[0]], trips, mixing)
        program = _estimated(program, set(estimates), axis, trips, first=not estimated)
        estimated = True


def _folded(program: Program, plan: Levels, axis: str, trips: int) -> Program:
    loops = [_loop_node(program, plan, loop, axis, trips) for loop in sorted(set(plan.loop_of.values()))]
    return _ordered(program, plan, loops)


def _loop_node(program: Program, plan: Levels, loop: int, axis: str, trips: int) -> Node:
    """One loop: its body, what it reads from outside and what it gathers."""
    nodes = [node for index, node in enumerate(program.nodes) if loop in plan.loops.get(index, ())]
    reductions = [program.nodes[index] for index in plan.reductions if plan.loop_of.get(index) == loop]
    outputs = tuple(node.refs[0] for node in reductions)
    read = [ref for node in nodes for ref in node.refs] + list(outputs)
    inputs = tuple(dict.fromkeys(id for id in read if id not in plan.varies))
    of_body = [*inputs, *(out for node in nodes for out in node.results)]
    body = Program(inputs, tuple(nodes), outputs, {id: program.values[id] for id in of_body}, stage=program.stage)
    gathers = tuple("stack" if kind(node) == "all_gather" else str(node.args[3]) for node in reductions)
    outs = tuple(node.outs[0] for node in reductions)
    phase = reductions[-1].phase
    each = Loop(body, trips, axis, gathers)
    return Node(LOOP, tuple(map(Ref, inputs)), (), outs, phase, note=f"{trips} microbatches", loop=each)


def _ordered(program: Program, plan: Levels, loops: Sequence[Node]) -> Program:
    """The outer nodes in their order, each loop just before the first node that reads what it gathers."""
    maker: dict[int, Node] = {}
    for index, node in enumerate(program.nodes):
        if index in plan.alive:
            maker.update(dict.fromkeys(node.results, node))
    for node in loops:
        maker.update(dict.fromkeys(node.results, node))
    done: set[int] = set()
    nodes: list[Node] = []

    def missing(node: Node) -> list[Node]:
        """What has to run before a node and has not."""
        found: list[Node] = []
        for ref in dict.fromkeys(node.refs):
            before = maker.get(ref)
            if before is not None and id(before) not in done:
                found.append(before)
        return found

    def emit(node: Node) -> None:
        stack = [node]
        while stack:
            top = stack[-1]
            if id(top) in done:
                stack.pop()
                continue
            first = missing(top)
            if first:
                stack.extend(reversed(first))
                continue
            done.add(id(top))
            nodes.append(stack.pop())

    for index, node in enumerate(program.nodes):
        if index in plan.alive:
            emit(node)
    for node in loops:  # what only the outputs read
        emit(node)
    edit = Editor(program)
    edit.values.update({id: _without(value, plan.axis) for id, value in program.values.items()})
    return edit.written(nodes)


def _without(value: Value, axis: str) -> Value:
    """A value outside of the loop: what is split over time there is of the size of a microbatch, and no part of a
    whole.
    """
    layout = value.layout
    if layout is None:
        return value
    pending_axes = [pending for pending, _ in layout.pending]
    if axis not in layout.axes and axis not in pending_axes:
        return value
    return attrs.evolve(value, layout=None)


# ---- estimates ----


def _estimated(program: Program, which: set[int], axis: str, trips: int, first: bool) -> Program:
    """Reductions `which` become estimates from the microbatch alone; see Note [Estimates]."""
    before = Levels(program, axis).varies
    edit, sources = Editor(program), set[int]()
    for index, node in enumerate(program.nodes):
        if index in which:
            is_sum = node.args[3] == "sum"
            edit.replace(index, _scaled(node, "aten.mul.Scalar", trips) if is_sum else _alias(node))
        elif first and is_over(node, axis) and kind(node) == "keep_first":
            # One value per trip is no longer the first trip's.
            edit.replace(index, _scaled(node, "aten.div.Scalar", trips))
        else:
            continue
        sources.update(node.results)
    changed = edit.done()
    each = Levels(changed, axis).varies - before
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

    for node in program.nodes:
        if node.phase == "update" and not reduces_over_time(node, axis):
            args, kwargs = map_refs((node.args, node.kwargs), lambda id: Ref(mean(id, node)))  # noqa: B023
            node = attrs.evolve(node, args=args, kwargs=kwargs)
            each -= set(node.results)
        elif not each.intersection(node.refs):  # made of what an update made of a mean, as where it is gathered
            each -= set(node.results) - sources
        nodes.append(node)
    outputs = [mean(out, None) for out in program.outputs]
    return edit.written(nodes, outputs)
