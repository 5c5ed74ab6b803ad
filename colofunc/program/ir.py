"""Program: what is computed, as frozen data.

One record serves two views. The *global* view comes from the tracer: every value has its global shape and no layout.
The *local* view is what one rank does: every value also has a `Layout`, its `shape` is the rank's part, and
collectives and copies are nodes like any other. Both are printed, checked, saved and executed by the same code.

    Value   one tensor in single assignment: id, shape, dtype, name, role, layout
    Node    one operator call: target name, args in which `Ref(id)` stands for a value, the ids it defines
    Program inputs, nodes, outputs, and the trees that pack and unpack them
    Loop    what a node repeats: a program whose ids are its own

Arguments other than tensors are plain Python data (int, float, bool, str, None, tuple, torch.dtype, torch.device,
torch.memory_format, torch.layout). Nodes never mutate their inputs unless their target is registered as in place
(`colofunc.update_` and friends), which only the last pass introduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import attrs
import torch

from colofunc.dtensor.layout import Layout
from colofunc.dtensor.rule import Ref as Ref
from colofunc.errors import ProgramError
from colofunc.ops.kernels import Planned, Table

PHASES = ("forward", "backward", "update")


@attrs.frozen
class Value:
    """One tensor of a program. `shape` is global before lowering and local after it (then `layout` has both)."""

    id: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""  # dotted name of an input leaf ("params.lm_head.weight"), else a readable hint
    role: str = "activation"  # "param" | "frozen" | "buffer" | "state" | "grad" | "batch" | "constant" | "seed" | "activation"
    layout: Layout | None = None
    device_free: bool = False  # does not depend on any input (a mask, an arange)
    of: int | None = attrs.field(default=None, eq=False)  # local view: the global value that it is a copy of, as its layout says
    place: str = "device"  # tier of memory of a value without a layout, which otherwise says it

    @property
    def tier(self) -> str:
        """The tier of memory that it lies in: "device", "host" or "disk"."""
        return self.place if self.layout is None else self.layout.tier

    def in_tier(self, tier: str) -> Value:
        """The same value in another tier of memory."""
        layout = None if self.layout is None else self.layout.with_tier(tier)
        return attrs.evolve(self, layout=layout, place=tier)

    @property
    def nbytes(self) -> int:
        n = self.dtype.itemsize
        for s in self.shape:
            n *= s
        return n


@attrs.frozen
class Node:
    """One operator call.

    `target`: "aten.mm.default", "colofunc.linear", "colofunc.all_gather", ... `outs`: ids of the values it defines, in
    the order of the operator's flat tensor results; None where a result is absent or not a tensor.
    `phase`: forward, backward or update. `path`: the module path ("transformer.h.0.attn"). `line`: "file.py:12 in f".
    """

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[int | None, ...]
    phase: str = "forward"
    path: str = ""
    line: str = ""
    note: str = ""  # why a pass made this node ("linear wants b s (tp i)")
    loop: Loop | None = None  # of a `colofunc.loop` node: what it repeats
    kernel: Planned | None = attrs.field(default=None, eq=False, repr=False)  # what the plan counts for it, see `passes.kernels`

    @cached_property
    def refs(self) -> tuple[int, ...]:
        """Ids of the tensor operands, in order of appearance in args then kwargs (repeats kept)."""
        return tuple(_refs((self.args, self.kwargs)))


def _refs(tree: Any) -> Iterator[int]:
    if type(tree) is Ref:
        yield tree.id
    elif type(tree) is tuple:
        for item in tree:
            yield from _refs(item)


LOOP = "colofunc.loop"
GATHERS = ("sum", "max", "min", "stack")


@attrs.frozen(eq=False)
class Loop:
    """What a node `colofunc.loop` repeats; the node's operands are the inputs of `body`, the same in every trip.

    Inside, `axis_index` and `take_shard` over `axis` mean the number of the trip. Output k of the body is gathered over
    the trips as `gathers[k]` says ("sum", "max", "min" or "stack", which puts the trips in a leading dim) and is result
    k of the node. It is gathered as soon as it is ready (`loop.gathered_at`), so that it need not live to the trip's end.
    """

    body: Program
    trips: int
    axis: str
    gathers: tuple[str, ...]


def map_refs(tree: Any, fn: Callable[[int], Any]) -> Any:
    """`tree` with every `Ref(i)` replaced by `fn(i)`; the other leaves stay."""
    if type(tree) is Ref:
        return fn(tree.id)
    if type(tree) is tuple:
        return tuple(map_refs(item, fn) for item in tree)
    return tree


@attrs.frozen
class Program:
    """A whole step. `inputs` and `outputs` are value ids; `outputs` may repeat ids and contain inputs.

    `aliases`: pairs (position in outputs, position in inputs) of leaves that are updated in place (donated).
    `constants`: input id -> tensor that the program carries itself; these ids are inputs too, after the user's.
    """

    inputs: tuple[int, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    values: Mapping[int, Value]
    constants: Mapping[int, torch.Tensor] = attrs.field(factory=dict, eq=False)
    aliases: tuple[tuple[int, int], ...] = ()
    stage: str = "global"  # "global" | "local" | "inplace": what check_program allows
    kernels: Table | None = attrs.field(default=None, eq=False, repr=False)  # from which the executor chooses; None: the built-in ones

    def value(self, id: int) -> Value:
        return self.values[id]

    def producers(self) -> dict[int, Node]:
        """Value id -> the node that defines it (inputs have none)."""
        return {o: node for node in self.nodes for o in node.outs if o is not None}

    def last_uses(self) -> dict[int, int]:
        """Value id -> index of the last node that reads it; len(nodes) for outputs; absent if never read."""
        last: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            for ref in node.refs:
                last[ref] = index
        for out in self.outputs:
            last[out] = len(self.nodes)
        return last

    def with_nodes(self, nodes: Iterable[Node], values: Mapping[int, Value] | None = None) -> Program:
        return attrs.evolve(self, nodes=tuple(nodes), values=self.values if values is None else values)

    def reordered(self, nodes: Iterable[Node], values: Mapping[int, Value] | None = None) -> Program:
        """The program with its nodes in another order, for passes that move them.

        Raises ProgramError where a node reads, or the program returns, what no node before it has made.
        """
        changed = self.with_nodes(nodes, values)
        defined = set(changed.inputs)
        for index, node in enumerate(changed.nodes):
            for ref in node.refs:
                if ref not in defined:
                    raise ProgramError(f"node {index}, {node.target} at {node.line or 'no line'}, was moved before what makes its %{ref}")
            defined.update(o for o in node.outs if o is not None)
        for out in changed.outputs:
            if out not in defined:
                raise ProgramError(f"a pass that moves nodes has lost what makes the output %{out}")
        return changed
