"""Within a budget: plan, lower, count; where it is too much, make again what backward reads, or plan for less.

The planner's estimate of the peak is quick and a little off, the accountant's is right to the byte and comes last. So a
plan is made, completed and counted, and made again with less in mind until what was counted fits.

    decide -> lower, passes -> (recompute) -> coalesce, chunks, buckets, in place -> count
       ^-------------------------- too much: aim for less ---------------------------|   -> updates side by side
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import ceil, inf

import attrs

from colofunc.compiler.completion import Completion
from colofunc.compiler.decisions import Candidates, Decided, assigned, decide
from colofunc.errors import CapacityError, PlanError
from colofunc.planner import joint
from colofunc.planner.candidate import Fitted
from colofunc.planner.joint import FAR, FRONTIER, FRONTIER_LARGE, SEARCHES, Proposed, frontier, together
from colofunc.planner.sharding.assign import Assignment, Memo, OverBudget, in_model_of, others
from colofunc.planner.sharding.by_axes import MOST_AXES
from colofunc.planner.sharding.constraints import Constraints
from colofunc.planner.sharding.lower_bound import arguments_at_least, at_least_any
from colofunc.program.ir import Program

SMALL, WORK = 100, 400
"""Programs of at most SMALL nodes: all shardings are looked at, where they are few; of at most WORK nodes: a few to which no price leads.
At most WORK nodes are finished in all of them. A program of at most WORK nodes is searched from nothing even where a sharding of a like one
is known, which takes little."""
SAME, CLEARLY = 0.01, 0.05
"""A known sharding is kept where another one is faster by at most SAME; it is not counted where the search says that it is slower by more
than CLEARLY."""
LARGE = 2000
"""Programs of more nodes have fewer searches for the least budget."""
SEARCHES_LARGE = 3
"""At most this many searches at a price of memory for these."""
Sharding = Callable[[], Decided]
"""Who computes what, its plan written at the first call."""


class DoesNotFit(PlanError):
    """No plan was found within the budget, and the least was not looked for. peak_bytes: of the leanest that was tried."""

    def __init__(self, peak_bytes: int) -> None:
        super().__init__(f"the leanest plan that was tried has a peak of {said(peak_bytes)}")
        self.peak_bytes = peak_bytes


def within(
    completion: Completion,
    candidates: Candidates,
    constraints: Constraints,
    named: Mapping[str, str],
    budget_bytes: int | None,
    axes: tuple[str, ...],
    parts: int = 1,
    tries: int = 4,
) -> tuple[Decided, Program] | Missed:
    """Plan and complete so that the accountant agrees that the peak is within the budget.

    The planner knows nothing of microbatches: a step in `parts` may hold so many times less than it says. Where a step may
    make values again or copy them, that and the sharding are decided together (`planner/joint.py`). Missed: nothing fits.
    """
    make = partial(decide, completion.program, completion.mesh, candidates, constraints, named, axes)
    assign = partial(assigned, completion.program, completion.mesh, candidates, constraints, axes)
    if budget_bytes is None:
        decided = make(budget_bytes=None)
        done = completion.finish(decided, None)
        if done.short:
            raise CapacityError(done.short)
        return _told(completion, decided, done)
    needs = partial(_needs, completion, candidates, axes, parts)
    search = partial(_searched, make, assign, candidates, needs=needs, parts=parts, tries=tries + parts.bit_length() - 1)
    found, leanest = search(completion, budget_bytes)
    if found is not None:
        return _told(completion, found.decided, found.done)
    return Missed(completion, candidates, budget_bytes, leanest, search, needs, make, assign, candidates.memo)


def nearby(
    completion: Completion,
    candidates: Candidates,
    constraints: Constraints,
    named: Mapping[str, str],
    budget_bytes: int | None,
    axes: tuple[str, ...],
    parts: int,
    known: Assignment,
) -> tuple[Decided, Program]:
    """The fastest of a sharding that is known from a like step and of what searches from there find. Raises PlanError where none fits.

    Without a budget `known` is taken where nothing is faster by more than SAME: two lengths that are planned alike are easier to follow.
    """
    candidates.memo = Memo(like=known if len(completion.program.nodes) > WORK else None)
    make = partial(decide, completion.program, completion.mesh, candidates, constraints, named, axes)
    assign = partial(assigned, completion.program, completion.mesh, candidates, constraints, axes)
    if budget_bytes is None or not completion.gives_way:
        found = assign(budget_bytes)
        return _faster(completion, make, in_model_of(found, known, completion.program) or known, found, budget_bytes)

    def propose(aim: int | None, price_s: float) -> Proposed[Sharding]:
        return _proposed(make, assign(aim, price_s), aim)

    def finish(sharding: Sharding, below_s: float) -> Fitted:
        return completion.finish(sharding(), budget_bytes, below_s)

    small = len(completion.program.nodes) <= WORK
    best = joint.nearby(_proposed(make, known, None), propose, finish, budget_bytes, parts, end_s=completion.end_s, small=small)
    if best is None:
        raise PlanError(f"no sharding near one that is known fits within {said(budget_bytes)} a rank")
    return _told(completion, best.proposed.plan(), best.done)


def _faster(
    completion: Completion, make: Callable[..., Decided], known: Assignment, found: Assignment, budget_bytes: int | None
) -> tuple[Decided, Program]:
    """Of a known sharding and one that was found, the faster by the clock. The known one is not lowered where it is clearly slower."""
    new = finished(completion, make(budget_bytes=budget_bytes, found=found), budget_bytes)
    if known.cost_s > found.cost_s * (1 + CLEARLY):
        return new
    try:
        kept = finished(completion, make(budget_bytes=budget_bytes, found=known), budget_bytes)
    except (PlanError, CapacityError):  # it is too large for these sizes
        return new
    return kept if kept[0].plan.cost_s <= new[0].plan.cost_s * (1 + SAME) else new


def _too_little(completion: Completion, budget_bytes: int, least: Tried, needs: Needs) -> str:
    """What to say where nothing fits: what would, and what to try."""
    others = [name for name, there in (("cf.checkpoint", completion.searches), ("cf.offload", completion.moves)) if not there]
    less = ", ".join(["a smaller batch", *others, *completion.wider])
    alone = f", and however it is sharded {words}" if (words := needs.above(budget_bytes)) else ""
    if completion.mesh.topology.ranks:
        alone += " (of ranks with less memory, what they lack to the roomiest counts as taken)"
    return (
        f"no plan found within {said(budget_bytes)} a rank: the least found has a peak of {said(least.done.peak_bytes)}{alone}; "
        f"give at least that, or use more ranks, {less}, or a topology with more memory. "
        f"It holds {completion.count(least.done.program).summary()}"
    )


@attrs.frozen(eq=False)
class Missed:
    """A search within a budget that found no plan, and what it takes to look for the least budget.

    memo: what the search for a sharding found, which the one for the least goes on from.
    """

    completion: Completion
    candidates: Candidates
    budget_bytes: int
    leanest: Tried
    search: Callable[..., tuple[Tried | None, Tried]]
    needs: Callable[[], Needs]
    make: Callable[..., Decided]
    assign: Callable[..., Assignment]
    memo: Memo

    def refused(self) -> DoesNotFit:
        """To raise where nobody asks for the least."""
        return DoesNotFit(self.leanest.done.peak_bytes)

    def plan(self) -> tuple[Decided, Program]:
        """What the search for the least budget finds, where that fits. Raises PlanError with the least otherwise."""
        completion, budget_bytes = self.completion, self.budget_bytes
        self.candidates.memo = self.memo
        needs = self.needs()
        self.candidates.memo = attrs.evolve(self.memo, fits={})
        least = self._least()
        if least.done.fits(budget_bytes):  # only what was asked for less was led there
            plan = attrs.evolve(least.decided.plan, budget_bytes=least.budget_bytes)
            return _told(completion, attrs.evolve(least.decided, plan=plan), least.done)
        if self.leanest.done.short and self.leanest.done.peak_bytes <= budget_bytes:
            raise CapacityError(self.leanest.done.short)
        raise PlanError(_too_little(completion, budget_bytes, least, needs))

    def _least(self) -> Tried:
        """The leanest plan found: by a glance where the budget is far below it; where it fits, the fastest that was found on the way."""
        nodes, known = len(self.completion.program.nodes), lru_cache(self.assign)
        few = self._pool(known, FRONTIER_LARGE)
        if few and nodes > SMALL:
            lean = glance(few)
            if lean.done.peak_bytes > FAR * self.budget_bytes and not lean.done.short:
                return lean
        pool = few if nodes > LARGE else self._pool(known, FRONTIER)
        least = least_budget(self._again, nodes > LARGE, pool)
        if not least.done.fits(self.budget_bytes):
            return least
        return _fastest_of([partial(_completed, self.completion, least.decided), *pool], self.budget_bytes) or least

    def _again(self, asked_bytes: int) -> Tried:
        self.candidates.memo = attrs.evolve(self.candidates.memo, fits={})  # as whoever gives that budget will find it
        fits, lean = self.search(self.completion, asked_bytes, any_that_fits=True)
        return fits or lean

    def _pool(self, known: Callable[..., Assignment], most: int) -> list[Leanest]:
        """Of several ranks; on one there is one sharding, in which every named policy was counted."""
        several = self.completion.mesh.size > 1 and self.completion.gives_way
        return _pool(self.make, known, self.completion, most) if several else []


@attrs.frozen
class Needs:
    """Bytes that every sharding takes at least: for what one operator makes, and for arguments that stay where they are."""

    operator_bytes: int
    argument_bytes: int

    def above(self, budget_bytes: int) -> str:
        """In words, what of it is more than a budget; "" where nothing is."""
        if self.argument_bytes > max(budget_bytes, self.operator_bytes):
            return f"its arguments take {said(self.argument_bytes)}"
        return f"one operator makes {said(self.operator_bytes)}" if self.operator_bytes > budget_bytes else ""


@attrs.frozen(eq=False)
class _Fits(Exception):
    """Ends a search: a plan that fits, where it does not matter whether another one is faster."""

    tried: Tried


def _searched(
    make: Callable[..., Decided],
    assign: Callable[..., Assignment],
    candidates: Candidates,
    completion: Completion,
    budget_bytes: int,
    needs: Callable[[], Needs],
    parts: int,
    tries: int,
    any_that_fits: bool = False,
) -> tuple[Tried | None, Tried]:
    """(the fastest plan found that fits or None, the leanest that was tried). any_that_fits: not the fastest, but the first."""
    if not completion.gives_way:
        return _lean(make, completion, budget_bytes, parts, tries)
    if completion.mesh.size == 1:  # then there is one plan, whatever it may hold
        decided = make(budget_bytes=None)
        one = Tried(decided, completion.finish(decided, budget_bytes), budget_bytes)
        return (one if one.done.fits(budget_bytes) else None), one
    small = len(completion.program.nodes) <= WORK
    searches = SEARCHES if len(completion.program.nodes) <= LARGE else SEARCHES_LARGE

    def finish(sharding: Sharding, below_s: float) -> Fitted:
        done = completion.finish(sharding(), budget_bytes, below_s)
        if any_that_fits and done.fits(budget_bytes):
            raise _Fits(Tried(sharding(), done, budget_bytes))
        return done

    def propose(aim: int | None, price_s: float) -> Proposed[Sharding]:
        return _proposed(make, assign(aim, price_s), aim)

    every = partial(_every, make, completion.program, candidates, budget_bytes * parts)
    most = max(2, WORK // max(1, len(completion.program.nodes)))

    def least() -> int:
        found = needs()
        return parts * max(found.operator_bytes, found.argument_bytes)

    try:
        best, lean = together(propose, finish, budget_bytes, parts, tries, searches, every, most, least, completion.end_s, small)
    except _Fits as first:
        return first.tried, first.tried
    fastest = None if best is None else Tried(best.proposed.plan(), best.done, budget_bytes)
    return fastest, Tried(lean.proposed.plan(), lean.done, budget_bytes)


def _fastest_of(pool: Sequence[Leanest], budget_bytes: int) -> Tried | None:
    """Of shardings that are completed for a budget the fastest that fits."""
    best, best_s = None, inf
    for complete in pool:
        one = complete(budget_bytes)
        took_s = one.decided.plan.cost_s + one.done.more_s
        if one.done.fits(budget_bytes) and took_s < best_s:
            best, best_s = one, took_s
    return best


def _pool(make: Callable[..., Decided], assign: Callable[..., Assignment], completion: Completion, most: int) -> list[Leanest]:
    """Shardings from the fastest to the leanest, which depend on the program alone, each to be completed for so many bytes."""

    def propose(aim: int | None, price_s: float) -> Proposed[Sharding]:
        try:
            return _proposed(make, assign(aim, price_s), None)
        except OverBudget as refused:
            return _proposed(make, refused.leanest, None)

    def complete(sharding: Sharding, asked_bytes: int) -> Tried:
        return _completed(completion, sharding(), asked_bytes)

    return [partial(complete, proposed.plan) for proposed in frontier(propose, most)]


def _completed(completion: Completion, decided: Decided, asked_bytes: int) -> Tried:
    return Tried(decided, completion.finish(decided, asked_bytes), asked_bytes)


def finished(completion: Completion, decided: Decided, budget_bytes: int | None) -> tuple[Decided, Program]:
    """Complete a plan whose sharding stands. Raises PlanError where the fastest way found does not fit."""
    done = completion.finish(decided, budget_bytes)
    if budget_bytes is None and done.short:
        raise CapacityError(done.short)
    if budget_bytes is not None and not done.fits(budget_bytes):
        raise PlanError(done.short or f"the least found has a peak of {said(done.peak_bytes)}, the budget is {said(budget_bytes)}")
    return _told(completion, decided, done)


def _every(
    make: Callable[..., Decided], program: Program, candidates: Candidates, budget_bytes: int, price_s: float | None
) -> Iterator[Proposed[Sharding]]:
    """Of a small program all shardings, cheapest first, of a larger one some; of a large one only where nothing fits so far (no price)."""
    if price_s is not None and len(program.nodes) > WORK:
        return
    for found in others(program, candidates.memo, budget_bytes, len(program.nodes) <= SMALL, price_s):
        yield _proposed(make, found, None)


def _needs(completion: Completion, candidates: Candidates, axes: tuple[str, ...], parts: int) -> Needs:
    """What every sharding of a step that was assigned before needs in each of its parts."""
    program, known, mesh = completion.program, candidates.memo.fastest, completion.mesh
    models = [known.model, *(model for model, _ in candidates.memo.models.values())] if known is not None else []
    several = sum(mesh.axis_size(axis) > 1 for axis in axes) > MOST_AXES
    makes = 0 if known is None or several else min(at_least_any(program, model, known.ties) for model in models)
    return Needs(makes // parts, 0 if completion.moves else arguments_at_least(program, mesh.size, completion.lies.tiers))


def _proposed(make: Callable[..., Decided], found: Assignment, aim: int | None) -> Proposed[Sharding]:
    """A sharding to think about. Its plan is written when somebody asks: of hundreds that are proposed few are finished."""
    return Proposed(lru_cache(1)(partial(make, budget_bytes=aim, found=found)), found.cost_s, found.peak_bytes, _key(found))


def _key(found: Assignment) -> object:
    """Equal for assignments that decide alike."""
    return [(s.name, s.ins, s.outs) for s in found.strategies], found.inputs, found.regather


def _lean(
    make: Callable[..., Decided], completion: Completion, budget_bytes: int, parts: int, tries: int
) -> tuple[Tried | None, Tried]:
    """(the first plan that fits or None, the leanest): sharding is asked for less until what was counted fits."""
    aim, least = budget_bytes * parts, list[Tried]()
    for _ in range(tries):
        try:
            decided = make(budget_bytes=aim)
        except OverBudget as refused:  # by an estimate: what is leanest by it is counted, too
            decided = make(budget_bytes=None, found=refused.leanest)
        one = Tried(decided, completion.finish(decided, budget_bytes), budget_bytes)
        least.append(one)
        if one.done.fits(budget_bytes):
            return one, one
        if decided.plan.peak_bytes > aim:  # then it is the leanest for every smaller aim
            break
        aim = int(min(aim, decided.plan.peak_bytes) * budget_bytes / one.done.peak_bytes * 0.99)
    return None, min(least, key=lambda one: one.done.peak_bytes)


def _told(completion: Completion, decided: Decided, done: Fitted) -> tuple[Decided, Program]:
    """The plan says what the program that runs holds and how long it takes, and what was done to keep to the budget."""
    program = completion.ended(done)
    lanes = completion.lanes(program)
    # Where ranks differ, what was compared with the budget is no number of bytes that some rank holds.
    known_bytes = done.peak_bytes if program is done.program and not completion.mesh.topology.ranks else 0
    plan = attrs.evolve(
        decided.plan,
        peak_bytes=known_bytes or completion.count(program).peak_bytes["device"],
        cost_s=lanes.end_s,
        communication_s=lanes.busy_s().get("collectives", 0.0),
        memory=done.words,
        spent=completion.spent(program, lanes, decided.plan),
    )
    return attrs.evolve(decided, plan=plan.with_pipeline(completion.pipelined(program))), program


# ---- the least budget ----
# Problem: how much is sent at once, what is copied and which shardings are looked at go by the budget, so the peak of the leanest plan
# that one search tried is not yet a budget that another search keeps to. Idea: begin with one byte and ask for one byte less than was
# counted last, until nothing holds less. This depends on no budget that was given, so every error names the same bytes (but for a `glance`
# where a budget is far too small, which may name more); and whoever gives at least them, and whose search finds nothing, is given the
# plan that was counted.
#
#     given 1,000 B: nothing.  asked for 1 B: a plan of 728 B, 727 B: one of 696 B, 695 B: nothing below    696 B are named
#
# A search for one byte looks at little (`planner/joint.py` gives up early where a budget is far too small), and one that asks for a
# byte less ends with the first plan that fits. So where a byte less was found once, half is asked for next: nothing is far too small
# there, and the leanest of all that such a search looks at is what many small steps would come to.
#
# On several ranks which shardings a search looks at goes by what making values again costs, so one under a named policy looks at others
# than a free one. Therefore a pool of shardings from the fastest to the leanest, which depends on the program alone, is completed as well:
# the same ones under each policy, and a free step counts every named policy in each of them.


MAX_DESCENTS, MAX_DESCENTS_LARGE = 12, 2
"""At most this many searches below the least peak so far; the second for large programs, whose searches take long."""
MAX_RAISES, RAISE_PART = 16, 8
"""Where another tier is short, the device's budget is raised by 1/RAISE_PART at a time, at most this many times."""
FINISHERS = 2
"""Of the pool so many, the leanest, are asked for less than they were counted with."""
GIB_FROM_BYTES = 1 << 27
"""Budgets from here on are written in GiB with two decimals, smaller ones in bytes."""


