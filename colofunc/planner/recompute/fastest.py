"""Which of the orders of work is taken: the fastest whose peak the accountant finds within the budget.

Problem: dynamic programming over stages knows sizes, not the peak to the byte: buffers, updates in place, what is in
flight. Idea: it proposes, for every amount of memory it might be given, and the accountant disposes. Proposals depend
on the program alone, and of those that fit the fastest is taken, so a larger budget never costs time, and the same plan
comes out on every rank. Those who propose: `chain` (dynamic programming over stages), `exhaustive` (every set of
values, for few values), `relaxed` (linear programs, where forward is no chain).

    for one in proposals(program, node_s):      # fastest first: keeps everything ... keeps least
        ...
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate, count
from math import inf

import attrs

from colofunc import progress
from colofunc.planner.candidate import Finish, FinishedProgram
from colofunc.planner.recompute.by_rank import RankLevels, fastest_by_rank, put_together
from colofunc.planner.recompute.chain import Back, ChainTable, Run, Sweep
from colofunc.planner.recompute.exhaustive import late
from colofunc.planner.recompute.needs import measured
from colofunc.planner.recompute.orders import AgainS, Order, Orders, fastest
from colofunc.planner.recompute.policies import NAMED, RecomputePolicy, every
from colofunc.planner.recompute.relaxed import relaxed
from colofunc.planner.recompute.stages import ForwardChain, ForwardStage, chain_of, joined_stages
from colofunc.program.aliases import aliases
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Program, kept_with
from colofunc.program.memory import memory
from colofunc.program.passes.loop import change_bodies
from colofunc.program.passes.recompute import Replay
from colofunc.spec.layout import At

SLOTS, ENTRIES = 2000, 6_000_000
"""Memory is divided into SLOTS, fewer where tables would have more than so many entries. What a stage keeps is rounded
up to slots, so with few of them deep chains seem not to fit that do."""
CANDIDATES = (NAMED["dots"], NAMED["nothing"], *map(every, (2, 4, 8)))
"""Policies that are counted beside those that are searched for."""
MORE = (NAMED["everything"], *map(every, (3, 5, 6, 7)))
"""Those that are counted, too, where nothing fits: no policy with a name may need less than what is refused."""
APART = 50
"""Peaks of two orders that tell what a byte costs are apart by at least 1/APART of the budget."""
FEW = 64
"""Up to this many nodes every proposal is counted; beyond, bisection assumes that more memory given is more memory
used."""
FINE, FEW_COUNTED = 1e-3, 2
"""Beyond FEW_COUNTED counted orders, one that would gain a smaller part of the step's work than FINE is not counted."""
GUESSES = 8
"""At most this many orders are counted around the one that is expected to fit just so, before bisection of the rest."""
NARROW, BESIDE = 1e-3, 4
"""An order that misses the budget by a smaller part of it says nothing about the next faster one: peaks nearly go with
the memory given. At most BESIDE of these are counted. GPT-2 small at the partitioner's peak (`python -m bench budget`,
budget 0.8) takes 0.3 % less by it."""
COUNTED, MIDDLE = 600, 4000
"""Up to COUNTED nodes all that linear programs propose is counted, up to MIDDLE nodes they are asked at all."""
LARGEST_STAGE = 0.1
"""Linear programs are asked where one stage holds more than this part of what all keep (skips leave few cuts), or where
nothing fits. Without them a U-shaped net (`tests/test_relaxed.py`, three levels) finds no plan at 0.55 of its peak and
below."""


def by_policy(program: Program, node_s: NodeSeconds, policy: RecomputePolicy, finish: Finish) -> FinishedProgram:
    """The program that keeps what the policy says, and what goes from stage to stage."""
    made, plain_s = _by_policy_everywhere(program, node_s, policy), _seconds(program, node_s)
    done = _with_again(made, finish, node_s, plain_s)
    return attrs.evolve(done, asked_s=_seconds(made, node_s) - plain_s)


def _with_again(
    made: Program, finish: Finish, node_s: NodeSeconds, plain_s: float, like: FinishedProgram | None = None
) -> FinishedProgram:
    """`made` finished; what it makes again costs, too."""
    done, again_s = finish(made, like), _seconds(made, node_s) - plain_s
    words = (f"made again: {again_s / plain_s:.1%} of the step's work",) if again_s > 0 else ()
    return attrs.evolve(done, more_s=done.more_s + again_s, words=(*words, *done.words))


