"""Facts about targets and lifetimes that passes and executors share.

Which nodes communicate, which arguments an operator writes to, which results may share memory with an operand, and
until when a value is needed.

>>> rearrange_steps("a (b c) -> b a c", ("b",), (2,), (4, 6))
((4, 2, 3), (1, 0, 2), None)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from math import prod

import torch

from colofunc.errors import ProgramError
from colofunc.ops import collectives, copies, debug, flat  # noqa: F401  which define the operators told apart here
from colofunc.ops.define import OPERATORS, of_kind
from colofunc.ops.pattern_words import factors_of
from colofunc.ops.targets import is_view, overload
from colofunc.program.ir import LOOP, Node, Program, Ref, computed_once

# Operators of torch, beside elementwise ones, whose results are memory of their own, whatever their arguments.
MAKERS = frozenset(
    """aten.mm.default aten.addmm.default aten.bmm.default aten.baddbmm.default aten.rsub.Tensor
    aten._softmax.default aten._log_softmax.default aten._softmax_backward_data.default
    aten._log_softmax_backward_data.default aten.nll_loss_backward.default aten.embedding.default
    aten.embedding_dense_backward.default aten.native_layer_norm.default aten.native_layer_norm_backward.default
    aten.native_group_norm.default aten._native_batch_norm_legit_no_training.default aten._native_batch_norm_legit.no_stats
    aten.upsample_nearest2d.default aten.upsample_nearest2d.vec aten.upsample_bilinear2d.default aten.upsample_bilinear2d.vec
    aten.avg_pool2d.default aten._adaptive_avg_pool2d.default aten.max_pool2d_with_indices.default aten.constant_pad_nd.default
    aten.convolution.default aten.convolution_backward.default aten.sum.dim_IntList aten.mean.dim aten.var.correction
    aten.var_mean.correction aten.cat.default aten.stack.default aten.index.Tensor
    aten.zeros_like.default aten.ones_like.default aten.full.default aten.zeros.default aten.ones.default""".split()
)
# Operators of torch most of whose work is multiplying matrices; without their overload.
PRODUCTS = frozenset(
    """aten.mm aten.addmm aten.bmm aten.baddbmm aten.addbmm aten.mv aten.addmv aten.dot aten._trilinear aten._scaled_mm aten._grouped_mm
    aten._int_mm aten.convolution aten.convolution_backward aten._scaled_dot_product_flash_attention_for_cpu
    aten._scaled_dot_product_flash_attention_for_cpu_backward""".split()
)
# How those of matrices read as the product of a linear layer of rows b, inputs i and outputs o.
AS_PRODUCTS = {
    "aten.addmm.default": ("o, b i, i o -> b o",),
    "aten.mm.default": ("b i, i o -> b o", "b o, o i -> b i", "i b, b o -> i o", "o b, b i -> o i"),
}
# Those of matrices, alone or as many as a batch has -> the position of the second factor among their tensors.
SECOND_FACTORS = {"aten.mm.default": 1, "aten.addmm.default": 2, "aten.bmm.default": 1, "aten.baddbmm.default": 2}
CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
BATCHED_PRODUCTS = ("aten.bmm.default", "aten.baddbmm.default")
# Operators of torch with weights -> the positions of these among their tensors.
WEIGHTS = {
    "aten.embedding.default": (0,),
    "aten.convolution.default": (1, 2),
    "aten.native_layer_norm.default": (1, 2),
    "aten.native_group_norm.default": (1, 2),
    "aten._fused_rms_norm.default": (1,),
}
# Operators of torch that look rows of a table up, that read few rows of whatever they are given, and that write few.
LOOKUPS = frozenset(("aten.embedding.default",))
READ_ROWS = LOOKUPS | {"aten.index_select.default", "aten.index.Tensor"}
WRITE_ROWS = frozenset(("aten.embedding_dense_backward.default", "aten.index_put.default", "aten.index_add.default"))
# Those to which it is all the same in which order their rows lie; without their overload.
ANY_ROW_ORDER = frozenset(
    """aten.mm aten.addmm aten._softmax aten._softmax_backward_data aten._log_softmax aten._log_softmax_backward_data
    aten.nll_loss_forward aten.nll_loss_backward aten.nll_loss2d_forward aten.nll_loss2d_backward
    aten.embedding aten.embedding_dense_backward aten.native_layer_norm aten.native_layer_norm_backward
    aten._fused_rms_norm aten._fused_rms_norm_backward""".split()
)
# Operators of one rank that only this package knows; executors emit them themselves.
LOCAL = of_kind("rank", "layout")
PEERS = of_kind("peer")  # between some of a group; written as they stand, started by nobody
WIRE = of_kind("wire")
COPIES = of_kind("copy")
EFFECTS = of_kind("effect")
COLLECTIVES = frozenset(f"colofunc.{name}" for name in of_kind("wire", "peer", "rank"))
"""Targets that an executor interprets, because they need more than one rank's tensor (or the rank itself)."""