@attrs.frozen(eq=False)
class Tried:
    """A plan that was completed and counted, and the budget that it was made for."""

    decided: Decided
    done: Fitted
    budget_bytes: int

    @property
    def least_bytes(self) -> int:
        """The budget that it keeps to, as it is said."""
        return said_bytes(self.done.peak_bytes)


Leanest = Callable[[int], Tried]
"""Bytes -> of a search within so many the first plan that fits, or else the leanest."""


def least_budget(search: Leanest, large: bool, pool: Sequence[Leanest] = ()) -> Tried:
    """The leanest plan found. pool: shardings that are looked at whatever is asked for, each completed for so many bytes."""
    best = _raised(search, _less_of(pool, search(1)))
    return _descended(search, best, MAX_DESCENTS_LARGE if large else MAX_DESCENTS)


def glance(pool: Sequence[Leanest]) -> Tried:
    """The leanest of some shardings when little is asked for, with no second look: where a budget is far below it, that is enough."""
    return min((complete(1) for complete in pool), key=_rank)


def _less_of(pool: Sequence[Leanest], best: Tried) -> Tried:
    """The leanest of the pool and what was found: all are asked for little, the best few for less than that."""
    tried = sorted(((complete(1), complete) for complete in pool), key=lambda one: _rank(one[0]))
    for one, complete in tried[:FINISHERS]:
        best = min(best, _descended(complete, one, MAX_DESCENTS), key=_rank)
    return best


