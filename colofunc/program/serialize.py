"""Saving programs: one folder with readable JSON and the constants as safetensors; no code, no pickle.

    save(program, "step.program")        step.program/program.json, step.program/constants.safetensors
    load("step.program") == program

Arguments that are no JSON are tagged: {"ref": 3}, {"dtype": "float32"}, {"tuple": [...]}, {"float": "inf"}, ...
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from colofunc.dtensor.layout import Layout, make_layout
from colofunc.errors import ProgramError
from colofunc.program.ir import Loop, Node, Program, Ref, Value

VERSION = 2


def save(program: Program, path: str | Path) -> None:
    """Write the program to folder `path`, which is made if need be."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {str(vid): t.detach().cpu().contiguous().clone() for vid, t in program.constants.items()}
    save_file(tensors, folder / "constants.safetensors")
    (folder / "program.json").write_text(json.dumps(to_dict(program), separators=(",", ":"), allow_nan=False) + "\n")


def load(path: str | Path) -> Program:
    """The program saved at `path`. Raises ProgramError where the folder holds none of this version."""
    folder = Path(path)
    try:
        data = json.loads((folder / "program.json").read_text())
        constants = load_file(folder / "constants.safetensors")
    except (OSError, ValueError) as error:
        raise ProgramError(f"{folder} holds no saved program: {error}") from error
    return from_dict(data, {int(k): v for k, v in constants.items()})


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


def from_dict(data: dict[str, Any], constants: dict[int, torch.Tensor]) -> Program:
    """The inverse of `to_dict`."""
    if data.get("version") != VERSION:
        raise ProgramError(
            f"a program of version {data.get('version')} cannot be read by version {VERSION}; save it again"
        )
    values = [_value_from(v) for v in data["values"]]
    return Program(
        inputs=tuple(data["inputs"]),
        nodes=tuple(_node_from(n) for n in data["nodes"]),
        outputs=tuple(data["outputs"]),
        values={v.id: v for v in values},
        constants={vid: constants[vid] for vid in data["constants"]},
        aliases=tuple((a, b) for a, b in data["aliases"]),
        stage=data["stage"],
    )


def _value_to(v: Value) -> list[Any]:
    return [v.id, list(v.shape), _dtype_to(v.dtype), v.name, v.role, _layout_to(v.layout), v.device_free, v.place]


def _value_from(data: list[Any]) -> Value:
    vid, shape, dtype, name, role, layout, free, place = data
    return Value(vid, tuple(shape), _dtype_from(dtype), name, role, _layout_from(layout), free, place=place)


def _node_to(n: Node) -> list[Any]:
    kwargs = [[k, encode(v)] for k, v in n.kwargs]
    plain = [n.target, [encode(a) for a in n.args], kwargs, list(n.outs), n.phase, n.path, n.line, n.note]
    return plain if n.loop is None else [*plain, _loop_to(n.loop)]


def _node_from(data: list[Any]) -> Node:
    target, args, kwargs, outs, phase, path, line, note, *loop = data
    given = tuple(decode(a) for a in args), tuple((k, decode(v)) for k, v in kwargs)
    return Node(target, *given, tuple(outs), phase, path, line, note, _loop_from(loop[0]) if loop else None)


def _loop_to(loop: Loop) -> list[Any]:
    return [to_dict(loop.body), loop.trips, loop.axis, list(loop.gathers)]


def _loop_from(data: list[Any]) -> Loop:
    body, trips, axis, gathers = data
    return Loop(from_dict(body, {}), trips, axis, tuple(gathers))


def _layout_to(layout: Layout | None) -> Any:
    if layout is None:
        return None
    dims = [[list(atom) for atom in dim] for dim in layout.dims]
    return [dims, list(layout.shape), [list(p) for p in layout.pending], layout.tier, layout.scheme]


def _layout_from(data: Any) -> Layout | None:
    if data is None:
        return None
    dims, shape, pending, tier, scheme = data
    atoms = tuple(tuple((size, axis) for size, axis in dim) for dim in dims)
    return make_layout(atoms, tuple(shape), tuple((axis, how) for axis, how in pending), tier, scheme)


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
    """The inverse of `encode`."""
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind == "ref":
        return Ref(value)
    if kind == "tuple":
        return tuple(decode(v) for v in value)
    if kind == "float":
        return float(value)
    if kind == "complex":
        return complex(*value)
    if kind == "device":
        return torch.device(value)
    found = getattr(torch, value, None)
    if kind not in _TORCH_KINDS.values() or found is None:
        raise ProgramError(f"a saved argument of kind {kind!r} ({value!r}) is not known")
    return found