Steps = tuple[tuple[int, ...] | None, tuple[int, ...] | None, tuple[int, ...] | None]


def is_product(target: str) -> bool:
    """Whether most of an operator's work is multiplying matrices; of torch's by name, of others as their definition
    says.
    """
    operator = OPERATORS.get(target)
    return target.rpartition(".")[0] in PRODUCTS if operator is None else operator.product


def backward_of(target: str) -> tuple[str, ...]:
    """The products that the gradients of a product are made by: torch's, where its definition names none."""
    operator = OPERATORS.get(target)
    named = () if operator is None else operator.backward_products
    return named or ("aten.mm.default",)


def as_products(target: str) -> tuple[str, ...]:
    """How an operator reads as the product of a linear layer, "b i, o i, o -> b o": torch's in several ways; () for what is
    none.
    """
    operator = OPERATORS.get(target)
    if operator is None:
        return AS_PRODUCTS.get(target, ())
    return (operator.as_product,) if operator.as_product else ()


def matrix_products() -> tuple[str, ...]:
    """The operators that read as the product of a linear layer."""
    ours = [name for name, operator in OPERATORS.items() if operator.as_product]
    return (*AS_PRODUCTS, *ours)


def weight_operands(target: str) -> tuple[int, ...]:
    """The positions, among the tensors that an operator is given, of those that are weights."""
    operator = OPERATORS.get(target)
    return WEIGHTS.get(target, ()) if operator is None else operator.weights


def reads_rows(target: str) -> bool:
    """Whether an operator reads few rows of its first operand."""
    operator = OPERATORS.get(target)
    return target in READ_ROWS if operator is None else operator.rows in ("read", "summed")


def sums_rows(target: str) -> bool:
    """Whether each row of an operator's result is a sum of rows of its first operand, at the indices of its second."""
    operator = OPERATORS.get(target)
    return operator is not None and operator.rows == "summed"


def is_lookup(target: str) -> bool:
    """Whether an operator looks rows of a table up, its first operand, by themselves or as bags that are summed.

    Reading rows by index alone is none: torch does so with activations as well.
    """
    return target in LOOKUPS if OPERATORS.get(target) is None else reads_rows(target)


def writes_rows(target: str) -> bool:
    """Whether an operator writes few rows of its result, those that it is given."""
    operator = OPERATORS.get(target)
    return target in WRITE_ROWS if operator is None else operator.rows == "written"


def row_order(target: str) -> str:
    """In which order the rows of an operator's operands may lie: "any", "dealt" (`ops.define`), or "" where the order
    may matter to local code.
    """
    operator = OPERATORS.get(target)
    if operator is not None:
        return operator.row_order
    return "any" if target.rpartition(".")[0] in ANY_ROW_ORDER else ""


