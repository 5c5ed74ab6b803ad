"""Eager operators on DTensors: each call is a program of one node.

The operator's global call is typed on meta tensors, the cheapest strategy for the layouts at hand is chosen (what the
operands already have is preferred), lowered like any program, run on the backend, and cached by call and layouts.

Note [Host tensors and NCCL]: NCCL carries tensors on a GPU only, and a state may lie in host memory. What is to travel
is copied to the rank's GPU first, and what has come is copied to where its layout says: the part and the result are on
the GPU for as long as the call takes. The other way, gloo beside NCCL, would need no memory there, but a second group
for every group of ranks, which a process group of the user's ("nccl") does not have, and a network that is 10 to 100
times slower.
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
from colofunc.executors.simulated import Shards
from colofunc.executors.watch import meet
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of
from colofunc.ops.define import KERNELS
from colofunc.ops.targets import is_view, target_of
from colofunc.plugins import Registry, build_registry
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
from colofunc.spec.strategies import enumerate_strategies, follow, replicated_strategy

_MASKS = (torch.bool, torch.uint8)
"""Dtypes of indices that are masks."""

_WRITES_AT = frozenset({torch.ops.aten.index_put, torch.ops.aten.index_put_})
"""Operators that write at indices; the last of their tensors is what they write."""


@lru_cache(maxsize=1 << 14)
def _conversion_program(src: Layout, dst: Layout, mesh: Mesh, dtype: torch.dtype) -> Program:
    values = {0: Value(0, src.local_shape, dtype, layout=src)}
    nodes = []
    note = f"{src.text()} -> {dst.text()}"
    for move in conversion(src, dst, mesh, dtype.itemsize).moves:
        id = len(values)
        values[id] = Value(id, move.local_shape, dtype, layout=move.layout)
        nodes.append(Node(f"colofunc.{move.target}", (Ref(id - 1), *move.args), (), (id,), note=note, on=move.on))
    return Program((0,), tuple(nodes), (len(values) - 1,), values, stage="local")


def convert_shards(
    shards: Shards, src: Layout, dst: Layout, mesh: Mesh, backend: Backend, what: str = "redistribute"
) -> Shards:
    """The owned ranks' parts of a tensor in `dst`, from those in `src`. Collective. `what` was called, for errors.

    See Note [Host tensors and NCCL].
    """
    wanted = dst
    # the memory of a part is seen by everybody in its process
    src, dst = src.with_tier("device"), dst.with_tier("device")
    if src is dst:
        return list(settled_parts(shards, wanted, mesh))
    program = _conversion_program(src, dst, mesh, shards[0].dtype)
    if has_wires(program):
        if backend.watch is not None:
            meet(backend.watch, f"{what} of a DTensor {src.shape} {src.text()!r}")
        shards = to_compute(shards, device_of(mesh))
    parts = backend.run(program, mesh, [shards])[0]
    if dst.at is not None:
        there = [holds(dst.at, mesh, rank) for rank in backend.ranks(mesh)]
        parts = [part if exists else part.new_empty(0) for part, exists in zip(parts, there, strict=True)]
    return settled_parts(parts, wanted, mesh)


def settled_parts(shards: Shards, layout: Layout, mesh: Mesh) -> Shards:
    """Parts in the memory that their layout says, beside the device on which steps on the mesh run."""
    device = device_of(mesh)
    moved = {id(shard): in_tier(shard, layout.tier, device) for shard in shards}
    return [moved[id(shard)] for shard in shards]


def to_compute(shards: Shards, device: torch.device) -> Shards:
    """Parts where operators and NCCL take them. Ranks that share a part go on sharing it."""
    if device.type == "cpu":
        return shards
    moved = {id(shard): in_tier(in_memory(shard), "device", device) for shard in shards}
    return [moved[id(shard)] for shard in shards]


@attrs.frozen
class _Eager:
    """A lowered operator: its program, and what its flat results are (a layout, or a constant that is no tensor)."""

    program: Program
    layouts: tuple[Layout | None, ...]
    tree: Any


def run_eager(
    func: Any, leaves: Sequence[Any], tree: Any, mesh: Mesh, backend: Backend, cls: Any
) -> tuple[list[Any], Any]:
    """Run `func` on flat arguments in which operands are DTensors (`cls`): (results, their tree).

    A result is (shards, layout) or plain data. An in-place operator runs as the one that returns a new tensor: its
    result 0 is what the first argument is to become.
    """
    plain = functional(func) if written_argument(func) else func
    operands = [leaf for leaf in leaves if isinstance(leaf, cls)]
    layouts = tuple(operand.sharding for operand in operands)
    described = tuple(TensorType(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, cls) else leaf for leaf in leaves)
    eager = _lowered(plain, _Leaves(described), tree, layouts, mesh, KERNELS.get(target_of(plain)))
    if backend.watch is not None and has_wires(eager.program):
        meet(backend.watch, f"{target_of(plain)} of a DTensor {layouts[0].shape} {layouts[0].text()!r}")
    device = device_of(mesh)
    outs = iter(backend.run(eager.program, mesh, [to_compute(operand.parts, device) for operand in operands]))
    results: list[Any] = []
    for layout in eager.layouts:
        results.append(None if layout is None else (next(outs), layout))
    return results, eager.tree


class _Leaves:
    """Flat arguments as a cache key, a `TensorType` in place of each operand.

    Others are compared by their repr: some are unhashable, and True, 1 and 1.0 are not the same argument.
    """

    __slots__ = ("key", "leaves")

    def __init__(self, leaves: tuple[Any, ...]) -> None:
        self.leaves = leaves
        self.key = tuple(leaf if isinstance(leaf, TensorType) else (type(leaf), repr(leaf)) for leaf in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Leaves) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=4096)
def written_argument(func: Any) -> bool:
    """Whether an operator such as `add_` writes to its first argument; refuses other mutation."""
    arguments = func._schema.arguments
    written: list[str] = []
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name)
    if not written:
        return False
    first = arguments[0]
    if written != [first.name] or str(first.type) != "Tensor":
        raise InputError(
            f"{func} writes to {', '.join(map(repr, written))}, which DTensors do not do outside a step; use the "
            "operator that returns new tensors (optimizers: foreach=False, fused=False)"
        )
    return True


def check_shape_known(func: Any, leaves: Sequence[Any]) -> None:
    """Raise InputError of operators whose result, or the shape of an operand, follows from data."""
    packet = func.overloadpacket
    if packet is torch.ops.aten.index or packet in _WRITES_AT:
        if _counts_mask(packet, leaves):
            raise InputError(
                "indexing a DTensor with a mask takes or wants as many elements as the mask has, which is known only "
                "from data; keep the shape with torch.where(mask, x, y), or take x.full()[mask]"
            )
    elif torch.Tag.dynamic_output_shape in func.tags:
        raise InputError(
            f"{target_of(func)} on a DTensor makes a result whose shape depends on data; ask it of x.full()"
        )


def _counts_mask(packet: Any, leaves: Sequence[Any]) -> bool:
    """Whether an operator at indices has a mask among them, and as many elements to take or write as the mask has."""
    indices = [leaf for leaf in leaves[1:] if isinstance(leaf, torch.Tensor)]
    if packet in _WRITES_AT:
        written = indices.pop()
        if written.numel() <= 1:  # the same everywhere, however many there are
            return False
    return any(index.dtype in _MASKS for index in indices)


@lru_cache(maxsize=4096)
def reshapes(func: Any) -> bool:
    """Whether an operator changes the shape of its argument where it stands (`squeeze_`)."""
    return torch.Tag.inplace_view in func.tags


@lru_cache(maxsize=4096)
def returns_views(func: Any) -> bool:
    """Whether results of an operator are views of its first argument."""
    if is_view(target_of(func)):  # the schema of `unsafe_split` does not say so
        return True
    arguments = func._schema.arguments
    if not arguments or arguments[0].alias_info is None:
        return False
    return not arguments[0].alias_info.is_write


@lru_cache(maxsize=4096)
def functional(func: Any) -> Any:
    """`aten.add_.Tensor` -> `aten.add.Tensor`."""
    form = functional_form(func)
    if form is None:
        raise InputError(f"{func} has no form that returns a new tensor; write x = f(x) instead of the in-place call")
    return form


@lru_cache(maxsize=4096)
def _lowered(func: Any, arguments: _Leaves, tree: Any, layouts: tuple[Layout, ...], mesh: Mesh, kernel: Any) -> _Eager:
    """`kernel`: a part of the cache's key, because an operator of `cf.operator` can be defined again."""
    program, call, out_tree = _program_of_one(func, arguments.leaves, tree)
    given = {position: layout.at for position, layout in enumerate(layouts) if layout.at is not None}
    everywhere = [layout.with_at(None) for layout in layouts]
    for axis, _ in given.values():  # an operator that runs at some indices of an axis has whole operands there
        everywhere = [layout.whole_along(axis) for layout in everywhere]
    choice = _choose(call, func, tuple(everywhere), mesh)
    placing = placing_of(program, given, mesh)
    at = None
    if placing is not None:  # results, scalars too, stay where the operator runs
        at = placing.nodes[0]
        placing = attrs.evolve(placing, outputs=(at,) * len(program.outputs))
    out_layouts = tuple(None if layout is None else layout.with_at(at) for layout in choice.strategy.outs)
    tensor_layouts = [layout for layout in out_layouts if layout is not None]
    local = lower(program, [choice], dict(enumerate(layouts)), tensor_layouts, mesh, record_local, placing=placing)
    return _Eager(local, out_layouts, out_tree)


