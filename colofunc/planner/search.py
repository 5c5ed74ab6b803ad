"""Search under the true cost: exact for small programs, otherwise a pairwise model that is corrected as it goes.

The true cost counts a conversion once however many operators use it; the pairwise model must split it among them. So:
solve the pairwise model with every split that could be right, then re-split by what the best choice actually shares and
solve again (each step an exact solve around a random cut), and try moves of a whole flow at once: all consumers of a
value to one layout. Only steps that lower the true cost are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from colofunc.dtensor.layout import Layout
from colofunc.planner.eliminate import Array, Graph, eliminate_all, exact_order, partial_order
from colofunc.planner.model import Model
from colofunc.planner.problem import NORMAL, Effort, improve

Judge = Callable[[Sequence[int]], float]


def search(
    model: Model,
    starts: Sequence[Sequence[int]] = (),
    extra: Sequence[Array] | None = None,
    seed: int = 0,
    effort: Effort = NORMAL,
    fresh: bool = True,
) -> list[int]:
    """The choice with the least true cost found. `extra`: added seconds per class and option (a price of memory).

    `fresh`: also search from nothing; without it only from `starts`.
    """
    exact = _exact(model, extra, effort)
    if exact is not None:
        return exact
    judge = judge_of(model, extra)
    rng = np.random.default_rng(seed)
    quick = attrs.evolve(effort, passes=max(3, effort.passes // 6), patience=2)
    pool = [list(s) for s in starts]
    for share in (1.0, 0.0) if fresh or not pool else ():
        graph = model.pair_graph(share, extra)
        core, recover = graph.reduce()
        pool.append(recover(improve(core, core.greedy(core.alive), rng, quick)))
    for start in starts:
        graph = model.pair_graph(start, extra)
        core, recover = graph.reduce()
        pool.append(recover(improve(core, list(start), rng, quick)))
    best = min(pool, key=judge)
    return polish(model, best, judge, extra, rng, effort)


def judge_of(model: Model, extra: Sequence[Array] | None) -> Judge:
    """True cost plus the price of memory."""

    def judge(choice: Sequence[int]) -> float:
        more = 0.0 if extra is None else sum(float(e[choice[c]]) for c, e in enumerate(extra))
        return model.true_cost(choice) + more

    return judge


def _exact(model: Model, extra: Sequence[Array] | None, effort: Effort) -> list[int] | None:
    if len(model.options) > 64 or model.copy_price:
        return None
    graph = model.exact_graph(effort.exact_elements >> 6, extra)
    order = None if graph is None else exact_order(graph, effort.exact_elements)
    if graph is None or order is None:
        return None
    return eliminate_all(graph, order, (), [0] * graph.size)


def polish(
    model: Model, x: list[int], judge: Judge, extra: Sequence[Array] | None, rng: np.random.Generator, effort: Effort
) -> list[int]:
    """Descend from `x` until neither re-split exact steps nor moves of single classes or whole flows help."""
    best = judge(x)
    stale = 0
    moved = True
    for _ in range(effort.passes):
        graph = model.pair_graph(x, extra)
        order, fixed = partial_order(graph, effort.pass_elements, rng)
        found = eliminate_all(graph, order, fixed, x)
        cost_s = judge(found)
        if cost_s < best - 1e-12 * abs(best):
            x, best, stale, moved = found, cost_s, 0, True
            continue
        stale += 1
        if effort.sweeps and moved and stale >= effort.patience // 2:
            x, best, moved = _sweep(model, x, best, extra)
            stale = 0 if moved else stale
        if stale >= effort.patience or (not fixed and not (effort.sweeps and moved)):
            break
    return x


def _sweep(model: Model, x: list[int], best: float, extra: Sequence[Array] | None) -> tuple[list[int], float, bool]:
    """One round of true-cost moves: every class to every option, every flow to every common layout."""
    graph = model.pair_graph(x, extra)
    around = graph.around()
    moved = False
    for f in range(len(model.flows)):
        for proposal in _together(model, f, x, graph, around):
            gain = change_s(model, x, proposal, extra)
            if gain < -1e-12 * abs(best):
                x, best, moved = _apply(x, proposal), best + gain, True
    for c, options in enumerate(model.options):
        if len(options) == 1:
            continue
        scores = _row(graph, around, c, x)
        # The pairwise row underestimates no single move by more than what is shared: the best few are enough.
        for o in np.argsort(scores, kind="stable")[:4]:
            proposal = {c: int(o)}
            gain = change_s(model, x, proposal, extra)
            if gain < -1e-12 * abs(best):
                x, best, moved = _apply(x, proposal), best + gain, True
    return x, best, moved


def _together(
    model: Model, f: int, x: Sequence[int], graph: Graph, around: Sequence[Sequence[tuple[int, ...]]]
) -> list[dict[int, int]]:
    """Moves of all consumers of a flow to one layout, with the producer as it is or giving that layout itself."""
    flow = model.flows[f]
    classes = {u[0] for u in flow.uses}
    if len(classes) < 2:
        return []
    rows = {c: _row(graph, around, c, x) for c in (*classes, flow.producer)}
    wanted: dict[Layout, dict[int, int]] = {}
    for use in flow.uses:
        layouts, at = model.side(use[0], use[1])
        for k, layout in enumerate(layouts):
            members = np.flatnonzero(at == k)
            wanted.setdefault(layout, {})[use[0]] = int(members[rows[use[0]][members].argmin()])
    sources, at = model.side(flow.producer, None, flow.result)
    out = []
    for layout, moves in wanted.items():
        moves = {c: o for c, o in moves.items() if x[c] != o}
        if not moves:
            continue
        out.append(moves)
        if layout in sources and flow.producer not in moves:
            members = np.flatnonzero(at == sources.index(layout))
            out.append({**moves, flow.producer: int(members[rows[flow.producer][members].argmin()])})
    return out


def _row(graph: Graph, around: Sequence[Sequence[tuple[int, ...]]], c: int, x: Sequence[int]) -> Array:
    """Cost of each option of class c in the pairwise model, the others as in x."""
    row = graph.unary[c].copy()
    for scope in around[c]:
        row += graph.tables[scope][tuple(slice(None) if v == c else x[v] for v in scope)]
    return row


def _apply(x: Sequence[int], moves: dict[int, int]) -> list[int]:
    y = list(x)
    for c, o in moves.items():
        y[c] = o
    return y


def change_s(model: Model, x: Sequence[int], moves: dict[int, int], extra: Sequence[Array] | None = None) -> float:
    """Change of the true cost (with the price of memory) when the classes of `moves` change option."""
    y = _apply(x, moves)
    delta = 0.0
    for c, o in moves.items():
        delta += model.weight[c] * float(model.seconds[c][o] - model.seconds[c][x[c]])
        if extra is not None:
            delta += float(extra[c][o] - extra[c][x[c]])
    for f in {f: None for c in moves for f in model.flows_of[c]}:
        delta += model.flow_s(f, y) - model.flow_s(f, x)
    return delta
