"""Check: a program keeps its own promises, or an error shows the node that breaks them.

Problem: a pass that makes a wrong program is found much later, by wrong numbers. Idea: after every pass, type the
program again: single assignment, every operand defined before, shapes and dtypes as the operator gives them, layouts
that fit, only what the stage allows.

    stage      nodes                                  values
    global     functional, no collectives             no layout
    local      functional, collectives                a layout whose local shape is the value's shape
    inplace    all                                    as local

The body of a loop is checked like the program around it, and what goes in and out of it.

Shapes are remembered by (operator, arguments, operand types), so that checking again costs a look-up per node. Who
checks one program after another that have most nodes in common keeps a `Checker`, which remembers these.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from colofunc.errors import ProgramError
from colofunc.mesh import Mesh
from colofunc.ops.targets import overload, resolve
from colofunc.program.facts import COLLECTIVES, is_effect, is_wire
from colofunc.program.ir import GATHERS, Loop, Node, Program, Ref, Value
from colofunc.program.places import SEND, made_at
from colofunc.program.text import node_text, type_text
from colofunc.program.tracing.infer import Meta, called, check_dtypes, contiguous, infer, remembered, slots
from colofunc.spec.layout import at_text, covers

STAGES = ("global", "local", "inplace")
NEIGHBOURS = 3
"""An error shows this many operators before the one that is wrong, and as many after it."""
MOST_CALLS = 100_000
"""Calls whose result types are kept."""


@attrs.frozen
class _Scope:
    """Where a program stands: the axes that layouts may use (None: any), and whether it is the body of a loop.

    `known`: nodes that were found right, by themselves and where they stand, with the values that they read and make.
    """

    axes: frozenset[str] | None
    known: dict[Any, tuple[Node, tuple[Value, ...]]]
    inside: bool = False


def check_program(program: Program, mesh: Mesh | None = None) -> None:
    """Raise ProgramError where the program breaks its invariants. With a mesh, layouts may use only its axes."""
    Checker(mesh)(program)


class Checker:
    """`check_program` for programs that have most of their nodes in common: what was found right is not looked at
    again.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self._scope = _Scope(None if mesh is None else frozenset(mesh.shape), {})

    def __call__(self, program: Program) -> None:
        _check(program, self._scope)


def _check(program: Program, scope: _Scope) -> None:
    if program.stage not in STAGES:
        raise ProgramError(f"program stage {program.stage!r} is none of {', '.join(STAGES)}")
    defined = _check_inputs(program, scope)
    for index, node in enumerate(program.nodes):
        problem = _node_problem(program, node, defined, scope)
        if problem:
            raise ProgramError(f"{problem}\n{_around(program, index)}")
        defined.update(node.results)
    _check_outputs(program, defined, scope)


def _check_inputs(program: Program, scope: _Scope) -> set[int]:
    if len(set(program.inputs)) != len(program.inputs):
        raise ProgramError("an id stands twice among the program's inputs")
    for vid in program.inputs:
        if vid not in program.values:
            raise ProgramError(f"input %{vid} has no value")
        problem = _unlaid_problem(program, vid, scope) or _value_problem(program, program.values[vid], scope)
        if problem:
            raise ProgramError(f"input {problem}")
    for vid, tensor in program.constants.items():
        if vid not in program.inputs:
            raise ProgramError(f"constant %{vid} is not among the inputs")
        value = program.values[vid]
        if program.stage == "global" and (tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype):
            raise ProgramError(
                f"constant %{vid} is {tensor.dtype} {tuple(tensor.shape)}, its value says {type_text(value)}"
            )
    return set(program.inputs)


def _check_outputs(program: Program, defined: set[int], scope: _Scope) -> None:
    for vid in program.outputs:
        if vid not in defined:
            raise ProgramError(f"output %{vid} is never defined")
        problem = _unlaid_problem(program, vid, scope)
        if problem:
            raise ProgramError(f"output {problem}")
    for out, into in program.aliases:
        if not (0 <= out < len(program.outputs) and 0 <= into < len(program.inputs)):
            raise ProgramError(f"alias ({out}, {into}) points outside of the outputs or inputs")
        new, old = program.values[program.outputs[out]], program.values[program.inputs[into]]
        if (new.shape, new.dtype, new.layout) != (old.shape, old.dtype, old.layout):
            raise ProgramError(
                f"output {out} ({type_text(new)}) cannot be updated in place of input {into} ({type_text(old)})"
            )


def _unlaid_problem(program: Program, vid: int, scope: _Scope) -> str:
    """What is wrong with an input or output that has no layout, "" where it has one or needs none."""
    if program.stage == "global" or scope.inside or program.values[vid].layout is not None:
        return ""
    return f"%{vid} has no layout in a {program.stage} program"


