"""Eager operators on DTensors: each call is a program of one node.

The operator's global call is typed on meta tensors, the cheapest strategy for the layouts at hand is chosen (what the
operands already have is preferred), lowered like any program, run on the backend, and cached by call and layouts.

Note [Host tensors and NCCL]: NCCL carries tensors on a GPU only, and a state may lie in host memory. What is to travel is copied
to the rank's GPU first, and what has come is copied to where its layout says: the part and the result are on the GPU for as long as
the call takes. The other way, gloo beside NCCL, would need no memory there, but a second group for every group of ranks, which a
process group of the user's ("nccl") does not have, and a network that is 10 to 100 times slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from colofunc.errors import InputError, RuleError
from colofunc.executors.backend import Backend
from colofunc.executors.disk.tensors import in_memory
from colofunc.executors.pools import in_tier
from colofunc.executors.watch import meet
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of
from colofunc.ops.define import KERNELS
from colofunc.ops.targets import target_of
from colofunc.program.facts import has_wires
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.lower import Choice, lower
from colofunc.program.placing import placing_of
from colofunc.program.tracing.ops import functional_form
from colofunc.program.tracing.trace import record_local
from colofunc.spec.conversions.conversion import conversion, conversion_s
from colofunc.spec.layout import Layout
from colofunc.spec.parts import holds
from colofunc.spec.rule import Call, Rule, Strategy, TensorType
from colofunc.spec.rules import rule_for, strategies_for
from colofunc.spec.strategies import FREE, enumerate_strategies, follow, replicated_strategy

Shards = list[torch.Tensor]
_MASKS = (torch.bool, torch.uint8)
_WRITES_AT = frozenset({torch.ops.aten.index_put, torch.ops.aten.index_put_})


@lru_cache(maxsize=1 << 14)
def _conversion_program(src: Layout, dst: Layout, mesh: Mesh, dtype: torch.dtype) -> Program:
    values = {0: Value(0, src.local_shape, dtype, layout=src)}
    nodes = []
    for move in conversion(src, dst, mesh, dtype.itemsize).moves:
        id = len(values)
        values[id] = Value(id, move.local_shape, dtype, layout=move.layout)
        note = f"{src.text()} -> {dst.text()}"
        nodes.append(Node(f"colofunc.{move.target}", (Ref(id - 1), *move.args), (), (id,), note=note, on=move.on))
    return Program((0,), tuple(nodes), (len(values) - 1,), values, stage="local")


def convert_shards(shards: Shards, src: Layout, dst: Layout, mesh: Mesh, backend: Backend, what: str = "redistribute") -> Shards:
    """The owned ranks' parts of a tensor in `dst`, from those in `src`. Collective. `what` was called, for errors.

    See Note [Host tensors and NCCL].
    """
    wanted = dst
    src, dst = src.with_tier("device"), dst.with_tier("device")  # the memory of a part is seen by everybody in its process
    if src is dst:
        return list(settled(shards, wanted, mesh))
    program = _conversion_program(src, dst, mesh, shards[0].dtype)
    if has_wires(program):
        if backend.watch is not None:
            meet(backend.watch, f"{what} of a DTensor {src.shape} {src.text()!r}")
        shards = to_compute(shards, device_of(mesh))
    made = backend.run(program, mesh, [shards])[0]
    if dst.at is not None:
        made = [x if holds(dst.at, mesh, rank) else x.new_empty(0) for rank, x in zip(backend.ranks(mesh), made, strict=True)]
    return settled(made, wanted, mesh)


def settled(shards: Shards, layout: Layout, mesh: Mesh) -> Shards:
    """Parts in the memory that their layout says, beside the device on which steps on the mesh run."""
    device = device_of(mesh)
    moved = {id(x): in_tier(x, layout.tier, device) for x in shards}
    return [moved[id(x)] for x in shards]


def to_compute(shards: Shards, device: torch.device) -> Shards:
    """Parts where operators and NCCL take them. Ranks that share a part go on sharing it."""
    if device.type == "cpu":
        return shards
    moved = {id(x): in_tier(in_memory(x), "device", device) for x in shards}
    return [moved[id(x)] for x in shards]


@attrs.frozen
class _Eager:
    """A lowered operator: its program, and what its flat results are (a layout, or a constant that is no tensor)."""

    program: Program
    layouts: tuple[Layout | None, ...]
    tree: Any


def run_eager(func: Any, leaves: Sequence[Any], tree: Any, mesh: Mesh, backend: Backend, cls: Any) -> tuple[list[Any], Any]:
    """Run `func` on flat arguments in which operands are DTensors (`cls`): (results, their tree).

    A result is (shards, layout) or plain data. An in-place operator runs as the one that returns a new tensor: its
    result 0 is what the first argument is to become.
    """
    plain = functional(func) if written_argument(func) else func
    operands = [x for x in leaves if isinstance(x, cls)]
    key = tuple(("T", tuple(x.shape), x.dtype) if isinstance(x, cls) else x for x in leaves)
    eager = _lowered(plain, _Leaves(key), tree, tuple(x.sharding for x in operands), mesh, KERNELS.get(target_of(plain)))
    if backend.watch is not None and has_wires(eager.program):
        meet(backend.watch, f"{target_of(plain)} of a DTensor {operands[0].sharding.shape} {operands[0].sharding.text()!r}")
    device = device_of(mesh)
    outs = iter(backend.run(eager.program, mesh, [to_compute(x.parts, device) for x in operands]))
    results: list[Any] = [None if layout is None else (next(outs), layout) for layout in eager.layouts]
    return results, eager.tree


class _Leaves:
    """Flat arguments as a cache key (some, like lists, are unhashable by themselves: compared by their repr)."""

    __slots__ = ("key", "leaves")

    def __init__(self, leaves: tuple[Any, ...]) -> None:
        self.leaves = leaves
        self.key = tuple(x if isinstance(x, tuple) else (type(x), repr(x)) for x in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Leaves) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=4096)
def written_argument(func: Any) -> bool:
    """Whether an operator such as `add_` writes to its first argument; refuses other mutation."""
    written = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not written:
        return False
    first = func._schema.arguments[0]
    if len(written) > 1 or written[0].name != first.name or str(first.type) != "Tensor":
        raise InputError(
            f"{func} writes to {', '.join(repr(a.name) for a in written)}, which DTensors do not do outside a step; use the "
            "operator that returns new tensors (optimizers: foreach=False, fused=False)"
        )
    return True


def check_shape_known(func: Any, leaves: Sequence[Any]) -> None:
    """Refuse operators whose result, or the shape of an operand, follows from data."""
    packet = func.overloadpacket
    if packet is torch.ops.aten.index or packet in _WRITES_AT:
        tensors = [x for x in leaves[1:] if isinstance(x, torch.Tensor)]
        masked = any(x.dtype in _MASKS for x in (tensors[:-1] if packet in _WRITES_AT else tensors))
        if masked and (packet not in _WRITES_AT or tensors[-1].numel() > 1):
            raise InputError(
                "indexing a DTensor with a mask takes or wants as many elements as the mask has, which is known only from data; "
                "keep the shape with torch.where(mask, x, y), or take x.full()[mask]"
            )
    elif torch.Tag.dynamic_output_shape in func.tags:
        raise InputError(f"{target_of(func)} on a DTensor makes a result whose shape depends on data; ask it of x.full()")


@lru_cache(maxsize=4096)
def reshapes(func: Any) -> bool:
    """Whether an operator changes the shape of its argument where it stands (`squeeze_`)."""
    return torch.Tag.inplace_view in func.tags


@lru_cache(maxsize=4096)
def is_view(func: Any) -> bool:
    """Whether results of an operator are views of its first argument."""
    first = func._schema.arguments[0] if func._schema.arguments else None
    said = first is not None and first.alias_info is not None and not first.alias_info.is_write
    return said or target_of(func).rsplit(".", 1)[0] in FREE  # `unsafe_split` does not say so


@lru_cache(maxsize=4096)
def functional(func: Any) -> Any:
    """`aten.add_.Tensor` -> `aten.add.Tensor`."""
    form = functional_form(func)
    if form is None:
        raise InputError(f"{func} has no form that returns a new tensor; write x = f(x) instead of the in-place call")
    return form


@lru_cache(maxsize=4096)
def _lowered(func: Any, keyed: _Leaves, tree: Any, layouts: tuple[Layout, ...], mesh: Mesh, kernel: Any) -> _Eager:
    """`kernel`: a part of the cache's key, because an operator of `cf.operator` can be defined again."""
    metas: list[Any] = []
    ids: list[Any] = []
    values: dict[int, Value] = {}
    for leaf in keyed.leaves:
        if isinstance(leaf, tuple) and len(leaf) == 3 and leaf[0] == "T":
            id = len(values)
            values[id] = Value(id, leaf[1], leaf[2])
            metas.append(torch.empty(leaf[1], dtype=leaf[2], device="meta"))
            ids.append(Ref(id))
        else:
            metas.append(torch.device("meta") if isinstance(leaf, torch.device) else leaf)
            ids.append(leaf)
    meta_args, meta_kwargs = pytree.tree_unflatten(metas, tree)
    try:
        flat, out_tree = pytree.tree_flatten(func(*meta_args, **meta_kwargs))
    except NotImplementedError as error:
        raise InputError(f"torch cannot say what {target_of(func)} returns without data; ask it of x.full()") from error
    args, kwargs = pytree.tree_unflatten(ids, tree)
    outs: list[int | None] = []
    n_inputs = len(values)
    for result in flat:
        if isinstance(result, torch.Tensor):
            outs.append(len(values))
            values[len(values)] = Value(len(values), tuple(result.shape), result.dtype)
        else:
            outs.append(None)
    name = target_of(func)
    node = Node(name, _tuples(args), tuple((k, _tuples(v)) for k, v in kwargs.items()), tuple(outs))
    ins = tuple(TensorType(values[i].shape, values[i].dtype) for i in range(n_inputs))
    types = tuple(None if o is None else TensorType(values[o].shape, values[o].dtype) for o in outs)
    call = Call(name, node.args, node.kwargs, ins, types)
    choice = _choose(call, func, tuple(layout.with_at(None) for layout in layouts), mesh)
    program = Program(tuple(range(n_inputs)), (node,), tuple(o for o in outs if o is not None), values)
    placing = placing_of(program, {k: layout.at for k, layout in enumerate(layouts) if layout.at is not None}, mesh)
    at = None if placing is None else placing.nodes[0]
    outs_at = tuple(None if layout is None else layout.with_at(at) for layout in choice.strategy.outs)
    if placing is not None:
        placing = attrs.evolve(placing, outputs=(at,) * len(program.outputs))
    out_layouts = [layout for layout in outs_at if layout is not None]
    local = lower(program, [choice], dict(enumerate(layouts)), out_layouts, mesh, record_local, placing=placing)
    return _Eager(local, outs_at, out_tree)


