"""Random cases: a generated program as a step on a generated mesh, with generated specs, under a generated chain.

Problem: what holds alone (a view, a spec, a budget) need not hold beside everything else. Idea: all of it is drawn from one
seed. The step is the program as it stands, or a training step whose loss is made of what the program returns; its numbers
are those of the function itself on one device, in float64, or under `cf.precision` as far off as rounding makes them.

    random_cases.draw(7).check()       # raises with the program, the specs and the chain
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import attrs
import random_programs
import torch
from random_programs import RandomProgram

import colofunc as cf
from colofunc.testing.check import run_reference, seeded

MESHES = ((2,), (3,), (4,), (5,), (6,), (2, 2), (2, 3), (3, 2))
AXES = ("dp", "tp", "x", "sp", "cp")
# Masters stay float64; what is computed from them has the bounds of the narrower dtype.
POLICIES = tuple(cf.Policy(params="fp64", compute=compute, reduce=reduce) for compute, reduce in (("bf16", "fp32"), ("fp32", "fp64")))
MOST_REFUSED = 0.2  # of many cases


@attrs.frozen
class Refusal:
    """A true reason to refuse a case. when: what the case has to have for it."""

    kind: str
    error: type[cf.ColofuncError]
    pattern: str
    when: Callable[[Case], bool] = lambda case: True


def accumulates(case: Case) -> bool:
    return any(name == "accumulate" for name, _ in case.links)


REFUSALS = (
    Refusal("a gradient that torch loses", cf.TraceError, r"changed in place at .*whose gradient would be lost"),
    Refusal("strides of memory that only the caller knows", cf.TraceError, r"reads the memory of input .*which is not contiguous"),
    Refusal("a budget below the peak", cf.PlanError, r"no plan found within", lambda case: (case.budget_part or 1.0) < 1.0),
    Refusal("rows that microbatches do not divide", cf.PlanError, r"microbatches( that| do not) divide", accumulates),
    Refusal("an operator that mixes samples", cf.PlanError, r"mixes (the )?samples", accumulates),
)


@attrs.frozen
class Case:
    seed: int
    program: RandomProgram
    trains: bool
    axes: dict[str, int]
    in_specs: Any
    out_specs: Any
    links: tuple[tuple[str, dict[str, Any]], ...]  # of the chain: transform, its options
    budget_part: float | None = None  # of what the step takes without a budget
    budgeted: str = "checkpoint"  # the transform that is given the budget

    def __str__(self) -> str:
        links = " ".join(f"{name}({options})" for name, options in self.links)
        kind = "training step" if self.trains else "function"
        head = f"case {self.seed}: {kind} on Mesh({self.axes})"
        if self.budget_part:
            head += f", {self.budgeted} with {self.budget_part:.3f} of the peak"
        head += f"; again: random_cases.draw({self.seed}).check()"
        return f"{head}\nin_specs={self.in_specs} out_specs={self.out_specs}\nchain: {links or 'none'}\n{self.program}"

    def arguments(self, layouts: bool = False) -> tuple[Any, ...]:
        """layouts: as callers may have them in memory. A step's inputs count as contiguous."""
        how = [(self.seed + k) % 8 * layouts for k in range(len(self.program.inputs))]
        inputs = [random_programs.in_other_memory(x, k) for x, k in zip(self.program.inputs, how, strict=True)]
        if not self.trains:
            return tuple(inputs)
        params, batch = {"v0": inputs[0]}, {f"v{i}": x for i, x in enumerate(inputs) if i > 0}
        return {"params": params, "momentum": {"v0": torch.zeros_like(inputs[0])}}, batch

    def function(self) -> Callable[..., Any]:
        return training(self.program) if self.trains else self.program.on_positions

    def staged(self) -> Any:
        mesh = cf.Mesh(**self.axes)
        step = cf.shard(self.function(), mesh, in_specs=self.in_specs, out_specs=self.out_specs)
        for name, options in self.links:
            step = getattr(cf, name)(step, **options)
        if self.budget_part is None:
            return step
        peak_bytes = step.lower(*self.arguments()).memory().peak_bytes["device"]
        budget = max(1, int(self.budget_part * peak_bytes))
        return getattr(cf, self.budgeted)(step, budget=budget)

    def refusal(self, error: Exception) -> str:
        """The kind of a true refusal, "" for any other error."""
        for known in REFUSALS:
            if isinstance(error, known.error) and known.when(self) and re.search(known.pattern, str(error)):
                return known.kind
        return ""

    def check(self) -> str:
        """ "" where it ran and is equal, or the kind of its refusal. Raises AssertionError with the case."""
        try:
            step = self.staged()
            if step.transform("precision") is not None:
                cf.testing.check(step, *self.arguments(), steps=1)
            else:
                want = seeded(self.seed, run_reference, self.function(), *self.arguments())
                cf.testing.compare(seeded(self.seed, step, *self.arguments(layouts=True)), want)
        except Exception as error:
            kind = self.refusal(error)
            if not kind:
                raise AssertionError(f"{type(error).__name__}: {error}\n{self}") from error
            return kind
        return ""


