"""Saving programs: one folder with readable JSON and the constants as safetensors; no code, no pickle.

    save(program, "step.program")        step.program/program.json, step.program/constants.safetensors
    load("step.program") == program

Arguments that are no JSON are tagged: {"ref": 3}, {"dtype": "float32"}, {"tuple": [...]}, {"float": "inf"}, ...
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from colofunc import owned, untrusted
from colofunc.errors import ProgramError, SpecError
from colofunc.program.actions import ActionTable
from colofunc.program.ir import Loop, Node, Program, Ref, Timetable, Value
from colofunc.spec.layout import At, Layout, make_layout

VERSION = 2
MARK = "colofunc_program"  # in both files, near their beginning


def save(program: Program, path: str | Path) -> None:
    """Write the program to folder `path`, which is made if need be. Raises ProgramError where its files are another's."""
    folder = owned.given(path, "save a program", ProgramError)
    constants = folder / "constants.safetensors"
    owned.check_own_kind(constants, MARK, "save a program", ProgramError)
    owned.check_own_kind(folder / "program.json", MARK, "save a program", ProgramError)
    text = json.dumps({MARK: 1, **to_dict(program)}, separators=(",", ":"), allow_nan=False) + "\n"
    tensors = {str(vid): t.detach().cpu().contiguous().clone() for vid, t in program.constants.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, constants, metadata={MARK: "1"})
    except (OSError, SafetensorError) as error:
        raise ProgramError(f"save a program to {str(folder)!r}: {error}; give another folder") from error
    owned.write_text(folder / "program.json", text, MARK, "save a program", ProgramError)


def load(path: str | Path) -> Program:
    """The program saved at `path`. Raises ProgramError where the folder holds none of this version, or one that was changed."""
    folder = owned.given(path, "load a program", ProgramError)
    try:
        data = untrusted.read_json(folder / "program.json")
        constants = load_file(folder / "constants.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ProgramError(f"{folder} holds no saved program: {error}") from error
    if isinstance(data, dict):
        data.pop(MARK, None)
    return from_dict(data, {int(k): v for k, v in constants.items() if k.isdecimal()})


def to_dict(program: Program) -> dict[str, Any]:
    """The program without its constants, as JSON data."""
    return {
        "version": VERSION,
        "stage": program.stage,
        "inputs": list(program.inputs),
        "outputs": list(program.outputs),
        "aliases": [list(pair) for pair in program.aliases],
        "constants": list(program.constants),
        "values": [_value_to(v) for v in program.values.values()],
        "nodes": [_node_to(n) for n in program.nodes],
    }


@attrs.frozen
class _Saved:
    """What `to_dict` gives, with the types of all that is no argument of a node."""

    version: int
    stage: Literal["global", "local", "inplace"]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...]
    constants: tuple[int, ...]
    values: tuple[tuple[int, tuple[int, ...], str, str, str, Any, bool, Literal["device", "host", "disk"]], ...]
    nodes: tuple[Any, ...]


_Node = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...], tuple[int | None, ...], str, str, str, str]
_LoopNode = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...], tuple[int | None, ...], str, str, str, str, Any]
_PlacedNode = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...], tuple[int | None, ...], str, str, str, str, Any, At]
_Loop = tuple[dict, int, str, tuple[str, ...]]  # type: ignore[type-arg]
_PlannedLoop = tuple[dict, int, str, tuple[str, ...], Any]  # type: ignore[type-arg]
_Timetable = tuple[str, tuple[str, ...], dict[str, int], tuple[tuple[int, str], ...], tuple[int, ...], str, bool]
_Layout = tuple[tuple[tuple[tuple[int, str | None], ...], ...], tuple[int, ...], tuple[tuple[str, str], ...], str, str | None]
_PlacedLayout = tuple[
    tuple[tuple[tuple[int, str | None], ...], ...], tuple[int, ...], tuple[tuple[str, str], ...], str, str | None, At
]


def from_dict(data: Any, constants: dict[int, torch.Tensor]) -> Program:
    """The inverse of `to_dict`. Raises ProgramError where it was changed to something that is no program."""
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise ProgramError(
            f"a program of version {version!r:.80} cannot be read by version {VERSION}; save it again"
        )
    try:
        return _program(untrusted.build(_Saved, data, "program"), constants)
    except (untrusted.Wrong, SpecError) as error:
        raise ProgramError(f"a saved program is damaged: {error}; save it again") from error
    except RecursionError as error:
        raise ProgramError("a saved program is damaged: it is nested too deeply; save it again") from error


def _program(saved: _Saved, constants: dict[int, torch.Tensor]) -> Program:
    values = {entry[0]: _value_from(entry) for entry in saved.values}
    lacking = [vid for vid in saved.constants if vid not in constants]
    if lacking:
        raise untrusted.Wrong(f"constant {lacking[0]} is in no file")
    nodes = tuple(_node_from(entry, f"nodes[{k}]") for k, entry in enumerate(saved.nodes))
    used = {id for node in nodes for id in (*node.refs, *node.outs) if id is not None}
    unknown = sorted((used | {*saved.inputs, *saved.outputs, *saved.constants}) - values.keys())
    if unknown or len(values) < len(saved.values):
        raise untrusted.Wrong(f"value {unknown[0]} is not described" if unknown else "a value is described twice")
    return Program(
        inputs=saved.inputs,
        nodes=nodes,
        outputs=saved.outputs,
        values=values,
        constants={vid: constants[vid] for vid in saved.constants},
        aliases=saved.aliases,
        stage=saved.stage,
    )


def _value_to(v: Value) -> list[Any]:
    return [v.id, list(v.shape), _dtype_to(v.dtype), v.name, v.role, _layout_to(v.layout), v.device_free, v.place]


