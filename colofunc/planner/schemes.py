"""Which weights are quantized how: the choice of least error within a number of bytes.

    errors = cf.scheme_errors(weights, sensitivities)            # of each weight and scheme: bytes, and what it does to the loss
    choice = errors.within("2GiB", keep="*.head.weight")
    print(choice)                                                # a line for each weight: what was chosen, and why
    step = cf.quantize(step, choice)

Problem: one scheme for all weights spends as much on those that hardly matter as on those that do. Idea: the errors of
different weights add up (`colofunc/functional/scheme_errors.py` says what they are), and so do bytes and seconds; so
the choice is a knapsack (at the end of this file), which is solved exactly, or with a bound that says how far off it
may be. Not to quantize a weight is one of its options, with no error.

Here the schemes of all weights are decided together, and nothing else. `scheme_search` finishes the whole step with
several choices, and so decides them together with sharding, recomputation and offload:
`cf.quantize(step, "auto", ...)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from colofunc.errors import InputError, PlanError, near
from colofunc.mesh.sizes import parse_bytes, size_text
from colofunc.ops.measured import same_weight
from colofunc.ops.quantizers import Quantizer
from colofunc.planner.plan import matches
from colofunc.planner.plan_table import time_text
from colofunc.planner.solver_lines import without_solver_lines
from colofunc.program.text import columns

AS_IT_IS = "as it is"
CLOSE = 1e-6
"""Relative difference to the bound below which a choice counts as the least: the solver's numbers are no better."""


@attrs.frozen
class Option:
    """One way to keep a weight. `scheme`: None leaves it as it is. `error`: rise of the loss, by the estimate.
    `seconds`: None: unknown."""

    scheme: Quantizer | None
    nbytes: int
    error: float
    seconds: float | None = None

    @property
    def name(self) -> str:
        """Its name in tables."""
        return AS_IT_IS if self.scheme is None else self.scheme.name


@attrs.frozen
class WeightOptions:
    """The ways in which one weight may be kept, the first as it is. `stays`: why there is no other, "" where there
    is."""

    name: str
    shape: tuple[int, ...]
    options: tuple[Option, ...]
    stays: str = ""

    def option(self, scheme: str) -> Option | None:
        """That of a scheme's name."""
        return next((option for option in self.options if option.name == scheme), None)


@attrs.frozen(eq=False)
class SchemeErrors:
    """Of each weight and scheme: bytes, error, and seconds where they were asked for. `print` shows a line for each
    weight."""

    weights: tuple[WeightOptions, ...]

    def within(self, budget: str | int, keep: str | Iterable[str] = (), limit_s: float | None = None) -> SchemeChoice:
        """The scheme of each weight with the least error together, within `budget` bytes of all these weights.

        budget: "2GiB" or a number of bytes, of whole weights, not of a rank's part; weights that stay count. keep:
        globs over names of weights that stay as they are. limit_s: at most so many seconds of all that reads these
        weights, where seconds were asked for. Raises PlanError with the least that is possible, InputError for a glob
        that matches nothing.
        """
        limit, weights = parse_bytes(budget, "budget"), self.kept(keep)
        limits: tuple[float, ...] = (limit,)
        if limit_s is not None:
            self._check_seconds()
            limits = (limit, limit_s)
        groups = []
        for weight in weights:
            groups.append(
                [SchemeOption(one.error, (one.nbytes, one.seconds or 0.0)[: len(limits)]) for one in weight.options]
            )
        picked = least_cost(groups, limits)
        if picked is None:
            raise PlanError(_too_little(weights, limit, limit_s))
        chosen = [weight.options[pick] for weight, pick in zip(weights, picked.picks, strict=True)]
        return SchemeChoice(tuple(map(WeightScheme, weights, chosen)), limit, limit_s, picked.bound)

    def kept(self, keep: str | Iterable[str]) -> tuple[WeightOptions, ...]:
        """The weights, those that `keep` matches with one option. Raises InputError for a glob that matches nothing."""
        globs = (keep,) if isinstance(keep, str) else tuple(keep)
        names = [weight.name for weight in self.weights]
        for glob in globs:
            if not any(matches(name, glob) for name in names):
                raise InputError(
                    f"keep={glob!r} matches none of the weights that were measured{near(glob, names, 'weights')}"
                )
        found = []
        for weight in self.weights:
            by = next((glob for glob in globs if matches(weight.name, glob)), None)
            found.append(
                weight if by is None else attrs.evolve(weight, options=weight.options[:1], stays=f"keep={by!r}")
            )
        return tuple(found)

    def uniform(self, scheme: str) -> SchemeChoice:
        """Every weight that can be in one scheme, the others as they are: what a choice is compared with."""
        names = {option.name for weight in self.weights for option in weight.options}
        if scheme not in names:
            raise InputError(f"there are no errors of the scheme {scheme!r}{near(scheme, names, 'schemes')}")
        chosen = [WeightScheme(weight, weight.option(scheme) or weight.options[0]) for weight in self.weights]
        return SchemeChoice(tuple(chosen), sum(one.option.nbytes for one in chosen))

    def _check_seconds(self) -> None:
        if any(option.seconds is None for weight in self.weights for option in weight.options):
            raise InputError(
                "limit_s: these errors have no seconds. Try: cf.scheme_errors(..., step=step, args=(state, batch))"
            )

    def __str__(self) -> str:
        names = dict.fromkeys(
            option.name for weight in self.weights for option in weight.options if option.scheme is not None
        )
        rows = [("weight", "shape", AS_IT_IS, *names)]
        for weight in self.weights:
            cells = []
            for name in names:
                option = weight.option(name)
                cells.append("-" if option is None else f"{option.error:.1e} in {size_text(option.nbytes)}")
            rows.append((weight.name, "x".join(map(str, weight.shape)), size_text(weight.options[0].nbytes), *cells))
        return "rise of the loss by the estimate, and bytes\n" + columns(rows, range(2, len(rows[0])))