def _program_of_one(func: Any, leaves: Sequence[Any], tree: Any) -> tuple[Program, Call, Any]:
    """The global program whose one node is the operator, its call, and the tree of its results.

    Raises InputError of an operator whose results torch does not know without data.
    """
    values: dict[int, Value] = {}

    def add(typ: TensorType) -> int:
        id = len(values)
        values[id] = Value(id, typ.shape, typ.dtype)
        return id

    ins: list[TensorType] = []
    metas: list[Any] = []  # the arguments for torch to type the call
    refs: list[Any] = []  # the arguments of the node
    for leaf in leaves:
        if isinstance(leaf, TensorType):
            ins.append(leaf)
            metas.append(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))
            refs.append(Ref(add(leaf)))
        else:
            metas.append(torch.device("meta") if isinstance(leaf, torch.device) else leaf)
            refs.append(leaf)
    meta_args, meta_kwargs = pytree.tree_unflatten(metas, tree)
    try:
        results, out_tree = pytree.tree_flatten(func(*meta_args, **meta_kwargs))
    except NotImplementedError as error:
        raise InputError(f"torch cannot say what {target_of(func)} returns without data; ask it of x.full()") from error

    types: list[TensorType | None] = []
    outs: list[int | None] = []
    for result in results:
        typ = TensorType(tuple(result.shape), result.dtype) if isinstance(result, torch.Tensor) else None
        types.append(typ)
        outs.append(None if typ is None else add(typ))
    args, kwargs = pytree.tree_unflatten(refs, tree)
    keywords = tuple((name, _tuples(value)) for name, value in kwargs.items())
    node = Node(target_of(func), _tuples(args), keywords, tuple(outs))
    call = Call(node.target, node.args, node.kwargs, tuple(ins), tuple(types))
    program = Program(tuple(range(len(ins))), (node,), node.results, values)
    return program, call, out_tree


