"""Linear programs with rounding: against trying every choice on small programs, and beside stages on a U-shaped net."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

import colofunc as cf
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Transform
from colofunc.planner.candidate import Finish, FinishedProgram
from colofunc.planner.recompute import relaxed as solver
from colofunc.planner.recompute.fastest import _bisect, _Proposals, _seconds, fit_recomputed
from colofunc.planner.recompute.relaxed import KeptMemory, Rounds, relaxed, rounds_of, solve
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Program
from colofunc.program.memory import memory
from colofunc.program.passes.inplace import in_place


class Block(torch.nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(i, 2 * o), torch.nn.Linear(2 * o, o)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.b(torch.nn.functional.gelu(self.a(x))))


class UShaped(torch.nn.Module):
    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.down = torch.nn.ModuleList(Block(width, width) for _ in range(depth))
        self.mid = Block(width, width)
        self.up = torch.nn.ModuleList(Block(2 * width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = self.mid(x)
        for block in self.up:
            x = block(torch.cat([x, skips.pop()], -1))
        return x


def step_of(depth: int, width: int = 16) -> tuple[cf.Staged, object, torch.Tensor]:
    torch.manual_seed(0)
    opt = cf.adapt(torch.optim.SGD, lr=0.1)
    step, state = cf.train_step(cf.functional(UShaped(depth, width)), opt, lambda out, _: (out**2).mean(), inputs=lambda b: ((b,), {}))
    return cf.shard(step, cf.Mesh(topology="a100-40g")), state, torch.randn(4096, width)


@pytest.fixture
def local() -> Callable[..., tuple[Program, NodeSeconds]]:
    """Depth -> the program of one rank as it comes to `fit`, and seconds of its nodes."""

    def of(depth: int, width: int = 16) -> tuple[Program, NodeSeconds]:
        seen = list[tuple[Program, NodeSeconds]]()

        def spy(program: Program, node_s: NodeSeconds, finish: Finish, budget: int | None) -> tuple[FinishedProgram, FinishedProgram]:
            seen.append((program, node_s))
            return (finish(program),) * 2

        step, *args = step_of(depth, width)
        stage(step, Transform("spy", candidates=lambda build: build.evolve(searches=(spy,)))).lower(*args)
        return seen[-1]

    return of


def counted(program: Program, like: FinishedProgram | None = None, moves: bool = True) -> FinishedProgram:
    done = in_place(program)
    return FinishedProgram(done, memory(done).peak_bytes["device"], 0.0)


def by_hand(pieces: list[KeptMemory], others: tuple[int, ...]) -> Rounds:
    return Rounds(Program((), (), (), {}), (1,) * len(others), tuple(pieces), others, {}, {})


def drawn(seed: int) -> Rounds:
    """Pieces in a row, each made of the one before, and read back in reverse order, one a round."""
    rng = np.random.default_rng(seed)
    n = 3
    sizes, costs = rng.integers(1, 4, n).tolist(), rng.integers(1, 5, n).tolist()
    made_of = [frozenset({v - 1} if v else ()) for v in range(n)]
    wanted = [frozenset({v, min(v + 1, n - 1), 2 * n - 1 - v}) for v in range(n)]
    pieces = [KeptMemory(v, sizes[v], float(costs[v]), made_of[v], v, wanted[v]) for v in range(n)]
    return by_hand(pieces, tuple(rng.integers(0, 2, 2 * n).tolist()))


def least_s(rounds: Rounds, most: int) -> float:
    """Trying every S; what has to be made then follows."""
    n, turns, best = len(rounds.pieces), len(rounds.ends), float("inf")
    free = [(t, v) for t in range(turns) for v, p in enumerate(rounds.pieces) if t > p.made]
    for some in product((False, True), repeat=len(free)):
        held = np.zeros((turns + 1, n), dtype=bool)
        for (t, v), is_ in zip(free, some, strict=True):
            held[t, v] = is_
        made = np.zeros((turns, n), dtype=bool)
        for t in range(turns):
            for v in reversed(range(n)):
                p = rounds.pieces[v]
                asked = t in p.read_in or held[t + 1, v] or any(made[t, u] and v in rounds.pieces[u].reads for u in range(v + 1, n))
                made[t, v] = t == p.made or (asked and not held[t, v])
        able = all(t >= rounds.pieces[v].made for t, v in zip(*np.nonzero(made), strict=True))
        sizes = np.array([p.nbytes for p in rounds.pieces])
        fits = all((held[t] | made[t]) @ sizes + rounds.others[t] <= most for t in range(turns))
        if able and fits:
            best = min(best, float((made * np.array([p.cost_s for p in rounds.pieces])).sum()))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_linear_program_is_a_bound_and_exact_where_all_fits(seed: int) -> None:
    rounds = drawn(seed)
    every_s = sum(p.cost_s for p in rounds.pieces)
    for most in range(rounds.most_bytes - 2, rounds.most_bytes + 1):
        found, least = solve(rounds, most), least_s(rounds, most)
        assert found is not None or least == float("inf")
        assert found is None or every_s - 1e-9 <= found[1] <= least + 1e-9
    assert found is not None and found[1] == pytest.approx(every_s)


def test_a_linear_program_that_takes_too_long_proposes_nothing(
    local: Callable[..., tuple[Program, NodeSeconds]], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, node_s = local(3)
    assert list(relaxed(program, node_s))
    monkeypatch.setattr(solver, "ITERATIONS", 1)
    assert not list(relaxed(program, node_s))


def test_on_a_u_shaped_net_less_memory_is_enough_than_with_stages_alone(local: Callable[..., tuple[Program, NodeSeconds]]) -> None:
    """At every budget no slower than stages alone, at some faster, and far below where these find nothing."""
    program, node_s = local(4, 64)
    whole, plain_s = counted(program).peak_bytes, _seconds(program, node_s)
    again_s = lambda one: _seconds(one, node_s) - plain_s  # noqa: E731
    tried = lambda one: FinishedProgram((done := counted(one)).program, done.peak_bytes, again_s(one))  # noqa: E731
    stages, gained, below = _Proposals.of(program, node_s).orders, 0, 0
    for share in (0.75, 0.72, 0.45):
        budget = int(whole * share)
        alone = min((one.more_s for one in _bisect(stages, tried, budget, again_s) if one.fits(budget)), default=None)
        both, _ = fit_recomputed(program, node_s, counted, budget)
        assert both is not None and both.fits(budget) and (alone is None or both.more_s <= alone)
        gained += alone is not None and both.more_s < alone * 0.99
        below += alone is None
    assert gained and below


def test_within_a_budget_that_only_rounds_keep_to_the_numbers_stay() -> None:
    with cf.testing.float64():
        step, state, batch = step_of(3)
        budget = int(step.lower(state, batch).memory().peak_bytes["device"] * 0.6)
        lean = cf.checkpoint(step, budget=budget)
        assert lean.lower(state, batch).memory().peak_bytes["device"] <= budget
        cf.testing.check(lean, state, batch)


def test_a_plan_of_rounds_keeps_what_it_says(local: Callable[..., tuple[Program, NodeSeconds]]) -> None:
    """With everything held nothing is made again; with nothing held everything that backward reads is."""
    program, node_s = local(3)
    rounds = rounds_of(program, node_s)
    assert rounds is not None
    all_ = np.ones((len(rounds.ends), len(rounds.pieces)), dtype=bool)
    assert len(rounds.replay(all_).nodes) == len(program.nodes)
    lean = rounds.replay(~all_)
    assert len(lean.nodes) > len(program.nodes) and counted(lean).peak_bytes < counted(program).peak_bytes


def test_where_stages_own_all_there_is_nothing_to_ask(local: Callable[..., tuple[Program, NodeSeconds]]) -> None:
    program, node_s = local(3)
    rounds = rounds_of(program, node_s)
    assert rounds is not None and list(relaxed(program, node_s))
    assert not list(relaxed(program, node_s, owned={piece.group for piece in rounds.pieces[1:]}))
