"""Options that pass on a pending reduction stay only where one can come up, and no cheaper assignment goes with them."""

import pytest
import torch
from test_planner import candidates_of, random_program

from colofunc.mesh import Mesh
from colofunc.planner.sharding import assign as module
from colofunc.planner.sharding.assign import assign
from colofunc.planner.sharding.classes import tie
from colofunc.planner.sharding.constraints import NONE
from colofunc.planner.sharding.option_filter import reachable
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.spec.conversions.conversion import conversion_s

MESH = Mesh(tp=4, topology="8xa100-80g")
SHAPE = (64, 64)


def chain(*targets: str) -> Program:
    """One operator after the other on a batch of rows."""
    nodes, values = [], {0: Value(0, SHAPE, torch.float32, "x", "batch")}
    for k, target in enumerate(targets):
        args = (Ref(k), Ref(k)) if "mm" in target else (Ref(k), (1,), True) if "amax" in target else (Ref(k),)
        values[k + 1] = Value(k + 1, (64, 1) if any("amax" in t for t in targets[: k + 1]) else SHAPE, torch.float32)
        nodes.append(Node(target, args, (), (k + 1,)))
    return Program((0,), tuple(nodes), (len(nodes),), values)


def passing(program: Program) -> list[set[str]]:
    """Per operator, the kinds of reduction that its options take in."""
    ties, candidates = tie(program, enabled=False), candidates_of(program, MESH)
    options = [module._options(program, m[0], candidates, NONE, None) for m in ties.members]
    left = reachable(program, ties, options)
    return [{how for s in left[ties.of_node(k)] for lay in s.ins for _, how in lay.pending} for k in range(len(program.nodes))]


def test_a_sum_passes_only_behind_a_product() -> None:
    assert passing(chain("aten.t.default", "aten.mm.default", "aten.t.default", "aten.tanh.default", "aten.t.default")) == [
        set(), set(), {"sum"}, set(), set(),
    ]  # fmt: skip


def test_a_maximum_passes_only_behind_a_maximum() -> None:
    assert passing(chain("aten.clone.default", "aten.amax.default", "aten.clone.default"))[::2] == [set(), {"max"}]


def test_what_only_a_wish_offers_stays() -> None:
    """Without the option that takes copies, the one that takes a sum is not dropped."""
    program = chain("aten.t.default")
    ties, candidates = tie(program, enabled=False), candidates_of(program, MESH)
    options = [module._options(program, m[0], candidates, NONE, None) for m in ties.members]
    only = tuple(s for s in options[1] if s.ins[0].pending)
    assert only and reachable(program, ties, [options[0], only])[1] == only


@pytest.mark.parametrize("seed", range(12))
def test_nothing_cheaper_is_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = random_program(seed)
    found = assign(program, MESH, candidates_of(program, MESH), convert_s=conversion_s)
    monkeypatch.setattr(module, "reachable", lambda program, ties, options: options)
    whole = assign(program, MESH, candidates_of(program, MESH), convert_s=conversion_s)
    assert found.cost_s <= whole.cost_s * (1 + 1e-9)