def _too_little(weights: Sequence[WeightOptions], limit: int, limit_s: float | None) -> str:
    """Why no choice keeps to the limits."""
    least, least_s = 0, 0.0
    for weight in weights:
        least += min(option.nbytes for option in weight.options)
        least_s += min(option.seconds or 0.0 for option in weight.options)
    if least > limit:
        return (
            f"these weights take {least:,} bytes at least, each in the smallest of the schemes, "
            f"and the budget is {limit:,}. Try: budget={least}, or fewer globs in keep="
        )
    return (
        f"no choice within {limit:,} bytes takes {time_text(limit_s or 0.0)} or less; the fastest of any size takes "
        f"{time_text(least_s)}. "
        "Try: a larger limit_s or budget"
    )


@attrs.frozen
class WeightScheme:
    """What was chosen for a weight."""

    weight: WeightOptions
    option: Option

    def why(self, choice: SchemeChoice) -> str:
        """What less error would cost, or why the weight stays."""
        if self.weight.stays:
            return self.weight.stays
        better = [option for option in self.weight.options if option.error < self.option.error]
        if not better:
            return "nothing has less error"
        nearest = min(better, key=lambda option: (option.nbytes, option.error))
        more, free_bytes = nearest.nbytes - self.option.nbytes, choice.free_bytes
        # Of weights that have a limit of their own, it is seconds that have no room.
        if free_bytes is not None and choice.limit_s is not None and more <= free_bytes:
            return f"{nearest.name} takes {time_text((nearest.seconds or 0.0) - (self.option.seconds or 0.0))} more"
        if more <= 0:  # of a choice that is not the one of least error
            return f"{nearest.name} has less error in no more bytes"
        gain = f"{nearest.name} takes {size_text(more)} more for {self.option.error - nearest.error:.1e} less"
        return gain if free_bytes is None else f"{gain}; {size_text(free_bytes)} are free"


@attrs.frozen
class Tried:
    """A choice with which a step was finished, and what it came to on a rank; `why`: that it cannot be within the
    budget."""

    nbytes: int
    error: float
    peak_bytes: int | None
    seconds: float | None
    why: str = ""


