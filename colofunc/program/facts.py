"""Facts about targets and lifetimes that passes and executors share.

What is known of any operator (`facts_of`), which nodes communicate, which arguments an operator writes to, which results
may share memory with an operand, and until when a value is needed.

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
from colofunc.ops.facts import Facts
from colofunc.ops.kernels import IN_ONE_CALL
from colofunc.ops.pattern_words import factors_of
from colofunc.ops.targets import is_view, overload
from colofunc.ops.torch_facts import facts_of_torch, torch_targets
from colofunc.program.ir import LOOP, Node, Program, Ref, computed_once

# Operators of one rank that only this package knows; executors emit them themselves.
LOCAL = of_kind("rank", "layout")
PEERS = of_kind("peer")  # between some of a group; written as they stand, started by nobody
WIRE = of_kind("wire")
COPIES = of_kind("copy")
EFFECTS = of_kind("effect")
COLLECTIVES = frozenset(f"colofunc.{name}" for name in of_kind("wire", "peer", "rank"))
"""Targets that an executor interprets, because they need more than one rank's tensor (or the rank itself)."""

Steps = tuple[tuple[int, ...] | None, tuple[int, ...] | None, tuple[int, ...] | None]


def facts_of(target: str) -> Facts:
    """What is known of an operator: of torch's, of ours and of plugins'."""
    operator = OPERATORS.get(target)
    return facts_of_torch(target) if operator is None else operator.facts


def is_product(target: str) -> bool:
    """Whether most of an operator's work is multiplying matrices."""
    return facts_of(target).product


def backward_of(target: str) -> tuple[str, ...]:
    """The products that the gradients of a product are made by: torch's, where nothing else is known."""
    return facts_of(target).backward_products or ("aten.mm.default",)


def matrix_products() -> tuple[str, ...]:
    """The operators that read as the product of a linear layer."""
    ours = [name for name, operator in OPERATORS.items() if operator.facts.as_products]
    return (*torch_targets("as_products"), *ours)


def reads_rows(target: str) -> bool:
    """Whether an operator reads few rows of its first operand."""
    return facts_of(target).rows in ("read", "indexed", "summed")


def sums_rows(target: str) -> bool:
    """Whether each row of an operator's result is a sum of rows of its first operand, at the indices of its second."""
    return facts_of(target).rows == "summed"


def is_lookup(target: str) -> bool:
    """Whether an operator looks rows of a table up, its first operand, by themselves or as bags that are summed."""
    return facts_of(target).rows in ("read", "summed")


def writes_rows(target: str) -> bool:
    """Whether an operator writes few rows of its result, those that it is given."""
    return facts_of(target).rows == "written"


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


def is_called_with_others(node: Node) -> bool:
    """Whether the clock takes a node for an update that one before it is called with (`one_call.with_one_launch`)."""
    return node.kernel is not None and node.kernel.name == IN_ONE_CALL


def written(node: Node) -> tuple[int, ...]:
    """Ids of the values that a node writes to in place."""
    arguments = written_arguments(node.target)
    if not arguments:
        return ()
    found = []
    for position, name in arguments:
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
    if target == LOOP or is_pointwise(target):
        return True
    return facts_of(target.removesuffix("_start") if is_started(target) else target).own_memory


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
