"""Attention masks as bounds: a number per column, and for every row the least and the most that it sees.

Problem: documents that are packed into one row of a batch, and padding, make a mask that is no band and that mostly
depends on an input, so that its value is not known while tracing. Made whole it has rows x columns elements. Idea: such
a mask is written as a conjunction of comparisons of a vector per row with a vector per column, and the vectors are all
that attention needs. They are cut out of the program in front of the comparison, which then nobody reads.

    document[j] == document[i]                      code: document            least: document[i]      most: document[i]
    position[j] <= position[i]                      code: position            least: -                most: position[i]
    keep[j]                                         code: keep                least: 1                most: 1
    a band lo[i] .. hi[i], known while tracing      code: 0, 1, 2, ...        least: lo[i]            most: hi[i] - 1

Conjuncts that are causal or a window stay these, because attention knows more of them. What is written in another way
(a disjunction, a distance, scores that are weighed) is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import attrs
import torch

from colofunc.ops.targets import KEEP_ORDER
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref, Value

# Least and most of what nothing bounds.
LOWEST, HIGHEST = -(1 << 62), 1 << 62
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
JOINS = ("aten.bitwise_and.Tensor", "aten.logical_and.default", "aten.mul.Tensor")
# Views that only add or drop dims in front of the rows, where sizes say so.
VIEWS = KEEP_ORDER | {"aten.expand.default", "aten.alias.default"}
# comparison -> the same with its operands exchanged
COMPARISONS = {"eq": "eq", "le": "ge", "ge": "le", "lt": "gt", "gt": "lt"}


@attrs.frozen
class MaskBound:
    """`column name row`: values of int or bool, (..., 1, columns) and (..., rows, 1).

    Without a row: the column is True. Without a column: the row is.
    """

    name: str
    column: int | None
    row: int | None


@attrs.frozen
class Parts:
    """A mask as the conjunction of values that are known while tracing and of comparisons."""

    known: tuple[int, ...]
    bounds: tuple[MaskBound, ...]


def parts_of(program: Program, makers: Mapping[int, Node], mask: int) -> Parts | None:
    """The conjuncts of a bool mask (b or 1, 1, rows, columns); None where it is no such conjunction."""
    value = program.values[mask]
    if value.dtype != torch.bool or len(value.shape) != 4 or value.shape[1] != 1 or min(value.shape[2:]) < 2:
        return None
    known: dict[int, None] = {}
    bounds: dict[MaskBound, None] = {}
    todo = [mask]
    while todo:
        vid = todo.pop()
        here = program.values[vid]
        if here.device_free:
            known[vid] = None
        elif _is_vector(here, -1):
            bounds[MaskBound("ge", None, vid)] = None
        elif _is_vector(here, -2):
            bounds[MaskBound("eq", vid, None)] = None
        elif (found := _opened(program, makers.get(vid), here)) is None:
            return None
        elif isinstance(found, MaskBound):
            bounds[found] = None
        else:
            todo += found
    return Parts(tuple(known), tuple(bounds))


def _is_vector(value: Value, dim: int) -> bool:
    """Whether a value is the same along the last dim, or the last but one."""
    return len(value.shape) < -dim or value.shape[dim] == 1


def _is_square(value: Value) -> bool:
    """Whether of the dims in front of rows and columns at most one, the batch, has more than one element."""
    return sum(size > 1 for size in value.shape[:-2]) <= 1


def _opened(program: Program, node: Node | None, here: Value) -> MaskBound | list[int] | None:
    """What stands behind a value: its conjuncts, or one comparison."""
    if node is None or not _is_square(here):
        return None
    sources = [program.values[ref] for ref in node.refs]
    if node.target in JOINS:
        return list(node.refs) if len(sources) == 2 and all(source.dtype == torch.bool for source in sources) else None
    if node.target in VIEWS:
        return list(node.refs) if _keeps(node, sources[0], here) else None
    name = node.target.split(".")[1]
    return _compared(COMPARISONS, name, node, program) if name in COMPARISONS else None


def _keeps(node: Node, source: Value, here: Value) -> bool:
    """Whether rows and columns, and the batch in front of them, are what they were."""
    if node.target == "aten.expand.default":
        return _is_square(source)
    alike = source.shape[-2:] == here.shape[-2:] and prod(source.shape[:-2]) == prod(here.shape[:-2])
    return alike and source.dtype == here.dtype and _is_square(source)


def _compared(names: Mapping[str, str], name: str, node: Node, program: Program) -> MaskBound | None:
    if len(node.args) != 2 or node.kwargs or len(node.refs) != 2:
        return None
    left, right = (program.values[ref] for ref in node.refs)
    if left.dtype not in INTEGERS or right.dtype not in INTEGERS or not (_is_square(left) and _is_square(right)):
        return None
    if _is_vector(left, -2) and _is_vector(right, -1):
        return MaskBound(name, left.id, right.id)
    if _is_vector(left, -1) and _is_vector(right, -2):
        return MaskBound(names[name], right.id, left.id)
    return None


@attrs.define
class BoundsWriter:
    """Writes the vectors of bounds into a program, in front of the attention that reads them."""

    edit: Editor
    constants: dict[int, torch.Tensor] = attrs.field(factory=dict)
    nodes: list[Node] = attrs.field(factory=list)
    written: dict[Any, int] = attrs.field(factory=dict)
    reader: Node | None = None

    @classmethod
    def of(cls, program: Program) -> BoundsWriter:
        return cls(Editor(program))

    @property
    def values(self) -> Mapping[int, Value]:
        """Those of the program and what was written."""
        return self.edit.values

    def taken(self) -> list[Node]:
        """The nodes that were written since they were last taken."""
        nodes, self.nodes = self.nodes, []
        return nodes

    def done(self, nodes: list[Node]) -> Program:
        """The program with these nodes, and with what was written."""
        program = self.edit.program
        inputs, constants = (*program.inputs, *self.constants), {**program.constants, **self.constants}
        return self.edit.written(nodes, inputs=inputs, constants=constants)

    def operands(
        self, parts: Parts, runs: tuple[torch.Tensor, torch.Tensor] | None, shape: tuple[int, ...]
    ) -> tuple[Ref, Ref, Ref]:
        """code (b, n, columns), least and most (b, n, rows) of a mask `shape` (b, 1, rows, columns).

        `runs`: the columns lo:hi, each (b or 1, rows), that what is known of it shows; None: all, or said in another
        way.
        """
        columns: list[int] = []
        least: list[int] = []
        most: list[int] = []
        for bound in parts.bounds:
            code, low, high = self._bound(bound, shape)
            columns.append(code)
            least.append(low)
            most.append(high)
        if runs is not None:
            columns.append(self._constant(torch.arange(shape[-1])[None, None]))
            least.append(self._constant(runs[0][:, None]))
            most.append(self._constant(runs[1][:, None] - 1))
        return self._stacked(columns), self._stacked(least), self._stacked(most)

    def _bound(self, bound: MaskBound, shape: tuple[int, ...]) -> tuple[int, int, int]:
        if bound.column is None:
            # A row that is True sees all columns, of which the code is 1.
            assert bound.row is not None
            return self._full(1, shape[-1]), self._full(1, shape[-2]), self._vector(bound.row, shape[-2], -1)
        code = self._vector(bound.column, shape[-1], -2)
        mine = self._full(1, shape[-2]) if bound.row is None else self._vector(bound.row, shape[-2], -1)
        low, high = self._full(LOWEST, shape[-2]), self._full(HIGHEST, shape[-2])
        if bound.name in ("lt", "gt"):
            mine = self._call("aten.add.Tensor", (Ref(mine), 1 if bound.name == "gt" else -1), self.values[mine])
        return {"eq": (code, mine, mine), "le": (code, low, mine), "lt": (code, low, mine)}.get(
            bound.name, (code, mine, high)
        )

    def _vector(self, vid: int, size: int, dim: int) -> int:
        """A value (..., 1, columns) or (..., rows, 1) as int64 (b, 1, size)."""
        value = self.values[vid]
        if value.dtype != torch.int64:
            vid = self._call(
                "aten._to_copy.default", (Ref(vid),), attrs.evolve(value, dtype=torch.int64), (("dtype", torch.int64),)
            )
        if len(value.shape) >= -dim:
            vid = self._select(vid, len(value.shape) + dim)
        while len(self.values[vid].shape) > 2 or (len(self.values[vid].shape) == 2 and self.values[vid].shape[0] == 1):
            ones = [place for place, size in enumerate(self.values[vid].shape[:-1]) if size == 1]
            vid = self._select(vid, ones[0])
        while len(self.values[vid].shape) < 3:
            here = self.values[vid]
            at = 0 if len(here.shape) < 2 else 1
            longer = (*here.shape[:at], 1, *here.shape[at:])
            vid = self._call("aten.unsqueeze.default", (Ref(vid), at), attrs.evolve(here, shape=longer))
        batch, _, has = self.values[vid].shape
        return vid if has == size else self._expanded(vid, (batch, 1, size))

    def _full(self, number: int, size: int) -> int:
        like = Value(0, (1, 1, size), torch.int64, device_free=True)
        return self._call("aten.full.default", (like.shape, number), like, (("dtype", torch.int64),))

    def _select(self, vid: int, dim: int) -> int:
        here = self.values[vid]
        shorter = (*here.shape[:dim], *here.shape[dim + 1 :])
        return self._call("aten.select.int", (Ref(vid), dim, 0), attrs.evolve(here, shape=shorter))

    def _expanded(self, vid: int, shape: tuple[int, ...]) -> int:
        here = self.values[vid]
        if here.shape == shape:
            return vid
        return self._call("aten.expand.default", (Ref(vid), shape), attrs.evolve(here, shape=shape))

    def _stacked(self, vectors: list[int]) -> Ref:
        """(b, 1, size) each -> (b, n, size)."""
        if len(vectors) == 1:
            return Ref(vectors[0])
        values = [self.values[vid] for vid in vectors]
        batch, size = max(value.shape[0] for value in values), values[0].shape[2]
        alike = tuple(Ref(self._expanded(vid, (batch, 1, size))) for vid in vectors)
        whole = attrs.evolve(
            values[0], shape=(batch, len(vectors), size), device_free=all(value.device_free for value in values)
        )
        return Ref(self._call("aten.cat.default", (alike, 1), whole))

    def _call(self, target: str, args: tuple[Any, ...], like: Value, kwargs: tuple[tuple[str, Any], ...] = ()) -> int:
        """The one result of a call, with shape, dtype and `device_free` of a value; equal calls are made once."""
        key = (target, args, kwargs)
        if key not in self.written:
            out = self.edit.new(Value(0, like.shape, like.dtype, device_free=like.device_free))
            reader = self.reader
            assert reader is not None
            self.nodes.append(
                Node(target, args, kwargs, (out,), phase=reader.phase, path=reader.path, line=reader.line, on=reader.on)
            )
            self.written[key] = out
        return self.written[key]

    def _constant(self, tensor: torch.Tensor) -> int:
        key = (tuple(tensor.shape), tensor.numpy().tobytes())
        if key not in self.written:
            out = self.edit.new(Value(0, tuple(tensor.shape), tensor.dtype, role="constant", device_free=True))
            self.constants[out] = tensor.contiguous()
            self.written[key] = out
        return self.written[key]
