"""What real ranks agree on before they run: one traced program, one plan, one seed, equal plain tensors.

Problem: a rank that decides otherwise than its peers gives wrong numbers or a hang. Idea: whatever could differ is
compared or comes from rank 0. All ranks trace and compare; rank 0 plans, lowers and broadcasts; plain tensors, which
count as global values, are compared by checksum on the first call of a signature; seeds are rank 0's. A failure that
all ranks share stays an ordinary exception on each of them; one that only some have names those ranks on the others.

    program = same(watch, "the traced program", trace_it, digest)        # watch is None: one process, nothing to do
    decided = from_main(watch, plan_it)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import attrs
import torch

from colofunc.compiler.decisions import Decisions
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import CollectiveError, ColofuncError, InputError
from colofunc.executors.backend import backend_for, on_real_ranks
from colofunc.executors.distributed import broadcast_object
from colofunc.executors.watch import Watch
from colofunc.mesh import Mesh
from colofunc.planner.sharding.explain import RuleOfNode
from colofunc.program.ir import Program
from colofunc.program.lazy import LazyTensor
from colofunc.program.lower import Choice
from colofunc.spec.rule import Strategy

T = TypeVar("T")


def watch_of(mesh: Mesh, executor: str | None) -> Watch | None:
    """The tie to the other processes if `mesh` runs, or is about to run, on real ranks.

    None if all is in this process.
    """
    return backend_for(mesh, executor).watch if on_real_ranks(mesh, executor) else None


def same(watch: Watch | None, what: str, make: Callable[[], T], digest: Callable[[T], str]) -> T:
    """`make()`, whose digest must be equal on all ranks.

    A rank on which it fails raises its own error; the others raise CollectiveError, which names that rank and its
    error, unless it failed there too.
    """
    if watch is None:
        return make()
    try:
        result = make()
    except Exception as error:
        watch.give_up(what, error, watch.deadline_s)
        raise
    watch.agree(what, digest(result), watch.deadline_s)
    return result


def from_main(watch: Watch | None, make: Callable[[], T]) -> T | None:
    """`make()` on rank 0, None elsewhere; what rank 0 raises is raised on every rank."""
    if watch is None:
        return make()
    result, failure = None, None
    if watch.rank == 0:
        try:
            result = make()
        except Exception as error:
            failure = error
    sent = None if failure is None else portable_error(failure)
    with watch if failure is None else nullcontext():
        failure_of_main = broadcast_object(sent)
    if failure is not None:
        raise failure
    if failure_of_main is not None:
        raise failure_of_main
    return result


def told_by_main(watch: Watch | None, value: T | None) -> T:
    """Rank 0's value on every rank; the others give None. Collective."""
    if watch is not None:
        with watch:
            value = broadcast_object(value)
    assert value is not None, "rank 0 has one"
    return value


def portable_error(error: Exception) -> Exception:
    """An error that survives the journey: of the nearest of its types that one message makes, else CollectiveError."""
    text = str(error)
    for kind in type(error).__mro__:
        if not issubclass(kind, Exception) or kind in (Exception, ColofuncError):
            break
        try:
            if str(kind(text)) == text:
                return kind(text)
        except Exception:  # types with other arguments
            continue
    return CollectiveError(f"rank 0 failed: {type(error).__name__}: {text}")


@attrs.frozen(eq=False)
class Lowering:
    """What rank 0 tells: its decisions without their code, the plan and the local program."""

    strategies: tuple[Strategy, ...]
    with_code: tuple[bool, ...]
    plan: Any
    local: Program
    constants: tuple[int, ...]  # positions among the inputs


def share(
    watch: Watch | None, planned: tuple[Decisions, Program] | None, program: Program, rule_of: RuleOfNode
) -> tuple[tuple[Choice, ...], Any, Program]:
    """(choices, plan, local program) of rank 0 on every rank. Tensors that the program carries are each rank's own.

    planned: rank 0's decisions and local program; None elsewhere. Collective.
    """
    if planned is not None:
        decided, local = planned
        if watch is not None:
            broadcast_object(_lowering(decided, local))
        return decided.choices, decided.plan, local
    assert watch is not None, "only ranks other than 0 come without a plan of their own"
    with watch:
        lowering: Lowering = broadcast_object(None)
    constants = {}
    for position in lowering.constants:
        constants[lowering.local.inputs[position]] = program.constants[program.inputs[position]]
    choices = []
    for node, strategy, has_code in zip(program.nodes, lowering.strategies, lowering.with_code, strict=True):
        if has_code:
            strategy = attrs.evolve(strategy, local=_elsewhere)
        choices.append(Choice(strategy, rule_of(node)))
    return tuple(choices), lowering.plan, attrs.evolve(lowering.local, constants=constants)


