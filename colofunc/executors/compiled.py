"""Compiled segments: what lies between collectives becomes one `torch.compile` function each.

Problem: a compiler fuses operators, and must not see collectives of a simulated mesh or of a process group. Idea: cut
the local program at its collectives; each run of compute nodes is an FX graph, compiled as a whole, and the program of
segments runs on any executor like any other program.

    linear gelu linear | all_reduce | add layer_norm       ->       segment_0, all_reduce, segment_1

Segments are compiled at their first call. Where the compiler is missing or fails, its error passes through: a step
that was asked to be compiled is not silently run otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.fx

from colofunc.executors.kernels import check_words, result_kind
from colofunc.executors.source import flat_results
from colofunc.ops.targets import resolve
from colofunc.program.facts import kind_of, written
from colofunc.program.ir import Node, Program, Ref, map_refs


def compile_segments(program: Program, compiler: str = "inductor") -> tuple[Program, Mapping[str, Callable[..., Any]]]:
    """(program of segments and collectives, target of each segment -> compiled callable). So are bodies of loops."""
    bound: dict[str, Callable[..., Any]] = {}
    return _segmented(program, compiler, bound), bound


def _segmented(program: Program, compiler: str, bound: dict[str, Callable[..., Any]]) -> Program:
    last = program.last_uses()
    nodes: list[Node] = []
    for first, group in _runs(program):
        if kind_of(group[0]) is not None:
            nodes += [_with_body(node, compiler, bound) for node in group]
            continue
        segment = _segment(group, first + len(group), last, f"segment.{len(bound)}")
        bound[segment.target] = Segment(graph_of(group, segment, program), compiler)
        nodes.append(segment)
    return attrs.evolve(program, nodes=tuple(nodes))


def _with_body(node: Node, compiler: str, bound: dict[str, Callable[..., Any]]) -> Node:
    if node.loop is None:
        return node
    return attrs.evolve(node, loop=attrs.evolve(node.loop, body=_segmented(node.loop.body, compiler, bound)))


def _runs(program: Program) -> list[tuple[int, list[Node]]]:
    """Maximal runs of compute nodes and of nodes that executors emit themselves, with the index of their first node."""
    runs: list[tuple[int, list[Node]]] = []
    for index, node in enumerate(program.nodes):
        own = kind_of(node) is not None
        if runs and (kind_of(runs[-1][1][0]) is not None) == own:
            runs[-1][1].append(node)
        else:
            runs.append((index, [node]))
    return runs


def _segment(group: list[Node], end: int, last: Mapping[int, int], target: str) -> Node:
    """One node in place of a run: reads what the run reads from outside, defines what is read after it."""
    inside = {o for node in group for o in node.outs if o is not None}
    ins = dict.fromkeys(i for node in group for i in node.refs if i not in inside)
    outs = tuple(o for node in group for o in node.outs if o is not None and last.get(o, -1) >= end)
    head = group[0]
    changed = {i for node in group for i in written(node)}
    target = f"{target}.{'_'.join(str(k) for k, i in enumerate(ins) if i in changed)}"
    return Node(target, tuple(Ref(i) for i in ins), (), outs, head.phase, head.path, head.line, f"{len(group)} operators compiled")


def graph_of(group: list[Node], segment: Node, program: Program) -> torch.fx.GraphModule:
    """The FX graph of a run of nodes; its results are a tuple."""
    graph = torch.fx.Graph()
    env: dict[int, Any] = {i: graph.placeholder(f"v{i}") for i in segment.refs}
    for node in group:
        check_words(node)
        args = map_refs(node.args, env.__getitem__)
        kwargs = {k: map_refs(v, env.__getitem__) for k, v in node.kwargs}
        call = graph.call_function(resolve(node.target), args, kwargs)
        _define(graph, env, node, call)
    graph.output(tuple(env[o] for o in segment.outs if o is not None))
    return torch.fx.GraphModule({}, graph)


def _define(graph: torch.fx.Graph, env: dict[int, Any], node: Node, call: Any) -> None:
    """Bind the results of a call, by `getitem` where there are several."""
    kind = result_kind(node.target)
    if kind == "one":
        for o in node.outs:
            if o is not None:
                env[o] = call
        return
    if kind == "nested":
        call = graph.call_function(flat_results, (call,))
    for k, o in enumerate(node.outs):
        if o is not None:
            env[o] = graph.call_function(operator.getitem, (call, k))


class Segment:
    """A compiled run of operators, as a callable that gives a flat tuple."""

    def __init__(self, module: torch.fx.GraphModule, compiler: str) -> None:
        self.module = module
        self._compiled: Any = torch.compile(module, backend=compiler, fullgraph=True, dynamic=False)

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._compiled(*inputs)