@attrs.frozen(eq=False)
class SchemeChoice:
    """The scheme of each weight, for `cf.quantize(step, choice)`. `print` shows a line for each weight: what was
    chosen, and why.

    `budget_bytes`, `limit_s`: what these weights were to keep to; None: nothing of their own. `bound`: the error that
    any choice within them has at least, None where it was not looked for. `tried`: the choices that a whole step was
    finished with, where "auto" made this one (on rank 0).
    """

    weights: tuple[WeightScheme, ...]
    budget_bytes: int | None
    limit_s: float | None = None
    bound: float | None = None
    tried: Sequence[Tried] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(chosen.option.nbytes for chosen in self.weights)

    @property
    def free_bytes(self) -> int | None:
        """What the budget has left; None: there is none for weights alone."""
        return None if self.budget_bytes is None else self.budget_bytes - self.nbytes

    @property
    def error(self) -> float:
        """The rise of the loss, by the estimate."""
        return sum(chosen.option.error for chosen in self.weights)

    @property
    def seconds(self) -> float | None:
        """Of all that reads these weights; None where it was not asked for."""
        found = [chosen.option.seconds for chosen in self.weights]
        return None if any(one is None for one in found) else sum(one or 0.0 for one in found)

    @property
    def schemes(self) -> Mapping[str, str]:
        """Weight's name -> its scheme's name."""
        return {chosen.weight.name: chosen.option.name for chosen in self.weights}

    def known(self, name: str) -> WeightScheme | None:
        """What was chosen for the weight of this name in a step, whose state may have further words in front; None:
        nothing."""
        fitting = []
        for chosen in self.weights:
            if chosen.weight.name == name:
                return chosen
            if same_weight(name, chosen.weight.name):
                fitting.append(chosen)
        return fitting[0] if len(fitting) == 1 else None

    def scheme(self, name: str) -> Quantizer | None:
        """The scheme of a weight of a step; None: it stays as it is. Raises InputError where nothing was chosen for
        it."""
        chosen = self.known(name)
        if chosen is None:
            names = list(self.schemes)
            raise InputError(
                f"cf.quantize: no scheme was chosen for {name!r}{near(name, names, 'weights')} Try: cf.scheme_errors "
                "with all weights of "
                "the step; where= that leaves it out"
            )
        return chosen.option.scheme

    def __str__(self) -> str:
        seconds = [] if self.seconds is None else ["seconds"]
        rows = [("weight", "scheme", "bytes", "error", *seconds, "why")]
        for chosen in self.weights:
            option = chosen.option
            times = [time_text(option.seconds or 0.0) for _ in seconds]
            rows.append(
                (chosen.weight.name, option.name, f"{option.nbytes:,}", f"{option.error:.1e}", *times, chosen.why(self))
            )
        return "\n".join([self.sentence(), columns(rows, range(2, 4 + len(seconds))), *self._tries()])

    def sentence(self) -> str:
        """Bytes and error of all weights, in a line."""
        before = sum(chosen.weight.options[0].nbytes for chosen in self.weights)
        within = "" if self.budget_bytes is None else f" within {size_text(self.budget_bytes)}"
        said = f"{size_text(self.nbytes)} of {size_text(before)}{within}; the loss rises by {self.error:.2e} by the estimate"
        if self.bound is None:
            return said
        least = (
            "the least possible" if self.error <= self.bound * (1 + CLOSE) else f"at least {self.bound:.2e} is possible"
        )
        return f"{said}, {least}"

    def _tries(self) -> list[str]:
        if not self.tried:
            return []
        rows: list[tuple[Any, ...]] = [("weights", "error", "peak", "step", "")]
        for tried in self.tried:
            peak = "-" if tried.peak_bytes is None else size_text(tried.peak_bytes)
            step = "-" if tried.seconds is None else time_text(tried.seconds)
            rows.append((size_text(tried.nbytes), f"{tried.error:.1e}", peak, step, tried.why))
        return ["tried with the whole step:", columns(rows, range(4))]


# ---- a knapsack with groups ----
#     first = [SchemeOption(0.0, (8,)), SchemeOption(0.3, (2,))]
#     second = [SchemeOption(0.0, (8,)), SchemeOption(0.1, (2,))]
#     least_cost([first, second], limits=(10,))      # picks (0, 1), cost 0.1
#
# A program of whole numbers (0 or 1 for each option), which HiGHS solves. Groups share nothing but the limits, so the
# relaxation has few fractions (at most one group for each limit) and its bound is near: 560 groups of 7 take a second
# or two. A solver of floating-point numbers keeps to a limit within a tolerance, so what it gives is added up exactly,
# and where it is above a limit by that, the limit is lowered by as much and asked again. `bound` says what any choice
# costs at least: the cost is the least one where they are equal.


