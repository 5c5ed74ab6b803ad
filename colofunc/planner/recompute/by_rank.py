"""Recomputation rank by rank, where the ranks of a pipeline do different parts of one program.

Problem: the first stages of a pipeline keep more microbatches than the last, and an order of work that is the same for
all makes values again where there is room to keep them. Idea: what one rank holds depends on its own nodes alone. Of
the orders from fast to lean that were found for the whole program each rank takes its own, and one order is put
together of them: bisection over all ranks at once, so that counting is as dear as it is for one.

    rank 0   order 7 of 40      the fastest within the budget by what rank 0 holds
    rank 3   order 0            nothing made again

Note [Put together]. Parts of forward run in turn, each as in the order of its rank. Behind them come the ranks in
reverse, each with what is left of its order. Nothing that another rank has sent is ever dropped (`passes.recompute`),
so that no rank goes back for another's sake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from colofunc.planner.candidate import FinishedProgram
from colofunc.planner.recompute.chain import Back, Run, Sweep
from colofunc.planner.recompute.stages import ForwardChain
from colofunc.program.ir import Program
from colofunc.spec.layout import At

RankLevels = Mapping[At, int]
"""Where ranks are on the axis of the pipeline -> the number of their order, from fast to lean."""
Sweeps = Sequence[Sweep]


def put_together(chain: ForwardChain, sweeps: Sweeps, levels: RankLevels) -> Program:
    """The program in which each rank works in its own order (Note [Put together])."""
    whole = [Run(number, 0) for number in range(len(chain.parts))]
    keeps_all: tuple[Run | Back, ...] = (*whole, *(Back(run.stage) for run in reversed(whole)))
    mine: list[tuple[Run | Back, ...]] = []
    for part in chain.parts:
        level = _level(chain, part.nodes, levels)
        mine.append(sweeps[min(level, len(sweeps)) - 1].order if level else keeps_all)
    forward: list[Run | Back] = []
    for number, order in enumerate(mine):
        forward.append(next(step for step in order if step.stage == number))
    backward: list[Run | Back] = []
    for group in reversed(_alike(mine)):
        backward += _left(mine[group[0]], group)
    return chain.replay([*forward, *backward])


def _level(chain: ForwardChain, nodes: Iterable[int], levels: RankLevels) -> int:
    """The order of a part; the leanest where nodes of several ranks are in it."""
    found = [levels.get(on, 0) for index in nodes if (on := chain.program.nodes[index].on) is not None]
    return max(found, default=0)


def _alike(orders: Sequence[tuple[Run | Back, ...]]) -> list[list[int]]:
    """Neighbouring parts that have one order."""
    groups: list[list[int]] = []
    for number, order in enumerate(orders):
        if groups and orders[groups[-1][-1]] is order:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _left(order: Iterable[Run | Back], group: Sequence[int]) -> list[Run | Back]:
    """The steps of some parts behind their first."""
    begun: set[int] = set()
    steps: list[Run | Back] = []
    for step in order:
        if step.stage not in group:
            continue
        if step.stage in begun:
            steps.append(step)
        begun.add(step.stage)
    return steps


def fastest_by_rank(
    combine: Callable[[RankLevels], Program],
    most: int,
    tried: Callable[[Program], FinishedProgram],
    whole: FinishedProgram,
    budget_bytes: int,
) -> list[FinishedProgram]:
    """What was counted on the way to the fastest order of each rank that fits; the leanest of all ranks is among them.

    combine: the program of some levels. most: the leanest level. whole: where nothing is made again, which is level 0.
    """
    if not most:
        return []
    low = dict.fromkeys(whole.peaks, 0)
    high = {at: most if peak_bytes > budget_bytes else 0 for at, peak_bytes in whole.peaks.items()}
    found = [tried(combine(high))]
    while found[0].fits(budget_bytes) and any(low[at] < high[at] for at in low):
        middle = {at: (low[at] + high[at]) // 2 for at in low}
        found.append(tried(combine(middle)))
        for at, peak_bytes in found[-1].peaks.items():
            if low[at] == high[at]:
                continue
            if peak_bytes <= budget_bytes:
                high[at] = middle[at]
            else:
                low[at] = middle[at] + 1
    if found[0].fits(budget_bytes):
        # At the last step of the bisection some ranks were at a level that does not fit.
        found.append(tried(combine(high)))
    return found
