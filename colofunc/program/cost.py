"""What a local program costs one rank: seconds, operations, and bytes on the wire per collective and axis.

Bytes are those that a ring algorithm receives per device (`wire_bytes`); seconds are roofline compute plus the
topology's alpha-beta communication, added up without overlap. Collectives are counted as nodes say, so what the
planner promised and what the program does can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any

import attrs
import torch

from colofunc.errors import InputError, near
from colofunc.mesh import Mesh, wire_bytes
from colofunc.mesh.cost import rate
from colofunc.mesh.curves import HOST_KERNEL, Tiles, attention_flops_per_s
from colofunc.ops.kernels import COPY, FUSED
from colofunc.ops.targets import argument_at, is_view
from colofunc.ops.twins import functional_of
from colofunc.program import facts
from colofunc.program.facts import written
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.lower import call_of
from colofunc.program.work_kinds import work_kind
from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.attention_call import AttentionCall

WIRE = facts.WIRE - {"all_gather_flat"} | {"send"}  # a gather of flat buffers is a gather
LOCAL_ONLY = facts.LOCAL | facts.EFFECTS | {"receive"}

RuleOf = Callable[[Call], Rule | None]


class Tally(dict[tuple[str, str], int]):
    """Counts by (collective, axes); a collective that the program does not use counts 0."""

    def __missing__(self, key: tuple[str, str]) -> int:
        kind = key[0] if isinstance(key, tuple) and key else key
        if kind not in WIRE:
            raise InputError(f"{key!r} is no (collective, axes) pair{near(str(kind), WIRE, 'collectives')}")
        return 0


@attrs.frozen
class CostReport:
    """Per rank. `bytes` and `calls` are keyed by (collective, axes), axes as "dp" or "dp,tp"."""

    compute_s: float
    communication_s: float
    flops: float
    memory_bytes: float
    bytes: Mapping[tuple[str, str], int]
    calls: Mapping[tuple[str, str], int]

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def wire_bytes(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        lines = [
            f"{self.seconds:.3g} s ({self.compute_s:.3g} compute, {self.communication_s:.3g} communication), "
            f"{self.flops:.3g} flops"
        ]
        for (kind, axes), nbytes in sorted(self.bytes.items()):
            lines.append(f"  {kind:<15} {axes:<8} {self.calls[kind, axes]:>5} calls {nbytes:>14,} B")
        return "\n".join(lines)


def collective_of(node: Node, values: Mapping[int, Value]) -> tuple[str, tuple[str, ...], int, int] | None:
    """(kind, axes, group size, bytes as `wire_bytes` wants them) of a collective node, else None."""
    kind = _collective_kind(node.target)
    if kind is None:
        return None
    axes = tuple(node.args[1])
    size = int(node.args[2])
    if kind == "all_to_all" and len(node.args) > 3:  # of the rows that are expected to travel
        value = values[node.refs[0]]
        expected = node.args[4] if len(node.args) > 4 else 0
        return kind, axes, size, value.nbytes // max(1, value.shape[1]) * expected
    nbytes = sum(values[ref].nbytes for ref in node.refs)
    if kind == "send":
        nbytes *= sum(target != node.args[3] for target in node.args[4])  # one after the other
    if kind == "all_gather":
        nbytes *= size
    return kind, axes, size, nbytes


def _wired_s(node: Node, mesh: Mesh, kind: str, axes: tuple[str, ...], full_bytes: int) -> float:
    """Seconds of a collective; a permute's are those of its table."""
    if not full_bytes:
        return 0.0  # nobody sends nothing
    table = tuple(node.args[3]) if kind == "permute" else ()
    return mesh.collective_s(kind, full_bytes, axes, table)


@cache
def _collective_kind(target: str) -> str | None:
    kind = target.removeprefix("colofunc.").removesuffix("_start")
    if kind == "all_gather_flat":
        return "all_gather"
    return kind if kind in WIRE else None


def program_cost(program: Program, mesh: Mesh, rule_of: RuleOf) -> CostReport:
    """Add up the nodes of a local program (or of a global one: then for one device)."""
    nbytes: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    compute_s = communication_s = flops = memory = 0.0
    for node in program.nodes:
        if node.loop is not None:
            inner, trips = program_cost(node.loop.body, mesh, rule_of), node.loop.trips
            nbytes.update({key: count * trips for key, count in inner.bytes.items()})
            calls.update({key: count * trips for key, count in inner.calls.items()})
            compute_s += inner.compute_s * trips
            communication_s += inner.communication_s * trips
            flops += inner.flops * trips
            memory += inner.memory_bytes * trips
            continue
        collective = collective_of(node, program.values)
        if collective is not None:
            kind, axes, size, full_bytes = collective
            key = (kind, ",".join(axes))
            nbytes[key] += wire_bytes(kind, full_bytes, size)
            calls[key] += 1
            if node.kernel is None:
                communication_s += _wired_s(node, mesh, kind, axes, full_bytes)
            else:
                communication_s += node.kernel.seconds
            continue
        work, moved, dtype = node_work(node, program.values, rule_of)
        flops += work
        memory += moved
        if node.kernel is not None:
            compute_s += node.kernel.seconds
        elif work or moved:
            compute_s += _kernel_s(node, program.values, mesh, (work, moved, dtype))
    return CostReport(compute_s, communication_s, flops, memory, Tally(nbytes), Tally(calls))


