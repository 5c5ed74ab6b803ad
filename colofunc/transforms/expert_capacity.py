"""expert_capacity: experts that take a bounded share of the tokens and drop the rest.

    step = cf.expert_capacity(cf.shard(step_fn, mesh, experts("ep")), 1.25)
    @cf.expert_capacity(factor=1.25)                       # as a decorator, before or after shard

Problem: work of a layer of experts is as uneven as its router, and recipes bound it: an expert takes `factor` times its
even share, and what is over is dropped (it adds nothing; weights of the others stay as they are). That changes numbers,
so no plan may do it. Idea: say it as a transform that means something without a mesh: choices are counted in the order
of all tokens of the batch, the first stay.

    capacity = ceil(factor * tokens * k / experts)

This is an ordinary function on one device, so the numbers stay equal to it on every mesh, and `cf.testing.check` holds.
It reaches every layer that becomes `colofunc.experts`. With `cf.accumulate` it is an error, because the place in a
queue depends on the microbatches before. Source: GShard (2006.16668), section 2.2; Switch (2101.03961), section 2.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, Transform
from colofunc.errors import PlanError
from colofunc.ops.experts import capacity_of, check_factor


def expert_capacity(step_fn: Callable[..., Any] | None = None, factor: float = 1.25) -> Any:
    """The step with at most ceil(factor * tokens * k / experts) choices per expert; the others are dropped.

    Numbers other than those of the step without it, the same on every mesh. Works alone, as a decorator, and in any
    order with other transforms.
    """
    transform = Transform("expert_capacity", {"factor": check_factor(factor)}, wrap=partial(_wrapped, float(factor)))
    return stage(step_fn, transform)


def _wrapped(factor: float, build: Build) -> Build:
    fn = build.fn

    @functools.wraps(fn)
    def stepped(*args: Any) -> Any:
        with capacity_of(factor) as capacity:
            out = fn(*args)
        if not capacity.layers:
            raise PlanError(
                f"cf.expert_capacity({factor}) finds no experts in this step. Try: cf.moe.experts in the model",
                about="experts",
            )
        return out

    return build.evolve(fn=stepped)