def _value_problem(program: Program, value: Value, scope: _Scope) -> str:
    """What is wrong with a value's layout, "" if nothing is."""
    layout = value.layout
    if program.stage == "global":
        return f"%{value.id} has a layout in a global program" if layout is not None else ""
    if layout is None:  # half-way through a conversion or inside local code
        return ""
    if layout.local_shape != value.shape:
        said = f"its layout {layout.text()!r} of {layout.shape} gives {layout.local_shape}"
        return f"%{value.id} has shape {value.shape}, {said}"
    if scope.axes is not None:
        pending = [axis for axis, _ in layout.pending]
        for axis in (*layout.axes, *pending, *(layout.at or ())[:1]):
            if axis.split("[")[0] not in scope.axes:
                return f"%{value.id} is laid out over axis {axis!r}, which the mesh does not have"
    return ""


def _node_problem(program: Program, node: Node, defined: set[int], scope: _Scope) -> str:
    """What is wrong with a node, "" if nothing is."""
    for ref in node.refs:
        if ref not in defined:
            return f"%{ref} is read before it is defined"
    for out in node.results:
        if out in defined:
            return f"%{out} is defined twice"
        if out not in program.values:
            return f"%{out} has no value"
    key, values = (id(node), program.stage, scope.inside, scope.axes), program.values
    known = scope.known.get(key)
    if known is not None and all(values[value.id] is value for value in known[1]):
        return ""
    problem = _own_problem(program, node, scope)
    if not problem and node.loop is None:
        # the node, too, so that its id stays its own
        scope.known[key] = node, tuple(values[id] for id in (*node.refs, *node.results))
    return problem


def _own_problem(program: Program, node: Node, scope: _Scope) -> str:
    """What is wrong with a node that reads and makes values of this program, "" if nothing is."""
    problem = _place_problem(program, node, scope)
    if problem:
        return problem
    for out in node.results:
        problem = _value_problem(program, program.values[out], scope)
        if problem:
            return problem
    if node.loop is not None:
        return _loop_problem(program, node, node.loop, scope)
    if is_wire(node):  # a started one gives what it gives when it is waited for
        node = attrs.evolve(node, target=node.target.removesuffix("_start"))
    return _legal_problem(program, node) or _type_problem(program, node)


def _place_problem(program: Program, node: Node, scope: _Scope) -> str:
    """What is wrong with who runs a node, "" if nothing is."""
    if node.on is not None and scope.axes is not None and node.on[0] not in scope.axes:
        return f"{node.target} runs at indices of axis {node.on[0]!r}, which the mesh does not have"
    if node.loop is not None:
        return ""  # each node of its body says who runs it
    reads, makes = node.on, made_at(node)
    if node.target == SEND:
        _, (axis,), _, source, _ = node.args
        reads = axis, (source,)
    for ref in node.refs:
        layout = program.values[ref].layout
        if layout is not None and not covers(layout.at, reads):
            where = at_text(reads) if reads else "on all ranks"
            return f"%{ref} lies as {layout.text()!r}, and {node.target} is to read it {where}"
    for out in node.results:
        layout = program.values[out].layout if out in program.values else None
        if layout is not None and not covers(makes, layout.at):
            where = at_text(makes) if makes else "on all ranks"
            return f"%{out} lies as {layout.text()!r}, and {node.target} makes it {where} only"
    return ""


def _loop_problem(program: Program, node: Node, loop: Loop, scope: _Scope) -> str:
    """What is wrong with a loop: its body, what goes in, what is gathered."""
    body = loop.body
    if loop.trips < 1 or body.stage != program.stage or body.constants or body.aliases:
        return (
            f"a loop of {loop.trips} trips with a body of stage {body.stage!r} stands in a program of stage "
            f"{program.stage!r}"
        )
    if len(node.refs) != len(body.inputs) or not len(node.outs) == len(body.outputs) == len(loop.gathers):
        return "a loop passes other values in or out than its body takes and gives"
    for ref, into in zip(node.refs, body.inputs, strict=True):
        given, taken = program.values[ref], body.values[into]
        if (given.shape, given.dtype) != (taken.shape, taken.dtype):
            return f"a loop passes {type_text(given)} for {type_text(taken)}"
    for out, made, how in zip(node.outs, body.outputs, loop.gathers, strict=True):
        if out is None or how not in GATHERS:
            return f"a loop gathers a value as {how!r}"
        gathered, each = program.values[out], body.values[made]
        shape = (loop.trips, *each.shape) if how == "stack" else each.shape
        if (gathered.shape, gathered.dtype) != (shape, each.dtype):
            return f"%{out} is {type_text(gathered)}, the loop's {how} gives {each.dtype} {shape}"
    problem = _timetable_problem(loop, scope)
    if problem:
        return problem
    axes = None if scope.axes is None else scope.axes | {loop.axis}
    try:
        _check(body, _Scope(axes, scope.known, inside=True))
    except ProgramError as error:
        return f"in the loop over {loop.axis}: {error}"
    return ""


