"""Compiled segments: what lies between collectives becomes one compiled function each.

Problem: a compiler fuses operators, and must not see collectives of a simulated mesh or of a process group. Idea: cut
the local program (`segments`); each segment is an FX graph, compiled as a whole, and the program of segments runs on
any executor like any other program. Equal segments, as those of equal layers, are one function.

    linear gelu linear | all_reduce | add layer_norm       ->       segment_0, all_reduce, segment_1

A function is compiled at its first call, for the strides that its operands have there, and again for others. The
compiler gets the graph itself: nothing is left for it to find out about Python. Where it is missing or fails, its error
passes through: a step that was asked to be compiled is not silently run otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import attrs
import torch
import torch.fx

from colofunc import compat
from colofunc.executors.kernels import check_words, result_kind
from colofunc.executors.pools import accelerator
from colofunc.executors.segments import REARRANGE, SegmentPiece, pieces, rearranged, unnumbered
from colofunc.executors.step_function import flat_results
from colofunc.ops.define import FOR_COMPILERS, NUMBERED
from colofunc.ops.targets import resolve
from colofunc.program.facts import takes_device
from colofunc.program.ir import Node, Program, Ref, map_refs
from colofunc.program.passes.loop import changed

SegmentFn = Callable[..., Sequence[torch.Tensor]]


def compile_segments(program: Program, compiler: str = "inductor") -> tuple[Program, Mapping[str, Callable[..., Any]]]:
    """(program of segments and other nodes, target of each segment -> compiled callable). So are bodies of loops."""
    known: dict[str, Segment] = {}
    segmented = _segmented(program, compiler, known)
    return segmented, {segment.target: segment for segment in known.values()}


def _segmented(program: Program, compiler: str, known: dict[str, Segment]) -> Program:
    for node in program.nodes:
        check_words(node)
    nodes: list[Node] = []
    at = 0
    for piece in pieces(program):
        nodes += [_with_body(node, compiler, known) for node in program.nodes[at : piece.first]]
        nodes += [*piece.ahead, _call(piece, program, compiler, known)]
        at = piece.first + piece.count
    nodes += [_with_body(node, compiler, known) for node in program.nodes[at:]]
    return program.reordered(nodes)


def _with_body(node: Node, compiler: str, known: dict[str, Segment]) -> Node:
    if node.loop is None:
        return node
    return attrs.evolve(node, loop=changed(node.loop, lambda body: _segmented(body, compiler, known)))


def _call(piece: SegmentPiece, program: Program, compiler: str, known: dict[str, Segment]) -> Node:
    """The node in place of a piece, which calls the function that pieces with its text share."""
    text = piece.text(program.values)
    if text not in known:
        target = f"segment.{len(known)}.{'_'.join(map(str, piece.changed))}"
        known[text] = Segment(target, piece, compiler)
    head = piece.nodes[0]
    note = f"{len(piece.nodes)} operators compiled"
    operands = (*(Ref(i) for i in piece.ins), *piece.numbers)
    return Node(known[text].target, operands, (), piece.outs, head.phase, head.path, head.line, note, on=head.on)


def graph_of(piece: SegmentPiece, device: torch.device) -> torch.fx.GraphModule:
    """The FX graph of a piece on a device; its results are a tuple."""
    graph = torch.fx.Graph()
    env: dict[int, Any] = {i: graph.placeholder(f"v{i}") for i in piece.ins}
    numbers = iter([graph.placeholder(f"number{k}") for k in range(len(piece.numbers))])
    for node in piece.nodes:
        check_words(node)
        given = unnumbered(node, next(numbers)) if node.target in NUMBERED else node.args
        args, kwargs = (_on(device, map_refs(tree, env.__getitem__)) for tree in (given, node.kwargs))
        named = dict(kwargs)
        if (
            node.target.startswith("aten.")
            and takes_device(node.target)
            and (not node.refs or named.get("device") is not None)
        ):
            named["device"] = device
        call = graph.call_function(_function(node.target), args, named)
        _define(graph, env, node, call)
    graph.output(tuple(env[out] for out in piece.outs))
    return torch.fx.GraphModule({}, graph)


def _function(target: str) -> Callable[..., Any]:
    """What stands for an operator in a graph."""
    return rearranged if target == REARRANGE else FOR_COMPILERS.get(target) or resolve(target)


def _on(device: torch.device, tree: Any) -> Any:
    """The arguments of a node on `device`: a program names none that exists."""
    if type(tree) is torch.device:
        return device
    return tuple(_on(device, item) for item in tree) if type(tree) is tuple else tree


def _define(graph: torch.fx.Graph, env: dict[int, Any], node: Node, call: Any) -> None:
    """Bind the results of a call, by `getitem` where there are several."""
    kind = result_kind(node.target)
    if kind == "one":
        for out in node.outs:
            if out is not None:
                env[out] = call
        return
    if kind == "nested":
        call = graph.call_function(flat_results, (call,))
    for place, out in enumerate(node.outs):
        if out is not None:
            env[out] = graph.call_function(operator.getitem, (call, place))


class Segment:
    """A compiled run of operators, as a callable that gives a flat sequence.

    `compiled`: what was compiled so far, for each way in which operands lay in memory.
    """

    def __init__(self, target: str, piece: SegmentPiece, compiler: str) -> None:
        self.target = target
        self.piece = piece
        self.compiled: dict[Any, SegmentFn] = {}
        self._compiler = compiler

    def __call__(self, *operands: Any) -> Sequence[torch.Tensor]:
        inputs = operands[: len(self.piece.ins)]
        lie: Any = tuple([x.stride() for x in inputs])
        device = inputs[0].device
        if self.piece.changed:
            lie = lie, shared(inputs)
        compiled = self.compiled.get((device, lie))
        given = (*inputs, *map(_number, operands[len(inputs) :]))
        if compiled is None:
            module = graph_of(self.piece, accelerator(inputs))
            compiled = self.compiled[device, lie] = compat.compile_graph(module, given, self._compiler)
        return compiled(*given)


@cache
def _number(value: int) -> torch.Tensor:
    """A number that a compiled function reads: of the host, so that nothing is sent to a device beforehand."""
    return torch.tensor(value)


def shared(inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """How operands overlap, for a function that writes to one of them: () where none do, else where each begins in
    which memory.
    """
    storages = [compat.storage_key(x) for x in inputs]
    if len(set(storages)) == len(storages):
        return ()
    spans: dict[int, list[tuple[int, int]]] = {}
    for x, storage in zip(inputs, storages, strict=True):
        length = (
            1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        )
        begin = int(x.storage_offset())
        spans.setdefault(storage, []).append((begin * x.itemsize, (begin + length) * x.itemsize))
    for mine in spans.values():
        mine.sort()
    if not any(a[1] > b[0] for mine in spans.values() for a, b in pairwise(mine)):
        return ()
    numbers = {storage: place for place, storage in enumerate(dict.fromkeys(storages))}
    return tuple((numbers[s], x.storage_offset()) for s, x in zip(storages, inputs, strict=True))