def training(program: RandomProgram) -> Callable[..., Any]:
    """A step with momentum; the loss is the mean square of what the program returns."""

    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            results = program.on_positions(*params.values(), *batch.values())
            parts = [x.square().mean().double() for x in results.values() if x.is_floating_point() and x.numel()]
            return torch.stack(parts).sum()

        loss, grads = cf.value_and_grad(loss_of)(state["params"])
        momentum = {name: 0.9 * m + grads[name] for name, m in state["momentum"].items()}
        params = {name: p - 0.1 * momentum[name] for name, p in state["params"].items()}
        return {"params": params, "momentum": momentum}, loss

    return step


def draw(seed: int, n_lines: int = 8) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    trains = rng.random() < 0.5
    policy = rng.choice(POLICIES) if trains and rng.random() < 0.3 else None
    lines = random_programs.LINES + random_programs.RANDOM
    tries = (random_programs.draw(1000 * seed + k, n_lines, lines, differentiated=trains, smooth=policy is not None) for k in range(1000))
    program = next(program for program in tries if runs(program, trains, policy))
    # The last bits of a sum may differ, and of floats seen as integers all bits count.
    floats = tuple(name for name, x in program(*program.inputs).items() if x.dtype == torch.float64)
    program = attrs.evolve(program, results=floats)
    sizes = rng.choice(MESHES)
    axes = dict(zip(rng.sample(AXES, len(sizes)), sizes, strict=True))
    specs = [spec(rng, x.shape, axes) for x in program.inputs]
    in_specs: Any = tuple(specs)
    out_specs: Any = None
    if trains:
        in_specs = ({"params": {"v0": specs[0]}, "momentum": None}, {f"v{i}": s for i, s in enumerate(specs) if i > 0})
    elif rng.random() < 0.5:
        out_specs = {name: spec(rng, x.shape, axes) for name, x in program(*program.inputs).items()}
    links: list[tuple[str, dict[str, Any]]] = [("precision", {"policy": policy})] if policy is not None else []
    if trains and rng.random() < 0.3:
        links.append(("accumulate", {"microbatches": 2}))
    memory = ["checkpoint", "offload"]
    budget_part = rng.uniform(0.6, 1.3) if rng.random() < 0.1 else None
    budgeted = memory.pop(rng.randrange(2)) if budget_part else ""
    if trains and "checkpoint" in memory and rng.random() < 0.3:
        links.append(("checkpoint", {"policy": rng.choice(("nothing", "dots", "everything"))}))
    if "offload" in memory and rng.random() < 0.15:
        links.append(("offload", {"policy": rng.choice(("auto", "host"))}))
    rng.shuffle(links)
    return Case(seed, program, trains, axes, in_specs, out_specs, tuple(links), budget_part, budgeted)


def runs(program: RandomProgram, trains: bool, policy: cf.Policy | None) -> bool:
    """Whether torch takes the program, as a training step where it is one, under that precision."""
    step = training(program)
    if policy is not None:
        step = cf.precision(step, policy).reference
    try:
        result = run_reference(step, *Case(0, program, True, {}, None, None, ()).arguments()) if trains else {}
    except Exception:
        return False
    return all(bool(torch.isfinite(x).all()) for x in torch.utils._pytree.tree_leaves(result))


def spec(rng: random.Random, shape: tuple[int, ...], axes: dict[str, int]) -> str | None:
    """A spec that fits: each axis on a dim that it divides (now and then on one that it does not), or on none."""
    if rng.random() < 0.3:
        return None
    on: list[list[str]] = [[] for _ in shape]
    local = list(shape)
    padded: set[int] = set()
    for axis, size in axes.items():
        fits = [d for d, n in enumerate(local) if n % size == 0 and d not in padded]
        uneven = [d for d, n in enumerate(local) if n % size and n > 1 and not on[d]]
        if fits and rng.random() < 0.7:
            dim = rng.choice(fits)
            on[dim].append(axis)
            local[dim] //= size
        elif uneven and rng.random() < 0.3:
            dim = rng.choice(uneven)
            on[dim].append(axis)
            padded.add(dim)
    words = []
    for d, names in enumerate(on):
        letter = "abcefg"[d]
        if d in padded:
            words.append(f"({names[0]} {letter}~)")
        elif names and rng.random() < 0.15:
            words.append(f"({letter} {' '.join(names)})")
        else:
            words.append(f"({' '.join(names)} {letter})" if names else letter)
    return " ".join(words)
