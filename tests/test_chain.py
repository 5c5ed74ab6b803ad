"""Keep or recompute on chains: published figures, a brute force over all orders, and what an order must hold."""

import itertools
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colofunc.planner.recompute.chain import Back, ChainStage, ChainTable, KeepOption, Run

UNIT, LOSS = ChainStage(1, 1, 1, (KeepOption(1, 0),)), ChainStage(0, 0, 0, (KeepOption(0, 0),))
# FIGURES: Rotor on L stages and a loss, x_0 counted in M.
ROTOR = {4: {4: 13, 5: 10, 6: 8}, 8: {4: 43, 5: 26, 6: 22, 7: 20, 8: 19, 9: 18, 10: 16}}


@pytest.mark.parametrize(("length", "memory", "seconds"), [(n, m, s) for n, row in ROTOR.items() for m, s in row.items()])
def test_rotors_figures(length: int, memory: int, seconds: int) -> None:
    found = ChainTable([UNIT] * length + [LOSS], memory - 1, memory - 1).at(memory - 1)
    assert found is not None and found.seconds == seconds


def test_in_less_than_one_stage_needs_nothing_fits() -> None:
    assert ChainTable([UNIT] * 4 + [LOSS], 1, 1).at(1) is None


stages = st.builds(
    lambda f, b, x, left, more, ways: ChainStage(
        f, b, x, (KeepOption(x + more, 0), *(KeepOption(max(x, x + more - k), s, needs) for k, s, needs in ways)), left
    ),
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 3),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.none() | st.integers(3, 9)), max_size=2),
)  # fmt: skip
equal_layers = st.builds(lambda layer, n, last: [*layer * n, last], st.lists(stages, min_size=1, max_size=2), st.integers(2, 3), stages)
chains = st.lists(stages, min_size=1, max_size=5) | equal_layers


@settings(max_examples=90, deadline=None)
@given(chains, st.integers(2, 20))
def test_the_table_is_the_recursion(chain: list[ChainStage], memory: int) -> None:
    @lru_cache(None)
    def c(i: int, j: int, m: int) -> float:
        best = float("inf")
        left = [sum(stage.left_bytes for stage in chain[k : j + 1]) for k in range(j + 2)]
        for way in chain[i].ways:
            if m >= max(chain[i].needs(way) + left[i + 1], way.nbytes):
                rest = 0 if i == j else c(i + 1, j, m - way.nbytes)
                best = min(best, chain[i].forward_s + chain[i].backward_s + way.again_s + rest)
        for k in range(i + 1, j + 1):
            if m >= chain[k - 1].out_bytes:
                run = sum(s.forward_s for s in chain[i:k])
                best = min(best, run + c(k, j, m - chain[k - 1].out_bytes) + (c(i, k - 1, m - left[k]) if m >= left[k] else float("inf")))
        return best

    found = ChainTable(chain, memory, memory).at(memory)
    assert (found.seconds if found else float("inf")) == c(0, len(chain) - 1, memory)


@settings(max_examples=120, deadline=None)
@given(chains, st.integers(4, 30), st.integers(1, 40))
def test_an_order_runs_every_backward_once_with_what_it_needs_and_costs_what_it_says(
    chain: list[ChainStage], memory: int, slots: int
) -> None:
    found = ChainTable(chain, memory, slots).at(slots)
    if found is None:
        return
    there, kept, spent, done = {0}, {}, 0.0, []  # inputs of stages that are there; stages that are kept, and how
    for step in found.order:
        stage = chain[step.stage]
        if isinstance(step, Run):
            assert step.stage in there
            spent += stage.forward_s
            there.add(step.stage + 1)
            if not step.first:
                there.discard(step.stage)
            if step.way is not None:
                kept[step.stage] = step.way
        else:
            way = kept.pop(step.stage)
            assert isinstance(step, Back) and step.stage in there
            inputs = sum(chain[k - 1].out_bytes for k in there if 1 <= k <= step.stage and k - 1 not in kept)
            others = sum(chain[k].ways[v].nbytes for k, v in kept.items()) + sum(chain[k].left_bytes for k in done)
            assert inputs + others + stage.needs(stage.ways[way]) <= memory
            spent += stage.backward_s + stage.ways[way].again_s
            done.append(step.stage)
    assert done == list(range(len(chain)))[::-1]
    assert spent == pytest.approx(found.seconds)


def test_what_is_left_is_rounded_to_slots_as_all_else_is() -> None:
    nbytes, memory = 659_659_290, 879_545_720  # three quarters, of which a float quotient would leave a little over
    whole = ChainTable([ChainStage(1, 1, 1, (KeepOption(1, 0),), nbytes)], memory, 200)
    assert whole._left(0, 0).tolist() == [whole._slots(nbytes)] == [150]
    assert whole._slots(nbytes + 1) == 151


@pytest.mark.parametrize("nbytes", [50_436, *range(40_000, 60_000, 997)])
def test_all_of_the_memory_is_as_many_slots_as_there_are(nbytes: int) -> None:
    """As a quotient 50,436 / 2,000 is a little less than it is."""
    whole = ChainTable([ChainStage(1, 1, 0, (KeepOption(0, 0, nbytes),))], nbytes, 2000)
    assert whole._slots(nbytes) == 2000 and len(list(whole.distinct())) == 1


def test_equal_layers_are_solved_once() -> None:
    layer = [ChainStage(f, 2 * f, x, (KeepOption(4 * x, 0), KeepOption(x, f)), x) for f, x in ((1, 3), (3, 2), (2, 5))]
    rows = [len(ChainTable([*layer * n, LOSS], 1000, 100).cost) for n in (10, 20, 40)]
    assert rows[2] - rows[1] == 2 * (rows[1] - rows[0])  # linear in the number of layers, where pieces are quadratic
    assert rows[2] < 121 * 122 / 2 / 10


def test_more_memory_never_costs_more() -> None:
    chain = []
    for f, x in itertools.product((1, 3), (2, 5)):
        chain.append(ChainStage(f, 2 * f, x, (KeepOption(4 * x, 0), KeepOption(2 * x, f / 4), KeepOption(x, f))))
    chain *= 3
    whole = ChainTable(chain, 400, 400)
    costs = [s.seconds if (s := whole.at(m)) else float("inf") for m in range(401)]
    assert costs == sorted(costs, reverse=True) and costs[-1] == sum(s.forward_s + s.backward_s for s in chain)