def _by_policy_everywhere(program: Program, node_s: NodeSeconds, policy: RecomputePolicy) -> Program:
    def change(part: Program) -> Program:
        replay = _by_policy(part, node_s, policy)
        return part if replay is None else replay.finish()

    return _changed(program, change)


def _by_policy(program: Program, node_s: NodeSeconds, policy: RecomputePolicy) -> Replay | None:
    """None: without a backward there is one order of work."""
    chain = chain_of(program, node_s, policy.keeps, policy.every)
    n = len(chain.parts)
    return chain.replayed([*(Run(s, 1) for s in range(n)), *(Back(s) for s in reversed(range(n)))]) if n else None


def _order_by_policy(program: Program, node_s: NodeSeconds, policy: RecomputePolicy) -> Order:
    replay = None if _has_loops(program) else _by_policy(program, node_s, policy)
    if replay is None:
        return Order(cache(partial(_by_policy_everywhere, program, node_s, policy)), 0, inf)
    return Order(cache(replay.finish), 0, inf, lambda: replay)


def _has_loops(program: Program) -> bool:
    return any(node.loop is not None for node in program.nodes)


def fit_recomputed(
    program: Program, node_s: NodeSeconds, finish: Finish, budget_bytes: int | None, below_s: float = inf
) -> tuple[FinishedProgram | None, FinishedProgram]:
    """(the fastest that fits or None, the leanest that was tried). `finish` completes a program and counts its peak.

    below_s: what costs as many seconds more is of no use, so it is not counted.
    """
    plain_s = _seconds(program, node_s)

    counted = count(1)

    def tried(one: Program, like: FinishedProgram | None = None, /, moves: bool = True) -> FinishedProgram:
        progress.at("checkpoint order", next(counted))
        return _with_again(one, partial(finish, moves=moves), node_s, plain_s, like)

    whole = tried(program)
    if budget_bytes is None or (whole.fits(budget_bytes) and whole.more_s <= 0):
        return whole, whole
    proposed = kept_with(program, (_Proposals, node_s), partial(_Proposals.of, program, node_s))
    orders, again_s = proposed.orders, proposed.again_s
    ranks_differ = whole.hint is None and len(whole.peaks) > 1
    if len(program.nodes) <= FEW:
        few: list[Callable[[], Program]] = [*orders, *proposed.late]
        found = _all(few, tried, again_s, whole, budget_bytes, below_s)
    elif ranks_differ:
        found = _rounded(proposed, tried, budget_bytes, below_s)
    elif whole.hint is None:
        found = _bisect(orders, tried, budget_bytes, again_s, below_s)
        found += _rounded(proposed, tried, budget_bytes, below_s, found)
    else:
        found = fastest(orders, again_s, tried, whole, budget_bytes, plain_s, below_s)
        best_s = min([below_s, *(one.more_s for one in (whole, *found) if one.fits(budget_bytes))])
        found += _unmoved(proposed, tried, budget_bytes, best_s)
    if ranks_differ:
        found += fastest_by_rank(proposed.of_ranks, len(orders), tried, whole, budget_bytes)
    found += _named(proposed, tried, (whole, *found), budget_bytes, below_s)
    leanest = min((whole, *found), key=lambda f: f.peak_bytes)
    fits = [f for f in (whole, *found) if f.fits(budget_bytes)]
    best = min(fits, key=lambda f: (f.more_s, f.peak_bytes), default=None)
    if best is not None:
        best = attrs.evolve(best, byte_s=_byte_s(best, found, budget_bytes))
    return best, leanest


def _byte_s(best: FinishedProgram, found: Sequence[FinishedProgram], budget: int) -> float | None:
    """Seconds that one more byte would save, as those tell that were counted and hold more; None where none of them
    does.

    Peaks that are closer than a part of the budget tell nothing: what an order holds and what it takes jump from one to
    the next.
    """
    slopes = []
    for one in found:
        more_bytes = one.peak_bytes - best.peak_bytes
        if more_bytes * APART > budget and one.more_s < best.more_s:
            slopes.append((best.more_s - one.more_s) / more_bytes)
    return max(slopes, default=None)


