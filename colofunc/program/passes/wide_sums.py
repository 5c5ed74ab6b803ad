"""Gradients are summed over the mesh in a dtype that is wide enough.

Problem: under mixed precision a weight's gradient is bfloat16 until the backward of the cast widens it, and reducing it
before that is half the bytes and eight bits of every partial sum. Idea: a pass over the local program of a rank finds
the reductions of gradients in a narrower dtype than asked for and puts the widening in front of them; where only
layout moves stand between the reduction and the cast that was there, that cast goes, so nothing is rounded twice.

    reduce_scatter(g: bf16)  view  _to_copy(f32)        ->        _to_copy(f32)  reduce_scatter(f32)  view

A reduction belongs to a gradient if its sum reaches a value of role "grad" through layout moves, additions and scalings by a
number. What is multiplied by another tensor or summed over a dim on its way is an activation (under tensor parallelism), which
may be many times larger than the gradient, and stays narrow. Single numbers (a loss) are summed wide as well, which costs nothing.

The pass runs after planning, so the planner is told what sums will cost: `gradients(program, dtype)` are the values of the
global program whose pending sums this pass will widen.
"""

from __future__ import annotations

import attrs
import torch

from colofunc.program.facts import kind_of, may_alias
from colofunc.program.ir import Node, Program, Ref, Value, map_refs

_REDUCES = frozenset({"reduce_scatter", "all_reduce"})
_LINEAR = frozenset({"add", "sub", "neg", "clone", "cat", "constant_pad_nd"})
_SCALINGS = frozenset({"mul", "div"})
_CASTS = frozenset({"aten._to_copy.default", "prims.convert_element_type.default"})


def wide_sums(program: Program, dtype: torch.dtype) -> Program:
    """`program` (functional, local) with every sum of gradients over mesh axes at least in `dtype`."""
    readers: dict[int, list[Node]] = {}
    for node in program.nodes:
        for i in node.refs:
            readers.setdefault(i, []).append(node)
    narrow = [node for node in program.nodes if _is_narrow(node, program, dtype)]
    narrow = [node for node in narrow if not program.values[node.refs[0]].shape or _to_gradient(node, program, readers)]
    if not narrow:
        return program
    state = _Rewriting(program, dtype, readers)
    wanted = {id(node) for node in narrow}
    nodes: list[Node] = []
    for node in program.nodes:
        nodes += state.widened(node) if id(node) in wanted else state.kept(node)
    outputs = tuple(state.instead.get(i, i) for i in program.outputs)
    return attrs.evolve(program.with_nodes(nodes, state.values), outputs=outputs)


def _is_reduction(node: Node) -> bool:
    kind = kind_of(node)
    return kind is not None and kind[0] in _REDUCES and node.args[-1] == "sum"


def _is_narrow(node: Node, program: Program, dtype: torch.dtype) -> bool:
    if not _is_reduction(node):
        return False
    source = program.values[node.refs[0]].dtype
    return source.is_floating_point and source.itemsize < dtype.itemsize


def _is_move(node: Node) -> bool:
    kind = kind_of(node)
    return len(set(node.refs)) == 1 and (may_alias(node) or (kind is not None and kind[0] in ("take_shard", "rearrange")))


def _to_gradient(node: Node, program: Program, readers: dict[int, list[Node]]) -> bool:
    seen: set[int] = set()
    pending = [o for o in node.outs if o is not None]
    while pending:
        at = pending.pop()
        if program.values[at].role == "grad":
            return True
        for reader in readers.get(at, ()):
            if _passes(reader, program):
                pending += [o for o in reader.outs if o is not None and o not in seen]
                seen.update(o for o in reader.outs if o is not None)
    return False


def _passes(node: Node, program: Program) -> bool:
    """Whether the sum of parts of the operand is, element by element, what becomes of the sum in the result."""
    name = node.target.split(".")[1]
    if name in _SCALINGS:
        return sum(bool(program.values[i].shape) for i in node.refs) <= 1
    return _is_move(node) or node.target in _CASTS or name in _LINEAR or kind_of(node) is not None


