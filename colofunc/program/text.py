"""Programs as text: one line per node, the same for equal programs.

    %4: f32[8,128,256] «(dp a) b (tp c)» = linear(%3, %1, %2)    # forward h.0.mlp.c_fc gpt2.py:120 in forward

`aten.` and an overload named `default` are left out of targets, our own namespace too. Layouts stand in « » where the
program is local.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from colofunc.program.ir import Node, Program, Ref, Timetable, Value
from colofunc.spec.layout import at_text

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def dtype_text(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def type_text(value: Value) -> str:
    """`f32[8,128]`, with the layout where there is one."""
    out = f"{dtype_text(value.dtype)}[{','.join(map(str, value.shape))}]"
    return f"{out} «{value.layout.text()}»" if value.layout is not None else out


@cache
def target_text(target: str) -> str:
    """`aten.mm.default` -> `mm`, `colofunc.linear` -> `linear`."""
    return target.removeprefix("aten.").removeprefix("colofunc.").removesuffix(".default")


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows as columns of equal width; `right`: those whose text stands on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells: list[str] = []
        for place, (text, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(text.rjust(width) if place in right else text.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def argument_text(arg: Any) -> str:
    kind = type(arg)
    if kind is Ref:
        return f"%{arg.id}"
    if kind is tuple:
        return "(" + ", ".join(map(argument_text, arg)) + ("," if len(arg) == 1 else "") + ")"
    if kind is torch.dtype:
        return dtype_text(arg)
    return repr(arg).removeprefix("torch.")


def value_text(value: Value) -> str:
    name = f" {value.name}" if value.name else ""
    return f"%{value.id}{name}: {type_text(value)}"


def _result_text(out: int | None, values: Mapping[int, Value]) -> str:
    if out is None:
        return "_"
    return value_text(values[out]) if out in values else f"%{out}: ?"


def node_text(node: Node, values: Mapping[int, Value]) -> str:
    """One line: results, call, where it comes from."""
    results = ", ".join(_result_text(o, values) for o in node.outs)
    arguments = [argument_text(a) for a in node.args] + [f"{k}={argument_text(v)}" for k, v in node.kwargs]
    call = f"{target_text(node.target)}({', '.join(arguments)})" + (
        f" {at_text(node.on)}" if node.on is not None else ""
    )
    origin = " ".join(filter(None, (node.phase, node.path, node.line, f"({node.note})" if node.note else "")))
    return f"{results} = {call}    # {origin}" if results else f"{call}    # {origin}"


def node_lines(node: Node, values: Mapping[int, Value]) -> list[str]:
    """A node, and what it repeats indented below it."""
    if node.loop is None:
        return [node_text(node, values)]
    loop = node.loop
    lines = [f"{node_text(node, values)}: {loop.trips} times over {loop.axis}"]
    heads = _heads(loop.timetable)
    for index, inner in enumerate(loop.body.nodes):
        lines += [f"    {head}" for head in heads.get(index, ())]
        lines += [f"    {line}" for line in node_lines(inner, loop.body.values)]
    outs = zip(node.outs, loop.gathers, loop.body.outputs, strict=True)
    return [*lines, *(f"    %{out} = {how} of %{id}" for out, how, id in outs)]


def _heads(timetable: Timetable | None) -> dict[int, list[str]]:
    """Position in a body -> the lines in front of it.

    Of a timetable they are its rows, of a part its stage and kind of action.
    """
    if timetable is None:
        return {}
    heads: dict[int, list[str]] = {0: []}
    for index, row in enumerate(timetable.table.rows):
        heads[0].append(f"{timetable.along}={index}: {' '.join(map(str, row))}")
    for (stage, kind), (first, _) in zip(timetable.parts, timetable.spans(), strict=False):
        heads.setdefault(first, []).append(f"-- {stage}{kind}")
    return heads


def text(program: Program) -> str:
    """The whole program: inputs with roles, nodes, outputs."""
    lines = []
    for vid in program.inputs:
        value = program.values[vid]
        lines.append(f"input {value_text(value)}    # {value.role}")
    for node in program.nodes:
        lines += node_lines(node, program.values)
    aliased = dict(program.aliases)
    outs = [f"%{o}" + (f" in place of {aliased[k]}" if k in aliased else "") for k, o in enumerate(program.outputs)]
    lines.append(f"return {', '.join(outs)}")
    return "\n".join(lines) + "\n"
