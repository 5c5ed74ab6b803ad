"""What stages need while their backward runs: what the search believes of an order is what the accountant finds of it."""

from typing import Any

import pytest
from test_budget import orders_of

from colofunc.planner.recompute.chain import Back, Run
from colofunc.planner.recompute.needs import measured
from colofunc.planner.recompute.stages import ForwardChain, chain_of
from colofunc.program.memory import memory
from colofunc.program.passes.inplace import in_place


def chain(name: str) -> ForwardChain:
    seen: list[ForwardChain] = []
    orders_of(name, lambda program, node_s: seen.append(measured(chain_of(program, node_s))) or program)
    return seen[0]


def counted(made: ForwardChain, order: Any) -> int:
    return memory(in_place(made.replay(order))).peak_bytes["device"]


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_the_peak_of_the_order_that_keeps_least_is_what_its_stages_need(name: str) -> None:
    made = chain(name)
    last = len(made.parts) - 1
    order = [*(Run(s, len(part.stage.ways) - 1) for s, part in enumerate(made.parts)), *(Back(s) for s in range(last, -1, -1))]
    inputs = sum(made.program.values[i].nbytes for i in made.program.inputs)
    kept = [part.stage.ways[-1].nbytes for part in made.parts]
    believed = inputs + max(sum(kept[:s]) + part.stage.needs(part.stage.ways[-1]) for s, part in enumerate(made.parts))
    assert believed == pytest.approx(counted(made, order), rel=0.03)


def test_backward_of_what_a_stage_reads_is_its_own() -> None:
    """The weight gradient of the head reads what the last block hands on; no block's backward begins before it."""
    made = chain("gpt2")
    nodes = made.program.nodes
    heads = [k for k, node in enumerate(nodes) if node.phase == "backward" and node.path == "lm_head"]
    assert len(heads) >= 2 and all(k in made.parts[-1].back for k in heads)


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_seconds_of_an_order_are_those_of_the_program_that_it_becomes(name: str) -> None:
    """Whatever an order makes again for nobody is in neither."""
    made = chain(name)
    last, took = len(made.parts) - 1, {node.target: 1.0 + k for k, node in enumerate(made.program.nodes)}
    back = [Back(s) for s in range(last, -1, -1)]
    again = [step for s in range(last, -1, -1) for step in (*(Run(t, None) for t in range(s)), Run(s, 0), Back(s))]
    orders = [[*(Run(s, way) for s in range(last + 1)), *back] for way in (0, -1)]
    for order in (*orders, [*(Run(s, None) for s in range(last + 1)), *again]):
        replay = made.replayed(order)
        seconds = replay.seconds([took[node.target] for node in made.program.nodes])
        assert seconds == sum(took[node.target] for node in replay.finish().nodes)
    assert len(replay.finish().nodes) > len(made.program.nodes)
