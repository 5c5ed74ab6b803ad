"""Wire: gradients are summed over the mesh from numbers in 8 or 4 bits.

Problem: a rank sends each gradient once or twice a step, four bytes a number, and rounding terms before a sum that is
made on the way would round every partial sum, too, or overflow. Idea: what sums becomes what moves, and a sum behind
it. Each rank packs its term (`ops.wire`), members exchange pieces, and each adds up the piece that it is for, in the
dtype that the sum had:

    reduce_scatter(x)   ->   wire_pack(x)  all_to_all  wire_sum
    all_reduce(x)       ->   wire_pack(x)  all_to_all  wire_sum  wire_pack  all_gather  wire_open

Pieces are what they were, and groups of numbers lie within one. Copies of a sum are equal on all ranks, as all open one
message. A sum belongs to a gradient as in `wide_sums`. Sums of few numbers stay: a latency is what they cost, and
norms, biases and counts are among them.

With error feedback the traced program has, for each gradient g, a residual r that the state keeps:

    sent, left = carry(g, r)                 on one device sent is g + r, left is 0

g and r pass it as terms of a sum (`+dp`), each rank its own, so what a rank has not sent is added to its next gradient.
In one rank's program `carry` is g + r, and what is left is that without what arrives of it. Where the plan sums g
before, nothing is left.

Source: ZeRO++ (2306.10209), section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import attrs
import torch

from colofunc.ops.targets import keeps_order
from colofunc.ops.wire import CARRY, RESIDUAL, Scheme
from colofunc.program.editor import Editor
from colofunc.program.facts import kind_of, sides
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.passes.wide_sums import is_reduction, passes_sums, reaches_gradient

LEAST = 2048
"""Sums of fewer numbers stay as they are: their latency is longer than their transfer, and many of them share one
message."""
FIT = "colofunc.fit"
SUMS = ("colofunc.reduce_scatter", "colofunc.all_reduce")
"""How the names of operators begin that sum over the mesh, those that are started included."""


def narrow_sums(program: Program, scheme: Scheme) -> Program:
    """`program` (functional, local) with the sums of gradients sent as `scheme` says."""
    writer = _Writer(program, scheme)
    for index in _found(program):
        if program.nodes[index].target != CARRY:
            writer.write(index)
    for index, node in enumerate(program.nodes):
        if node.target == CARRY:
            writer.carry(index)
    return writer.edit.done()


def _found(program: Program) -> Iterator[int]:
    """Positions of the sums that are sent narrow, but for those that carry a residual."""
    carried = set(_carried(program))
    for index, node in enumerate(program.nodes):
        if index not in carried and _is_large_sum(program, node) and reaches_gradient(node, program):
            yield index


def _carried(program: Program) -> Iterator[int]:
    """Positions of sums of what carries a residual: the first of each is narrow, what sums its result again is not."""
    for node in program.nodes:
        sent = [id for id in node.outs[:1] if id is not None and node.target == CARRY]
        while sent:
            for index in program.readers.get(sent.pop(), ()):
                reader = program.nodes[index]
                if is_reduction(reader):
                    yield index
                if passes_sums(reader, program):
                    sent += reader.results


def _is_large_sum(program: Program, node: Node) -> bool:
    return is_reduction(node) and _is_large(program, node)


def _is_large(program: Program, node: Node) -> bool:
    """Whether what is summed is worth packing."""
    term = program.values[node.refs[0]]
    return term.dtype.is_floating_point and prod(term.shape) >= LEAST


def _is_move(node: Node, program: Program) -> bool:
    """Whether a node gives its operand's elements in another shape, or some zeros beside them, and can be undone."""
    if node.target == FIT:
        before = program.values[node.refs[0]].shape
        return all(there >= here for here, there in zip(before, node.args[1], strict=True))
    kind = kind_of(node)
    return keeps_order(node.target) or (kind is not None and kind[0] == "rearrange")