def kind_of(node: Node) -> tuple[str, bool] | None:
    """(kind, asynchronous) of a node that executors emit themselves: collectives, copies between tiers, `wait`, layout
    moves, effects, loops; else None."""
    return kind_of_target(node.target)


@cache
def kind_of_target(target: str) -> tuple[str, bool] | None:
    """`kind_of` a node with this target."""
    if not target.startswith("colofunc."):
        return None
    name = target[len("colofunc.") :]
    if name in WIRE | LOCAL | PEERS | COPIES | EFFECTS or target == LOOP:
        return name, False
    base = name.removesuffix("_start")
    if base != name and (base in WIRE or base in COPIES):
        return base, True
    return None


def draws_by_place(target: str) -> bool:
    """Whether an operator draws random numbers by where its part lies in the global tensor."""
    operator = OPERATORS.get(target)
    return operator is not None and operator.draws_by_place


def is_wire(node: Node) -> bool:
    """Whether a node communicates (asynchronous starts included)."""
    kind = kind_of(node)
    return kind is not None and kind[0] in WIRE


def is_peer(node: Node) -> bool:
    """Whether a node sends to some of a group, or receives from one of it."""
    kind = kind_of(node)
    return kind is not None and kind[0] in PEERS


def is_copy(node: Node) -> bool:
    """Whether a node copies from one tier of memory to another (asynchronous starts included)."""
    kind = kind_of(node)
    return kind is not None and kind[0] in COPIES


def is_effect(target: str) -> bool:
    """Whether an operator has no result but an effect, for which it stays where it stands (`cf.debug`)."""
    kind = kind_of_target(target)
    return kind is not None and kind[0] in EFFECTS


def is_cast(node: Node) -> bool:
    """Whether a node gives its operand another dtype and does nothing else."""
    return node.target == "aten._to_copy.default" and [name for name, _ in node.kwargs] == ["dtype"]


def has_wires(program: Program) -> bool:
    """Whether a program communicates, in loops too."""
    for node in program.nodes:
        if is_wire(node) or is_peer(node):
            return True
        if node.loop is not None and has_wires(node.loop.body):
            return True
    return False


