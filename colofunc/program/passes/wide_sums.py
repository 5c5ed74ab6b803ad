"""Gradients are summed over the mesh in a dtype that is wide enough.

Problem: under mixed precision a weight's gradient is bfloat16 until the backward of the cast widens it, and reducing it
before that is half the bytes and eight bits of every partial sum. Idea: a pass over the local program of a rank finds
the reductions of gradients in a narrower dtype than asked for and puts the widening in front of them; where only
layout moves stand between the reduction and the cast that was there, that cast goes, so nothing is rounded twice.

    reduce_scatter(g: bf16)  view  _to_copy(f32)        ->        _to_copy(f32)  reduce_scatter(f32)  view

A reduction belongs to a gradient if its sum reaches a value of role "grad" through layout moves, additions and scalings
by a number. What is multiplied by another tensor or summed over a dim on its way is an activation (under tensor
parallelism), which may be many times larger than the gradient, and stays narrow. Single numbers (a loss) are summed
wide as well, which costs nothing.

The pass runs after planning, so the planner is told what sums will cost: `narrow_sources(program, dtype)` are the values of
the global program whose pending sums this pass will widen.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch

from colofunc.program.editor import Editor
from colofunc.program.facts import kind_of, may_alias
from colofunc.program.ir import Node, Program, Ref

_REDUCES = frozenset({"reduce_scatter", "all_reduce"})
_LINEAR = frozenset({"add", "sub", "neg", "clone", "cat", "constant_pad_nd"})
_SCALINGS = frozenset({"mul", "div"})
_CASTS = frozenset({"aten._to_copy.default", "prims.convert_element_type.default"})


def wide_sums(program: Program, dtype: torch.dtype) -> Program:
    """`program` (functional, local) with every sum of gradients over mesh axes at least in `dtype`."""
    narrow = [node for node in program.nodes if _is_narrow(node, program, dtype)]
    narrow = [node for node in narrow if not program.values[node.refs[0]].shape or reaches_gradient(node, program)]
    if not narrow:
        return program
    state = _Rewriting(program, dtype)
    for node in narrow:
        state.widen(program.made_at[node.results[0]])
    return state.edit.done()


def is_reduction(node: Node) -> bool:
    """Whether a node adds up terms over the mesh."""
    kind = kind_of(node)
    return kind is not None and kind[0] in _REDUCES and node.args[-1] == "sum"


def _is_narrow(node: Node, program: Program, dtype: torch.dtype) -> bool:
    if not is_reduction(node):
        return False
    source = program.values[node.refs[0]].dtype
    return source.is_floating_point and source.itemsize < dtype.itemsize


def _is_move(node: Node) -> bool:
    kind = kind_of(node)
    return len(set(node.refs)) == 1 and (
        may_alias(node) or (kind is not None and kind[0] in ("take_shard", "rearrange"))
    )


def reaches_gradient(node: Node, program: Program) -> bool:
    """Whether what a node of a local program gives becomes a gradient, element by element."""
    seen: set[int] = set()
    pending = list(node.results)
    while pending:
        at = pending.pop()
        if program.values[at].role == "grad":
            return True
        for reader in (program.nodes[index] for index in program.readers.get(at, ())):
            if passes_sums(reader, program):
                pending += [out for out in reader.results if out not in seen]
                seen.update(reader.results)
    return False


def passes_sums(node: Node, program: Program) -> bool:
    """Whether the sum of parts of the operand is, element by element, what becomes of the sum in the result."""
    name = node.target.split(".")[1]
    if name in _SCALINGS:
        return sum(bool(program.values[ref].shape) for ref in node.refs) <= 1
    return _is_move(node) or node.target in _CASTS or name in _LINEAR or kind_of(node) is not None


def narrow_sources(program: Program, dtype: torch.dtype) -> frozenset[int]:
    """The values of a global program that are narrower than `dtype` and become a gradient.

    Their sums will be widened.
    """
    values = ((i, program.values[i].dtype) for i in toward(program, gradients_of(program)))
    return frozenset(i for i, d in values if d.is_floating_point and d.itemsize < dtype.itemsize)


def gradients_of(program: Program) -> list[int]:
    """The gradients of a global program."""
    return [i for i, value in program.values.items() if value.role == "grad"]


def toward(program: Program, ids: Iterable[int]) -> frozenset[int]:
    """Some values of a global program, and those that become one of them, element by element."""
    made = program.makers
    found: set[int] = set()
    pending = list(ids)
    while pending:
        at = pending.pop()
        if at in found:
            continue
        found.add(at)
        node = made.get(at)
        if node is not None and passes_sums(node, program):
            pending += node.refs
    return frozenset(found)


class _Rewriting:
    """Reductions that are widened one by one."""

    def __init__(self, program: Program, dtype: torch.dtype) -> None:
        self.program, self.dtype, self.edit = program, dtype, Editor(program)

    def widen(self, index: int) -> None:
        """The cast, the reduction in the wide dtype, and a cast back unless nobody wants the narrow result."""
        node, values = self.program.nodes[index], self.edit.values
        (out,) = node.results
        operand = self.edit.name_of(node.refs[0])
        if values[operand].dtype != self.dtype:
            wide = self._like(operand)
            self.edit.insert(index, self._cast(node, operand, wide, self.dtype))
            operand = wide
        reduced = attrs.evolve(node, args=(Ref(operand), *node.args[1:]))
        chain = self._until_cast(out)
        if chain is None:
            wide = self._like(out)
            back = self._cast(node, wide, out, values[out].dtype)
            self.edit.replace(index, attrs.evolve(reduced, outs=(wide,)), back)
            return
        for id in chain[:-1]:
            values[id] = attrs.evolve(values[id], dtype=self.dtype)
        sum_, gradient = chain[-2], values[chain[-1]]
        values[sum_] = attrs.evolve(values[sum_], role=gradient.role, name=gradient.name)
        self.edit.rename(chain[-1], sum_)
        self.edit.drop(self.program.made_at[chain[-1]])
        self.edit.replace(index, reduced)

    def _like(self, id: int) -> int:
        return self.edit.new(self.edit.values[id], dtype=self.dtype, name="")

    def _cast(self, node: Node, source: int, out: int, dtype: torch.dtype) -> Node:
        return attrs.evolve(
            node, target="aten._to_copy.default", args=(Ref(source),), kwargs=(("dtype", dtype),), outs=(out,),
            note=f"gradients are summed in {dtype}",
        )  # fmt: skip

    def _until_cast(self, value: int) -> list[int] | None:
        """The values from `value` through layout moves to the result of the cast that widens it.

        None if it goes elsewhere.
        """
        chain = [value]
        while len(self.program.readers.get(chain[-1], ())) == 1 and chain[-1] not in self.program.outputs:
            (position,) = self.program.readers[chain[-1]]
            reader = self.program.nodes[position]
            (out, *more) = reader.outs
            if out is None or more:
                return None
            if reader.target in _CASTS:
                if self.edit.values[out].dtype != self.dtype:
                    return None
                return [*chain, out]
            if not _is_move(reader) and not is_reduction(reader):
                return None
            chain.append(out)
        return None
