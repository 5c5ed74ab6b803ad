"""A sharding that is looked at under several budgets is written and counted once."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import colofunc as cf
from colofunc.compiler import completion
from colofunc.compiler.kept_programs import KeptPrograms
from colofunc.program.ir import Program
from colofunc.program.passes.buckets import BucketLimit


def test_what_is_packed_serves_every_limit_that_allows_the_same_buckets() -> None:
    """Collectives of 50 and 200 bytes were asked about: limits from 50 to 199 bytes are one."""
    kept, local, packed = KeptPrograms(), Program((), (), (), {}), []

    def pack(most: BucketLimit) -> tuple[Program, tuple[()]]:
        packed.append(most.nbytes)
        most.allows(50)
        most.allows(200)
        return local, ()

    for nbytes in (100.0, 50.0, 199.0, 200.0, 49.0, 1000.0):
        kept.packed(local, nbytes, pack)
    assert packed == [100.0, 200.0, 49.0]


def test_while_the_least_budget_is_looked_for_no_sharding_is_lowered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered, plain = Counter[Any](), completion.lower

    def counting(program: Any, choices: Any, *more: Any, **options: Any) -> Any:
        inputs, outputs, _, _, regather = more
        lowered[tuple(choice.strategy for choice in choices), tuple(inputs.items()), outputs, regather] += 1
        return plain(program, choices, *more, **options)

    monkeypatch.setattr(completion, "lower", counting)
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())
    with pytest.raises(cf.PlanError, match="the least found has a peak of"):
        cf.checkpoint(cf.shard(step, cf.Mesh(dp=2)), budget=100).lower(state, cf.abstract((8, 16)))
    assert len(lowered) > 1 and set(lowered.values()) == {1}