def _value_from(entry: tuple[Any, ...]) -> Value:
    vid, shape, dtype, name, role, layout, free, place = entry
    if any(n < 0 for n in shape):
        raise untrusted.Wrong(f"value {vid} has shape {shape}")
    return Value(vid, shape, _dtype_from(dtype), name, role, _layout_from(layout), free, place=place)


def _node_to(n: Node) -> list[Any]:
    kwargs = [[k, encode(v)] for k, v in n.kwargs]
    plain = [n.target, [encode(a) for a in n.args], kwargs, list(n.outs), n.phase, n.path, n.line, n.note]
    if n.on is not None:
        return [*plain, None if n.loop is None else _loop_to(n.loop), [n.on[0], list(n.on[1])]]
    return plain if n.loop is None else [*plain, _loop_to(n.loop)]


def _node_from(data: Any, where: str) -> Node:
    kinds = {9: _LoopNode, 10: _PlacedNode}
    entry = untrusted.check(kinds.get(len(data), _Node) if isinstance(data, list) else _Node, data, where)
    target, args, kwargs, outs, phase, path, line, note = entry[:8]
    loop, on = (*entry[8:], None, None)[:2]
    given = tuple(decode(a) for a in args), tuple((k, decode(v)) for k, v in kwargs)
    return Node(target, *given, outs, phase, path, line, note, None if loop is None else _loop_from(loop, where), on=on)


def _loop_to(loop: Loop) -> list[Any]:
    plain = [to_dict(loop.body), loop.trips, loop.axis, list(loop.gathers)]
    return plain if loop.timetable is None else [*plain, _timetable_to(loop.timetable)]


def _loop_from(data: Any, where: str) -> Loop:
    planned = isinstance(data, list) and len(data) == 5
    body, trips, axis, gathers, *rest = untrusted.check(_PlannedLoop if planned else _Loop, data, f"{where}.loop")
    return Loop(from_dict(body, {}), trips, axis, gathers, _timetable_from(rest[0], where) if rest else None)


def _timetable_to(timetable: Timetable) -> list[Any]:
    rows = str(timetable.table).splitlines()
    parts = [list(part) for part in timetable.parts]
    return [timetable.along, rows, dict(timetable.stages), parts, list(timetable.ends), timetable.schedule, timetable.validate_late]


def _timetable_from(data: Any, where: str) -> Timetable:
    along, rows, stages, parts, ends, schedule, late = untrusted.check(_Timetable, data, f"{where}.loop.timetable")
    return Timetable(along, ActionTable.parse(rows), stages, parts, ends, schedule, late)


def _layout_to(layout: Layout | None) -> Any:
    if layout is None:
        return None
    dims = [[list(atom) for atom in dim] for dim in layout.dims]
    plain = [dims, list(layout.shape), [list(p) for p in layout.pending], layout.tier, layout.scheme]
    return plain if layout.at is None else [*plain, [layout.at[0], list(layout.at[1])]]


def _layout_from(data: Any) -> Layout | None:
    if data is None:
        return None
    placed = isinstance(data, list) and len(data) == 6
    dims, shape, pending, tier, scheme, *at = untrusted.check(_PlacedLayout if placed else _Layout, data, "layout")
    if len(dims) != len(shape) or any(n < 0 for dim in dims for n, _ in dim):
        raise untrusted.Wrong(f"a layout {dims!r:.80} does not fit shape {shape!r:.80}")
    return make_layout(dims, shape, pending, tier, scheme, at[0] if at else None)


def _dtype_to(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_from(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ProgramError(f"{name!r} is no dtype of this torch version")
    return found


_TORCH_KINDS: dict[type, str] = {torch.dtype: "dtype", torch.memory_format: "memory_format", torch.layout: "layout"}


def encode(arg: Any) -> Any:
    """A node argument as JSON data."""
    kind = type(arg)
    if arg is None or kind in (bool, int, str):
        return arg
    if kind is float:
        return arg if math.isfinite(arg) else {"float": repr(arg)}
    if kind is Ref:
        return {"ref": arg.id}
    if kind is tuple:
        return {"tuple": [encode(a) for a in arg]}
    if kind is complex:
        return {"complex": [arg.real, arg.imag]}
    if kind is torch.device:
        return {"device": str(arg)}
    for torch_kind, name in _TORCH_KINDS.items():
        if isinstance(arg, torch_kind):
            return {name: str(arg).removeprefix("torch.")}
    raise ProgramError(f"an argument of type {kind.__name__} cannot be saved")


def decode(data: Any) -> Any:
    """The inverse of `encode`. Raises ProgramError for what `encode` does not give."""
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is not dict or len(data) != 1:
        raise ProgramError(f"a saved argument {data!r:.80} is not known")
    ((kind, value),) = data.items()
    try:
        return _decoded(kind, value)
    except (untrusted.Wrong, ValueError, RuntimeError) as error:
        raise ProgramError(f"a saved argument of kind {kind!r:.80} ({value!r:.80}) is not known") from error


def _decoded(kind: str, value: Any) -> Any:
    if kind == "ref":
        return Ref(untrusted.check(int, value, "ref"))
    if kind == "tuple":
        return tuple(decode(v) for v in untrusted.check(tuple[Any, ...], value, "tuple"))
    if kind == "complex":
        return complex(*untrusted.check(tuple[float, float], value, "complex"))
    word = untrusted.check(str, value, kind)
    if kind == "float":
        return float(word)
    if kind == "device":
        return torch.device(word)
    found = getattr(torch, word, None)
    wanted = next((torch_kind for torch_kind, name in _TORCH_KINDS.items() if name == kind), None)
    if wanted is None or not isinstance(found, wanted):
        raise untrusted.Wrong(f"{kind} {word!r}")
    return found
