"""Updates of one kind run as one call: the same numbers as one by one, no higher peak, and never where another node needs the order."""

import random
import re

import attrs
import pytest
import torch
from colofunc_plugins import tensor, zero
from test_executors import per_rank, program
from test_offload import training
from torch import nn

import colofunc as cf
from colofunc.executors.simulated import SimulatedProgram
from colofunc.ops.define import KERNELS
from colofunc.ops.update_lists import MANY
from colofunc.program.ir import Ref
from colofunc.program.lanes import lanes
from colofunc.program.memory import memory
from colofunc.program.passes import one_call
from colofunc.program.passes.one_call import (
    kind_of_update,
    runs_of_updates,
    small_updates_in_one_call,
    updates_in_one_call,
    with_one_launch,
)

R = Ref
D = torch.float64
ONE = cf.Mesh()
SMALL_BYTES = one_call.SMALL_BYTES


# ---- the functions of many parameters ----


def operands(rng, dtype, how):
    """A tensor of some shape (empty and 0-dim ones too), contiguous or not."""
    shape = tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 3)))
    x = torch.rand(shape, dtype=torch.float32).to(dtype)
    if how == "transposed":
        return torch.empty(shape[::-1], dtype=dtype).permute(tuple(reversed(range(x.dim())))).copy_(x)
    if how == "gaps":
        return torch.zeros(*shape, 2, dtype=dtype)[..., 0].copy_(x)
    return x


def like(x, how):
    """Random numbers that lie in memory as `x`, or as `how` says."""
    fresh = torch.rand(x.shape, dtype=torch.float32).to(x.dtype)
    return fresh if how == "contiguous" else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(fresh)


def many(rng, dtype):
    """Parameters, gradients and three states of each. What of a parameter lies otherwise is drawn, too."""
    lists = []
    for _ in range(rng.randint(1, 6)):
        p = operands(rng, dtype, rng.choice(["contiguous"] * 3 + ["transposed", "gaps"]))
        lists.append([p, *(like(p, rng.choice(["as it", "as it", "contiguous"])) for _ in range(4))])
    return [list(column) for column in zip(*lists, strict=True)]


def arguments_of(target, rng, dtype, finite):
    """Arguments of the function of many parameters, options drawn."""
    p, g, m, v, x = many(rng, dtype)
    go = None if finite is None else torch.tensor(finite)
    none, flag, maximize = [None] * len(p), rng.random() < 0.5, rng.random() < 0.5
    scalars = torch.tensor(float(rng.randint(1, 4))), torch.tensor(rng.random(), dtype=D)
    if target == "colofunc.adamw_":
        options = 0.9, 0.99, 1e-8, rng.choice([0.0, 0.1]), rng.random() < 0.5, flag
        return [p, g, m, v, *scalars, *options, x if flag else none, maximize, go]
    momentum = rng.choice([0.0, 0.9])
    options = momentum, rng.choice([0.0, 0.0, 0.3]), rng.choice([0.0, 0.1]), flag
    return [p, g, m if momentum else none, *scalars, *options, maximize, go]


@pytest.mark.parametrize("finite", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, D, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", sorted(MANY))
def test_many_parameters_have_the_numbers_of_each(target, dtype, finite) -> None:
    own = MANY[target].own
    for seed in range(25):
        torch.manual_seed(seed)
        args = arguments_of(target, random.Random(seed), dtype, finite)
        wanted = [[copied(t) for t in arg] if k in own else arg for k, arg in enumerate(args)]
        before = [t.clone() for t in args[0]]
        for each in range(len(before)):
            KERNELS[target](*(arg[each] if k in own else arg for k, arg in enumerate(wanted)))
        MANY[target].call(*args)
        for k in own:
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(args[k], wanted[k], strict=True)), seed
        moved = any(not torch.equal(a, b) for a, b in zip(args[0], before, strict=True))
        assert moved is (finite is not False and any(t.numel() for t in before)), seed


def copied(x):
    """The same numbers, which lie in memory the same way."""
    return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


# ---- which updates stand side by side ----


def sgd(param, grad, lr=3, momentum=0.0, decay=0.0):
    return "colofunc.sgd_", (R(param), R(grad), None, R(3), R(lr), momentum, 0.0, decay, False), ()


