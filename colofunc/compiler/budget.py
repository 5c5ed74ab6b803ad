"""Within a budget: plan, lower, count; where it is too much, make again what backward reads, or plan for less.

The planner's estimate of the peak is quick and a little off, the accountant's is right to the byte and comes last. So a
plan is made, completed and counted, and made again with less in mind until what was counted fits.

    decide -> lower, passes -> (recompute) -> coalesce, chunks, buckets, in place -> count
       ^-------------------------- too much: aim for less ---------------------------|   -> updates side by side
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import inf
from operator import itemgetter
from typing import Protocol

import attrs

from colofunc.compiler.decide import Candidates, Decided, assigned, decide
from colofunc.compiler.least_budget import Leanest, Tried, least_budget, said
from colofunc.errors import CapacityError, PlanError
from colofunc.mesh import Mesh
from colofunc.planner.fitted import Finish, Fitted
from colofunc.planner.jointly import FRONTIER, FRONTIER_LARGE, SEARCHES, Proposed, frontier, together
from colofunc.planner.offload.choice import Hint
from colofunc.planner.offload.fastest import Offloaded
from colofunc.planner.recompute.stages import NodeS
from colofunc.planner.sharding.assign import Assignment, Memo, OverBudget, others
from colofunc.planner.sharding.constraints import Constraints
from colofunc.planner.sharding.least import at_least_any
from colofunc.program.check import check_program
from colofunc.program.cost import RuleOf, node_s
from colofunc.program.facts import is_copy
from colofunc.program.ir import Node, Program, Value
from colofunc.program.lanes import Lanes, played
from colofunc.program.lower import lower
from colofunc.program.memory import MemoryReport
from colofunc.program.passes.buckets import buckets
from colofunc.program.passes.chunks import chunked
from colofunc.program.passes.coalesce import reduces_early, views_late
from colofunc.program.passes.inplace import in_place
from colofunc.program.passes.one_call import calls_saved, updates_in_one_call
from colofunc.program.timed import Timed
from colofunc.program.tracing.trace import record_local

SHARE = 32
"""Under a budget, a bucket of collectives may use at most 1/SHARE of it."""
SMALL, WORK = 100, 400
"""Programs of at most SMALL nodes: all shardings are looked at, where they are few. At most WORK nodes are finished in all of them."""
LARGE = 2000
"""Programs of more nodes have fewer searches at a price of memory."""
# (program of one rank, seconds of a node, how to complete and count it, budget) -> (what fits or None, the leanest tried)
Refit = Callable[[Program, NodeS, Finish, int | None], tuple[Fitted | None, Fitted]]
Rewrite = Callable[[Program, Mesh], Program]
AS_IT_IS: Sequence[Rewrite] = (lambda program, _: program,)
Sharding = Callable[[], Decided]
"""Who computes what, its plan written at the first call."""


class Move(Protocol):
    """Writes copies between tiers into a finished program of one rank. like: what to take over, for an estimate."""

    def __call__(
        self, program: Program, mesh: Mesh, node_s: NodeS, budget_bytes: int | None, /, *, like: Hint | None = None
    ) -> Offloaded: ...


@attrs.frozen(eq=False)
class Ending:
    """What happens to a program of one rank once its plan is made.

    `passes`: of plugins and transforms. `ways`: what comes behind them, the fastest first where there are several. `chunks`: input
    position -> elements of the chunks that it lies in. `temporaries`: whether they are written over. `count`: the accountant of the
    executor that will run it. `refit`: of `checkpoint`.
    `move`: of `offload`, for the program in the `order` in which that executor runs it, with so many bytes gathered ahead.
    `timed`: how long operators take, where that was measured. `wider`: what to write where policies forbid what needs less memory.
    """

    program: Program
    mesh: Mesh
    rule_of: RuleOf
    passes: Sequence[Rewrite]
    chunks: Mapping[int, int | str]
    temporaries: bool
    count: Callable[[Program], MemoryReport]
    refit: Refit | None = None
    move: Move | None = None
    order: Callable[[Program, float], Program] = lambda program, _: program
    ways: Sequence[Rewrite] = AS_IT_IS
    timed: Timed | None = None
    wider: Sequence[str] = ()
    known: dict[int, tuple[Node, tuple[Value, ...], float]] = attrs.field(factory=dict, init=False)

    def finish(self, decided: Decided, budget_bytes: int | None) -> Fitted:
        """The program that runs, as decided, in the fastest way that fits. Its peak is counted only where somebody asks."""
        lowered = self._lowered(decided)
        first = self._rewritten(lowered, self.ways[0])
        best = self._refitted(first, budget_bytes)
        if budget_bytes is None or (best.fits(budget_bytes) and best.more_s <= 0):
            return best
        rest = {_looks(some): some for some in self._rest(lowered)}
        rest.pop(_looks(first), None)  # a way that changes nothing
        near = [(self._counted(budget_bytes, some, best), self._seconds(some) - self._seconds(first), some) for some in rest.values()]
        guesses = [(_rank(budget_bytes, guess, slower_s), slower_s, some) for guess, slower_s, some in near]
        for guess, slower_s, some in sorted(guesses, key=itemgetter(0)):
            if guess < _rank(budget_bytes, best) or not best.fits(budget_bytes):
                found = self._refitted(some, budget_bytes)
                best = min(best, attrs.evolve(found, more_s=found.more_s + slower_s), key=partial(_rank, budget_bytes))
        return best

    def _rest(self, lowered: Program) -> Iterator[Program]:
        """All ways but the first that can be gone."""
        for way in self.ways[1:] if self.mesh.size > 1 else ():
            try:
                yield self._rewritten(lowered, way)
            except PlanError:
                continue  # the first one stands

    def _refitted(self, local: Program, budget_bytes: int | None) -> Fitted:
        counted = partial(self._counted, budget_bytes)
        if self.refit is None:
            return counted(local)
        fitted, leanest = self.refit(local, self._node_s, counted, budget_bytes)
        return fitted or leanest

    def _seconds(self, local: Program) -> float:
        return sum(self._node_s(node, local.values) for node in local.nodes)

    @property
    def gives_way(self) -> bool:
        """Whether a program that is too large may be made to fit."""
        return self.refit is not None or self.move is not None

    def _node_s(self, node: Node, values: Mapping[int, Value]) -> float:
        """Orders of the same work have most of their nodes in common, so those that came by are `known`, with what they read and make."""
        took = self.known.get(id(node))
        if took is not None and took[0] is node and all(values[value.id] is value for value in took[1]):
            return took[2]
        model = partial(node_s, mesh=self.mesh, rule_of=self.rule_of)
        seconds = model(node, values) if self.timed is None else self.timed.node_s(node, values, model)
        self.known[id(node)] = node, tuple(values[i] for i in (*node.refs, *node.outs) if i is not None), seconds
        return seconds

    def _lowered(self, decided: Decided) -> Program:
        layouts = decided.input_layouts, decided.output_layouts
        local = lower(self.program, decided.choices, *layouts, self.mesh, record_local, decided.regather)
        check_program(local, self.mesh)
        for rewrite in self.passes:
            local = self._rewritten(local, rewrite)
        return local

    def _rewritten(self, local: Program, rewrite: Rewrite) -> Program:
        local = rewrite(local, self.mesh)
        check_program(local, self.mesh)
        return local

    def _completed(self, local: Program, bucket_bytes: float) -> Program:
        chunks = {local.inputs[k]: size for k, size in self.chunks.items()}
        local, apart = chunked(views_late(reduces_early(local)), chunks)
        packed = buckets(local, self.mesh, apart, bucket_bytes)
        return in_place(packed, self.temporaries, every_state=self.move is not None)

    def _counted(self, budget_bytes: int | None, local: Program, like: Fitted | None = None, moves: bool = True) -> Fitted:
        piece = inf if budget_bytes is None or not self.gives_way else budget_bytes / SHARE
        if like is not None and isinstance(like.hint, Hint) and self.move is not None and budget_bytes is not None:
            done = self.order(self._completed(local, piece), piece)
            near = self.move(done, self.mesh, self._node_s, budget_bytes, like=like.hint)
            return Fitted(local, budget_bytes + near.over, near.exposed_s, (), near.short, near.hint)
        check_program(local, self.mesh)
        done = self._completed(local, piece)
        if self.move is None or not moves:
            return Fitted(done, 0 if budget_bytes is None and self.refit is None else self._peak(done), 0.0)
        moved = self.move(self.order(done, piece), self.mesh, self._node_s, budget_bytes)
        check_program(moved.program, self.mesh)
        return Fitted(moved.program, self._peak(moved.program), moved.exposed_s, moved.words, moved.short, moved.hint)

    def ended(self, done: Fitted) -> Program:
        """What runs of a program that was chosen: its updates side by side, where that holds no more and takes no longer.

        They are not compiled, and one between two operators would keep a compiler from fusing these. But one may fill the time until
        a copy has come, so where there are copies the clock decides.
        """
        program, moved = done.program, updates_in_one_call(done.program, self.count)
        if moved is program or not any(map(is_copy, program.nodes)):
            return moved
        saved_s = (calls_saved(moved) - calls_saved(program)) * self.mesh.topology.device.launch_s  # which the clock counts one by one
        return moved if self.lanes(moved).end_s - saved_s <= self.lanes(program).end_s else program

    def lanes(self, done: Program) -> Lanes:
        """How long what is done takes, in the order in which the executor runs it."""
        return played(self.order(done, inf), self.mesh, self._node_s)

    def _peak(self, done: Program) -> int:
        return self.count(done).peak_bytes["device"]


def _rank(budget_bytes: int, done: Fitted, slower_s: float = 0.0) -> tuple[bool, float]:
    return (False, done.more_s + slower_s) if done.fits(budget_bytes) else (True, done.peak_bytes)


def _looks(local: Program) -> tuple[object, ...]:
    """The operators outside of loops, and those in each."""
    return tuple(node.target if node.loop is None else _looks(node.loop.body) for node in local.nodes)


def within(
    ending: Ending,
    candidates: Candidates,
    constraints: Constraints,
    named: Mapping[str, str],
    budget_bytes: int | None,
    axes: tuple[str, ...],
    parts: int = 1,
    tries: int = 4,
    name_least: bool = True,
) -> tuple[Decided, Program]:
    """Plan and complete so that the accountant agrees that the peak is within the budget.

    The planner knows nothing of microbatches: a step in `parts` may hold so many times less than it says. Where a step may
    make values again or copy them, that and the sharding are decided together (`planner/jointly.py`). `name_least`: whether an
    error says what could be given, which takes a few searches more.
    """
    make = partial(decide, ending.program, ending.mesh, candidates, constraints, named, axes)
    assign = partial(assigned, ending.program, ending.mesh, candidates, constraints, axes)
    if budget_bytes is None:
        decided = make(budget_bytes=None)
        done = ending.finish(decided, None)
        if done.short:
            raise CapacityError(done.short)
        return _told(ending, decided, done)
    search = partial(_searched, make, assign, candidates, parts=parts, tries=tries + parts.bit_length() - 1)
    found, leanest = search(ending, budget_bytes)
    if found is not None:
        return _told(ending, found.decided, found.done)
    if not name_least:
        raise PlanError(leanest.done.short or f"no plan found within {said(budget_bytes)} a rank")
    needs_bytes = _needs(ending.program, candidates) // parts
    candidates.memo = Memo(candidates.memo.fastest, misses=candidates.memo.misses)

    def again(asked_bytes: int) -> Tried:
        candidates.memo = attrs.evolve(candidates.memo, fits={})  # as whoever gives that budget will find it
        fits, lean = search(ending, asked_bytes, any_that_fits=True)
        return fits or lean

    large = len(ending.program.nodes) > LARGE
    several = ending.mesh.size > 1 and ending.gives_way  # on one rank there is one sharding, in which every named policy was counted
    pool = _pool(make, assign, ending, FRONTIER_LARGE if large else FRONTIER) if several else []
    least = least_budget(again, large, pool)
    if least.done.fits(budget_bytes):  # only what was asked for less was led there
        least = _fastest_of(pool, budget_bytes) or least
        plan = attrs.evolve(least.decided.plan, budget_bytes=least.budget_bytes)
        return _told(ending, attrs.evolve(least.decided, plan=plan), least.done)
    if leanest.done.short and leanest.done.peak_bytes <= budget_bytes:
        raise CapacityError(leanest.done.short)
    raise PlanError(_too_little(ending, budget_bytes, least, needs_bytes))


def _too_little(ending: Ending, budget_bytes: int, least: Tried, needs_bytes: int) -> str:
    """What to say where nothing fits: what would, and what to try."""
    others = [name for name, there in (("cf.checkpoint", ending.refit), ("cf.offload", ending.move)) if there is None]
    less = ", ".join(["a smaller batch", *others, *ending.wider])
    alone = f", and however it is sharded one operator makes {said(needs_bytes)}" if needs_bytes > budget_bytes else ""
    return (
        f"no plan found within {said(budget_bytes)} a rank: the least found has a peak of {said(least.done.peak_bytes)}{alone}; "
        f"give at least that, or use more ranks, {less}, or a topology with more memory. "
        f"It holds {ending.count(least.done.program).summary()}"
    )


@attrs.frozen(eq=False)
class _Fits(Exception):
    """Ends a search: a plan that fits, where it does not matter whether another one is faster."""

    tried: Tried


def _searched(
    make: Callable[..., Decided],
    assign: Callable[..., Assignment],
    candidates: Candidates,
    ending: Ending,
    budget_bytes: int,
    parts: int,
    tries: int,
    any_that_fits: bool = False,
) -> tuple[Tried | None, Tried]:
    """(the fastest plan found that fits or None, the leanest that was tried). any_that_fits: not the fastest, but the first."""
    if not ending.gives_way:
        return _lean(make, ending, budget_bytes, parts, tries)
    if ending.mesh.size == 1:  # then there is one plan, whatever it may hold
        decided = make(budget_bytes=None)
        one = Tried(decided, ending.finish(decided, budget_bytes), budget_bytes)
        return (one if one.done.fits(budget_bytes) else None), one
    searches = SEARCHES if len(ending.program.nodes) <= LARGE else 3

    def finish(sharding: Sharding) -> Fitted:
        done = ending.finish(sharding(), budget_bytes)
        if any_that_fits and done.fits(budget_bytes):
            raise _Fits(Tried(sharding(), done, budget_bytes))
        return done

    def propose(aim: int | None, price_s: float) -> Proposed[Sharding]:
        return _proposed(make, assign(aim, price_s), aim)

    every = partial(_every, make, ending.program, candidates, budget_bytes * parts)
    most = max(2, WORK // max(1, len(ending.program.nodes)))
    needs = partial(_needs, ending.program, candidates)
    try:
        best, lean = together(propose, finish, budget_bytes, parts, tries, searches, every, most, needs)
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


def _pool(make: Callable[..., Decided], assign: Callable[..., Assignment], ending: Ending, most: int) -> list[Leanest]:
    """Shardings from the fastest to the leanest, which depend on the program alone, each to be completed for so many bytes."""

    def propose(aim: int | None, price_s: float) -> Proposed[Sharding]:
        try:
            return _proposed(make, assign(aim, price_s), None)
        except OverBudget as refused:
            return _proposed(make, refused.leanest, None)

    def complete(sharding: Sharding, asked_bytes: int) -> Tried:
        return Tried(sharding(), ending.finish(sharding(), asked_bytes), asked_bytes)

    return [partial(complete, proposed.plan) for proposed in frontier(propose, most)]


def finished(ending: Ending, decided: Decided, budget_bytes: int | None) -> tuple[Decided, Program]:
    """Complete a plan whose sharding stands. Raises PlanError where the fastest way found does not fit."""
    done = ending.finish(decided, budget_bytes)
    if budget_bytes is None and done.short:
        raise CapacityError(done.short)
    if budget_bytes is not None and not done.fits(budget_bytes):
        raise PlanError(done.short or f"the least found has a peak of {said(done.peak_bytes)}, the budget is {said(budget_bytes)}")
    return _told(ending, decided, done)


def _every(
    make: Callable[..., Decided], program: Program, candidates: Candidates, budget_bytes: int, price_s: float | None
) -> Iterator[Proposed[Sharding]]:
    """All shardings of a small program, cheapest first; of a larger one, and where nothing fits so far (no price), some."""
    for found in others(program, candidates.memo, budget_bytes, len(program.nodes) > SMALL, price_s):
        yield _proposed(make, found, None)


def _needs(program: Program, candidates: Candidates) -> int:
    """Bytes that every sharding of a step that was assigned before needs at least."""
    known = candidates.memo.fastest
    return min((at_least_any(program, model, known.ties) for model, _ in candidates.memo.models.values()), default=0) if known else 0


def _proposed(make: Callable[..., Decided], found: Assignment, aim: int | None) -> Proposed[Sharding]:
    """A sharding to think about. Its plan is written when somebody asks: of hundreds that are proposed few are finished."""
    key = [(s.name, s.ins, s.outs) for s in found.strategies], found.inputs, found.regather
    return Proposed(lru_cache(1)(partial(make, budget_bytes=aim, found=found)), found.cost_s, found.peak_bytes, key)


def _lean(
    make: Callable[..., Decided], ending: Ending, budget_bytes: int, parts: int, tries: int
) -> tuple[Tried | None, Tried]:
    """(the first plan that fits or None, the leanest): sharding is asked for less until what was counted fits."""
    aim, least = budget_bytes * parts, list[Tried]()
    for _ in range(tries):
        try:
            decided = make(budget_bytes=aim)
        except OverBudget as refused:  # by an estimate: what is leanest by it is counted, too
            decided = make(budget_bytes=None, found=refused.leanest)
        one = Tried(decided, ending.finish(decided, budget_bytes), budget_bytes)
        least.append(one)
        if one.done.fits(budget_bytes):
            return one, one
        if decided.plan.peak_bytes > aim:  # then it is the leanest for every smaller aim
            break
        aim = int(min(aim, decided.plan.peak_bytes) * budget_bytes / one.done.peak_bytes * 0.99)
    return None, min(least, key=lambda one: one.done.peak_bytes)


def _told(ending: Ending, decided: Decided, done: Fitted) -> tuple[Decided, Program]:
    """The plan says what the program that runs holds and how long it takes, and what was done to keep to the budget."""
    program = ending.ended(done)
    lanes = ending.lanes(program)
    known_bytes = done.peak_bytes if program is done.program else 0
    plan = attrs.evolve(
        decided.plan,
        peak_bytes=known_bytes or ending.count(program).peak_bytes["device"],
        cost_s=lanes.end_s,
        communication_s=lanes.busy_s().get("collectives", 0.0),
        memory=done.words,
    )
    return attrs.evolve(decided, plan=plan), program
