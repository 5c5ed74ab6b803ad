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

from colofunc.compiler.decisions import Decided
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import CollectiveError, InputError
from colofunc.executors.backend import backend_for, on_real_ranks
from colofunc.executors.distributed import broadcast_object
from colofunc.executors.watch import Watch
from colofunc.mesh import Mesh
from colofunc.planner.sharding.explain import RuleOf
from colofunc.program.ir import Program
from colofunc.program.lazy import LazyTensor
from colofunc.program.lower import Choice
from colofunc.spec.rule import Strategy

T = TypeVar("T")


def watch_of(mesh: Mesh, executor: str | None) -> Watch | None:
    """The tie to the other processes if `mesh` runs, or is about to run, on real ranks; None if all is in this process."""
    return backend_for(mesh, executor).watch if on_real_ranks(mesh, executor) else None


def same(watch: Watch | None, what: str, make: Callable[[], T], digest: Callable[[T], str]) -> T:
    """`make()`, whose digest must be equal on all ranks.

    A rank on which it fails raises its own error; the others raise CollectiveError, which names that rank and its
    error, unless it failed there too.
    """
    if watch is None:
        return make()
    try:
        made = make()
    except Exception as error:
        watch.give_up(what, error, watch.deadline_s)
        raise
    watch.agree(what, digest(made), watch.deadline_s)
    return made


def from_main(watch: Watch | None, make: Callable[[], T]) -> T | None:
    """`make()` on rank 0, None elsewhere; what rank 0 raises is raised on every rank."""
    if watch is None:
        return make()
    made, failure = None, None
    if watch.rank == 0:
        try:
            made = make()
        except Exception as error:
            failure = error
    with watch if failure is None else nullcontext():
        told = broadcast_object(None if failure is None else _told(failure))
    if failure is not None:
        raise failure
    if told is not None:
        raise told
    return made


def told(watch: Watch | None, value: T | None) -> T:
    """Rank 0's value on every rank; the others give None. Collective."""
    if watch is not None:
        with watch:
            value = broadcast_object(value)
    assert value is not None, "rank 0 has one"
    return value


def _told(error: Exception) -> Exception:
    """An error that survives the journey: the same type where one message makes it, else CollectiveError."""
    text = str(error)
    try:
        if str(type(error)(text)) == text:
            return type(error)(text)
    except Exception:  # types with other arguments
        pass
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
    watch: Watch | None, made: tuple[Decided, Program] | None, program: Program, rule_of: RuleOf
) -> tuple[tuple[Choice, ...], Any, Program]:
    """(choices, plan, local program) of rank 0 on every rank. Tensors that the program carries are each rank's own."""
    if made is not None:
        decided, local = made
        if watch is None:
            return decided.choices, decided.plan, local
        plain = tuple(attrs.evolve(c.strategy, local=None) for c in decided.choices)
        coded = tuple(c.strategy.local is not None for c in decided.choices)
        places = tuple(k for k, i in enumerate(local.inputs) if i in local.constants)
        broadcast_object(Lowering(plain, coded, decided.plan, attrs.evolve(local, constants={}), places))
        return decided.choices, decided.plan, local
    assert watch is not None, "only ranks other than 0 come without a plan of their own"
    with watch:
        told: Lowering = broadcast_object(None)
    constants = {told.local.inputs[k]: program.constants[program.inputs[k]] for k in told.constants}
    choices = []
    for node, strategy, has_code in zip(program.nodes, told.strategies, told.with_code, strict=True):
        choices.append(Choice(attrs.evolve(strategy, local=_elsewhere) if has_code else strategy, rule_of(node)))
    return tuple(choices), told.plan, attrs.evolve(told.local, constants=constants)


def _elsewhere(*shards: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    raise CollectiveError("local code of a strategy is recorded on rank 0 only; the local program has it")


def equal_leaves(watch: Watch, names: Sequence[str], leaves: Sequence[torch.Tensor]) -> None:
    """Raise InputError unless plain tensors, which are global values, are equal on all ranks; collective."""
    mine = [_sum_of(leaf) for leaf in leaves]
    everyone = watch.exchange("the arguments", ",".join(map(str, mine)), watch.deadline_s)
    sums = [text.split(",") for text in everyone]
    for k, name in enumerate(names):
        column = [row[k] if k < len(row) else "" for row in sums]
        if len(set(column)) > 1:
            common = max(column, key=column.count)
            odd = [r for r, value in enumerate(column) if value != common]
            raise InputError(
                f"argument {name!r} {tuple(leaves[k].shape)} is a plain tensor, so it is the global value and must be equal on "
                f"all ranks, but ranks {odd} hold other numbers; seed all ranks alike, let cf.batches(loader, mesh, spec) read each "
                f"rank's rows, or enter them with cf.from_local(t, spec, mesh)"
            )


def _sum_of(leaf: torch.Tensor) -> int:
    if isinstance(leaf, LazyTensor):
        return leaf.source.token()
    return 0 if isinstance(leaf, DTensor) or leaf.is_meta else checksum(leaf)


def equal_captured(watch: Watch | None, program: Program, captured: Mapping[int, torch.Tensor]) -> None:
    """Raise InputError naming a captured tensor (by value id) that ranks hold with other numbers; collective."""
    if watch is None or not captured:
        return
    sums = [0 if t.is_meta or isinstance(t, DTensor) else checksum(t) for t in captured.values()]
    rows = [text.split(",") for text in watch.exchange("the captured tensors", ",".join(map(str, sums)), watch.deadline_s)]
    for k, id in enumerate(captured):
        column = [row[k] if k < len(row) else "" for row in rows]
        if len(set(column)) > 1:
            common = max(column, key=column.count)
            value = program.values[id]
            line = next((node.line for node in program.nodes if id in node.refs), "")
            where = f" (used at {line})" if line else ""
            raise InputError(
                f"the step captures a tensor {value.name or ''}{value.shape}{where}, which counts as the global value, but ranks "
                f"{[r for r, text in enumerate(column) if text != common]} hold other numbers; pass it as an argument, or make it "
                "alike on all ranks"
            )


def checksum(x: torch.Tensor) -> int:
    """A 32-bit checksum of a tensor's values in row-major order."""
    flat = x.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
