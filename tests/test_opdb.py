"""Rules on the sample inputs of torch's operator database.

Every sample is run once, forward and backward, under a mode that records the aten calls it makes; each distinct call is
then tried by brute force (see rule_oracle): what its rule claims must hold. The run prints which (operator, factor,
axis) triples were really split and which operators were not, so that a rule that is never exercised is seen.

The default run takes a few samples of each database entry; `-m sweep` takes many.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from rule_oracle import RuleBroken, check_call, make_call, mesh_of, tried_strategies
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from colofunc.spec.rules import rule_for

# Entries that cannot be recorded as functional calls on dense tensors.
_SKIPPED = (
    "sparse masked. _refs torch._ jiterator to_sparse nn.functional.ctc special.chebyshev special.hermite "
    "special.laguerre special.legendre special.bessel special.modified special.scaled special.spherical "
    "special.shifted special.airy"
)
SKIP_PREFIX = tuple(_SKIPPED.split())
MAX_NUMEL = 20_000
# Operators that the default run really splits: 332 with torch 2.14. The database of torch 2.11 calls other ones first, or in shapes
# that no axis divides (leaky_relu, gather, stack): 326.
AT_LEAST = 325 if TorchVersion(torch.__version__) < "2.12" else 330


class Record(TorchDispatchMode):
    """Keeps (target, args, kwargs) of every aten call with dense, small, CPU operands that does not mutate them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        plain = all(t.layout == torch.strided and t.numel() <= MAX_NUMEL for t in tensors)
        known = not any(isinstance(leaf, (torch.Generator, torch.nn.Module)) for leaf in leaves)
        if plain and known and not func._schema.is_mutable and func.namespace == "aten":
            keep = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs))
            self.calls.append((str(func), *keep))
        return func(*args, **kwargs)


@pytest.fixture
def no_test_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database looks for a unittest on the stack, twice for each operator; with thousands of modules loaded that is most of a run."""
    monkeypatch.setattr("torch.testing._internal.common_utils.extract_test_fn", lambda: None, raising=False)


@attrs.define
class Tally:
    """What a run has tried."""

    triples: Counter[tuple[str, str, int]] = attrs.field(factory=Counter)
    calls: Counter[str] = attrs.field(factory=Counter)
    ruled: set[str] = attrs.field(factory=set)
    broken: dict[str, str] = attrs.field(factory=dict)
    seen: set[Any] = attrs.field(factory=set)
    per_op: Counter[str] = attrs.field(factory=Counter)


def entries() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db  # slow to import

    return [op for op in op_db if not op.name.startswith(SKIP_PREFIX) and torch.float64 in op.dtypes]


def recorded(op: Any, samples: int) -> Iterator[tuple[str, Any, Any]]:
    """The aten calls of the first samples of a database entry, forward and backward."""
    grad = op.supports_autograd
    try:
        inputs = op.sample_inputs("cpu", torch.float64, requires_grad=grad)
    except Exception:
        return
    for n, sample in enumerate(inputs):
        if n >= samples:
            return
        record = Record()
        try:
            with record:
                out = op(sample.input, *sample.args, **sample.kwargs)
                leaves = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
                if leaves:
                    torch.autograd.backward(leaves, [torch.randn_like(t) for t in leaves])
        except Exception:
            pass  # samples that a mode cannot run; what was recorded before is used
        yield from record.calls


def key_of(target: str, args: Any, kwargs: Any) -> Any:
    shapes = pytree.tree_map_only(torch.Tensor, lambda t: (tuple(t.shape), t.dtype), (args, kwargs))
    return target, repr(shapes)


def sweep(samples: int, per_op: int, deadline_s: float | None = None) -> Tally:
    """Try the distinct calls of all entries; at most `per_op` calls of each operator."""
    tally, began = Tally(), time.monotonic()
    for op in entries():
        if deadline_s is not None and time.monotonic() - began > deadline_s:
            break
        torch.manual_seed(0)
        for target, args, kwargs in recorded(op, samples):
            key = key_of(target, args, kwargs)
            if key in tally.seen or tally.per_op[target] >= per_op:
                continue
            tally.seen.add(key)
            try_one(target, args, kwargs, tally)
    return tally


def try_one(target: str, args: Any, kwargs: Any, tally: Tally) -> None:
    try:
        call, tensors = make_call(target, args, kwargs)
    except Exception:
        return  # arguments that are no program data
    tally.calls[target] += 1
    rule = None
    try:
        rule = rule_for(call)
        done = [] if rule is None else check_call(call, tensors, rule)
        strategies = tried_strategies(call, tensors, (mesh_of(2), mesh_of(3)))
    except RuleBroken as error:
        tally.broken.setdefault(target, f"{[tuple(t.shape) for t in call.ins]} {error}"[:600])
        return
    except Exception as error:
        tally.broken.setdefault(target, f"{call.args} {call.kwargs} rule raises {type(error).__name__}: {error}"[:600])
        return
    tally.per_op[target] += bool(done or strategies)
    if rule is not None:
        tally.ruled.add(target)
    for factor, n, kind in done:
        if kind in ("major", "striped", "cyclic", "composite"):
            tally.triples[target, factor, n] += 1
    for name in strategies:
        tally.triples[target, name, 0] += 1


def report(tally: Tally) -> str:
    split = defaultdict(set)
    for target, factor, n in tally.triples:
        split[target].add((factor, n))
    unchecked = sorted(set(tally.calls) - set(split))
    no_rule = [t for t in unchecked if t not in tally.ruled]
    idle = [t for t in unchecked if t in tally.ruled]
    lines = [
        f"{sum(tally.calls.values())} calls of {len(tally.calls)} operators; {len(split)} operators really split, "
        f"{len(tally.triples)} (operator, factor, axis) triples; {len(tally.broken)} broken",
        f"with a rule but never split ({len(idle)}): {' '.join(idle)}",
        f"without a rule ({len(no_rule)}): {' '.join(no_rule)}",
        *(f"BROKEN {target}: {text}" for target, text in sorted(tally.broken.items())),
    ]
    return "\n".join(lines)


def table(tally: Tally) -> str:
    """One line per operator: the factors that were split, with the axis sizes; strategies in braces."""
    split: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for target, factor, n in tally.triples:
        split[target][factor].add(n)
    lines = []
    for target, factors in sorted(split.items()):
        words = [f + ("/" + ",".join(map(str, sorted(ns))) if 0 not in ns else "") for f, ns in sorted(factors.items())]
        lines.append(f"{target:48} {'  '.join(words[:12])}{'  ...' if len(words) > 12 else ''}")
    return "\n".join(lines)


def check(samples: int, per_op: int, at_least: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tally = sweep(samples, per_op)
    print(table(tally), report(tally), sep="\n", file=sys.stderr)
    assert not tally.broken, report(tally)
    assert len({target for target, _, _ in tally.triples}) >= at_least, report(tally)


@pytest.mark.usefixtures("no_test_looked_for")
def test_rules_hold_on_the_operator_database() -> None:
    check(samples=2, per_op=1, at_least=AT_LEAST)


@pytest.mark.sweep
@pytest.mark.usefixtures("no_test_looked_for")
def test_rules_hold_on_the_whole_operator_database() -> None:
    check(samples=60, per_op=16, at_least=400)