def _tuples(tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return tuple(_tuples(x) for x in tree)
    return tree


def _choose(call: Call, func: Any, layouts: tuple[Layout, ...], mesh: Mesh) -> Choice:
    """The cheapest strategy that takes some operand as it lies; any other only where none does."""
    rule: Rule | None = rule_for(call)
    if rule is None and torch.Tag.nondeterministic_seeded in func.tags:
        raise RuleError(
            f"{call.target} draws random numbers and has no form keyed by position, so they could not be the same on every mesh; "
            "draw with torch.rand_like, torch.randn_like, torch.bernoulli or F.dropout"
        )
    options: list[Strategy] = []
    if rule is not None:
        options += [s for k, lay in enumerate(layouts) if (s := follow(call, rule, k, lay)) is not None]
    # Only axes that some operand lies on: results stay where a reader expects them, nothing is cut further unasked.
    used = {a for lay in layouts for a in (*lay.axes, *(p for p, _ in lay.pending))}
    options += enumerate_strategies(call, rule, mesh, tuple(a for a in mesh.axis_names if a in used))
    options += [s for s in strategies_for(call, mesh) if used.issuperset(a for lay in s.ins for a in lay.axes)]
    options.append(replicated_strategy(call))

    def seconds(s: Strategy) -> float:
        moved = sum(conversion_s(a, b, mesh, t.dtype.itemsize) for a, b, t in zip(layouts, s.ins, call.ins, strict=True))
        dtype = str(call.ins[0].dtype if call.ins else torch.float32).removeprefix("torch.")
        return moved + s.cost.extra_s + mesh.compute_s(s.cost.flops, s.cost.nbytes, dtype)

    return Choice(min(options, key=seconds), rule)