def node_s(node: Node, values: Mapping[int, Value], mesh: Mesh, rule_of: RuleOf) -> float:
    """Seconds of one node: compute, or communication; of a loop all its trips."""
    return seconds_on(mesh, rule_of)(node, values)


NodeSeconds = Callable[[Node, Mapping[int, Value]], float]


@lru_cache(maxsize=64)
def seconds_on(mesh: Mesh, rule_of: RuleOf) -> NodeSeconds:
    """`node_s` on one machine, for many nodes: what it knows of calls is found once.

    Layers are alike, so that most calls are known, as `node_work` knows the work of calls.
    """
    known: dict[Any, float] = {}

    def seconds(node: Node, values: Mapping[int, Value]) -> float:
        if node.loop is not None:
            inner = program_cost(node.loop.body, mesh, rule_of)
            return inner.seconds * node.loop.trips
        if node.kernel is not None:
            return node.kernel.seconds
        sort = _sort_of(node.target)
        if sort == WIRED:
            collective = collective_of(node, values)
            assert collective is not None, "an operator that is wired has a collective"
            kind, axes, _, full_bytes = collective
            return _wired_s(node, mesh, kind, axes, full_bytes)
        if sort != WORK:
            return mesh.view_s if sort == VIEW else 0.0
        key = _key_of(node, values)
        found = known.get(key)
        if found is None:
            if len(known) >= MOST_CALLS:
                known.clear()
            found = known[key] = _alone_s(node, values, mesh, rule_of)
        return found

    return seconds


def _alone_s(node: Node, values: Mapping[int, Value], mesh: Mesh, rule_of: RuleOf) -> float:
    work = node_work(node, values, rule_of)
    return _kernel_s(node, values, mesh, work) if work[0] or work[1] else 0.0


def _kernel_s(node: Node, values: Mapping[int, Value], mesh: Mesh, work: NodeWork) -> float:
    """Seconds of a kernel that nobody has chosen among several."""
    flops, moved, dtype = work
    attention = mesh.topology.device.attention
    if attention and node.target in AttentionCall.TARGETS:
        first = argument_at(node.target, "q")  # what stands in front of k and v is always there
        q, v = values[node.refs[first]].shape, values[node.refs[first + 2]].shape
        is_backward = node.target == AttentionCall.BACKWARD
        products = 5 if is_backward else 2
        keys = flops / max(1, products * prod(q[:3]) * (q[3] + v[3]))
        attained = attention_flops_per_s(attention, HOST_KERNEL, max(q[3], v[3]), max(1.0, keys), is_backward)
        if attained is not None:
            return flops / attained + mesh.topology.device.launch_s
    kind, tiles = work_kind(node.target), mesh.topology.device.tiles
    if tiles is not None and kind == "product" and mesh.topology.device.work_rate(kind, dtype) is None:
        flops *= _product_times(node, values, flops, tiles)
    return mesh.compute_s(flops, moved, dtype, kind)


def _product_times(node: Node, values: Mapping[int, Value], flops: float, tiles: Tiles) -> float:
    """How many times longer a product takes for its sizes; 1 where they cannot be told.

    Of a batch of (m, k) by (k, n) products a has b m k elements, the other operand b k n, and the result b m n; bmnk
    are half its operations. So whatever the order of dims, and whatever is transposed, m, n, k and b are told by these
    four numbers. A convolution has fewer elements in its input than k by m, and counts as one product.
    """
    sizes = sorted((prod(values[ref].shape) for ref in node.refs), reverse=True)[:2]
    result = prod(values[node.results[0]].shape) if node.results else 0
    if len(sizes) < 2 or not flops or not result or 0 in sizes:
        return 1.0
    multiplied = flops / 2
    batch = max(1.0, result * sizes[0] * sizes[1] / multiplied**2)
    m, k = multiplied / sizes[1], multiplied / result
    return tiles.times(m, result / (m * batch), k, batch)


def is_bound_by_memory(node: Node, values: Mapping[int, Value], mesh: Mesh, rule_of: RuleOf) -> bool:
    """Whether moving an operator's bytes takes longer than its operations, by the rates of large ones."""
    if node.loop is not None:
        return False
    if node.kernel is not None and node.kernel.name in (COPY, FUSED):
        return True
    flops, moved, dtype = node_work(node, values, rule_of)
    return moved / mesh.topology.device.memory_bytes_per_s > flops / rate(mesh.topology, dtype)


WIRED, VIEW, UNCOUNTED, WORK = "wired", "view", "uncounted", "work"