def gradients(program: Program, dtype: torch.dtype) -> frozenset[int]:
    """The values of a global program that are narrower than `dtype` and become a gradient: their sums will be widened."""
    made = program.producers()
    found: set[int] = set()
    pending = [i for i, value in program.values.items() if value.role == "grad"]
    while pending:
        at = pending.pop()
        if at in found:
            continue
        found.add(at)
        node = made.get(at)
        if node is not None and _passes(node, program):
            pending += node.refs
    values = ((i, program.values[i].dtype) for i in found)
    return frozenset(i for i, d in values if d.is_floating_point and d.itemsize < dtype.itemsize)


@attrs.define
class _Rewriting:
    program: Program
    dtype: torch.dtype
    readers: dict[int, list[Node]]
    values: dict[int, Value] = attrs.field(factory=dict)
    instead: dict[int, int] = attrs.field(factory=dict)  # value -> what stands for it now
    dropped: set[int] = attrs.field(factory=set)  # ids of casts that are not needed any more

    def __attrs_post_init__(self) -> None:
        self.values = dict(self.program.values)

    def kept(self, node: Node) -> list[Node]:
        if id(node) in self.dropped:
            return []
        if not self.instead.keys() & set(node.refs):
            return [node]
        args, kwargs = map_refs((node.args, node.kwargs), lambda i: Ref(self.instead.get(i, i)))
        return [attrs.evolve(node, args=args, kwargs=kwargs)]

    def widened(self, node: Node) -> list[Node]:
        """The cast, the reduction in the wide dtype, and a cast back unless nobody wants the narrow result."""
        (node,) = self.kept(node)
        (out,) = node.outs
        assert out is not None
        if self.values[node.refs[0]].dtype == self.dtype:
            operand, cast = node.refs[0], []
        else:
            operand = self._like(node.refs[0])
            cast = [self._cast(node, node.refs[0], operand, self.dtype)]
        reduced = attrs.evolve(node, args=(Ref(operand), *node.args[1:]))
        chain = self._until_cast(out)
        if chain is not None:
            for i in chain[:-1]:
                self.values[i] = attrs.evolve(self.values[i], dtype=self.dtype)
            self.instead[chain[-1]] = chain[-2]
            sum_, gradient = self.values[chain[-2]], self.values[chain[-1]]
            self.values[chain[-2]] = attrs.evolve(sum_, role=gradient.role, name=gradient.name)
            return [*cast, reduced]
        wide = self._like(out)
        return [*cast, attrs.evolve(reduced, outs=(wide,)), self._cast(node, wide, out, self.values[out].dtype)]

    def _like(self, id: int) -> int:
        new = max(self.values) + 1
        self.values[new] = attrs.evolve(self.values[id], id=new, dtype=self.dtype, name="")
        return new

    def _cast(self, node: Node, source: int, out: int, dtype: torch.dtype) -> Node:
        return attrs.evolve(
            node, target="aten._to_copy.default", args=(Ref(source),), kwargs=(("dtype", dtype),), outs=(out,),
            note=f"gradients are summed in {dtype}",
        )  # fmt: skip

    def _until_cast(self, value: int) -> list[int] | None:
        """The values from `value` through layout moves to the result of the cast that widens it; None if it goes elsewhere."""
        chain = [value]
        while len(self.readers.get(chain[-1], ())) == 1 and chain[-1] not in self.program.outputs:
            (reader,) = self.readers[chain[-1]]
            (out, *more) = reader.outs
            if out is None or more:
                return None
            if reader.target in _CASTS:
                if self.values[out].dtype != self.dtype:
                    return None
                self.dropped.add(id(reader))
                return [*chain, out]
            if not _is_move(reader) and not _is_reduction(reader):
                return None
            chain.append(out)
        return None