def _raised(search: Leanest, best: Tried) -> Tried:
    """Where another tier is short, the first plan for more bytes of the device where none is."""
    for _ in range(MAX_RAISES if best.done.short else 0):
        asked_bytes = max(best.done.peak_bytes, best.budget_bytes + max(1, best.budget_bytes // RAISE_PART))
        best = search(asked_bytes)
        if not best.done.short:
            break
    return best


def _descended(search: Leanest, best: Tried, searches: int) -> Tried:
    """The leanest plan that one search leads to, from one that was found."""
    halved = True  # not worth a search unless a byte less is found
    for _ in range(searches):
        less = search(_below(best.least_bytes) if halved else max(1, best.least_bytes // 2))
        if not less.done.short and less.done.peak_bytes < best.done.peak_bytes:
            best, halved = less, not halved
        elif halved:
            break
        else:
            halved = True
    return best


def _rank(one: Tried) -> tuple[bool, int]:
    return bool(one.done.short), one.done.peak_bytes


def said(nbytes: int) -> str:
    """Rounded up: whoever gives it as a budget has enough."""
    return f"{_hundredths(nbytes) / 100:.2f} GiB" if nbytes >= GIB_FROM_BYTES else f"{nbytes:,} B"


def said_bytes(nbytes: int) -> int:
    """The bytes that a budget has which is given as `said` says it."""
    return int(_hundredths(nbytes) / 100 * 2**30) if nbytes >= GIB_FROM_BYTES else nbytes


def _below(nbytes: int) -> int:
    """The next smaller amount that is said in other words."""
    return int((_hundredths(nbytes) - 1) / 100 * 2**30) if nbytes > GIB_FROM_BYTES else nbytes - 1


def _hundredths(nbytes: int) -> int:
    return ceil(nbytes / 2**30 * 100)
