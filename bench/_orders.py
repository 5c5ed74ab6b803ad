"""Orders of work that others choose, as programs of ours: torch's partitioner under a memory budget, `checkpoint_sequential`.

Problem: tools that keep or make again are compared by what their own estimates say, each on a graph of its own. Idea: the
program of a step is handed to the other one as its graph; what it decides to save is written down as an order of the same
nodes (`program/passes/recompute.py`), so that one accountant counts the bytes of all and one model their seconds.

    for budget in (0.0, 0.5, 1.0):
        made = partitioned(program, node_s, budget)      # functorch's min-cut partitioner, activation_memory_budget=0.5
    made = sequential(program, ["layer1.0", "layer1.1", ...], segments=4)

The partitioner (`torch._functorch.partitioners`, private, hence here and not in the library) gets the same nodes with their
shapes, and for its knapsack the seconds of the same model instead of flops. It asks an operator's kind by its aten name: ours
go in under that of their kind, and norms as reductions that may be made again, as they are behind its decompositions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import getitem

import attrs
import torch
from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomRuntimeEstimator
from torch._subclasses import FakeTensorMode

from colofunc.program.aliases import aliases
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Node, Program
from colofunc.program.passes.recompute import Replay

aten = torch.ops.aten
KINDS = {  # ours, and what torch decomposes -> an operator of that kind
    "colofunc.linear": aten.mm.default,
    "colofunc.attention": aten._scaled_dot_product_flash_attention.default,
    "aten.native_layer_norm": aten.var_mean.correction,
    "aten._native_batch_norm_legit_functional": aten.var_mean.correction,
    "aten.native_batch_norm": aten.var_mean.correction,
    "aten._log_softmax": aten.sum.dim_IntList,
    "aten.embedding": aten.index.Tensor,
    "aten.transpose": aten.permute.default,
}


def kind_of(node: Node) -> Callable[..., object]:
    """The aten operator that the partitioner is to take a node for."""
    parts = node.target.split(".")
    found = KINDS.get(".".join(parts[:2]))
    if found is None and parts[0] == "aten":
        found = getattr(getattr(aten, parts[1]), parts[2], None)
    return found if found is not None else aten.bernoulli.default  # of no kind: neither recomputed by default nor fused


def joint(program: Program) -> tuple[fx.GraphModule, int]:
    """(forward and backward of a step as the partitioner wants them, number of results of forward). Nodes have the names n0, n1, ..."""
    first = first_of(program)
    memory, graph = aliases(program), fx.Graph()
    there: dict[int, fx.Node] = {}
    with FakeTensorMode():
        bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}

        def shown(id: int) -> torch.Tensor:
            """A tensor without data in the storage of its group."""
            value = program.values[id]
            base = bases.setdefault((memory.group(id), value.dtype), torch.empty(1, dtype=value.dtype))
            return base.as_strided(value.shape, (0,) * len(value.shape))

        for number, id in enumerate(program.inputs):
            there[id] = graph.placeholder(f"primals_{number + 1}")
            there[id].meta["val"] = shown(id)
        tangent = graph.placeholder("tangents_1")
        tangent.meta["val"] = torch.empty(())
        for k, node in enumerate(program.nodes):
            if node.phase == "update":
                continue
            args = (*(there[r] for r in node.refs), *((tangent,) if k == first else ()))
            made = graph.create_node("call_function", kind_of(node), args, name=f"n{k}")
            outs = [o for o in node.outs if o is not None]
            made.meta["val"] = shown(outs[0]) if len(node.outs) == 1 and outs else tuple(map(shown, outs))
            for position, o in enumerate(outs):
                there[o] = made if len(node.outs) == 1 else _item(graph, made, position, shown(o), k)
    wanted = {*program.outputs, *(r for node in program.nodes if node.phase == "update" for r in node.refs)}
    results = {
        phase: [there[o] for node in program.nodes if node.phase == phase for o in node.outs if o in wanted and o in there]
        for phase in ("forward", "backward")
    }  # fmt: skip
    graph.output([*results["forward"], *results["backward"]])
    return fx.GraphModule(torch.nn.Module(), graph), len(results["forward"])


def _item(graph: fx.Graph, made: fx.Node, position: int, shown: torch.Tensor, k: int) -> fx.Node:
    item = graph.create_node("call_function", getitem, (made, position), name=f"n{k}_{position}")
    item.meta["val"] = shown
    return item


@attrs.frozen
class _Seconds(CustomRuntimeEstimator):
    """For the partitioner's knapsack: what a node costs in the common model."""

    program: Program
    node_s: NodeSeconds

    def __call__(self, node: fx.Node) -> float:
        return self.node_s(self.program.nodes[int(node.name.removeprefix("n").split("_")[0])], self.program.values)

    def uuid(self) -> None:
        """Nothing is cached."""


