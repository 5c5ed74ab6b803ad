"""Within a budget: plan, lower, count; where it is too much, make again what backward reads, or plan for less.

The planner's estimate of the peak is quick and a little off, the accountant's is right to the byte and comes last. So a
plan is made, completed and counted, and made again with less in mind until what was counted fits.

    decide -> lower, passes -> (recompute) -> coalesce, chunks, buckets, in place -> count
       ^-------------------------- too much: aim for less ---------------------------|   -> updates side by side
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from math import inf

import attrs

from colofunc.compiler.completion import Completion
from colofunc.compiler.decisions import Decisions
from colofunc.compiler.least_budget import SearchBudget, Trial, budget_text, glance, least_budget
from colofunc.compiler.sharder import LazySharding, Sharder
from colofunc.errors import CapacityError, PlanError
from colofunc.planner.candidate import FinishedProgram
from colofunc.planner.joint import (
    FAR_OVER,
    FRONTIER_PRICES,
    FRONTIER_PRICES_LARGE,
    MAX_PRICES,
    Proposal,
    decide_from_known,
    decide_jointly,
    frontier,
)
from colofunc.planner.sharding.assign import Assignment, Memo, OverBudget, others
from colofunc.planner.sharding.by_axes import MOST_AXES
from colofunc.planner.sharding.lower_bound import arguments_at_least, at_least_any
from colofunc.program.ir import Program

SMALL, MEDIUM, LARGE = 100, 400, 2000
"""In nodes. Up to SMALL: all shardings are compared, where they are few. Up to MEDIUM: a few to which no price leads
are compared as well, at most MEDIUM nodes are finished in all of them, and a search begins from nothing even where a
sharding of a like step is known, which takes little. Above LARGE: fewer searches."""
MAX_PRICES_LARGE = 3
"""At most this many searches at a price of memory for large programs."""
SHARDINGS_FOR_LESS = 4
"""At most this many shardings for one budget where nothing else can be done; microbatches add one for each doubling."""
TOLERANCE, CLEARLY_SLOWER = 0.01, 0.05
"""A known sharding is kept where another one is faster by at most TOLERANCE; it is not counted where the search says
that it is slower by more than CLEARLY_SLOWER."""


class DoesNotFit(PlanError):
    """No plan was found within the budget, and the least was not looked for.

    peak_bytes: of the leanest that was tried.
    """

    def __init__(self, peak_bytes: int) -> None:
        super().__init__(f"the leanest plan that was tried has a peak of {budget_text(peak_bytes)}")
        self.peak_bytes = peak_bytes


# ---- ways to a plan ----


def plan_for_budget(
    sharder: Sharder, budget_bytes: int | None, parts: int = 1, named: Iterable[Decisions] = ()
) -> tuple[Decisions, Program] | FailedSearch:
    """Plan and complete so that the accountant agrees that the peak is within the budget.

    The planner knows nothing of microbatches: a step in `parts` may hold so many times less than it says. Where a step
    may make values again or copy them, that and the sharding are decided together (`planner/joint.py`). `named`: further
    shardings, each of which is finished and counted as well. FailedSearch: nothing fits.
    """
    completion = sharder.completion
    if budget_bytes is None:
        finished = [(decided, completion.finish(decided, None)) for decided in (sharder.decide(None), *named)]
        fitting = [each for each in finished if not each[1].short]
        if not fitting:
            raise CapacityError(finished[0][1].short)
        return _soonest(completion, fitting)
    search = BudgetSearch(sharder, parts, SHARDINGS_FOR_LESS + parts.bit_length() - 1)
    fastest, leanest = search.run(budget_bytes)
    fitting = []
    if fastest is not None:
        fitting.append((fastest.decided, completion.finish_best(fastest.decided, budget_bytes, fastest.done)))
    elif search.lower_bounds().above(budget_bytes):
        named = ()
    for decided in named:
        if _may_be_sooner(completion, decided, budget_bytes, fitting):
            done = completion.finish_best(decided, budget_bytes)
            if done.fits(budget_bytes):
                fitting.append((decided, done))
    if not fitting:
        return FailedSearch(search, budget_bytes, leanest, sharder.candidates.memo)
    return _soonest(completion, fitting)


def or_named(
    completion: Completion,
    outcome: tuple[Decisions, Program],
    budget_bytes: int | None,
    named: Iterable[Decisions],
) -> tuple[Decisions, Program]:
    """A plan that stands, or a sharding among `named` that is faster by more than TOLERANCE."""
    for decided in named:
        done = completion.finish_best(decided, budget_bytes)
        fits = not done.short if budget_bytes is None else done.fits(budget_bytes)
        if fits and completion.end_s(done) * (1 + TOLERANCE) < outcome[0].plan.cost_s:
            outcome = _with_counted_figures(completion, decided, done)
    return outcome


def _may_be_sooner(
    completion: Completion,
    decided: Decisions,
    budget_bytes: int,
    fitting: Sequence[tuple[Decisions, FinishedProgram]],
) -> bool:
    """Whether a sharding may end sooner within the budget than those that fit: it does without one.

    Of programs that are not small it has to fit as it is, for what makes it fit is searched for as long as for a plan; so
    it has where nothing fits, where it may be what is planned without a budget.
    """
    free = completion.finish(decided, None)
    if not free.fits(budget_bytes) and (not fitting or len(completion.program.nodes) > MEDIUM):
        return False
    return all(completion.end_s(free) < completion.end_s(done) for _, done in fitting)


def _soonest(completion: Completion, fitting: list[tuple[Decisions, FinishedProgram]]) -> tuple[Decisions, Program]:
    """Of finished shardings the one that ends first by the clock, which a single one is not asked."""
    if len(fitting) > 1:
        fitting = sorted(fitting, key=lambda each: completion.end_s(each[1]))
    return _with_counted_figures(completion, *fitting[0])


def plan_from_known(
    sharder: Sharder, budget_bytes: int | None, parts: int, known: Assignment
) -> tuple[Decisions, Program]:
    """The fastest of a sharding that is known from a like step and of what searches from there find.

    Raises PlanError where none fits.

    Without a budget `known` is taken where nothing is faster by more than TOLERANCE: two lengths that are planned alike
    are easier to follow.
    """
    completion, program = sharder.completion, sharder.program
    is_medium = len(program.nodes) <= MEDIUM
    sharder.candidates.memo = Memo(like=None if is_medium else known)
    if budget_bytes is None or not completion.gives_way:
        found = sharder.assign(budget_bytes)
        return _faster_plan(sharder, sharder.among(found, known), found, budget_bytes)

    def finish(sharding: LazySharding, below_s: float) -> FinishedProgram:
        return completion.finish(sharding(), budget_bytes, below_s)

    best = decide_from_known(
        sharder.proposal(known, None),
        sharder.propose,
        finish,
        budget_bytes,
        parts,
        end_s=completion.end_s,
        small=is_medium,
    )
    if best is None:
        raise PlanError(f"no sharding near one that is known fits within {budget_text(budget_bytes)} a rank")
    decided = best.proposal.plan()
    return _with_counted_figures(completion, decided, completion.finish_best(decided, budget_bytes, best.done))


def _faster_plan(
    sharder: Sharder, known: Assignment, found: Assignment, budget_bytes: int | None
) -> tuple[Decisions, Program]:
    """Of a known sharding and one that was found, the faster by the clock.

    The known one is not lowered where it is clearly slower.
    """
    plan_found = plan_of(sharder.completion, sharder.decide(budget_bytes, found), budget_bytes)
    if known.cost_s > found.cost_s * (1 + CLEARLY_SLOWER):
        return plan_found
    try:
        plan_known = plan_of(sharder.completion, sharder.decide(budget_bytes, known), budget_bytes)
    except (PlanError, CapacityError):  # it is too large for these sizes
        return plan_found
    known_s, found_s = plan_known[0].plan.cost_s, plan_found[0].plan.cost_s
    return plan_known if known_s <= found_s * (1 + TOLERANCE) else plan_found


def plan_of(completion: Completion, decided: Decisions, budget_bytes: int | None) -> tuple[Decisions, Program]:
    """Complete a plan whose sharding stands. Raises PlanError where the fastest way found does not fit."""
    done = completion.finish_best(decided, budget_bytes)
    if budget_bytes is None:
        if done.short:
            raise CapacityError(done.short)
    elif not done.fits(budget_bytes):
        peak, budget = budget_text(done.peak_bytes), budget_text(budget_bytes)
        raise PlanError(done.short or f"the least found has a peak of {peak}, the budget is {budget}")
    return _with_counted_figures(completion, decided, done)


def _with_counted_figures(
    completion: Completion, decided: Decisions, done: FinishedProgram
) -> tuple[Decisions, Program]:
    """The plan says what the program that runs holds and how long it takes, and what was done to keep to the budget."""
    program = completion.ended(done)
    lanes = completion.lanes(program)
    peak_bytes = 0
    if program is done.program and not completion.mesh.topology.ranks:
        peak_bytes = done.peak_bytes
    # Where ranks differ, what was compared with the budget is no number of bytes that some rank holds.
    if not peak_bytes:
        peak_bytes = completion.count(program).peak_bytes["device"]
    plan = attrs.evolve(
        decided.plan,
        peak_bytes=peak_bytes,
        cost_s=lanes.end_s,
        communication_s=lanes.busy_s().get("collectives", 0.0),
        memory=done.words,
        spent=completion.spent(program, lanes, decided.plan),
    )
    return attrs.evolve(decided, plan=plan.with_pipeline(completion.pipelined(program))), program


# ---- a search within a budget ----


@attrs.frozen(eq=False)
class _FirstFit(Exception):
    """Ends a search: a plan that fits, where it does not matter whether another one is faster."""

    trial: Trial


@attrs.frozen(eq=False)
class BudgetSearch:
    """Looks for plans of one step within budgets.

    `tries`: shardings at most for one budget, where nothing else can be done.
    """

    sharder: Sharder
    parts: int
    tries: int

    def run(self, budget_bytes: int, any_that_fits: bool = False) -> tuple[Trial | None, Trial]:
        """(the fastest plan found that fits or None, the leanest that was tried). any_that_fits: not the fastest, but
        the first.
        """
        completion = self.sharder.completion
        if not completion.gives_way:
            return self._by_sharding_alone(budget_bytes)
        if completion.mesh.size == 1:  # then there is one sharding
            only = self.complete(self.sharder.decide(None), budget_bytes)
            return (only if only.done.fits(budget_bytes) else None), only
        try:
            return self._jointly(budget_bytes, any_that_fits)
        except _FirstFit as first:
            return first.trial, first.trial

    def _jointly(self, budget_bytes: int, any_that_fits: bool) -> tuple[Trial | None, Trial]:
        """Sharding and ways to make a program fit, decided together."""
        completion, node_count = self.sharder.completion, len(self.sharder.program.nodes)

        def finish(sharding: LazySharding, below_s: float) -> FinishedProgram:
            done = completion.finish(sharding(), budget_bytes, below_s)
            if any_that_fits and done.fits(budget_bytes):
                raise _FirstFit(Trial(sharding(), done, budget_bytes))
            return done

        def lower_bound() -> int:
            bounds = self.lower_bounds()
            return self.parts * max(bounds.operator_bytes, bounds.argument_bytes)

        best, leanest = decide_jointly(
            self.sharder.propose,
            finish,
            budget_bytes,
            self.parts,
            self.tries,
            max_prices=MAX_PRICES if node_count <= LARGE else MAX_PRICES_LARGE,
            others=partial(self._others, budget_bytes),
            max_others=max(2, MEDIUM // max(1, node_count)),
            lower_bound=lower_bound,
            end_s=completion.end_s,
            small=node_count <= MEDIUM,
        )
        fastest = None if best is None else Trial(best.proposal.plan(), best.done, budget_bytes)
        return fastest, Trial(leanest.proposal.plan(), leanest.done, budget_bytes)

    def _others(self, budget_bytes: int, price_s: float | None) -> Iterator[Proposal[LazySharding]]:
        """Further shardings, cheapest first: of a small program all, of larger ones some, of large ones only if nothing
        fits.
        """
        program = self.sharder.program
        if price_s is not None and len(program.nodes) > MEDIUM:
            return
        aim_bytes, is_small = budget_bytes * self.parts, len(program.nodes) <= SMALL
        for assignment in others(program, self.sharder.candidates.memo, aim_bytes, is_small, price_s):
            yield self.sharder.proposal(assignment, None)

    def _by_sharding_alone(self, budget_bytes: int) -> tuple[Trial | None, Trial]:
        """(the first plan that fits or None, the leanest): sharding is asked for less until what was counted fits."""
        aim_bytes = budget_bytes * self.parts
        trials = list[Trial]()
        for _ in range(self.tries):
            try:
                decided = self.sharder.decide(aim_bytes)
            except OverBudget as refused:  # by an estimate, so what is leanest by it is counted as well
                decided = self.sharder.decide(None, refused.leanest)
            trial = self.complete(decided, budget_bytes)
            trials.append(trial)
            if trial.done.fits(budget_bytes):
                return trial, trial
            estimated_bytes = decided.plan.peak_bytes
            if estimated_bytes > aim_bytes:  # then it is the leanest for every smaller aim
                break
            aim_bytes = int(min(aim_bytes, estimated_bytes) * budget_bytes / trial.done.peak_bytes * 0.99)
        return None, min(trials, key=lambda trial: trial.done.peak_bytes)

    def complete(self, decided: Decisions, budget_bytes: int) -> Trial:
        """A sharding that stands, completed within a budget if it can be."""
        return Trial(decided, self.sharder.completion.finish(decided, budget_bytes), budget_bytes)

    def pool(self, assign: Callable[..., Assignment], max_prices: int) -> list[SearchBudget]:
        """Shardings from the fastest to the leanest, which depend on the program alone, each to be completed within so
        many bytes.

        Of several ranks: on one there is one sharding, in which every named policy was counted.
        """
        completion = self.sharder.completion
        if completion.mesh.size == 1 or not completion.gives_way:
            return []

        def propose(aim_bytes: int | None, price_s: float) -> Proposal[LazySharding]:
            try:
                return self.sharder.proposal(assign(aim_bytes, price_s), None)
            except OverBudget as refused:
                return self.sharder.proposal(refused.leanest, None)

        def complete(sharding: LazySharding, budget_bytes: int) -> Trial:
            return self.complete(sharding(), budget_bytes)

        return [partial(complete, proposal.plan) for proposal in frontier(propose, max_prices)]

    def lower_bounds(self) -> LowerBounds:
        """What every sharding of a step that was assigned before needs in each of its parts."""
        completion, memo = self.sharder.completion, self.sharder.candidates.memo
        program, mesh = completion.program, completion.mesh
        operator_bytes = 0
        searched_axes = [axis for axis in self.sharder.axes if mesh.axis_size(axis) > 1]
        # Where axes are decided by turns, no model has all of an operator's options.
        if memo.fastest is not None and len(searched_axes) <= MOST_AXES:
            models = [memo.fastest.model, *(model for model, _ in memo.models.values())]
            operator_bytes = min(at_least_any(program, model, memo.fastest.ties) for model in models)
        argument_bytes = 0
        if not completion.moves:
            argument_bytes = arguments_at_least(program, mesh.size, completion.lies.tiers)
        return LowerBounds(operator_bytes // self.parts, argument_bytes)


@attrs.frozen
class LowerBounds:
    """Bytes that every sharding takes at least: for what one operator makes, and for arguments that stay where they
    are.
    """

    operator_bytes: int
    argument_bytes: int

    def above(self, budget_bytes: int) -> str:
        """In words, which of them is more than a budget; "" where none is."""
        if self.argument_bytes > max(budget_bytes, self.operator_bytes):
            return f"its arguments take {budget_text(self.argument_bytes)}"
        if self.operator_bytes > budget_bytes:
            return f"one operator makes {budget_text(self.operator_bytes)}"
        return ""


# ---- where nothing fits ----


@attrs.frozen(eq=False)
class FailedSearch:
    """A search within a budget that found no plan, and what it takes to look for the least budget.

    memo: what the search for a sharding found, which the one for the least goes on from.
    """

    search: BudgetSearch
    budget_bytes: int
    leanest: Trial
    memo: Memo

    def refusal(self) -> DoesNotFit:
        """To raise where nobody asks for the least."""
        return DoesNotFit(self.leanest.done.peak_bytes)

    def plan_for_least(self) -> tuple[Decisions, Program]:
        """What the search for the least budget finds, where that fits. Raises PlanError with the least otherwise."""
        sharder, budget_bytes = self.search.sharder, self.budget_bytes
        sharder.candidates.memo = self.memo
        bounds = self.search.lower_bounds()
        sharder.candidates.memo = attrs.evolve(self.memo, fits={})
        least = self._least()
        if least.done.fits(budget_bytes):  # a search comes to it only when it is asked for less
            plan = attrs.evolve(least.decided.plan, budget_bytes=least.budget_bytes)
            return _with_counted_figures(sharder.completion, attrs.evolve(least.decided, plan=plan), least.done)
        if self.leanest.done.short and self.leanest.done.peak_bytes <= budget_bytes:
            raise CapacityError(self.leanest.done.short)
        raise PlanError(_no_plan_text(sharder.completion, budget_bytes, least, bounds))

    def _least(self) -> Trial:
        """The leanest plan found: by a glance where the budget is far below it.

        Where it fits, the fastest that was found on the way.
        """
        node_count = len(self.search.sharder.program.nodes)
        assign = cache(self.search.sharder.assign)
        pool = self.search.pool(assign, FRONTIER_PRICES_LARGE)
        if pool and node_count > SMALL:
            leanest = glance(pool)
            if leanest.done.peak_bytes > FAR_OVER * self.budget_bytes and not leanest.done.short:
                return leanest
        if node_count <= LARGE:
            pool = self.search.pool(assign, FRONTIER_PRICES)
        least = least_budget(self._search_anew, node_count > LARGE, pool)
        if not least.done.fits(self.budget_bytes):
            return least
        return _fastest_of([partial(self.search.complete, least.decided), *pool], self.budget_bytes) or least

    def _search_anew(self, budget_bytes: int) -> Trial:
        # A search that anybody makes with this budget remembers no choices that met other ones.
        candidates = self.search.sharder.candidates
        candidates.memo = attrs.evolve(candidates.memo, fits={})
        fits, leanest = self.search.run(budget_bytes, any_that_fits=True)
        return fits or leanest


def _fastest_of(pool: Sequence[SearchBudget], budget_bytes: int) -> Trial | None:
    """Of shardings that are completed for a budget the fastest that fits."""
    best, best_s = None, inf
    for complete in pool:
        trial = complete(budget_bytes)
        total_s = trial.decided.plan.cost_s + trial.done.more_s
        if trial.done.fits(budget_bytes) and total_s < best_s:
            best, best_s = trial, total_s
    return best


def _no_plan_text(completion: Completion, budget_bytes: int, least: Trial, bounds: LowerBounds) -> str:
    """What to say where nothing fits: what would, and what to try."""
    remedies = ["a smaller batch"]
    if not completion.searches:
        remedies.append("cf.checkpoint")
    if not completion.moves:
        remedies.append("cf.offload")
    remedies.extend(completion.wider)
    notes = ""
    if above := bounds.above(budget_bytes):
        notes += f", and however it is sharded {above}"
    if completion.mesh.topology.ranks:
        notes += " (of ranks with less memory, what they lack to the roomiest counts as taken)"
    return (
        f"no plan found within {budget_text(budget_bytes)} a rank: the least found has a peak of "
        f"{budget_text(least.done.peak_bytes)}{notes}; give at least that, or use more ranks, {', '.join(remedies)}, "
        f"or a topology with more memory. It holds {completion.count(least.done.program).summary()}"
    )