def _all(
    orders: Sequence[Callable[[], Program]], tried: Finish, again_s: AgainS, whole: FinishedProgram, budget: int,
    below_s: float,
) -> list[FinishedProgram]:  # fmt: skip
    """Every order, but those that make again what costs more than the best that is known does in all."""
    found, bound_s = list[FinishedProgram](), min(below_s, whole.more_s if whole.fits(budget) else inf)
    for one in sorted((order() for order in orders), key=again_s):
        if again_s(one) < (below_s if whole.hint is None else bound_s):
            found.append(tried(one))
            bound_s = min(bound_s, found[-1].more_s) if found[-1].fits(budget) else bound_s
    return found


def _named(
    proposed: _Proposals, tried: Finish, found: Sequence[FinishedProgram], budget: int, below_s: float = inf
) -> list[FinishedProgram]:
    """What policies with a name keep, as far as it may be faster than what was found; all of them where nothing fits so
    far.
    """
    named = list[FinishedProgram]()
    for policies in (CANDIDATES, MORE):
        orders = sorted(map(proposed.by_policy, policies), key=proposed.again_s)
        named += _faster(orders, proposed.again_s, tried, (*found, *named), budget, below_s)
        if below_s < inf or any(one.fits(budget) for one in (*found, *named)):
            break
    return named


def _faster(
    orders: Orders, again_s: AgainS, tried: Finish, found: Sequence[FinishedProgram], budget: int, below_s: float
) -> list[FinishedProgram]:
    """Of orders from fast to lean, those counted that may be faster than what was found."""
    counted = list[FinishedProgram]()
    too_hopeful_s = list[float]()  # what was searched in full, beyond its sketch
    best_s = min([below_s, *(one.more_s for one in found if one.fits(budget))])
    whole = found[0]
    for order in orders:
        if again_s(order) >= best_s:
            break
        one = order()
        # Where copies have to be searched for, a sketch says whether that is worth it.
        sketch_s = tried(one, whole).more_s if whole.hint is not None and best_s < inf else None
        if sketch_s is not None and sketch_s + min(too_hopeful_s, default=0.0) >= best_s:
            continue
        counted.append(tried(one))
        if sketch_s is not None:
            too_hopeful_s.append(counted[-1].more_s - sketch_s)
        if counted[-1].fits(budget):
            best_s = min(best_s, counted[-1].more_s)
    return counted


def _unmoved(proposed: _Proposals, tried: Finish, budget: int, best_s: float) -> list[FinishedProgram]:
    """What is fastest where nothing is copied, if it may be faster than `best_s`: whoever may copy loses nothing by it."""

    def still(one: Program) -> FinishedProgram:
        return attrs.evolve(tried(one, moves=False), program=one)

    if best_s <= 0:
        return []
    found = _bisect(proposed.orders, still, budget, proposed.again_s, best_s)
    # Of a chain of small stages hardly anything is leaner than its own orders, and copies help where they do not fit.
    if not proposed.has_small_stages:
        found += _rounded(proposed, still, budget, best_s, found)
    best = min(
        (one for one in found if one.fits(budget) and one.more_s < best_s), key=lambda one: one.more_s, default=None
    )
    return [] if best is None else [tried(best.program)]


def _rounded(
    proposed: _Proposals,
    tried: Callable[[Program], FinishedProgram],
    budget: int,
    below_s: float,
    by_stages: Sequence[FinishedProgram] = (),
) -> list[FinishedProgram]:
    """Where stages do not own what is kept (skips, dense features), orders that linear programs propose: the fastest
    that fits last.

    by_stages: what the chain's own orders came to.
    """
    count, again_s = len(proposed.program.nodes), proposed.again_s
    if count > MIDDLE:
        return []
    if proposed.has_small_stages and any(one.fits(budget) for one in by_stages):
        return []
    plans = sorted((one for one in proposed.relaxed if again_s(one) < below_s), key=again_s)
    if count > COUNTED:
        return _bisect(list(_leaner(plans, proposed.node_s)), tried, budget, again_s)
    found = list[FinishedProgram]()
    for one in plans:
        found.append(tried(one))
        if found[-1].fits(budget):
            break
    return found