def partitioned(program: Program, node_s: NodeSeconds, budget: float) -> Program:
    """The order that `activation_memory_budget` = `budget` makes: what is not saved is made again when backward first reads it."""
    module, count = joint(program)
    with config.patch(activation_memory_budget=budget, activation_memory_budget_runtime_estimator=_Seconds(program, node_s), cse=False):
        _, back = min_cut_rematerialization_partition(module, (), num_fwd_outputs=count)
    names = {node.name for node in back.graph.find_nodes(op="placeholder")}
    saved = set[int]()
    for k, node in enumerate(program.nodes):
        outs = [o for o in node.outs if o is not None]
        saved |= {o for p, o in enumerate(outs) if (f"n{k}" if len(node.outs) == 1 else f"n{k}_{p}") in names}
    first, order = first_of(program), Replay(program)
    for k in range(first):
        order.run(k)
    order.want(sorted(saved))
    order.drop(_droppable(program) - saved)
    for k in range(first, len(program.nodes)):
        order.run(k)
    return order.finish()


def sequential(program: Program, functions: Sequence[str], segments: int) -> Program:
    """`torch.utils.checkpoint.checkpoint_sequential(functions, segments)`: equal numbers of functions a segment, all but the last
    made again as a whole when backward comes to them, up to what backward reads.

    functions: paths of modules in the order in which they run. What is before the first of them and behind the last is kept.
    """
    first, gone = first_of(program), _droppable(program)
    begins = [min(k for k, node in enumerate(program.nodes[:first]) if _inside(node.path, name)) for name in functions]
    size = len(functions) // segments
    edges = [begins[size * s] for s in range(segments)]  # the last segment begins at the last of them
    maker = {o: k for k, node in enumerate(program.nodes) for o in node.outs if o is not None}
    of = {v: bisect_right(edges, maker[v]) - 1 for v in gone if edges[0] <= maker[v] < edges[-1]}
    entering = {r for k, node in enumerate(program.nodes[:first]) for r in node.refs if of.get(r, -1) < bisect_right(edges, k) - 1}
    held = {v for v in of if v not in entering}
    read = {r for node in program.nodes[first:] for r in node.refs}
    order = Replay(program)
    for k in range(first):
        order.run(k)
    order.drop(held)
    for k in range(first, len(program.nodes)):
        for segment in sorted({of[r] for r in program.nodes[k].refs if r in held and r not in order.there}, reverse=True):
            order.want(sorted(v for v in held & read if of[v] == segment))
        order.run(k)
    return order.finish()


def first_of(program: Program) -> int:
    """Where backward begins."""
    return next(k for k, node in enumerate(program.nodes) if node.phase == "backward")


def _inside(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _droppable(program: Program) -> set[int]:
    """What forward makes for itself and for backward alone."""
    late = {*program.outputs, *(r for node in program.nodes if node.phase == "update" for r in node.refs)}
    made = program.nodes[: first_of(program)]
    return {o for node in made if node.phase != "update" for o in node.outs if o is not None and o not in late}
