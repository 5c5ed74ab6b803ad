"""The kit for users and plugin authors: `cf.testing`.

    check(step, state, batch)           a staged step against its function on one device, every leaf
    check_pure(step_fn, *args)          a step function computes and does nothing else
    check_strategies(plugin, op)        every strategy of an operator against the operator
    check_plan(plan)                    a named plan on small steps and meshes: equal, used, composed, or refused
    compare(a, b)                       two trees, DTensors or plain
    last_bit(fn, *args)                 how far a function moves when its inputs move by their last bit
    float64()                           unmodified models really in float64
    fail(rank=1, at="all_gather")       a rank that fails on purpose
    programs, models                    small steps and modules with names
    strategies, pytest_plugin           Hypothesis strategies, fixtures (import these modules where they are needed)
"""

from colofunc.errors import FaultError
from colofunc.executors.faults import fail
from colofunc.testing import models, programs
from colofunc.testing.check import Checked, check
from colofunc.testing.conditioning import last_bit
from colofunc.testing.numerics import float64
from colofunc.testing.plans import TriedPlan, TriedPlans, check_plan
from colofunc.testing.prove import Proved, Sample, check_strategies, sample
from colofunc.testing.pure import check_pure
from colofunc.testing.trees import compare

__all__ = [
    "Checked",
    "FaultError",
    "Proved",
    "Sample",
    "TriedPlan",
    "TriedPlans",
    "check",
    "check_plan",
    "check_pure",
    "check_strategies",
    "compare",
    "fail",
    "float64",
    "last_bit",
    "models",
    "programs",
    "sample",
]