def updates(between=(), peak=64):
    """Parameters 0 and 1, data 2, scalars 3 and 4; gradients 5 and 6, each with its update behind it, and then a large value."""
    nodes = [
        ("aten.new_zeros.default", (R(2), (peak,)), (9,)),  # the peak of the program, which is over before the updates
        ("aten.neg.default", (R(2),), (5,)),
        sgd(0, 5),
        *between,
        ("aten.exp.default", (R(2),), (6,)),
        sgd(1, 6),
        ("aten.sin.default", (R(2),), (8,)),
    ]
    shapes = [(4,)] * 3 + [()] * 2 + [(4,)] * 4 + [(peak,)]
    return program([0, 1, 2, 3, 4], nodes, [0, 1, 8], shapes)


def names(p):
    return [node.target.split(".")[1] for node in p.nodes]


def same_results(p, q, mesh=ONE):
    torch.manual_seed(0)
    inputs = [[torch.rand(s, dtype=D)] for s in ((4,), (4,), (4,), (), ())]
    first = SimulatedProgram(p, mesh)([[x[0].clone()] for x in inputs])
    second = SimulatedProgram(q, mesh)([[x[0].clone()] for x in inputs])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


def test_an_update_waits_for_the_next_one_and_they_are_one_call() -> None:
    p = updates()
    q = updates_in_one_call(p, memory)
    assert names(q) == ["new_zeros", "neg", "exp", "sin", "sgd_", "sgd_"]
    assert runs_of_updates(p) == {} and runs_of_updates(q) == {4: (4, 5)}
    source = SimulatedProgram(q, ONE).write(((0,),) * 5, torch.device("cpu")).function().source
    assert "sgd_all_((v0, v1), (v5, v6), None, v3, v3, 0.0, 0.0, 0.0, False)" in source
    same_results(p, q)


BETWEEN = {
    "reads what was updated": ("aten.mul.Tensor", (R(2), R(0)), (7,)),
    "reads a view of it": ("aten.view.default", (R(0), (4,)), (7,)),
    "writes over the gradient": ("aten.neg.out", (R(2),), ()),
    "writes over what was updated": sgd(0, 2, momentum=0.0),
    "writes to the rate": ("aten.mul.out", (R(3), R(3)), ()),
}


@pytest.mark.parametrize("why", BETWEEN)
def test_an_update_does_not_wait_past_a_node_that(why) -> None:
    target, args, outs = BETWEEN[why]
    p = updates([(target, args, outs)])
    if target.endswith(".out"):
        out = 5 if why == "writes over the gradient" else 3
        p = attrs.evolve(p, nodes=tuple(attrs.evolve(n, kwargs=(("out", R(out)),)) if n.target == target else n for n in p.nodes))
    q = updates_in_one_call(p, memory)
    at = {id(node): k for k, node in enumerate(q.nodes)}
    assert at[id(p.nodes[2])] < at[id(p.nodes[3])]
    assert all(sum(q.nodes[k].args[0].id == 0 for k in run) < 2 for run in runs_of_updates(q).values())
    same_results(p, q)


OTHERS = {
    "another rate": sgd(1, 6, lr=4),
    "another weight decay": sgd(1, 6, decay=0.1),
    "another operator": ("colofunc.adamw_", (R(1), R(6), R(7), R(8), R(3), R(3), 0.9, 0.99, 1e-8, 0.0, True), ()),
    "the same parameter": sgd(0, 6),
    "a gradient that is updated first": sgd(1, 0),
}


@pytest.mark.parametrize("why", OTHERS)
def test_two_updates_are_two_calls_where_the_second_has(why) -> None:
    p = program(
        [0, 1, 2, 3, 4, 7, 8], [("aten.exp.default", (R(2),), (6,)), sgd(0, 2), OTHERS[why]], [0, 1], [(4,)] * 3 + [()] * 2 + [(4,)] * 4
    )
    assert runs_of_updates(p) == {} == runs_of_updates(updates_in_one_call(p, memory))
    assert [n.args[0].id for n in updates_in_one_call(p, memory).nodes[1:]] == [n.args[0].id for n in p.nodes[1:]]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_lies_in_another_tier_is_updated_alone(tier) -> None:
    p = updates()
    values = {i: value.in_tier(tier) if i in (0, 1) else value for i, value in p.values.items()}
    p = attrs.evolve(p, values=values)
    assert updates_in_one_call(p, memory) is p and all(kind_of_update(node, values) is None for node in p.nodes)


def test_tensors_of_several_dtypes_are_updated_alone() -> None:
    p = updates()
    p = attrs.evolve(p, values=p.values | {6: attrs.evolve(p.values[6], dtype=torch.float32)})
    assert [kind_of_update(node, p.values) is None for node in p.nodes if node.target == "colofunc.sgd_"] == [False, True]
    assert updates_in_one_call(p, memory) is p