MOST_NODES = 20_000
"""Nodes of the search tree that are looked at, so that an answer does not depend on how fast a machine is."""
ROUNDS = 8
"""How often limits are lowered because an answer was above them by a tolerance."""
ROW = 1e6
"""What a limit becomes in the solver, whose tolerance is absolute."""


@attrs.frozen
class SchemeOption:
    """An option: its cost, 0 or more, and what it takes of each resource."""

    cost: float
    takes: tuple[float, ...]


@attrs.frozen
class Picked:
    """Which option of each group, what all of them cost, and what any choice costs at least."""

    picks: tuple[int, ...]
    cost: float
    bound: float


def least_cost(groups: Sequence[Sequence[SchemeOption]], limits: Sequence[float]) -> Picked | None:
    """The choice of the least cost within `limits`, one for each resource; None where there is none."""
    if not groups:
        return Picked((), 0.0, 0.0)
    first = _cheapest(groups)
    if _above(groups, first, limits) is None:  # no limit binds
        cost = _cost(groups, first)
        return Picked(first, cost, cost)
    asked = [float(limit) for limit in limits]
    bound: float | None = None
    for _ in range(ROUNDS):
        answer = _solved(groups, asked)
        if answer is None:
            return None
        if bound is None:
            bound = answer.bound  # of the limits as they are
        above = _above(groups, answer.picks, limits)
        if above is None:
            return attrs.evolve(answer, bound=min(bound, answer.cost))
        resource, by = above
        asked[resource] -= by
    return None


def _cheapest(groups: Sequence[Sequence[SchemeOption]]) -> tuple[int, ...]:
    """Of each group the option of the least cost, of several the one that takes least."""
    return tuple(min(range(len(group)), key=lambda k: (group[k].cost, group[k].takes)) for group in groups)


def _cost(groups: Sequence[Sequence[SchemeOption]], picks: Sequence[int]) -> float:
    return sum(group[pick].cost for group, pick in zip(groups, picks, strict=True))


def _above(
    groups: Sequence[Sequence[SchemeOption]], picks: Sequence[int], limits: Sequence[float]
) -> tuple[int, float] | None:
    """The first resource of which picks take more than there is, and by how much."""
    for resource, limit in enumerate(limits):
        by = sum(group[pick].takes[resource] for group, pick in zip(groups, picks, strict=True)) - limit
        if by > 0:
            return resource, by
    return None


def _solved(groups: Sequence[Sequence[SchemeOption]], limits: Sequence[float]) -> Picked | None:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    sizes = [len(group) for group in groups]
    items = [item for group in groups for item in group]
    if any(limit < 0 for limit in limits):
        return None
    cost = np.array([item.cost for item in items])
    group_of = np.repeat(np.arange(len(groups)), sizes)
    one_each = csr_matrix((np.ones(len(items)), (group_of, np.arange(len(items)))))
    rows = [LinearConstraint(one_each, 1, 1)]
    for resource, limit in enumerate(limits):
        takes = np.array([item.takes[resource] for item in items], dtype=float)
        # In units in which the limit (or the largest that an option takes, where it is 0) is ROW.
        unit = max(limit, float(takes.max())) / ROW or 1.0
        rows.append(LinearConstraint(csr_matrix(takes / unit), -np.inf, limit / unit))
    # The solver stops within 1e-6 of the least cost: costs are scaled so that this is nothing.
    scale = 1e6 / (float(cost.max()) or 1.0)
    options = {"mip_rel_gap": 0.0, "node_limit": MOST_NODES}
    with without_solver_lines():
        result = milp(
            cost * scale, constraints=rows, bounds=Bounds(0, 1), integrality=np.ones(len(items)), options=options
        )
    if result.x is None:
        return None
    picks, begin = [], 0
    for size in sizes:
        picks.append(int(np.argmax(result.x[begin : begin + size])))
        begin += size
    found = _cost(groups, picks)
    return Picked(tuple(picks), found, min(found, max(0.0, float(result.mip_dual_bound) / scale)))