def _leaner(plans: Sequence[Program], node_s: NodeSeconds) -> Iterator[Order]:
    """Those that hold less than all before them."""
    least = inf
    for plan in plans:
        peak = memory(plan).peak_bytes["device"]
        if peak < least:
            least = peak
            yield Order(partial(lambda plan: plan, plan), peak, _seconds(plan, node_s))


def _bisect(
    orders: Orders, tried: Callable[[Program], FinishedProgram], budget: int, again_s: AgainS, below_s: float = inf
) -> list[FinishedProgram]:
    """Those that were counted on the way to the fastest that fits; the leanest that makes less than `below_s` again is
    among them.

    Counting is dear, so what is counted next is what is expected to fit just so; after GUESSES of these, what halves
    the rest.
    """
    quick = (
        len(orders) if below_s == inf else bisect_left(range(len(orders)), below_s, key=lambda k: again_s(orders[k]))
    )
    if not quick:
        return []
    last = quick - 1
    found = {last: tried(orders[last]())}
    low, high = 0, last  # high fits, or nothing does
    while low < high and found[last].peak_bytes <= budget:
        expected = _expected(orders, {k: one.peak_bytes for k, one in found.items()}, budget)
        middle = (low + high) // 2 if len(found) > GUESSES else min(max(expected, low), high - 1)
        if len(found) > FEW_COUNTED and orders[middle].at_most_s > orders[high].at_most_s * (1 - FINE):
            break
        found[middle] = tried(orders[middle]())
        low, high = (low, middle) if found[middle].peak_bytes <= budget else (middle + 1, high)
    return [*found.values(), *_beside_narrow_misses(orders, tried, budget, found)]


def _beside_narrow_misses(
    orders: Orders, tried: Callable[[Program], FinishedProgram], budget: int, found: Mapping[int, FinishedProgram]
) -> Iterator[FinishedProgram]:
    """From the fastest order that misses the budget narrowly to faster ones, up to one that fits or misses by more."""
    narrow = [k for k, one in found.items() if budget < one.peak_bytes <= budget * (1 + NARROW)]
    first = min(narrow, default=0)
    for k in range(first - 1, max(first - 1 - BESIDE, -1), -1):
        if k in found:
            return
        one = tried(orders[k]())
        yield one
        if one.peak_bytes <= budget or one.peak_bytes > budget * (1 + NARROW):
            return


def _expected(orders: Orders, peaks: Mapping[int, int], budget: int) -> int:
    """The first order that should fit, if peaks go with the memory that orders were found for as they do near the
    budget.
    """
    near, *others = sorted(peaks, key=lambda k: abs(peaks[k] - budget))
    slope = 1.0
    if others:
        given_bytes = orders[near].given_bytes - orders[others[0]].given_bytes
        peak_bytes = peaks[near] - peaks[others[0]]
        slope = max(peak_bytes / given_bytes, 0.1) if given_bytes else slope
    room = orders[near].given_bytes + (budget - peaks[near]) / slope
    return next((k for k, order in enumerate(orders) if order.given_bytes <= room), len(orders) - 1)