def test_a_program_with_collectives_keeps_its_order_and_one_with_copies_that_of_large_updates(monkeypatch) -> None:
    monkeypatch.setattr(one_call, "SMALL_BYTES", 0)
    for target, args in (("colofunc.all_reduce", (R(2), ("dp",), 1, "sum")), ("colofunc.to_host", (R(2),))):
        p = updates([(target, args, (7,))])
        assert updates_in_one_call(p, memory) is p


def random_updates(seed):
    """Gradients of random sizes, each made from what the one before was made from, with an update behind each; some values live long."""
    rng = random.Random(seed)
    count = rng.randint(2, 9)
    shapes = [(rng.randint(1, 40),) for _ in range(count)] * 2 + [()]  # parameters, data of their sizes, a scalar
    nodes, outputs, scalar = [], list(range(count)), 2 * count
    for k in range(count):
        held = len(shapes)
        shapes += [(rng.randint(1, 200),), shapes[k], ()]
        nodes.append(("aten.new_zeros.default", (R(scalar), shapes[held]), (held,)))
        nodes.append(("aten.neg.default", (R(count + k),), (held + 1,)))
        target = rng.choice([0.0, 0.0, 0.1])
        nodes.append(("colofunc.sgd_", (R(k), R(held + 1), None, R(scalar), R(scalar), 0.0, 0.0, target, False), ()))
        nodes.append(("aten.sum.default", (R(rng.choice([held, k, held + 1])),), (held + 2,)))
        outputs.append(held + 2)
    return program(range(2 * count + 1), nodes, outputs, shapes)


def test_no_peak_is_higher_and_no_number_another() -> None:
    joined = 0
    for seed in range(60):
        p = random_updates(seed)
        q = updates_in_one_call(p, memory)
        assert memory(q).peak_bytes["device"] <= memory(p).peak_bytes["device"], seed
        joined += len(runs_of_updates(q)) > len(runs_of_updates(p))
        torch.manual_seed(seed)
        inputs = [torch.rand(p.values[i].shape, dtype=D) for i in p.inputs]
        first, second = (SimulatedProgram(each, ONE)([[x.clone()] for x in inputs]) for each in (p, q))
        assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True)), seed
    assert joined > 20


def test_gradients_that_would_be_the_peak_are_freed_one_by_one() -> None:
    p = updates(peak=1)
    assert updates_in_one_call(p, memory) is p or memory(updates_in_one_call(p, memory)).peak_bytes == memory(p).peak_bytes
    wide = [("aten.neg.default", (R(2),), (5,)), sgd(0, 5), ("aten.exp.default", (R(2),), (6,)), sgd(1, 6)]
    alone = program([0, 1, 2, 3], wide, [0, 1], [(1000,)] * 3 + [(), ()] + [(1000,)] * 2)
    assert updates_in_one_call(alone, memory).nodes == alone.nodes


# ---- past collectives and copies ----


PAST = {
    "a collective": [("colofunc.all_gather_start", (R(2), ("dp",), 1), (7,)), ("colofunc.wait", (R(7),), (10,))],
    "a copy": [("colofunc.to_host", (R(2),), (7,))],
}


def with_between(what, peak=64):
    p = updates(PAST[what], peak)
    values = {**p.values, 7: attrs.evolve(p.values[7], shape=(1, 4), place="device" if what == "a collective" else "host")}
    if what == "a collective":
        values[10] = attrs.evolve(values[7], id=10)
    return attrs.evolve(p, values=values)


def counted(p):
    return memory(p, sent=True)


@pytest.mark.parametrize("what", PAST)
def test_a_small_update_waits_for_the_next_one_past(what, monkeypatch) -> None:
    p = with_between(what)
    q = small_updates_in_one_call(p, counted)
    assert names(q)[-2:] == ["sgd_", "sgd_"] and runs_of_updates(p) == {} and len(runs_of_updates(q)) == 1
    assert counted(q).peak_bytes == counted(p).peak_bytes
    same_results(p, q, cf.Mesh(dp=1))
    assert small_updates_in_one_call(with_between(what, peak=1), counted).nodes == with_between(what, peak=1).nodes  # it would hold more
    monkeypatch.setattr(one_call, "SMALL_BYTES", 31)  # a parameter and its gradient take 32
    assert small_updates_in_one_call(p, counted) is p