@cache
def written_arguments(target: str) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an operator writes to; () for functional ones.

    A compiled segment says it in its name: "segment.3.0_2" writes to its arguments 0 and 2.
    """
    if target.startswith("segment."):
        positions = target.split(".")[2].split("_")
        return tuple((int(position), "") for position in positions if position)
    kind = kind_of_target(target)
    if kind is not None and kind[0] not in COPIES:
        return ()
    found: list[tuple[int, str]] = []
    for position, argument in enumerate(overload(target)._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append((position, argument.name))
    return tuple(found)


def written(node: Node) -> tuple[int, ...]:
    """Ids of the values that a node writes to in place."""
    found = []
    for position, name in written_arguments(node.target):
        arg = node.args[position] if position < len(node.args) else dict(node.kwargs).get(name)
        if isinstance(arg, Ref):
            found.append(arg.id)
        elif isinstance(arg, tuple):
            found += [item.id for item in arg if isinstance(item, Ref)]
    return tuple(found)


@cache
def takes_device(target: str) -> bool:
    """Whether an operator has a `device` argument."""
    return any(argument.name == "device" for argument in overload(target)._schema.arguments)


@cache
def is_pointwise(target: str) -> bool:
    """Whether an operator of torch makes each element from those at the same place."""
    return target.startswith("aten.") and torch.Tag.pointwise in overload(target).tags


@cache
def makes_memory(target: str) -> bool:
    """Whether each result of an operator is memory of its own, whose elements lie apart: who reads it last may write
    over it.
    """
    defined = OPERATORS.get(target.removesuffix("_start") if is_started(target) else target)
    if defined is not None:
        return defined.own_memory
    return target in MAKERS or target == LOOP or is_pointwise(target)


def is_started(target: str) -> bool:
    """Whether an operator is the start of a collective, or of a copy between tiers, that is waited for later."""
    kind = kind_of_target(target)
    return kind is not None and kind[1]


@cache
def _may_alias(target: str) -> bool:
    if is_view(target) or target.startswith("segment."):  # nobody looks into a compiled segment
        return True
    kind = kind_of_target(target)
    if kind is not None:
        return (kind[0] in LOCAL and kind[0] != "axis_index") or kind == ("put", True)
    schema = overload(target)._schema
    return any(result.alias_info is not None for result in schema.returns)


def aliasing(program: Program) -> frozenset[str]:
    """The operators of a program of which a result may share memory with an operand."""
    return frozenset(filter(_may_alias, program.targets))


def may_alias(node: Node) -> bool:
    """Whether a result of `node` may share memory with one of its operands."""
    return _may_alias(node.target)


def sides(pattern: str) -> tuple[list[list[str]], list[list[str]]]:
    """Both sides of an einops pattern: per dim its factors, sizes of 1 left out."""
    left, right = pattern.split("->")
    return factors_of(left), factors_of(right)


@lru_cache(maxsize=1 << 14)
def rearrange_steps(pattern: str, names: tuple[str, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Steps:
    """(reshape, permutation, reshape) that carry out an einops pattern on `shape`.

    None stands for a step that changes nothing.
    """
    left, right = sides(pattern)
    known = dict(zip(names, sizes, strict=True))
    if len(left) != len(shape):
        raise ProgramError(f"rearrange {pattern!r} has {len(left)} dims, the value has shape {shape}")
    for dim, size in zip(left, shape, strict=True):
        unknown = [factor for factor in dim if factor not in known]
        if len(unknown) > 1:
            raise ProgramError(f"rearrange {pattern!r}: sizes of {unknown} are not given")
        if unknown:
            known[unknown[0]] = size // max(1, _product(dim, known))
        if _product(dim, known) != size:
            raise ProgramError(f"rearrange {pattern!r} with {known} does not fit {shape}")
    flat_left = [factor for dim in left for factor in dim]
    flat_right = [factor for dim in right for factor in dim]
    if sorted(flat_left) != sorted(flat_right):
        raise ProgramError(f"rearrange {pattern!r}: both sides need the same names")
    split = tuple(known[factor] for factor in flat_left)
    order = tuple(flat_left.index(factor) for factor in flat_right)
    moved = tuple(known[factor] for factor in flat_right)
    final = tuple(_product(dim, known) for dim in right)
    if order == tuple(range(len(order))):
        # Nothing is permuted: one reshape does.
        return (final if final != shape else None), None, None
    return (split if split != shape else None), order, (final if final != moved else None)


def _product(dim: list[str], sizes: Mapping[str, int]) -> int:
    """The size of a dim by those of its factors; one that is not known counts as 1."""
    return prod(sizes.get(factor, 1) for factor in dim)


@computed_once
def behind_forward(program: Program) -> frozenset[int]:
    """Positions of the nodes of backward passes and updates, and of those that read what such nodes make.

    An update that is written by hand has the phase of the forward pass, as all that is computed outside of a gradient
    and of an optimizer. So has what lowering puts in front of such a reader, to bring a gradient to where it is wanted.
    """
    behind, made = set[int](), set[int]()
    for index, node in enumerate(program.nodes):
        if node.phase != "forward" or not made.isdisjoint(node.refs):
            behind.add(index)
            made.update(node.results)
    return frozenset(behind)


@computed_once
def lifetimes(program: Program) -> Mapping[int, int]:
    """Value id -> position of the last node that needs it, as `Program.last_uses`.

    A started collective needs its operand until it is waited for.
    """
    started = set(filter(is_started, program.targets))
    if not started:
        return program.last_uses
    last = dict(program.last_uses)
    for node in program.nodes:
        if node.target in started:
            (out,) = node.outs
            ready = last.get(out, -1) if out is not None else -1
            for ref in node.refs:
                last[ref] = max(last[ref], ready)
    return last