def _timetable_problem(loop: Loop, scope: _Scope) -> str:
    """What is wrong with how a loop is to be run, "" if nothing is."""
    timetable = loop.timetable
    if timetable is None:
        return ""
    if scope.axes is not None and timetable.along not in scope.axes:
        return f"a loop has a timetable along axis {timetable.along!r}, which the mesh does not have"
    if len(timetable.parts) != len(timetable.ends) or list(timetable.ends) != sorted(timetable.ends):
        return f"a loop has {len(timetable.parts)} parts that end at {timetable.ends}"
    if timetable.ends and timetable.ends[-1] != len(loop.body.nodes):
        return f"the parts of a loop end at node {timetable.ends[-1]} of {len(loop.body.nodes)}"
    for row in timetable.table.rows:
        for action in row:
            no_part = timetable.parts and (action.stage, action.kind) not in timetable.parts
            if no_part or action.microbatch >= loop.trips:
                return f"a loop of {loop.trips} trips has no {action}"
    return ""


def _legal_problem(program: Program, node: Node) -> str:
    if program.stage == "global" and node.target in COLLECTIVES:
        return f"a collective ({node.target}) stands in a global program"
    try:
        func = overload(node.target)
    except ProgramError as error:
        return str(error)
    if program.stage != "inplace" and func._schema.is_mutable:
        return f"{node.target} writes to its operands, which only the in-place stage allows"
    return ""


def _type_problem(program: Program, node: Node) -> str:
    """Compare the node's results with what the operator gives for its operands."""
    try:
        problem = _mismatch(program, node, node_types(node, program.values))
        if problem and node.refs:  # some shape functions depend on the device: what a fake CPU tensor says counts
            problem = _mismatch(program, node, _fake_types(node, program.values))
        return problem
    except ProgramError:
        raise
    except Exception as error:  # whatever the operator says about its operands
        return f"{node.target} refuses its operands: {type(error).__name__}: {error}"


def _mismatch(program: Program, node: Node, types: list[Meta | None]) -> str:
    if node.target == SEND and not node.outs:
        return ""  # the half of who sends to others only
    if len(types) != len(node.outs):
        return f"{node.target} gives {len(types)} results, the node defines {len(node.outs)}"
    for out, meta in zip(node.outs, types, strict=True):
        if out is None:
            continue
        value = program.values[out]
        if meta is None or meta.shape != value.shape or meta.dtype != value.dtype:
            given = "no tensor" if meta is None else f"{meta.dtype} {meta.shape}"
            return f"%{out} is {type_text(value)}, the operator gives {given}"
    return ""


def node_types(node: Node, values: Any) -> list[Meta | None]:
    """Shape and dtype of each flat result of a node, found by its operator's shape function."""
    key: list[Any] = [node.target, torch.get_default_dtype()]
    metas: list[Meta] = []

    def collect(arg: Any) -> None:
        if type(arg) is Ref:
            value = values[arg.id]
            meta = contiguous(value.shape, value.dtype)
            metas.append(meta)
            key.append(meta)
        elif type(arg) is tuple:
            key.append(len(arg))
            for item in arg:
                collect(item)
        else:
            key.append(type(arg))
            key.append(arg)

    for arg in node.args:
        collect(arg)
    for name, arg in node.kwargs:
        key.append(name)
        collect(arg)
    call = tuple(key)
    found = _FOUND.get(call)
    if found is None:
        if len(_FOUND) > MOST_CALLS:
            _FOUND.clear()
        found = _FOUND[call] = _types(call, node, metas)
    return found


_FOUND: dict[Any, list[Meta | None]] = {}


def _types(key: Any, node: Node, metas: list[Meta]) -> list[Meta | None]:
    if is_effect(node.target):
        return []  # shows whatever it is given
    # Tensors without data are ten times as fast as fake ones; where they do not serve, fake ones decide.
    func = resolve(node.target)
    check_dtypes(func, metas)
    operands = [torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device="meta") for meta in metas]
    try:
        if not metas:
            raise NotImplementedError("a factory names its device")
        out = called(func, node.args, node.kwargs, operands)
    except Exception:
        results = remembered(key, func, node.args, node.kwargs, metas)
        return [None if slot is None else results.metas[slot] for slot in slots(results.form)]
    return [] if out is None else [_meta(x) for x in _flat(out)]


def _fake_types(node: Node, values: Any) -> list[Meta | None]:
    metas = [contiguous(values[ref].shape, values[ref].dtype) for ref in node.refs]
    results = infer(resolve(node.target), node.args, node.kwargs, metas)
    return [None if slot is None else results.metas[slot] for slot in slots(results.form)]


def _flat(out: Any) -> list[Any]:
    if isinstance(out, (tuple, list)):
        return [x for part in out for x in _flat(part)]
    return [out]


def _meta(x: Any) -> Meta | None:
    return Meta(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else None


def _around(program: Program, index: int) -> str:
    """The offending node between its neighbours."""
    lines = []
    for position in range(max(0, index - NEIGHBOURS), min(len(program.nodes), index + NEIGHBOURS + 1)):
        mark = "-->" if position == index else "   "
        lines.append(f"{mark} {node_text(program.nodes[position], program.values)}")
    return "\n".join(lines)