def test_a_collective_of_what_is_updated_does_not_begin_later() -> None:
    p = updates([("colofunc.all_gather_start", (R(0), ("dp",), 1), (7,))])
    q = small_updates_in_one_call(p, counted)
    assert names(q) == ["new_zeros", "neg", "sgd_", "all_gather_start", "exp", "sin", "sgd_"]


@pytest.mark.parametrize("way", ["copies", "sums over tp", "chunks over dp"])
def test_updates_of_a_lowered_step_are_one_call_past(way, monkeypatch) -> None:
    """Of collectives that come one by one, or of gradients between copies of activations; the calls of one by one beside them."""
    step, state, batch = training(layers=3, rows=1024 if way == "copies" else 64, pairs=way == "sums over tp")

    def lowered(small_bytes):
        monkeypatch.setattr(one_call, "SMALL_BYTES", small_bytes)
        if way != "copies":
            axis, plan = ("tp", tensor("1d", "tp")) if way == "sums over tp" else ("dp", zero(3, "dp", chunk=32 * 33))
            mesh = cf.Mesh(**{axis: 4}, topology="8xa100-80g")
            return cf.shard(step, mesh, plan).on("distributed").lower(state, batch)
        mesh = cf.Mesh(topology="a100-40g:datasheet")
        whole = cf.shard(step, mesh).lower(state, batch).memory().peak_bytes["device"]
        return cf.offload(cf.shard(step, mesh), budget=int(0.8 * whole)).lower(state, batch)

    found = []
    for small_bytes in (0, SMALL_BYTES):
        low = lowered(small_bytes)
        running, updates = low.program, sum(node.target in MANY for node in low.program.nodes)
        # The clock counts each update as a call of its own.
        seconds = low.lanes().end_s - (updates - update_calls(running)) * low.priced.topology.device.launch_s
        found.append((update_calls(running), len(running.nodes), low.memory().peak_bytes, seconds))
    (apart, *one_by_one, apart_s), (together, *at_once, together_s) = found
    assert apart > 4 and together == 1 and one_by_one == at_once
    assert together_s <= apart_s


def update_calls(p):
    """How often the host calls an update of the device."""
    updates = sum(kind_of_update(node, p.values) is not None for node in p.nodes)
    return updates - sum(len(run) - 1 for run in runs_of_updates(p).values())


# ---- whole steps ----


def step_of(net, cls, **options):
    opt = cf.adapt(cls, lr=1e-2, **options)
    return cf.train_step(cf.functional(net), opt, loss=lambda out: out.square().mean(), clip=1.0)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))


def calls_of(low):
    """How many parameters each call of several updates takes."""
    source = SimulatedProgram(low.program, low.mesh).write(((0,),) * len(low.program.inputs), torch.device("cpu")).function().source
    return [found.count(",") + 1 for found in re.findall(r"_all_\(\(([^)]*)\)", source)]


STEPS = {
    "AdamW": (torch.optim.AdamW, {}, [8]),
    "Adam": (torch.optim.Adam, dict(amsgrad=True, weight_decay=0.1), [8]),
    "AdamW in groups": (torch.optim.AdamW, dict(groups={"*.bias": dict(weight_decay=0.0), "5.*": dict(lr=1e-3)}), [3, 3]),
    "SGD": (torch.optim.SGD, dict(momentum=0.9, nesterov=True), [8]),
    "SGD, damped": (torch.optim.SGD, dict(momentum=0.9, dampening=0.5, weight_decay=0.1), [8]),
    "SGD without momentum": (torch.optim.SGD, {}, [8]),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_have_the_numbers_of_their_function(name) -> None:
    cls, options, many = STEPS[name]
    step_fn, state = step_of(net().double(), cls, **options)
    step = cf.shard(step_fn, ONE)
    x = torch.randn(64, 6, dtype=D)
    cf.testing.check(step, state, x, steps=3)
    assert sorted(calls_of(step.lower(state, x)))[-len(many) :] == many


def test_parameters_whose_gradients_lie_otherwise_have_their_numbers_too() -> None:
    """Weights in another memory format, as convolutions have them."""
    torch.manual_seed(0)
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).double().to(memory_format=torch.channels_last)
    step_fn, state = step_of(convolutions, torch.optim.AdamW)
    cf.testing.check(cf.shard(step_fn, ONE), state, torch.randn(4, 3, 9, 9, dtype=D), steps=3)


