"""What tests of tracing share: a step beside its program."""

from collections.abc import Callable
from typing import Any

import torch
from interpreter import run_reference

from colofunc.ops import canonical
from colofunc.program.tracing.trace import Traced, trace
from colofunc.program.tracing.tree import flatten

f64 = torch.float64


def close(a: Any, b: Any) -> None:
    """Same tree, equal leaves."""
    mine, tree = flatten(a)
    theirs, other = flatten(b)
    assert tree.names() == other.names()
    assert mine
    for name, x, y in zip(tree.names(), mine, theirs, strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def same(fn: Callable[..., Any], *args: Any) -> Traced:
    """Trace, run the program, compare with the function itself under the same canonical operators."""
    traced = trace(fn, args)
    inputs = traced.pack(args)
    before = [t.clone() for t in inputs]
    seed = [torch.tensor(7)] if traced.uses_seed else []
    out = traced.unpack(run_reference(traced.program, inputs + seed))
    with canonical.single_device(torch.tensor(7)):
        expected = fn(*args)
    close(out, expected)
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x, y)
    return traced


def targets(traced: Traced) -> list[str]:
    return [node.target for node in traced.program.nodes]
