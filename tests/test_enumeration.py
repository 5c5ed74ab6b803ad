"""All choices of small problems in order of their cost, against trying each."""

from itertools import islice, product

import numpy as np
import pytest
import torch

import colofunc as cf
from colofunc.compiler import named_candidates
from colofunc.planner.sharding import assign
from colofunc.planner.sharding.eliminate import Graph, exact_order
from colofunc.planner.sharding.enumeration import (
    _in_order,
    _stays,
    alone_each,
    at_least,
    buckets_of,
    cheapest,
    fitting,
    leaning,
    roomy,
)
from colofunc.program.ir import Program


def drawn(seed: int, n: int = 5) -> Graph:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, n)
    graph = Graph([rng.integers(0, 9, k).astype(float) for k in sizes])
    for _ in range(n + 1):
        scope = sorted(rng.choice(n, rng.integers(2, 4), replace=False).tolist())
        graph.add(scope, rng.integers(0, 9, [sizes[v] for v in scope]).astype(float))
    return graph


@pytest.mark.parametrize("seed", range(20))
def test_every_choice_comes_once_and_in_order(seed: int) -> None:
    graph = drawn(seed)
    order = exact_order(graph, 1 << 20)
    assert order is not None
    found = list(_in_order(graph, order, set(range(graph.size)), 10_000))
    every = list(product(*(range(len(u)) for u in graph.unary)))
    assert sorted(map(tuple, found)) == sorted(every)
    assert [graph.cost(x) for x in found] == sorted(graph.cost(x) for x in every)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_is_known_before_any_choice_is_made(seed: int) -> None:
    graph = drawn(seed)
    least, found = buckets_of(graph, exact_order(graph, 1 << 20) or ())
    assert least == min(graph.cost(x) for x in product(*(range(len(u)) for u in graph.unary)))
    assert all((bucket.regret.min(axis=0) == 0).all() for bucket in found)


def test_a_choice_that_does_not_matter_is_not_made_twice() -> None:
    graph = drawn(3)
    order = exact_order(graph, 1 << 20) or []
    some = list(_in_order(graph, order, {0}, 10_000))
    assert len(some) == len(graph.unary[0]) and {x[0] for x in some} == set(range(len(some)))


def planned(monkeypatch: pytest.MonkeyPatch) -> tuple[Program, assign.Assignment]:
    """A program, and what was assigned last for it: one linear layer on two ranks."""
    monkeypatch.setattr(named_candidates, "MOST_NODES", 0)  # which are assigned behind it
    made = list[tuple[Program, assign.Assignment]]()
    real = assign._assignment
    monkeypatch.setattr(assign, "_assignment", lambda *args: made.append((args[0], real(*args))) or made[-1][1])
    net = torch.nn.Linear(32, 64)
    opt = cf.adapt(torch.optim.SGD, lr=0.1)
    step, state = cf.train_step(cf.functional(net), opt, lambda out, _: out.sum(), inputs=lambda b: ((b,), {}))
    cf.shard(step, cf.Mesh(dp=2, topology="8xa100-40g")).lower(state, torch.randn(256, 32))
    return made[-1]


def test_shardings_of_a_step_come_cheapest_first_and_begin_with_the_one_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, one = planned(monkeypatch)
    costs = [one.model.true_cost(x) for x in islice(cheapest(one.model, 100_000), 50)]
    assert costs[0] == pytest.approx(one.cost_s) and len(costs) >= 3
    assert costs == pytest.approx(sorted(costs), rel=1e-9)


def test_none_that_holds_nowhere_less_than_a_cheaper_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, one = planned(monkeypatch)
    picked = ([options[o] for options, o in zip(one.model.options, x, strict=True)] for x in cheapest(one.model, 100_000))
    held = [[s.outs[0].local_numel for s in some if s.outs[0]] for some in picked]
    for k, mine in enumerate(held):
        assert not any(all(a <= b for a, b in zip(other, mine, strict=True)) for other in held[:k])


def test_bytes_that_one_operator_alone_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's linear layer makes 256 x 64 floats, and backward reads as many; parameters and updates are not counted."""
    program, one = planned(monkeypatch)
    whole = [0] * len(one.choice)  # replicated
    assert at_least(alone_each(program, one.model, one.ties), whole) == 256 * 64 * 4 <= one.peak_bytes


def test_where_no_choice_fits_none_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    program, one = planned(monkeypatch)
    least = max(map(min, alone_each(program, one.model, one.ties)))
    assert [*fitting(program, one.model, one.ties, 4 * least)]
    monkeypatch.setattr("colofunc.planner.sharding.enumeration.cheapest", None)  # which is not called
    assert not [*fitting(program, one.model, one.ties, least - 1)]


def test_shardings_that_may_be_brought_down_to_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward of the layer reads x and w and makes y: replicated 32768 + 8448 + 65536 bytes; half the batch a rank, 57600."""
    program, one = planned(monkeypatch)
    alone = alone_each(program, one.model, one.ties)
    at = lambda budget: [at_least(alone, x) for x in roomy(program, one.model, one.ties, one.choice, budget)]  # noqa: E731
    assert max(at(106_752)) == 65_536 and at(60_000) and max(at(60_000)) <= 32_768 and not at(20_000)


def test_where_only_state_costs_it_is_split_and_where_only_what_is_made_costs_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks the weight and its bias, 8448 bytes, the batch, 32768, and 256 x 64 floats of the layer, 65536."""
    program, one = planned(monkeypatch)

    def held_bytes(choice: list[int], items: list[int]) -> int:
        total = 0
        for variable, (item, *_) in enumerate(one.ties.members):
            layout = one.model.options[variable][choice[variable]].outs[0]
            if item in items and layout is not None:
                total += layout.local_numel * 4
        return total

    inputs = [k for k, i in enumerate(program.inputs) if program.values[i].role in ("param", "batch")]
    layer = [one.ties.n_inputs + k for k, node in enumerate(program.nodes) if node.target == "colofunc.linear"]
    state, little_state, made, little_made = leaning(program, one.model, one.ties, one.choice, 1.0)
    assert held_bytes(state, inputs) == held_bytes(little_state, inputs) == (8448 + 32_768) / 2
    assert held_bytes(made, layer) == held_bytes(little_made, layer) == 65_536 / 2


def test_inputs_that_never_leave_lie_beside_operators_that_do_not_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch, 32768 bytes, beside the sum of what the layer makes of it, and not beside the layer; a constant, 256, beside both."""
    program, one = planned(monkeypatch)
    stays = _stays(program, one.model, one.ties, [0] * len(one.choice))
    at = {node.target: stays[one.ties.of_node(k)] for k, node in enumerate(program.nodes)}
    assert (at["aten.sum.default"], at["colofunc.linear"]) == (32_768 + 256, 256)
