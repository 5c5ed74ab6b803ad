"""Packed rows: what a step writes into a cache is packed, and written where the packed cache lies.

    %3 = widen_saved(%data, %scale)  %4 = index_copy(%3, 2, %at, %keys)  %5 = attention(%q, %4, ...)  %6, %7 = pack_saved(%4)
    ->
    %8, %9 = pack_saved(%keys)  %6 = index_copy(%data, 2, %at, %8)  %7 = index_copy(%scale, 2, %at, %9)
    %10 = widen_saved(%6, %7)   %5 = attention(%q, %10, ...)

Problem: the step's own code is given a widened cache, and to pack all of it again would round every row at every step.
Idea: operators that write whole rows, or take a view of whole rows, do the same to numbers and scales. So a row keeps
the numbers that it was written with; whoever reads the cache has it widened right in front, and of a cache in layers
one layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from colofunc.errors import InputError
from colofunc.ops.packed_rows import NUMBERS
from colofunc.ops.saved_activations import PACK, WIDEN, scale_dtype_of
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref, reading

SOURCE_AT: Mapping[str, int] = {
    "aten.index_copy.default": 3, "aten.slice_scatter.default": 1, "aten.select_scatter.default": 1, "aten.index_put.default": 2,
}  # fmt: skip
"""Operators that write rows -> which argument these are."""
DIMS_AT: Mapping[str, tuple[int, ...]] = {
    "aten.index_copy.default": (1,), "aten.slice_scatter.default": (2,), "aten.select_scatter.default": (2,), "aten.select.int": (1,),
    "aten.slice.Tensor": (1,), "aten.transpose.int": (1, 2), "aten.index_select.default": (1,), "aten.clone.default": (),
    "aten.alias.default": (), "aten.detach.default": (),
}  # fmt: skip
"""Operators that leave rows whole where these arguments are not the last dim."""

RowPair = tuple[int, int]  # numbers, scales


def write_packed(program: Program) -> Program:
    """`program` (global) whose caches in packed rows are written and read so.

    Raises InputError where one is made in another way.
    """
    return _Caches(program).written() if WIDEN in program.targets else program


class _Caches:
    """What stands for which value. `packed`: value -> its numbers and scales, where those are known."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.edit = Editor(program)
        self.inputs = set(program.inputs)
        self.packed: dict[int, RowPair] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of caches
        self.named: dict[int, str] = {}  # value -> the cache that it is of
        self.changed: dict[int, str] = {}  # value -> the cache of which it is all, changed otherwise than by rows

    def written(self) -> Program:
        for index, node in enumerate(self.program.nodes):
            if node.target == WIDEN and self.inputs.issuperset(node.refs):
                data, scale = node.refs
                cache = self.program.values[data]
                self.shapes[cache.name] = cache.shape
                self._know(node.results[0], (data, scale), cache.name)
                self.edit.drop(index)
            elif node.target == PACK:
                self._give(index, node)
            elif node.refs and node.refs[0] in self.packed and self._keeps_rows(node):
                self._carry(index, node)
            elif not self.packed.keys().isdisjoint(node.refs):
                self._widen(index, node)
            else:
                self._follow(node)
        for out in self.packed.keys() & set(self.program.outputs):
            end = len(self.program.nodes)
            self.edit.rename(out, self._wide(end, out, self.program.makers[out]))
        return self.edit.done()

    def _know(self, id: int, pair: RowPair, name: str) -> None:
        self.packed[id] = pair
        self.named[id] = name

    def _follow(self, node: Node) -> None:
        """Note what is all of a cache, changed: it is made of rows of it and has its shape."""
        for ref in node.refs:
            name = self.packed_name(ref)
            for out in node.results:
                if name and self.program.values[out].shape == self.shapes[name]:
                    self.changed[out] = name

    def packed_name(self, id: int) -> str:
        """The cache that a value is, changed or not; "" where it is none."""
        return self.named.get(id, self.changed.get(id, ""))

    def _give(self, index: int, node: Node) -> None:
        """What a step returns in place of a cache: what was written, or a new value, as of all rows of a prompt."""
        (source,) = node.refs
        pair = self.packed.get(source)
        if pair is not None:
            for old, new in zip(node.results, pair, strict=True):
                self.edit.rename(old, new)
            self.edit.drop(index)
        elif source in self.changed:
            maker = self.program.makers[source]
            raise InputError(
                f"cf.quantize(caches=): the step changes {self.changed[source]!r} otherwise than by writing rows into "
                f"it, by {maker.target.split('.')[1]} ({maker.line}), so that all of it would be rounded anew. Try: "
                "cache.index_copy(dim, at, rows), cache[:, :, i:j] = rows; globs in caches= that leave it out"
            )

    def _keeps_rows(self, node: Node) -> bool:
        """Whether a node does to whole rows of its first operand what it may do to numbers and scales alike."""
        last = len(self.program.values[node.refs[0]].shape) - 1
        if node.kwargs or (node.target not in DIMS_AT and node.target not in SOURCE_AT):
            return False
        if any(
            position >= len(node.args) or node.args[position] in (last, -1) for position in DIMS_AT.get(node.target, ())
        ):
            return False
        if node.target == "aten.index_put.default":
            indices, adds = node.args[1], len(node.args) > 3 and node.args[3]
            if adds or (len(indices) > last and indices[last] is not None):
                return False
        if node.target not in SOURCE_AT:
            return True
        rows = node.args[SOURCE_AT[node.target]]
        width = self.program.values[node.refs[0]].shape[-1]
        return isinstance(rows, Ref) and self.program.values[rows.id].shape[-1:] == (width,)

    def _carry(self, index: int, node: Node) -> None:
        """The same operator on numbers and on scales."""
        values = self.edit.values
        source: RowPair | None = None
        at = SOURCE_AT.get(node.target)
        if at is not None:
            source = self.packed.get(node.args[at].id) or self._pack(index, node.args[at].id, node)
        shape = self.program.values[node.results[0]].shape
        made = []
        for number, part in enumerate(self.packed[node.refs[0]]):
            args = list(node.args)
            args[0] = Ref(part)
            if at is not None and source is not None:
                args[at] = Ref(source[number])
            out = self.edit.new(
                values[part], shape=shape if number == 0 else (*shape[:-1], 1), name="", role="activation"
            )
            self.edit.insert(index, attrs.evolve(node, args=tuple(args), outs=(out,)))
            made.append(out)
        self._know(node.results[0], (made[0], made[1]), self.named[node.refs[0]])
        self.edit.drop(index)

    def _pack(self, index: int, rows: int, node: Node) -> RowPair:
        value = self.program.values[rows]
        codes = self.edit.new(value, dtype=NUMBERS, name="")
        scale = self.edit.new(value, shape=(*value.shape[:-1], 1), dtype=scale_dtype_of(value.dtype), name="")
        args = Ref(rows), len(value.shape) - 1, value.shape[-1], NUMBERS
        self.edit.insert(index, attrs.evolve(node, target=PACK, args=args, kwargs=(), outs=(codes, scale)))
        return codes, scale

    def _wide(self, index: int, id: int, node: Node) -> int:
        """A cache, widened in front of a position."""
        value = self.program.values[id]
        out = self.edit.new(value, name="")
        data, scale = self.packed[id]
        args = Ref(data), Ref(scale), NUMBERS, value.dtype
        self.edit.insert(index, attrs.evolve(node, target=WIDEN, args=args, kwargs=(), outs=(out,)))
        return out

    def _widen(self, index: int, node: Node) -> None:
        """A reader of caches, which are widened for it."""
        wide = {id: self._wide(index, id, node) for id in dict.fromkeys(node.refs) if id in self.packed}
        self.edit.replace(index, reading(node, wide))
        self._follow(node)
