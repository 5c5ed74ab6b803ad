"""A peak budget as a price per byte.

Problem: seconds and bytes are two goals. Idea: charge `price` seconds per byte of everything that is alive at the peak
and minimise the sum. A price of zero gives the fastest choice, a high one the leanest; the smallest price whose choice
fits is found by bisection; where what is too much can be made again or moved, the price is what that costs (`at_price`).
What is alive at the peak changes with the choice, so the charge is averaged over the
choices seen so far (a subgradient). In the end options are given back what they would like best, while it fits.

Source: Lagrangian relaxation for the constrained problem, Fisher (Management Science 27, 1981).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from colofunc.planner.sharding.eliminate import Array
from colofunc.planner.sharding.memory import Liveness, Peak
from colofunc.planner.sharding.model import Model
from colofunc.planner.sharding.search import Effort, lighter, search

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
        def mix(old: Mapping[object, float], new: Mapping[object, int]) -> dict[object, float]:
            keys = dict.fromkeys((*old, *new))
            return {k: (1 - share) * old.get(k, 0.0) + share * new.get(k, 0) for k in keys}

        return _Charge(mix(self.outs, peak.alive_outs), mix(self.copies, peak.alive_copies))  # type: ignore[arg-type]


def fit(
    model: Model,
    live: Liveness,
    start: Sequence[int],
    budget_bytes: int,
    seed: int,
    effort: Effort,
    before: Sequence[Sequence[int]] = (),
) -> Fit:
    """The fastest choice found whose peak is within the budget. `before`: choices that met other budgets."""
    peak = live.peak(start)
    charge = _Charge(dict(peak.alive_outs), dict(peak.alive_copies))
    light = lighter(effort)
    best: tuple[float, list[int]] | None = None
    least: tuple[int, Mapping[str, int], list[int]] = (peak.nbytes, peak.by_role, list(start))
    if least[0] <= budget_bytes:
        best = (model.true_cost(start), list(start))
    x = list(start)
    low, high = 0.0, None
    price = model.true_cost(start) / max(1, peak.nbytes)
    for turn in range(16):
        priced = model.priced(_copies(model, charge, price), _extra(model, charge, price))
        x = search(priced, [x, *before], seed, light, fresh=turn == 0)
        seconds, peak = model.true_cost(x), live.peak(x)
        nbytes = peak.nbytes
        charge = charge.mixed(peak, 1 / (2 + turn / 2))
        if nbytes < least[0]:
            least = (nbytes, peak.by_role, x)
        if nbytes <= budget_bytes:
            high = price
            if best is None or seconds < best[0]:
                best = (seconds, x)
        else:
            low = price
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
"""At most this many rounds of charging for what is alive at the peak, which changes with the choice, where a search begins at an assignment
of a like program, which alone is restarted (`search`); elsewhere more than one wins nothing."""


def at_price(
    model: Model,
    live: Liveness,
    start: Sequence[int],
    price_s_per_byte: float,
    seed: int,
    effort: Effort,
    before: Sequence[Sequence[int]] = (),
    restarts: int = 0,
) -> list[int]:
    """The choice found for which seconds, and bytes at the peak at a price, are least together. What lies there costs time:
    to make it again, or to copy it. `start`: the fastest, `before`: choices that were good at other prices. `restarts`: see `search`."""
    light = lighter(effort)
    peak = live.peak(start)
    charge = _Charge(dict(peak.alive_outs), dict(peak.alive_copies))
    best, x = (model.true_cost(start) + price_s_per_byte * peak.nbytes, list(start)), list(start)
    for turn in range(TURNS_FROM_LIKE if restarts else 1):
        priced = model.priced(_copies(model, charge, price_s_per_byte), _extra(model, charge, price_s_per_byte))
        y = search(priced, [x, *before], seed, light, False, 0 if turn else restarts)
        peak = live.peak(y)
        best = min(best, (model.true_cost(y) + price_s_per_byte * peak.nbytes, y))
        if y == x:
            break
        x, charge = y, charge.mixed(peak, 1 / (2 + turn / 2))
    return best[1]


def _extra(model: Model, charge: _Charge, price: float) -> list[Array]:
    itemsize = {(f.producer, f.result): f.itemsize for f in model.flows}
    extra = [np.zeros(len(options)) for options in model.options]
    for (c, j), members in charge.outs.items():
        sizes = [0 if (lay := s.outs[j]) is None else lay.local_numel * itemsize[c, j] for s in model.options[c]]
        extra[c] += price * members * np.array(sizes, dtype=float)
    return extra


def _copies(model: Model, charge: _Charge, price: float) -> list[float]:
    return [price * charge.copies.get(f, 0.0) for f in range(len(model.flows))]


def _give_back(model: Model, live: Liveness, x: list[int], budget_bytes: int) -> list[int]:
    """Single changes that save time, largest first, kept while the peak stays within the budget."""
    gains = []
    for c in range(len(model.options)):
        row = model.row(c, x)
        gains += [(float(row[o] - row[x[c]]), c, int(o)) for o in np.flatnonzero(row < row[x[c]])]
    cost_s = model.true_cost(x)
    for _, c, o in sorted(gains)[:GIVEN_BACK]:
        y = [*x[:c], o, *x[c + 1 :]]
        now = model.true_cost(y)
        if now < cost_s and live.peak(y).nbytes <= budget_bytes:
            x, cost_s = y, now
    return x