@cache
def _sort_of(target: str) -> str:
    """How an operator counts: as a collective, as a view, not at all (what only executors do), or by its work."""
    if _collective_kind(target) is not None:
        return WIRED
    if is_view(target):
        return VIEW
    if target.removeprefix("colofunc.") in LOCAL_ONLY:
        return UNCOUNTED
    return WORK


def does_work(target: str) -> bool:
    """Whether a device has something to do for an operator: it is no view, no collective, and not only written down."""
    return _sort_of(target) == WORK


NodeWork = tuple[float, float, str]
"""(flops, bytes read and written, dtype name)"""
MOST_CALLS = 1 << 15
"""Calls of which the work is kept, of one set of rules."""


def node_work(node: Node, values: Mapping[int, Value], rule_of: RuleOf) -> NodeWork:
    """Work of one compute node from its own shapes.

    Layers are alike, and candidates of a plan differ in few nodes: what a call does is worked out once, and found again
    by what it depends on. That takes a fifth of the time of asking its rule.
    """
    known, key = _works(rule_of), _key_of(node, values)
    found = known.get(key)
    if found is None:
        if len(known) >= MOST_CALLS:
            known.clear()
        found = known[key] = _work(node, values, rule_of)
    return found


@lru_cache(maxsize=64)
def _works(rule_of: RuleOf) -> dict[Any, NodeWork]:
    return {}


def _key_of(node: Node, values: Mapping[int, Value]) -> tuple[Any, ...]:
    """What the work of a node depends on: its operator, its arguments with shapes and dtypes in place of tensors, and
    its results'.
    """
    key: list[Any] = [node.target]
    _describe(node.args, values, key)
    if node.kwargs:
        _describe(node.kwargs, values, key)
    for out in node.outs:
        if out is None:
            key.append(None)
        else:
            value = values[out]
            key += (value.shape, value.dtype)
    return tuple(key)


def _describe(args: tuple[Any, ...], values: Mapping[int, Value], key: list[Any]) -> None:
    for arg in args:
        if type(arg) is Ref:
            value = values[arg.id]
            key += (Ref, value.shape, value.dtype)
        elif type(arg) is tuple:
            key.append(len(arg))
            _describe(arg, values, key)
        else:
            key += (type(arg), arg)


def _work(node: Node, values: Mapping[int, Value], rule_of: RuleOf) -> NodeWork:
    call, _ = call_of(node, values)
    types = [each for each in (*call.ins, *call.outs) if each is not None]
    dtype = arithmetic_dtype([(each.dtype, prod(each.shape)) for each in types])
    if _sort_of(call.target) in (VIEW, UNCOUNTED):
        return 0.0, 0.0, dtype
    # An elementwise operator does one operation for each element of the largest tensor.
    flops = float(max((prod(each.shape) for each in types), default=0))
    rule = None if _sort_of(call.target) == WIRED else rule_of(_as_function(call))
    if rule is not None and rule.flops is not None:
        flops = float(rule.flops)
    moved = float(sum(each.nbytes for each in types))
    if moved:
        moved += _written_bytes(node, values)
    return flops, moved, dtype


def _as_function(call: Call) -> Call:
    """A call that is given memory for its result (`cat.out`) as the one that makes its result, of which rules speak."""
    found = functional_of(call.target)
    if found is None or not found[1]:
        return call
    target, argument = found
    place = dict(call.kwargs)[argument]
    kwargs = tuple((name, value) for name, value in call.kwargs if name != argument)
    # The memory is the last operand, so that the others keep their numbers.
    return attrs.evolve(call, target=target, kwargs=kwargs, ins=call.ins[: place.id], outs=(call.ins[place.id],))


def arithmetic_dtype(tensors: Sequence[tuple[torch.dtype, int]]) -> str:
    """Of operands and results with their numbers of elements, the name of the floating dtype that most elements have.

    What is in another dtype beside it (a gradient in float32, the weights of a router) is cast before it is multiplied.
    """
    elements: dict[torch.dtype, int] = {}
    for dtype, count in tensors:
        if dtype.is_floating_point:
            elements[dtype] = elements.get(dtype, 0) + count
    first = tensors[0][0] if tensors else torch.float32
    most = max(elements, key=lambda dtype: elements[dtype], default=first)
    return str(most).removeprefix("torch.")


def _written_bytes(node: Node, values: Mapping[int, Value]) -> int:
    """What a node moves more than its operands and results, since it writes to some of its operands."""
    into = written(node)
    if not into:
        return 0
    changed = sum(values[id].nbytes for id in into)
    if facts.facts_of(node.target).touches_part:
        given = sum(values[ref].nbytes for ref in node.refs if ref not in into)
        return given - changed * (1 + len(node.results))
    in_place = node.target.split(".")[1].endswith("_")
    if in_place and node.results:
        return 0  # `add_` reads what it writes, and gives it as its result: both are counted
    if in_place or functional_of(node.target) is None:
        return changed
    # `add.out` does not read what it writes.
    return -changed if node.results else 0
