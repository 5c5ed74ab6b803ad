"""Buckets: many small collectives become one on a flat buffer, with exactly the same numbers.

Problem: a collective costs a latency whatever its size, and a model has two small parameters for every large one. Idea:
collectives of the same kind, axes and dtype share one buffer where a latency costs more than copying in and out:

    rs(b0) rs(b1) rs(b2)        ->        cat(b0, b1, b2)  reduce_scatter  slice slice slice

Gathers move up to the first of their bucket, whose operands are there already; reductions wait for the last of theirs,
as long as nobody reads a result in between. A bucket is closed where its transfer takes many latencies, so that what
follows can still overlap it. The order is part of the program, hence the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import attrs

from colofunc.mesh import Mesh
from colofunc.program.cost import collective_of
from colofunc.program.ir import Node, Program, Ref, Value

COPIES = 4  # reads and writes of a byte that goes into a buffer and out again
LATENCIES = 20  # a bucket is full when its transfer takes this many
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@attrs.define
class _Bucket:
    members: list[int]
    nbytes: int
    until: int  # first read of a result so far


def buckets(program: Program, mesh: Mesh) -> Program:
    """`program` (functional, local) with small collectives put together."""
    found = [b.members for b in _find(program, mesh) if len(b.members) > 1]
    if not found:
        return program
    values = dict(program.values)
    instead: dict[int, list[Node]] = {k: [] for members in found for k in members}
    for members in found:
        gather = program.nodes[members[0]].target == "colofunc.all_gather"
        instead[members[0] if gather else members[-1]] = _together([program.nodes[k] for k in members], values)
    nodes: list[Node] = []
    for index, node in enumerate(program.nodes):
        nodes += instead.get(index, [node])
    return program.with_nodes(nodes, values)


def _find(program: Program, mesh: Mesh) -> list[_Bucket]:
    made = {o: index for index, node in enumerate(program.nodes) for o in node.outs if o is not None}
    first = _first_reads(program)
    open_buckets: dict[Any, _Bucket] = {}
    every: list[_Bucket] = []
    for index, node in enumerate(program.nodes):
        collective = collective_of(node, program.values)
        if collective is None or node.target not in ("colofunc.all_gather", "colofunc.reduce_scatter", "colofunc.all_reduce"):
            continue
        kind, axes, _, nbytes = collective
        alpha_s, beta_s = mesh.alpha_beta(kind, axes)
        if COPIES * nbytes / mesh.topology.device.memory_bytes_per_s >= alpha_s:
            continue
        key = (kind, node.args[1:], program.values[node.refs[0]].dtype)
        used = first.get(node.outs[0], len(program.nodes)) if node.outs[0] is not None else len(program.nodes)
        bucket = open_buckets.get(key)
        if bucket is not None and (bucket.nbytes + nbytes) * beta_s <= LATENCIES * alpha_s:
            if made.get(node.refs[0], -1) < bucket.members[0] if kind == "all_gather" else index < bucket.until:
                bucket.members.append(index)
                bucket.nbytes += nbytes
                bucket.until = min(bucket.until, used)
                continue
        open_buckets[key] = _Bucket([index], nbytes, used)
        every.append(open_buckets[key])
    return every


def _first_reads(program: Program) -> dict[int, int]:
    first: dict[int, int] = {}
    for index in range(len(program.nodes) - 1, -1, -1):
        first.update(dict.fromkeys(program.nodes[index].refs, index))
    return first


def _together(members: Sequence[Node], values: dict[int, Value]) -> list[Node]:
    """The nodes of one bucket; they define what the members defined."""
    head = members[0]
    scatter, gather = head.target == "colofunc.reduce_scatter", head.target == "colofunc.all_gather"
    n = int(head.args[2])
    nodes: list[Node] = []

    def add(target: str, args: tuple[Any, ...], shape: tuple[int, ...], out: int | None = None) -> int:
        if out is None:
            out = max(values) + 1
            values[out] = Value(out, shape, values[head.refs[0]].dtype, role=values[head.refs[0]].role)
        nodes.append(attrs.evolve(head, target=target, args=args, kwargs=(), outs=(out,), note=f"bucket of {len(members)}"))
        return out

    # One row per receiving member for a scatter, flat otherwise.
    lead = (n,) if scatter else ()
    flat, sizes = [], []
    for node in members:
        shape = values[node.refs[0]].shape
        sizes.append(prod(shape[len(lead) :]))
        flat.append(add("colofunc.rearrange", (Ref(node.refs[0]), *_flatten(shape, len(lead))), (*lead, sizes[-1])))
    whole = add("aten.cat.default", (tuple(map(Ref, flat)), len(lead)), (*lead, sum(sizes)))
    lead = (n,) if gather else ()
    moved = add(head.target, (Ref(whole), *head.args[1:]), (*lead, sum(sizes)))
    start = 0
    for node, size in zip(members, sizes, strict=True):
        piece = add("aten.slice.Tensor", (Ref(moved), len(lead), start, start + size), (*lead, size))
        (out,) = node.outs
        assert out is not None, "a collective defines its result"
        add("colofunc.rearrange", (Ref(piece), *_unflatten(values[out].shape, len(lead))), (), out)
        start += size
    return nodes


def _words(shape: Sequence[int]) -> Iterator[tuple[str, int]]:
    return zip(_LETTERS, shape, strict=False)


def _flatten(shape: tuple[int, ...], lead: int) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """Pattern, names and sizes that flatten all dims behind the first `lead`."""
    names = [name for name, _ in _words(shape)]
    inner = f"({' '.join(names[lead:])})" if len(names) > lead else "1"
    return f"{' '.join(names)} -> {' '.join([*names[:lead], inner])}", (), ()


def _unflatten(shape: tuple[int, ...], lead: int) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    pattern, _, _ = _flatten(shape, lead)
    left, right = pattern.split(" -> ") if " -> " in pattern else ("", pattern.removeprefix("-> "))
    known = list(_words(shape))[lead:]
    return f"{right} -> {left}".rstrip() + ("" if left else " "), tuple(k for k, _ in known), tuple(s for _, s in known)