def test_a_step_whose_gradients_overflow_changes_nothing_in_one_call() -> None:
    step_fn, state = step_of(net(), torch.optim.AdamW)
    step = cf.precision(step_fn, "fp16")
    state = step.init(state, torch.randn(64, 6))
    assert calls_of(step.lower(state, torch.randn(64, 6))) != []
    state, _ = step(state, torch.randn(64, 6))
    before = {n: p.full().clone() for n, p in state["params"].items()}
    state, _ = step(state, torch.full((64, 6), float("inf")))
    assert int(state["loss_scale"]["skipped"]) == 1
    assert all(torch.equal(p.full(), before[n]) for n, p in state["params"].items())
    state, _ = step(state, torch.randn(64, 6))
    assert not torch.equal(state["params"]["0.weight"].full(), before["0.weight"])


def test_the_plan_says_what_is_held_and_a_step_holds_no_more_than_with_updates_early() -> None:
    for rows in (1, 8, 512):
        step_fn, state = step_of(net(), torch.optim.AdamW)
        low = cf.shard(step_fn, ONE).lower(state, torch.randn(rows, 6))
        assert low.plan.peak_bytes == low.memory().peak_bytes["device"]
        compiled = cf.shard(step_fn, ONE).on("compiled").lower(state, torch.randn(rows, 6))
        assert compiled.program.stage == "inplace"


def test_a_tap_sees_every_update() -> None:
    step_fn, state = step_of(net(), torch.optim.AdamW)
    step, x = cf.shard(step_fn, ONE), torch.randn(64, 6)
    low = step.lower(state, x)
    assert [n.target for n in low.program.nodes].count("colofunc.adamw_") == 8
    assert low.text().count("adamw_(") >= 8
    assert not low.compare(state, x).differences


@pytest.mark.parametrize("change", ["offload", "checkpoint", "accumulate"])
def test_other_transforms_have_the_same_numbers(change) -> None:
    step_fn, state = step_of(net().double(), torch.optim.AdamW)
    x = torch.randn(64, 6, dtype=D)
    step = {
        "offload": lambda: cf.offload(step_fn, policy="host"),
        "checkpoint": lambda: cf.checkpoint(step_fn, policy="auto"),
        "accumulate": lambda: cf.accumulate(step_fn, microbatches=4),
    }[change]()
    cf.testing.check(step, state, x, steps=2)


def test_ranks_that_hold_parts_of_their_own_update_them_one_by_one() -> None:
    p = attrs.evolve(updates())
    q = updates_in_one_call(p, memory)
    mesh = cf.Mesh(tp=4)
    inputs = [per_rank(4), per_rank(4), *([x] * 4 for x in torch.rand(3, 4, dtype=D))]
    inputs[3:] = [[torch.tensor(0.5, dtype=D)] * 4 for _ in range(2)]
    runner = SimulatedProgram(q, mesh)
    want = SimulatedProgram(p, mesh)([[x.clone() for x in each] if k < 2 else each for k, each in enumerate(inputs)])
    got = runner([[x.clone() for x in each] if k < 2 else each for k, each in enumerate(inputs)])
    assert all(torch.equal(a, b) for x, y in zip(want, got, strict=True) for a, b in zip(x, y, strict=True))
    apart, alike = (runner.write(tuple(lanes), torch.device("cpu")).function().source for lanes in (
        [(0, 1, 2, 3)] * 2 + [(0,) * 4] * 3, [(0,) * 4] * 5
    ))  # fmt: skip
    assert "sgd_all_" not in apart and "sgd_all_" in alike


@pytest.mark.parametrize("hands_out", [0.0, 2e-5])
def test_the_clock_counts_one_launch_for_a_run_of_updates(hands_out) -> None:
    """Whoever hands work out hands a run out once."""
    mesh = cf.Mesh(topology="a100-40g")
    device = attrs.evolve(mesh.topology.device, host_launch_s=hands_out)
    mesh = mesh.with_topology(attrs.evolve(mesh.topology, device=device))
    step, *args = training(layers=3, d=8, rows=4)
    apart = cf.shard(step, mesh).lower(*args).program
    runs = runs_of_updates(apart)
    saved = sum(len(run) - 1 for run in runs.values())
    assert saved > 3
    together = with_one_launch(apart, mesh, lambda call: None)
    assert [node.target for node in together.nodes] == [node.target for node in apart.nodes]
    lasts_s = [lanes(one, mesh, lambda call: None).end_s for one in (apart, together)]
    each_s = hands_out or device.launch_s  # kernels this short take as long as they are handed out
    assert lasts_s[0] - lasts_s[1] == pytest.approx(saved * each_s, rel=0.01)
    assert with_one_launch(together, mesh, lambda call: None).nodes == together.nodes