@attrs.frozen(eq=False)
class _Proposals:
    """All orders that are proposed for a program, whatever the budget is.

    `chains`, `sweeps`: of the program and of the bodies of its loops, from fast to lean, by `id` of the program. What
    is made is kept, for the next budget.
    """

    program: Program
    node_s: NodeSeconds
    chains: Mapping[int, ForwardChain]
    sweeps: Mapping[int, Sequence[Sweep]]
    again: dict[int, tuple[Program | Order, float]] = attrs.field(factory=dict, init=False)
    named: dict[str, Order] = attrs.field(factory=dict, init=False)
    by_levels: dict[frozenset[tuple[At, int]], Program] = attrs.field(factory=dict, init=False)

    @staticmethod
    def of(program: Program, node_s: NodeSeconds) -> _Proposals:
        chains = {id(p): measured(joined_stages(chain_of(p, node_s))) for p in program.with_bodies()}
        sweeps = {key: _sweeps(chain) for key, chain in chains.items() if chain.parts}
        return _Proposals(program, node_s, chains, {key: some for key, some in sweeps.items() if some})

    def again_s(self, one: Program | Order) -> float:
        """Seconds of what a proposal makes again."""
        if id(one) not in self.again:
            self.again[id(one)] = one, self._work_s(one) - sum(self._node_seconds)
        return self.again[id(one)][1]

    def _work_s(self, one: Program | Order) -> float:
        if isinstance(one, Program):
            return _seconds(one, self.node_s)
        if one.replayed is None:
            return _seconds(one(), self.node_s)
        return one.replayed().seconds(self._node_seconds)

    @cached_property
    def _node_seconds(self) -> list[float]:
        return list(_each_s(self.program, self.node_s))

    def by_policy(self, policy: RecomputePolicy) -> Order:
        """The order of a policy with a name."""
        if policy.name not in self.named:
            self.named[policy.name] = _order_by_policy(self.program, self.node_s, policy)
        return self.named[policy.name]

    @cached_property
    def late(self) -> list[Callable[[], Program]]:
        """Of a small program every set of values that is kept."""
        return list(map(cache, late(self.program)))

    @cached_property
    def stages(self) -> tuple[ForwardStage, ...]:
        return chain_of(self.program, self.node_s).parts

    @cached_property
    def has_small_stages(self) -> bool:
        """Whether no stage of forward holds much of what all of them keep."""
        kept_bytes = [part.stage.ways[0].nbytes for part in self.stages]
        return max(kept_bytes, default=0) <= LARGEST_STAGE * sum(kept_bytes)

    @cached_property
    def relaxed(self) -> list[Program]:
        """What linear programs propose."""
        groups = aliases(self.program)
        owned = {g for part in self.stages for g in (*part.saved, *map(groups.group, part.out))}
        return [order() for order in relaxed(self.program, self.node_s, owned)]

    @cached_property
    def orders(self) -> list[Order]:
        """Of the whole program from fast to lean, by how much memory they may use."""
        return list(self._orders())

    def _orders(self) -> Iterator[Order]:
        for k in range(max(map(len, self.sweeps.values()), default=0)):
            mine = {key: some[min(k, len(some) - 1)] for key, some in self.sweeps.items()}

            def change(part: Program, mine: Mapping[int, Sweep] = mine) -> Program:
                sweep = mine.get(id(part))
                return part if sweep is None else self.chains[id(part)].replay(sweep.order)

            given_bytes = sum(sweep.given_bytes for sweep in mine.values())
            replayed = None
            if len(self.chains) == 1 and mine:
                (sweep,) = mine.values()
                replayed = partial(self._replayed, sweep)
            at_most_s = sum(sweep.seconds for sweep in mine.values())
            yield Order(cache(partial(_changed, self.program, change)), given_bytes, at_most_s, replayed)

    def _replayed(self, sweep: Sweep) -> Replay:
        return self.chains[id(self.program)].replayed(sweep.order)

    def of_ranks(self, levels: RankLevels) -> Program:
        """The program in which each rank of a pipeline works in an order of its own; 0: nothing is made again."""

        def change(part: Program) -> Program:
            sweeps = self.sweeps.get(id(part))
            return part if sweeps is None else put_together(self.chains[id(part)], sweeps, levels)

        key = frozenset(levels.items())
        if key not in self.by_levels:
            self.by_levels[key] = _changed(self.program, change)
        return self.by_levels[key]


def _changed(program: Program, change: Callable[[Program], Program]) -> Program:
    """The program and the bodies of its loops."""
    return change_bodies(change(program), change)


def _sweeps(chain: ForwardChain) -> Sequence[Sweep]:
    """The distinct orders for all amounts of memory, from fast to lean."""
    stages = chain.stages
    # by the stages behind each
    left = list(accumulate((stage.left_bytes for stage in reversed(stages)), initial=0))[-2::-1]
    backward = max(
        stage.needs(way) + max(later, 0) for stage, later in zip(stages, left, strict=True) for way in stage.ways
    )
    most = sum(max(s.ways[0].nbytes, s.out_bytes) for s in stages) + backward
    return sorted(ChainTable(stages, most, SLOTS, ENTRIES).distinct(), key=lambda sweep: sweep.seconds)


def _seconds(program: Program, node_s: NodeSeconds) -> float:
    return sum(_each_s(program, node_s))


def _each_s(program: Program, node_s: NodeSeconds) -> Iterator[float]:
    """Seconds of each node."""
    for node in program.nodes:
        yield (
            _seconds(node.loop.body, node_s) * node.loop.trips
            if node.loop is not None
            else node_s(node, program.values)
        )
