"""What a compiled step holds: values that no kernel writes, and operands that a function holds until it returns.

Problem: the accountant counts every operator's result, and a compiler leaves out what only its own kernels would read:
of a loss over logits in bfloat16 their float32 copy, their softmax and the gradient of the loss, each twice as large as
the logits. Idea: `fused` says which operators become one kernel. A value that is read within its own kernel alone is
not written; what a kernel reads is held until it has computed all of its results.

    linear cast log_softmax nll_loss_backward log_softmax_backward cast linear_dx
           ----------------------------------                      the compiler writes the rest

It must never be less than what the compiler keeps (`tests/test_unwritten.py` measures it), so a value counts where it
may be written:

- Results that another group or the rest of the step reads, views of them, what is written to in place, and sums.
- Results of operators that add up over a row what they read again, backward of softmax and of norms; and of the latter
  an inner value of that size, too.
- Of a softmax what it leaves of each row.
- What is read more than once and takes long to compute again on a CPU: exponentials and the like
  (torch/_inductor/ir.py, `should_realize_on_reuse`).
- Results of operators that the compiler calls as they are, or that nothing is known of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from colofunc.executors.fused import fusion_groups
from colofunc.executors.segments import SegmentPiece, pieces
from colofunc.ops.kernels import wide
from colofunc.program.facts import is_pointwise, written
from colofunc.program.ir import Node, Program, Value
from colofunc.program.layout_copies import only_describes
from colofunc.program.memory import Fused
from colofunc.program.work_kinds import work_kind

INLINED = frozenset(
    """aten._to_copy.default aten._softmax.default aten._log_softmax.default aten.nll_loss_backward.default aten.full.default
    aten.full_like.default aten.zeros_like.default aten.ones_like.default""".split()
)
"""Operators beside elementwise ones whose results a compiler computes where they are read."""
SOFTMAX = frozenset("aten._softmax.default aten._log_softmax.default".split())
"""They leave the largest element of each row and its sum."""


def counted(program: Program, last: Mapping[int, int], uncompiled: tuple[str, ...] = ()) -> Fused:
    """What a compiled program leaves out, and until when it holds the other values, for `memory`. last: of a value, who
    reads it last. uncompiled: modules that other software leaves as they are.
    """
    unwritten, held, inner_bytes = dict[int, int](), dict(last), dict[int, int]()
    place = {id(node): index for index, node in enumerate(program.nodes)}
    for piece in pieces(program, uncompiled):
        group_of: dict[int, int] = {}  # of a node
        for number, group in enumerate(fusion_groups(piece.nodes)):
            group_of.update(dict.fromkeys(map(id, group), number))
        unwritten.update(dict.fromkeys(_inlined(piece, group_of), 0))
        for node in piece.nodes:
            if node.target in SOFTMAX and node.outs[0] in unwritten:
                unwritten[node.outs[0]] = _rows_bytes(node, program.values[node.outs[0]])
        for i, until in _read_until(piece.nodes, group_of, place).items():
            held[i] = max(held.get(i, -1), until)
        end = piece.first + piece.count - 1
        for i in piece.ins:
            held[i] = max(held.get(i, -1), end)
        for node in filter(_is_norm_backward, piece.nodes):
            inner_bytes[place[id(node)]] = max((program.values[out].nbytes for out in node.results), default=0)
    return Fused(unwritten, held, inner_bytes)


def _inlined(piece: SegmentPiece, group_of: Mapping[int, int]) -> set[int]:
    """The values of a piece that are read by operators of their own group alone, and that the compiler computes where
    they are read.
    """
    found: dict[int, int] = {}  # value -> its group
    reads: dict[int, int] = {}
    for node in piece.nodes:
        for ref in node.refs:
            reads[ref] = reads.get(ref, 0) + 1
            if ref in found and found[ref] != group_of.get(id(node)):
                del found[ref]
        if id(node) in group_of and _is_inlined(node):
            found.update(dict.fromkeys(node.results, group_of[id(node)]))
        for changed in written(node):
            found.pop(changed, None)
    # What is dear is not computed again for each reader.
    heavy: set[int] = set()
    for node in piece.nodes:
        if work_kind(node.target) == "transcendental":
            heavy.update(out for out in node.results if reads.get(out, 0) > 1)
    return found.keys() - set(piece.outs) - heavy


def _read_until(nodes: Sequence[Node], group_of: Mapping[int, int], place: Mapping[int, int]) -> dict[int, int]:
    """Value -> the position at which the kernel that reads it is done: that of the last of its group that is computed
    from it.
    """
    until: dict[int, int] = {}  # of a value, within the group that makes it
    makers = {out: group_of.get(id(node)) for node in nodes for out in node.results}
    read: dict[int, int] = {}
    for node in reversed(nodes):
        done = max((until.get(out, -1) for out in node.results), default=-1)
        done = max(done, place[id(node)])
        for ref in node.refs:
            read[ref] = max(read.get(ref, -1), done)
            if id(node) in group_of and makers.get(ref) == group_of[id(node)]:
                until[ref] = max(until.get(ref, -1), done)
    return read


def _is_inlined(node: Node) -> bool:
    return only_describes(node.target) or is_pointwise(node.target) or node.target in INLINED


def _rows_bytes(node: Node, value: Value) -> int:
    """Two numbers, at least in float32, of each row of a softmax."""
    row = value.shape[int(node.args[1])] if value.shape else 1
    return 2 * wide(value.dtype).itemsize * prod(value.shape) // max(row, 1)


def _is_norm_backward(node: Node) -> bool:
    return work_kind(node.target) == "normalisation" and node.target.rpartition(".")[0].endswith(("_backward", "_dx"))
