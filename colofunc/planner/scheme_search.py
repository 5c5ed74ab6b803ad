"""Schemes of weights, sharding, what is made again and what is copied, decided together.

Problem: how small weights have to be depends on what recomputation and copies would cost instead, and that is known
only of a finished step. To decide schemes first quantizes what there was room for, or keeps what is then copied in
every step. Idea: a choice of schemes is a candidate. The step is finished with it by the one planner, which decides
sharding, recomputation and residency for these very weights, and is counted by the accountant and the clock. Of what
fits the best is taken:

    limit_s     the least error of all that take at most so many seconds (None: any)
    rise        the fewest seconds of all whose loss rises by at most so much

Which candidates: one scheme for all weights, where seconds count; then choices for some bytes of all weights, each a
knapsack (`schemes`), halving the bytes next to the best one; and of the best with other schemes for some weights (all
others of a small model) those that may be better by what is known. That is the seconds of a weight in a scheme, as they
were counted in the steps finished so far, and that a choice needs no less memory than one that is too large already, has
no weight larger than it and rounds the same inputs.

A scheme that rounds inputs of layers too has the bytes of one that does not, and more error: it is taken for its
seconds, which bytes say nothing about. So a step with this scheme for all weights is counted even where its error is
above `rise`: what is learnt are the seconds of each weight, of which some may be taken.

    as it is    0         1.20 s (copied)
    int8        4e-5      0.41 s
    nf4         9e-3      0.46 s                  refused: rise=1e-3
    int8, two as they are       2e-5   0.39 s     taken
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import inf, prod

import attrs

from colofunc.errors import PlanError
from colofunc.planner.plan_table import time_text
from colofunc.planner.schemes import Option, SchemeChoice, SchemeOption, Tried, WeightOptions, WeightScheme, least_cost

Picks = tuple[int, ...]
"""Of each weight the number of an option."""
LEVELS = 12
"""At most so many choices for some bytes are finished with the whole step, those of one scheme counted."""
OTHERS = 12
"""At most so many choices are finished because they differ from the best one in some weights."""
ALL = 256
"""Where there are no more choices than this, all of them are looked at; otherwise those that differ in one weight."""
LITTLE = 1e-3
"""Of the least that may be gained by other schemes for some weights, in relation to all."""
NARROW = 1 / 256
"""Where two levels of bytes are no further apart, in relation to all bytes, nothing is looked for between them."""
GAIN = 2.0
"""How many times as fast a product of rounded inputs is taken to be, as long as none of its weight was counted."""


@attrs.frozen(eq=False)
class CountedSchemes:
    """A step with a choice of schemes: its peak on a rank, its seconds by the clock, and those of each weight.

    `why`: it fits no budget.
    """

    peak_bytes: int | None = None
    seconds: float | None = None
    weight_s: Mapping[str, float] = attrs.field(factory=dict)
    why: str = ""


CountPicks = Callable[[Picks], CountedSchemes]


def search(
    weights: Sequence[WeightOptions], finish: CountPicks, rise: float | None = None, limit_s: float | None = None
) -> Picks:
    """The best choice that fits, as said above. Raises PlanError where none was found."""
    return _Search(weights, finish, rise, limit_s).run()


def choice_of(weights: Sequence[WeightOptions], picks: Picks, tried: Sequence[Tried] = ()) -> SchemeChoice:
    """The choice with these options."""
    chosen = tuple(WeightScheme(weight, weight.options[pick]) for weight, pick in zip(weights, picks, strict=True))
    return SchemeChoice(chosen, budget_bytes=None, tried=tried)


def _rounds_inputs(option: Option) -> bool:
    return option.scheme is not None and option.scheme.rounds_inputs


def _needs_as_much(option: Option, other: Option) -> bool:
    """Whether a step needs no less memory with an option of a weight than with another, as far as is known."""
    if option.nbytes < other.nbytes:
        return False
    # What a product needs beside its weight differs where inputs are rounded, so the two say nothing of each other.
    return option.scheme == other.scheme or not (_rounds_inputs(option) or _rounds_inputs(other))


@attrs.define(eq=False)
class _Search:
    weights: Sequence[WeightOptions]
    finish: CountPicks
    rise: float | None
    limit_s: float | None
    tried: dict[Picks, CountedSchemes] = attrs.field(factory=dict)
    too_large: list[Picks] = attrs.field(factory=list)
    known_s: dict[tuple[int, int], float] = attrs.field(factory=dict)
    """(weight, option) -> the least seconds that were counted of them."""
    rest_s: float = 0.0
    """Seconds of the fastest step so far beside those of the weights."""
    best: Picks | None = None
    small: Picks = ()

    def run(self) -> Picks:
        sure = self.surest()
        if self.rise is not None and self.error(sure) > self.rise:
            raise PlanError(
                f"cf.quantize(scheme='auto', rise={self.rise}): weights that are quantized already let the loss rise "
                "by "
                f"{self.error(sure):.1e}. Try: a larger rise; the weights that they were quantized from"
            )
        self.small = self.smallest()
        self.look(sure)
        if self.best is None or self.rise is not None:
            seconds_count = self.rise is not None or self.limit_s is not None
            for picks in self.uniform() if seconds_count else ():
                self.look_at_one_scheme(picks)
            self.look(self.small)
            some_round = any(_rounds_inputs(option) for weight in self.weights for option in weight.options)
            # No other has a smaller weight; but one whose inputs are rounded, or not, may need less beside its weights.
            if self.best is None and self.rise is None and self.small in self.too_large and not some_round:
                raise PlanError(self.refused())
            if some_round and seconds_count:
                self.look(self.at(self.nbytes(sure)) or sure)  # the best by seconds, of which bytes say nothing
            self.between(self.nbytes(self.small), self.nbytes(sure))
            self.others()
        if self.best is None:
            raise PlanError(self.refused())
        return self.best

    # ---- what is known of a choice ----

    def nbytes(self, picks: Picks) -> int:
        return sum(weight.options[pick].nbytes for weight, pick in zip(self.weights, picks, strict=True))

    def error(self, picks: Picks) -> float:
        return sum(weight.options[pick].error for weight, pick in zip(self.weights, picks, strict=True))

    def seconds_of(self, number: int, pick: int) -> float:
        """Of all that reads a weight: as counted, else in relation to its bytes, of which all are read."""
        known = self.known_s.get((number, pick))
        if known is not None:
            return known
        options = self.weights[number].options
        sizes = [option.nbytes for option in options]
        beside = []
        for (other, k), seconds in self.known_s.items():
            if other == number:
                beside.append((abs(sizes[k] - sizes[pick]), seconds / sizes[k]))
        by_bytes = min(beside)[1] * sizes[pick] if beside else float(sizes[pick])
        return by_bytes / GAIN if _rounds_inputs(options[pick]) else by_bytes

    def estimated_s(self, picks: Picks) -> float:
        """Seconds of the step, no more than what is likely: the rest of it as in the fastest step so far."""
        return self.rest_s + self.weights_s(picks)

    def weights_s(self, picks: Picks) -> float:
        """Seconds of all that reads weights."""
        return sum(self.seconds_of(number, pick) for number, pick in enumerate(picks))

    def fits(self, done: CountedSchemes) -> bool:
        return not done.why and (self.limit_s is None or (done.seconds or 0.0) <= self.limit_s)

    def key(self, picks: Picks) -> tuple[float, float]:
        """What is to be least."""
        seconds, error = self.tried[picks].seconds or 0.0, self.error(picks)
        return (error, seconds) if self.rise is None else (seconds, error)

    def is_allowed(self, picks: Picks) -> bool:
        """Whether the loss rises by no more than it may."""
        return self.rise is None or self.error(picks) <= self.rise

    def rounds_inputs(self, picks: Picks) -> bool:
        """Whether some weight has a scheme that rounds inputs of layers too."""
        return any(_rounds_inputs(weight.options[pick]) for weight, pick in zip(self.weights, picks, strict=True))

    def is_too_large(self, picks: Picks) -> bool:
        """Whether a choice with no larger weight, and the same inputs rounded, was too large."""
        for other in self.too_large:
            if all(
                _needs_as_much(weight.options[here], weight.options[there])
                for weight, here, there in zip(self.weights, picks, other, strict=True)
            ):
                return True
        return False

    # ---- finishing ----

    def look(self, picks: Picks) -> None:
        """Finish the step with a choice, if it was not and may be taken."""
        if picks in self.tried or not self.is_allowed(picks) or self.is_too_large(picks):
            return
        done = self.tried[picks] = self.finish(picks)
        self.learn(picks, done)
        if self.fits(done) and (self.best is None or self.key(picks) < self.key(self.best)):
            self.best = picks

    def look_at_one_scheme(self, picks: Picks) -> None:
        """Finish the step with one scheme for all weights, if it may be taken, or if only so is known what it takes."""
        if self.is_allowed(picks):
            self.look(picks)
        elif self.rounds_inputs(picks) and not self.is_too_large(picks):
            self.learn(picks, self.finish(picks))

    def learn(self, picks: Picks, done: CountedSchemes) -> None:
        """What a finished step says about others."""
        if done.why:
            self.too_large.append(picks)
        for number, pick in enumerate(picks):
            seconds = done.weight_s.get(self.weights[number].name)
            if seconds is not None:
                self.known_s[number, pick] = min(seconds, self.known_s.get((number, pick), inf))
        # Of all that were finished anew: what is known of weights has changed.
        rests = [one.seconds - self.weights_s(other) for other, one in self.tried.items() if one.seconds is not None]
        self.rest_s = min(rests, default=0.0)

    # ---- candidates ----

    def surest(self) -> Picks:
        """The least error, of several choices the one of fewest bytes."""
        picks = []
        for weight in self.weights:
            ranked = [(option.error, option.nbytes, position) for position, option in enumerate(weight.options)]
            picks.append(min(ranked)[2])
        return tuple(picks)

    def uniform(self) -> Iterator[Picks]:
        """One scheme for all weights that it takes, the others of least error."""
        surest = self.surest()
        names = dict[str, None]()
        for weight in self.weights:
            names.update(dict.fromkeys(option.name for option in weight.options))
        for name in names:
            picks = list(surest)
            for number, weight in enumerate(self.weights):
                of_name = [position for position, option in enumerate(weight.options) if option.name == name]
                if of_name:
                    picks[number] = of_name[0]
            yield tuple(picks)

    def smallest(self) -> Picks:
        """The fewest bytes whose error may be."""
        limits = () if self.rise is None else (self.rise,)
        groups = []
        for weight in self.weights:
            groups.append([SchemeOption(option.nbytes, (option.error,)[: len(limits)]) for option in weight.options])
        picked = least_cost(groups, limits)
        return self.surest() if picked is None else self.surest_of_same_bytes(picked.picks)

    def surest_of_same_bytes(self, picks: Picks) -> Picks:
        """A choice with the least error that each weight may have in as many bytes."""
        surest = []
        for weight, pick in zip(self.weights, picks, strict=True):
            errors = []
            for position, option in enumerate(weight.options):
                if option.nbytes == weight.options[pick].nbytes:
                    errors.append((option.error, position))
            surest.append(min(errors)[1])
        return tuple(surest)

    def at(self, nbytes: float) -> Picks | None:
        """The best by what is known within some bytes; None: nothing is."""
        limits, groups = [nbytes], []
        if self.rise is not None:
            limits.append(self.rise)
        elif self.limit_s is not None and self.known_s:
            limits.append(self.limit_s - self.rest_s)
        for number, weight in enumerate(self.weights):
            items = []
            for k, one in enumerate(weight.options):
                seconds = self.seconds_of(number, k)
                cost, takes = (one.error, seconds) if self.rise is None else (seconds, one.error)
                items.append(SchemeOption(cost, (one.nbytes, takes)[: len(limits)]))
            groups.append(items)
        picked = least_cost(groups, limits)
        if picked is None and len(limits) > 1 and self.rise is None:  # by the estimate; it may be possible all the same
            by_bytes = []
            for items in groups:
                by_bytes.append([SchemeOption(item.cost, item.takes[:1]) for item in items])
            picked = least_cost(by_bytes, limits[:1])
        return None if picked is None else picked.picks

    def between(self, low: float, high: float) -> None:
        """Choices for bytes between the fewest and the most, next to the best."""
        levels = sorted({low, high, *(float(self.nbytes(picks)) for picks in self.tried)})
        narrow = NARROW * (high - low)
        for _ in range(LEVELS):
            apart = [
                (above - below, below, above) for below, above in pairwise(levels) if above - below > max(narrow, 1)
            ]
            here = [interval for interval in apart if self.is_next_to_best(*interval[1:])]
            if not here or len(self.tried) >= LEVELS:
                return
            _, below, above = max(here)
            middle = (below + above) // 2
            picks = self.at(middle)
            if picks is not None:
                self.look(picks)
            levels = sorted({*levels, middle, *([] if picks is None else [float(self.nbytes(picks))])})

    def is_next_to_best(self, below: float, above: float) -> bool:
        """Whether a better choice may be between two levels of bytes.

        More bytes have less error, so error alone is looked for above.
        """
        if self.best is None:
            return True
        best = self.nbytes(self.best)
        refused = [self.nbytes(picks) for picks, done in self.tried.items() if not self.fits(done)]
        least_refused = min((one for one in refused if one > best), default=inf)
        if self.rise is None:
            return best <= below and above <= least_refused
        fitting = [self.nbytes(picks) for picks, done in self.tried.items() if self.fits(done)]
        under = max((one for one in fitting if one < best), default=0.0)
        over = min((one for one in fitting if one > best), default=inf)
        return under <= below and above <= min(over, least_refused)

    def others(self) -> None:
        """The best with other schemes for some weights, where that may be better."""
        looked = 0
        while looked < OTHERS:
            picks = min(self.promising(), key=self.promise, default=None)
            if picks is None:
                return
            self.look(picks)
            looked += 1

    def promise(self, picks: Picks) -> tuple[float, Picks]:
        """By what is known; the least first."""
        by_error = self.rise is None and self.best is not None
        return (self.error(picks) if by_error else self.estimated_s(picks)), picks

    def promising(self) -> Iterator[Picks]:
        for picks in self.unlike():
            if picks in self.tried or self.is_too_large(picks) or not self.is_allowed(picks):
                continue
            if self.best is None:
                yield picks
            elif self.rise is None:
                quick = self.limit_s is None or self.estimated_s(picks) <= self.limit_s
                if quick and self.error(picks) < self.error(self.best) * (1 - LITTLE):
                    yield picks
            elif self.estimated_s(picks) < (self.tried[self.best].seconds or 0.0) * (1 - LITTLE):
                yield picks

    def unlike(self) -> Iterator[Picks]:
        """All choices of a small model, of others those that differ from the best in one weight."""
        counts = [len(weight.options) for weight in self.weights]
        if prod(counts) <= ALL:
            yield from product(*map(range, counts))
        elif self.best is not None:
            for number, count in enumerate(counts):
                for pick in range(count):
                    yield (*self.best[:number], pick, *self.best[number + 1 :])

    def refused(self) -> str:
        """Why nothing was found."""
        small = self.small
        why = self.tried[small].why if small in self.tried else "it is refused with smaller ones"
        within = "" if self.rise is None else f" with a rise of the loss of at most {self.rise:.1e}"
        if not why and self.limit_s is not None:
            fastest = min(done.seconds for done in self.tried.values() if done.seconds is not None)
            return (
                f"cf.quantize(scheme='auto', limit_s={self.limit_s}): the fastest step that was found takes "
                f"{time_text(fastest)}. "
                "Try: a larger limit_s or budget"
            )
        return (
            f"cf.quantize(scheme='auto'): with weights of {self.nbytes(small):,} bytes, the least possible{within}, "
            "the step is not within "
            f"its budget: {why}. Try: a larger budget{'' if self.rise is None else ' or rise='}; cf.offload and "
            "cf.checkpoint in the chain"
        )
