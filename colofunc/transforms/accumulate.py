"""accumulate: the batch in microbatches, one after another, with the numbers of the whole batch.

    step = cf.accumulate(step_fn, microbatches=4)                   # the batch is known by its role
    step = cf.accumulate(cf.shard(step_fn, mesh), microbatches=4)   # before or after shard: the same plan

Problem: activations grow with the batch. Gradient accumulation by hand divides the loss by the number of microbatches,
which is wrong wherever they hold different numbers of labels, and has to be written anew around every clip and metric.
Idea: microbatches are a mesh axis in time. The step is traced once, on the whole batch; the program of one rank is
split over that axis by the rules that split it over `dp` (`program.passes.time`), and its ranks run in a loop
(`program.passes.fold`): means divide by the whole batch's count, gradients are summed in one accumulator each and
reduced over the mesh once, per-sample outputs are put together, clipping and the update run once.

Parameters that lie sharded are gathered once, before the loop, and gradients reduced once, behind it. Under a budget
(the device's memory is one) either happens in every trip, or both, where that is faster than other ways to keep to it.

What reads all rows at once (batch norm in training, a contrastive loss) cannot be computed so: it is an error that
names the operator. With mixing="per-microbatch" such a statistic is the microbatch's own, as in a loop by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from colofunc.compiler.microbatches import check_number, equal_parts, loops_over
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, Transform
from colofunc.errors import PlanError, near
from colofunc.program.passes.mixing import MIXING


def accumulate(
    step_fn: Callable[..., Any] | None = None,
    microbatches: int = 1,
    batch: int | str | None = None,
    mixing: str = "error",
) -> Any:
    """The step with its batch in `microbatches` parts, one after another; the same numbers.

    batch: the argument whose leaves are split on dim 0, by position or name (None: the first that is the batch alone,
    by the roles of its leaves). Leaves without dims, or of another leading size than most, stay whole. mixing: what to
    do with operators that mix samples: "error", or "per-microbatch" (statistics of a microbatch stand for those of the
    batch, so the numbers change). As a decorator: `@cf.accumulate(microbatches=4)`.
    """
    check_number(microbatches, "accumulate")
    if mixing not in MIXING:
        raise PlanError(f"unknown mixing {mixing!r}{near(str(mixing), MIXING, 'ways')}")
    options = dict(microbatches=microbatches, batch=batch, mixing=mixing)
    transform = Transform(
        "accumulate",
        options,
        constrain=partial(equal_parts, microbatches, batch, mixing),
        candidates=partial(_loops_too, microbatches, batch, mixing),
        microbatches=microbatches,
    )
    return stage(step_fn, transform)


def _loops_too(microbatches: int, batch: int | str | None, mixing: str, build: Build) -> Build:
    if microbatches == 1:
        return build
    return build.evolve(alternatives=(*build.alternatives, loops_over(microbatches, batch, mixing, build)))


__all__ = ["accumulate"]
