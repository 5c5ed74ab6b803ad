"""A peak budget as a price per byte.

Problem: seconds and bytes are two goals. Idea: charge `price` seconds per byte of everything that is alive at the peak
and minimise the sum. A price of zero gives the fastest choice, a high one the leanest; the smallest price whose choice
fits is found by bisection; where what is too much can be made again or moved, the price is what that costs
(`at_price`). What is alive at the peak changes with the choice, so the charge is averaged over the choices seen so far
(a subgradient). In the end options are given back what they would like best, while it fits.

Source: Lagrangian relaxation for the constrained problem, Fisher (Management Science 27, 1981).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import attrs
import numpy as np

from colofunc.planner.sharding.eliminate import Array
from colofunc.planner.sharding.memory import Liveness, Peak
from colofunc.planner.sharding.model import PairwiseModel
from colofunc.planner.sharding.search import Effort, lighter, search_neighbours

K = TypeVar("K", bound=Hashable)

GIVEN_BACK = 60
"""At most this many single changes that save time are tried when a budget is met."""


@attrs.frozen
class Fit:
    """`choice` is None where nothing fits; `least_bytes` is the least peak seen, `least_roles` what it is made of."""

    choice: list[int] | None
    least_bytes: int
    least_roles: Mapping[str, int]
    least_choice: list[int]


@attrs.frozen(eq=False)
class _Charge:
    """Members of (class, result) and copies of a flow that are alive at the peak, averaged over choices."""

    outs: Mapping[tuple[int, int], float]
    copies: Mapping[int, float]

    def mixed(self, peak: Peak, share: float) -> _Charge:
        """The average with another peak, which counts for `share`."""
        return _Charge(_mixed(self.outs, peak.alive_outs, share), _mixed(self.copies, peak.alive_copies, share))

    @staticmethod
    def of(peak: Peak) -> _Charge:
        return _Charge(dict(peak.alive_outs), dict(peak.alive_copies))


def _mixed(old: Mapping[K, float], new: Mapping[K, int], share: float) -> dict[K, float]:
    keys = dict.fromkeys((*old, *new))
    return {key: (1 - share) * old.get(key, 0.0) + share * new.get(key, 0) for key in keys}


def fit_within(
    model: PairwiseModel,
    live: Liveness,
    start: Sequence[int],
    budget_bytes: int,
    effort: Effort,
    before: Sequence[Sequence[int]] = (),
) -> Fit:
    """The fastest choice found whose peak is within the budget. `before`: others that are known, such as those that met
    other budgets.
    """
    peak = live.peak(start)
    charge = _Charge.of(peak)
    light = lighter(effort)
    best: tuple[float, list[int]] | None = None
    least: tuple[int, Mapping[str, int], list[int]] = (peak.nbytes, peak.by_role, list(start))
    for known in (start, *before):
        cost_s = model.true_cost(known)
        if (best is None or cost_s < best[0]) and live.peak(known).nbytes <= budget_bytes:
            best = (cost_s, list(known))
    choice = list(start)
    low, high = 0.0, None
    price = model.true_cost(start) / max(1, peak.nbytes)
    for turn in range(16):
        choice = search_neighbours(_priced(model, charge, price), [choice, *before], light, fresh=turn == 0)
        cost_s, peak = model.true_cost(choice), live.peak(choice)
        charge = charge.mixed(peak, 1 / (2 + turn / 2))
        if peak.nbytes < least[0]:
            least = (peak.nbytes, peak.by_role, choice)
        if peak.nbytes <= budget_bytes:
            high = price
            if best is None or cost_s < best[0]:
                best = (cost_s, choice)
        else:
            low = price

        # Bisection, by factors: between a price that was too low and one at which it fits, once there is one.
        if high is None:
            if turn >= 11 or price > 1e3:
                break
            price *= 8
        elif high < low * 1.4:
            break
        else:
            price = (low * high) ** 0.5 if low else high / 8
    if best is None:
        return Fit(None, *least)
    return Fit(_give_back(model, live, best[1], budget_bytes), *least)


TURNS_FROM_LIKE = 3
"""At most this many rounds of charging for what is alive at the peak, which changes with the choice, where a search
begins at an assignment of a like program, which alone is restarted (`search`); elsewhere more than one wins nothing."""


def at_price(
    model: PairwiseModel,
    live: Liveness,
    start: Sequence[int],
    price_s_per_byte: float,
    effort: Effort,
    before: Sequence[Sequence[int]] = (),
    restarts: int = 0,
) -> list[int]:
    """The choice found for which seconds, and bytes at the peak at a price, are least together. What lies there costs
    time: to make it again, or to copy it. `start`: the fastest, `before`: choices that were good at other prices.
    `restarts`: see `search`."""
    light = lighter(effort)
    peak = live.peak(start)
    charge = _Charge.of(peak)
    choice = list(start)
    best = (model.true_cost(start) + price_s_per_byte * peak.nbytes, choice)
    for turn in range(TURNS_FROM_LIKE if restarts else 1):
        priced = _priced(model, charge, price_s_per_byte)
        found = search_neighbours(priced, [choice, *before], light, False, 0 if turn else restarts)
        peak = live.peak(found)
        best = min(best, (model.true_cost(found) + price_s_per_byte * peak.nbytes, found))
        if found == choice:
            break
        choice, charge = found, charge.mixed(peak, 1 / (2 + turn / 2))
    return best[1]


def _priced(model: PairwiseModel, charge: _Charge, price: float) -> PairwiseModel:
    """The model in which what is alive at the peak costs a price a byte."""
    copies = [price * charge.copies.get(flow, 0.0) for flow in range(len(model.flows))]
    return model.priced(copies, _option_costs(model, charge, price))


def _option_costs(model: PairwiseModel, charge: _Charge, price: float) -> list[Array]:
    """Per class, what each of its options costs by the results that are alive at the peak."""
    itemsize = {(flow.producer, flow.result): flow.itemsize for flow in model.flows}
    costs = [np.zeros(len(options)) for options in model.options]
    for (cls, result), members in charge.outs.items():
        sizes = []
        for strategy in model.options[cls]:
            layout = strategy.outs[result]
            sizes.append(0 if layout is None else layout.local_numel * itemsize[cls, result])
        costs[cls] += price * members * np.array(sizes, dtype=float)
    return costs


def _give_back(model: PairwiseModel, live: Liveness, choice: list[int], budget_bytes: int) -> list[int]:
    """Single changes that save time, largest first, kept while the peak stays within the budget.

    Without them a plan of OPT-30B on eight devices takes 1 % longer (`bench planning`).
    """
    gains = list[tuple[float, int, int]]()
    for cls in range(len(model.options)):
        row = model.row(cls, choice)
        now_s = row[choice[cls]]
        for better in np.flatnonzero(row < now_s).tolist():
            gains.append((float(row[better] - now_s), cls, better))
    cost_s = model.true_cost(choice)
    for _, cls, option in sorted(gains)[:GIVEN_BACK]:
        changed = [*choice[:cls], option, *choice[cls + 1 :]]
        changed_s = model.true_cost(changed)
        if changed_s < cost_s and live.peak(changed).nbytes <= budget_bytes:
            choice, cost_s = changed, changed_s
    return choice