def _lowering(decided: Decisions, local: Program) -> Lowering:
    """What rank 0 tells: functions and tensors stay behind."""
    strategies = [choice.strategy for choice in decided.choices]
    return Lowering(
        strategies=tuple(attrs.evolve(strategy, local=None) for strategy in strategies),
        with_code=tuple(strategy.local is not None for strategy in strategies),
        plan=decided.plan,
        local=attrs.evolve(local, constants={}),
        constants=tuple(position for position, id in enumerate(local.inputs) if id in local.constants),
    )


def _elsewhere(*shards: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    raise CollectiveError("local code of a strategy is recorded on rank 0 only; the local program has it")


def equal_leaves(watch: Watch, names: Sequence[str], leaves: Sequence[torch.Tensor]) -> None:
    """Raise InputError unless plain tensors, which are global values, are equal on all ranks; collective."""
    sums = [_sum_of(leaf) for leaf in leaves]
    for name, leaf, odd_ranks in zip(names, leaves, _odd_ranks(watch, "the arguments", sums), strict=True):
        if odd_ranks:
            raise InputError(
                f"argument {name!r} {tuple(leaf.shape)} is a plain tensor, so it is the global value and must be equal "
                f"on all ranks, but ranks {odd_ranks} hold other numbers; seed all ranks alike, let cf.batches(loader, "
                "mesh, spec) read each rank's rows, or enter them with cf.from_local(t, spec, mesh)"
            )


def _odd_ranks(watch: Watch, what: str, sums: Sequence[int]) -> list[list[int]]:
    """Of each tensor, the ranks whose checksum is another than that of most; collective. sums: this rank's."""
    texts = watch.exchange(what, ",".join(map(str, sums)), watch.deadline_s)
    sums_of_ranks = [text.split(",") for text in texts]
    odd_ranks: list[list[int]] = []
    for position in range(len(sums)):
        of_tensor = [row[position] if position < len(row) else "" for row in sums_of_ranks]
        if len(set(of_tensor)) == 1:
            odd_ranks.append([])
            continue
        common = max(of_tensor, key=of_tensor.count)
        odd_ranks.append([rank for rank, text in enumerate(of_tensor) if text != common])
    return odd_ranks


def _sum_of(leaf: torch.Tensor) -> int:
    """What ranks compare of a tensor: nothing of one that has no data, or that is no global value."""
    if isinstance(leaf, LazyTensor):
        return leaf.source.token()
    if isinstance(leaf, DTensor) or leaf.is_meta:
        return 0
    return value_checksum(leaf)


def equal_captured(watch: Watch | None, program: Program, captured: Mapping[int, torch.Tensor]) -> None:
    """Raise InputError naming a captured tensor (by value id) that ranks hold with other numbers; collective."""
    if watch is None or not captured:
        return
    sums = [
        0 if tensor.is_meta or isinstance(tensor, DTensor) else value_checksum(tensor) for tensor in captured.values()
    ]
    for id, odd_ranks in zip(captured, _odd_ranks(watch, "the captured tensors", sums), strict=True):
        if odd_ranks:
            value = program.values[id]
            line = next((node.line for node in program.nodes if id in node.refs), "")
            where = f" (used at {line})" if line else ""
            raise InputError(
                f"the step captures a tensor {value.name or ''}{value.shape}{where}, which counts as the global value, "
                f"but ranks {odd_ranks} hold other numbers; pass it as an argument, or make it alike on all ranks"
            )


def value_checksum(x: torch.Tensor) -> int:
    """A 32-bit checksum of a tensor's values in row-major order."""
    flat = x.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return 0
    return zlib.crc32(flat.view(torch.uint8).numpy().data)