def _tuples(tree: Any) -> Any:
    """A tree with its lists as tuples, which can be hashed."""
    if isinstance(tree, (list, tuple)):
        return tuple(_tuples(branch) for branch in tree)
    return tree


def _choose(call: Call, func: Any, layouts: tuple[Layout, ...], mesh: Mesh) -> Choice:
    """The cheapest strategy for operands that lie so; of equally cheap ones, one that takes some operand as it lies.

    By the rules and strategies of colofunc and of installed plugins. Raises RuleError of operators that draw random
    numbers and have no rule, and where a rule contradicts the operator's shapes.
    """
    registry = build_registry(())
    rule = registry.rule(call)
    if rule is not None:
        rule.check(call)
    elif torch.Tag.nondeterministic_seeded in func.tags:
        raise RuleError(
            f"{call.target} draws random numbers and has no form keyed by position, so they could not be the same on "
            "every mesh; draw with torch.rand_like, torch.randn_like, torch.bernoulli or F.dropout"
        )
    dtype = str(call.ins[0].dtype if call.ins else torch.float32).removeprefix("torch.")

    def seconds(strategy: Strategy) -> float:
        moved_s = 0.0
        for layout, wanted, typ in zip(layouts, strategy.ins, call.ins, strict=True):
            moved_s += conversion_s(layout, wanted, mesh, typ.dtype.itemsize)
        return moved_s + strategy.cost.extra_s + mesh.compute_s(strategy.cost.flops, strategy.cost.nbytes, dtype)

    return Choice(min(_options(call, rule, layouts, mesh, registry), key=seconds), rule)


def _options(
    call: Call, rule: Rule | None, layouts: tuple[Layout, ...], mesh: Mesh, registry: Registry
) -> list[Strategy]:
    """Strategies for operands that lie so. Those that take some operand as it lies are the first."""
    options: list[Strategy] = []
    if rule is not None:
        for position, layout in enumerate(layouts):
            strategy = follow(call, rule, position, layout)
            if strategy is not None:
                options.append(strategy)
    # Only axes that some operand lies on: results stay where a reader expects them, nothing is cut further unasked.
    used: set[str] = set()
    for layout in layouts:
        used.update(layout.axes)
        used.update(axis for axis, _ in layout.pending)
    options += enumerate_strategies(call, rule, mesh, tuple(axis for axis in mesh.axis_names if axis in used))
    for strategy in registry.extra_strategies(call, mesh):
        if all(used.issuperset(layout.axes) for layout in strategy.ins):
            options.append(strategy)
    options.append(replicated_strategy(call))
    return options
