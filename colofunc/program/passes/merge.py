"""Merge: several collectives of one kind become one on a flat buffer.

    rs(g0) rs(g1) rs(g2)        ->        pack(g0, g1, g2)  reduce_scatter  slice slice slice

Which ones and where is decided elsewhere (`buckets` by latency, `chunks` by what a plan asks for); here is what they
become. A scatter's buffer has one row per receiving member, and so has what a gather gives, so pieces of it are parts
of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import attrs

from colofunc.ops import flat as _operators  # noqa: F401  registers the operators that are put in here
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Ref, Value

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def merge(
    members: Sequence[Node], edit: Editor, note: str, sources: Sequence[int] | None = None, adjacent: bool = False
) -> list[Node]:
    """The nodes that stand for `members`, collectives alike but for their operands.

    They define what the members defined.

    edit: of their program, which is given the values in between.

    sources: what goes into the buffer for each, if that is not its operand (the same elements in another dtype); one
    that stands there twice is sent once. adjacent: a gather of tensors that lie one behind the other, and are not
    copied.
    """
    head = members[0]
    gather, lead = head.target == "colofunc.all_gather", int(head.target == "colofunc.reduce_scatter")
    values = edit.values
    like = values[head.refs[0]]
    nodes: list[Node] = []

    def add(target: str, args: tuple[Any, ...], shape: tuple[int, ...], out: int | None = None) -> int:
        if out is None:
            out = edit.new(Value(0, shape, like.dtype, role=like.role))
        nodes.append(attrs.evolve(head, target=target, args=args, kwargs=(), outs=(out,), note=note))
        return out

    sent = dict.fromkeys(node.refs[0] for node in members) if sources is None else dict.fromkeys(sources)
    sizes = [prod(values[i].shape[lead:]) for i in sent]
    total, rows, n = sum(sizes), values[next(iter(sent))].shape[:lead], int(head.args[2])
    operands = tuple(map(Ref, sent))
    if adjacent:
        moved = add("colofunc.all_gather_flat", (operands, *head.args[1:]), (n, total))
    else:
        whole = add("colofunc.pack", (operands, lead, like.dtype), (*rows, total))
        moved = add(head.target, (Ref(whole), *head.args[1:]), (n, total) if gather else (total,))
    pieces, start, front = {}, 0, (n,) if gather else ()
    for source, size in zip(sent, sizes, strict=True):
        pieces[source] = add("aten.slice.Tensor", (Ref(moved), len(front), start, start + size), (*front, size))
        start += size
    for node, source in zip(members, sources or [node.refs[0] for node in members], strict=True):
        (out,) = node.outs
        assert out is not None, "a collective defines its result"
        add("colofunc.rearrange", (Ref(pieces[source]), *_unflatten(values[out].shape, len(front))), (), out)
    return nodes


def _words(shape: Sequence[int]) -> Iterator[tuple[str, int]]:
    return zip(_LETTERS, shape, strict=False)


def _unflatten(shape: tuple[int, ...], lead: int) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """Pattern, names and sizes that give flattened dims behind the first `lead` their shape again."""
    names = [name for name, _ in _words(shape)]
    inner = f"({' '.join(names[lead:])})" if len(names) > lead else "1"
    left, known = " ".join([*names[:lead], inner]), list(_words(shape))[lead:]
    return f"{left} -> {' '.join(names)}", tuple(k for k, _ in known), tuple(s for _, s in known)