class _Writer:
    """Sums of one program that are written anew."""

    def __init__(self, program: Program, scheme: Scheme) -> None:
        self.program, self.scheme, self.edit = program, scheme, Editor(program)

    def write(self, index: int) -> _Sent:
        """The sum at `index` as what moves and a sum behind it."""
        program, node = self.program, self.program.nodes[index]
        (out,) = node.outs
        assert out is not None, "a sum"
        axes, n = node.args[1], int(node.args[2])
        (term,) = node.refs
        value, total = program.values[term], program.values[out]
        scatters = node.target == "colofunc.reduce_scatter"
        piece = total.shape if scatters else (-(-prod(total.shape) // n),)
        rows = (n, self.scheme.row_bytes(prod(piece)))
        packed, moved = self._bytes(value, rows), self._bytes(value, rows)
        nodes = [
            self._node(node, "colofunc.wire_pack", (Ref(term), self.scheme.name, n), packed),
            self._node(node, "colofunc.all_to_all", (Ref(packed), axes, n), moved),
        ]
        summed = out if scatters else self.edit.new(self._plain(total), shape=piece)
        nodes.append(self._node(node, "colofunc.wire_sum", (Ref(moved), piece, total.dtype, self.scheme.name), summed))
        sent = None
        if not scatters:
            sent, every = self._bytes(value, (1, rows[1])), self._bytes(value, (n, 1, rows[1]))
            message = self._bytes(value, rows)
            nodes += [
                self._node(node, "colofunc.wire_pack", (Ref(summed), self.scheme.name, 1), sent),
                self._node(node, "colofunc.all_gather", (Ref(sent), axes, n), every),
                self._node(node, "aten.view.default", (Ref(every), rows), message),
                self._node(node, "colofunc.wire_open", (Ref(message), total.shape, total.dtype, self.scheme.name), out),
            ]
        self.edit.replace(index, *nodes)
        return _Sent(node, term, packed, None if sent is None else summed, sent)

    def carry(self, index: int) -> None:
        """g + r in place of `carry`, and what of it does not arrive."""
        program, node = self.program, self.program.nodes[index]
        gradient, residual = node.args[:2]
        sent, left = node.outs
        assert sent is not None and left is not None, "both are results"
        self.edit.replace(index, self._node(node, "aten.add.Tensor", (gradient, residual), sent))
        path = self._path_to_sum(sent)
        if path is None:
            zeros = self._node(node, "aten.zeros_like.default", (residual,), left)
            self.edit.insert(index + 1, zeros)
            return
        *moves, at = path
        done = self.write(at)
        term = program.values[done.term]
        missing = left if not moves else self.edit.new(self._plain(term))
        more: tuple[object, ...] = (None, None, None)
        nodes = []
        if done.sent is not None and done.total is not None:
            member = self.edit.new(self._plain(term), shape=(), dtype=torch.int64)
            nodes.append(self._node(done.node, "colofunc.axis_index", (done.node.args[1],), member))
            more = Ref(done.total), Ref(done.sent), Ref(member)
        nodes.append(
            self._node(
                done.node, "colofunc.wire_left", (Ref(done.term), Ref(done.packed), self.scheme.name, *more), missing
            )
        )
        for position in reversed(moves):
            move = program.nodes[position]
            before = program.values[move.refs[0]]
            result = left if position == moves[0] else self.edit.new(self._plain(before))
            nodes.append(self._undone(done.node, move, before, missing, result))
            missing = result
        self.edit.insert(at + 1, *nodes)

    def _path_to_sum(self, value: int) -> list[int] | None:
        """Positions of the moves from a value to the one large sum of it, and of that sum.

        None where there is none, or are several.
        """
        path: list[int] = []
        while True:
            found = []
            for index in self.program.readers.get(value, ()):
                reader = self.program.nodes[index]
                if _is_large_sum(self.program, reader) or (_is_move(reader, self.program) and self._sums(reader)):
                    found.append(index)
            if len(found) != 1:
                return None
            path.append(found[0])
            reader = self.program.nodes[found[0]]
            if is_reduction(reader):
                return path
            (value,) = reader.results

    def _sums(self, move: Node) -> bool:
        """Whether a large sum reads what a move gives, behind further moves."""
        for index in self.program.readers.get(move.results[0], ()):
            reader = self.program.nodes[index]
            if _is_large_sum(self.program, reader) or (_is_move(reader, self.program) and self._sums(reader)):
                return True
        return False

    def _undone(self, like: Node, move: Node, before: Value, moved: int, result: int) -> Node:
        """The node that gives elements back the shape that they had before a move."""
        if move.target == FIT:
            return self._node(like, FIT, (Ref(moved), before.shape), result)
        if keeps_order(move.target):
            return self._node(like, "aten.reshape.default", (Ref(moved), before.shape), result)
        _, pattern, names, sizes = move.args
        known = _sizes_of(pattern, names, sizes, before.shape)
        left, right = pattern.split("->")
        back = f"{right.strip()} -> {left.strip()}"
        return self._node(like, "colofunc.rearrange", (Ref(moved), back, tuple(known), tuple(known.values())), result)

    def _bytes(self, like: Value, shape: tuple[int, ...]) -> int:
        return self.edit.new(self._plain(like), shape=shape, dtype=torch.uint8)

    def _plain(self, like: Value) -> Value:
        """A value that is nobody's gradient, of the same kind of elements."""
        return attrs.evolve(like, name="", role="activation", layout=None, of=None, place=like.tier)

    def _node(self, like: Node, target: str, args: tuple[object, ...], out: int) -> Node:
        return attrs.evolve(
            like, target=target, args=args, kwargs=(), outs=(out,), note=f"gradients are sent as {self.scheme.name}"
        )


@attrs.frozen
class _Sent:
    """A sum that was written anew: what was summed, the message, and of one that all have the own piece and its
    message.
    """

    node: Node
    term: int
    packed: int
    total: int | None
    sent: int | None


def _sizes_of(pattern: str, names: tuple[str, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> dict[str, int]:
    """Sizes of all factors of a pattern whose left side is of this shape."""
    known = dict(zip(names, sizes, strict=True))
    for factors, size in zip(sides(pattern)[0], shape, strict=True):
        for factor in factors:
            if factor not in known:
                known[factor] = size // prod(known.get(other, 1) for other in factors if other != factor)
    return known


def with_residuals(program: Program) -> Program:
    """The traced `program` with a `carry` behind each gradient of which the state keeps a residual (`ops.wire.residual`
    marks it).
    """
    edit = Editor(program)
    marks = [(index, node) for index, node in enumerate(program.nodes) if node.target == RESIDUAL]
    last = {str(node.args[1]): node.refs[0] for _, node in marks}  # path of a leaf -> what is left so far
    for index, node in enumerate(program.nodes):
        outs, more = list(node.outs), list[Node]()
        for position, out in enumerate(node.outs):
            path = None if out is None else _path_of(program.values[out], last)
            if out is None or path is None:
                continue
            gradient, residual = program.values[out], program.values[last[path]]
            if (gradient.shape, gradient.dtype) != (residual.shape, residual.dtype):
                continue
            raw = edit.new(gradient, name="", role="activation")
            left = edit.new(residual, name="", role="activation")
            more.append(
                attrs.evolve(
                    node, target=CARRY, args=(Ref(raw), Ref(last[path])), kwargs=(), outs=(out, left), loop=None
                )
            )
            outs[position], last[path] = raw, left
        if more:
            edit.replace(index, attrs.evolve(node, outs=tuple(outs)), *more)
    for index, node in marks:
        edit.rename(node.results[0], last[str(node.args[1])])
        edit.drop(index)
    return edit.done()


def _path_of(value: Value, paths: Mapping[str, int]) -> str | None:
    """Of which of some leaves of argument 0 a value is the gradient; names begin with that of the argument."""
    if value.role != "grad":
        return None
    name = value.name.removeprefix("grad.")
    return next((path for path in (name, name.partition(".")[2]) if path in paths), None)


def sums_in_full(program: Program) -> bool:
    """Whether gradients are summed over the mesh in a message that would be worth packing, and is not packed."""
    return any(node.target.startswith(SUMS) and _is_large(program, node) for node in program.nodes)


def saved_bytes(program: Program) -> tuple[int, int]:
    """(bytes that a rank sends for the sums that were written anew, the same as they were)."""
    after = before = 0
    for node in program.nodes:
        if node.loop is not None:
            inside = saved_bytes(node.loop.body)
            after, before = after + node.loop.trips * inside[0], before + node.loop.trips * inside[1]
        elif node.target in ("colofunc.wire_sum", "colofunc.wire_open"):
            n, row_bytes = program.values[node.refs[0]].shape
            out = program.values[node.results[0]]
            after += (n - 1) * row_bytes
            before += (n - 1) * (out.nbytes if node.target == "colofunc.wire_sum" else out.nbytes // n)
    return after, before
