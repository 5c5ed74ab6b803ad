"""Sums of narrow gradients and losses: over microbatches, over the mesh, of every way to differentiate, on real ranks."""

import pytest
import torch
from colofunc_plugins import zero
from narrow_steps import BF16, F32, IDEAL, batch, by_autograd, by_backward, by_func, by_value_and_grad, net, training
from torch import nn

import colofunc as cf


def wires(low) -> dict[str, set[torch.dtype]]:
    """Kind of collective -> dtypes that it moves."""
    found: dict[str, set[torch.dtype]] = {}
    for node in low.program.nodes:
        name = node.target.removeprefix("colofunc.").removesuffix("_start")
        if name in ("all_gather", "reduce_scatter", "all_reduce") and low.program.values[node.refs[0]].shape:
            found.setdefault(name, set()).add(low.program.values[node.refs[0]].dtype)
    return found


WIDE = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.GELU(), nn.Linear(1024, 512))


def zero3(name: str, shape: tuple[int, ...]) -> str | None:
    return "(dp o) ..." if name.startswith(("state.params", "state.opt.exp")) else None


def lowered(policy=None):
    step_fn, state = training(WIDE)
    data = {"x": cf.abstract((65536, 512)), "y": cf.abstract((65536, 512))}
    step = cf.shard(step_fn, cf.Mesh(dp=4, topology="8xa100-80g"), zero3, in_specs=(None, "(dp b) ..."))
    return (step if policy is None else cf.precision(step, policy)).lower(state, data)


def test_masters_are_cast_before_they_are_gathered_and_gradients_after_they_are_summed_only_if_asked() -> None:
    plain, wide, narrow = lowered().cost().bytes, lowered("bf16"), lowered(cf.Policy(reduce="bf16"))
    assert plain["all_gather", "dp"] > 0 and plain["reduce_scatter", "dp"] > 0
    for low in (wide, narrow):
        assert low.cost().bytes["all_gather", "dp"] * 2 == plain["all_gather", "dp"]
        assert wires(low)["all_gather"] == {BF16}
    assert wide.cost().bytes["reduce_scatter", "dp"] == plain["reduce_scatter", "dp"]
    assert wires(wide)["reduce_scatter"] == {F32}
    assert narrow.cost().bytes["reduce_scatter", "dp"] * 2 == plain["reduce_scatter", "dp"]
    assert wires(narrow)["reduce_scatter"] == {BF16}


BIASED = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.GELU())])


@pytest.mark.parametrize("ranks", [8, 64])
def test_a_small_gradient_is_summed_in_the_same_dtype_as_the_large_ones(ranks) -> None:
    """A cast that only the update reads can wait as well as its result: both could share the start of one collective."""
    step_fn, state = training(BIASED)
    data = {"x": cf.abstract((4096, 1024)), "y": cf.abstract((4096, 1024))}
    step = cf.shard(step_fn, cf.Mesh(dp=ranks, topology="8xa100-80g"), zero(3, "dp"), in_specs=(None, "(dp b) ..."))
    assert wires(cf.precision(step, cf.Policy(reduce="bf16")).lower(state, data))["reduce_scatter"] == {BF16}
    assert wires(cf.precision(step, "bf16").lower(state, data))["reduce_scatter"] == {F32}


def test_a_gradient_that_is_summed_wide_is_rounded_once() -> None:
    """Two partial sums whose bf16 sum would lose the smaller one."""
    x = torch.tensor([[1.0], [2.0**-9]])

    def grad(p, x):
        return cf.value_and_grad(lambda p: (x.to(p["w"].dtype) @ p["w"]).sum())(p)[1]["w"]

    sharded = cf.shard(grad, cf.Mesh(dp=2, topology="ideal"), in_specs=(None, "(dp b) i"))
    policies = {dtype: cf.Policy(reduce=dtype) for dtype in (F32, BF16)}
    found = {d: float(cf.precision(sharded, p)({"w": torch.ones(1, 1)}, x).full()) for d, p in policies.items()}
    assert found == {F32: 1.0 + 2.0**-9, BF16: 1.0}


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_microbatches_are_summed_in_float32_and_the_mesh_after_them(policy) -> None:
    step_fn, state = training(WIDE)
    data = {"x": cf.abstract((65536, 512)), "y": cf.abstract((65536, 512))}
    sharded = cf.shard(step_fn, cf.Mesh(dp=4, topology="8xa100-80g"), zero3, in_specs=(None, "(dp b) ..."))
    low = cf.accumulate(cf.precision(sharded, policy), microbatches=4).lower(state, data)
    loops = [n for n in low.program.nodes if n.outs and any(low.program.values[o].role == "grad" for o in n.outs if o is not None)]
    summed = {low.program.values[o].dtype for n in loops for o in n.outs if o is not None and low.program.values[o].role == "grad"}
    assert summed == {F32} and wires(low)["reduce_scatter"] == {F32}
    step_fn, state = training(net(), clip=1.0)
    step = cf.accumulate(cf.precision(cf.shard(step_fn, IDEAL), policy), microbatches=4)
    cf.testing.check(step, state, batch(16), tolerance=2e-2)


def test_a_loss_in_bf16_is_summed_over_the_mesh_in_float32() -> None:
    step = cf.precision(cf.shard(by_value, cf.Mesh(dp=2, topology="ideal"), in_specs=(None, "(dp b) i")), "bf16")
    x = torch.tensor([[1.0], [2.0**-9]])
    assert float(step({"w": torch.ones(1, 1)}, x)) == 1.0 + 2.0**-9


def by_value(p, x):
    return cf.value_and_grad(lambda p: (x @ p["w"]).sum())(p)[0]


@pytest.mark.parametrize("how", [by_value_and_grad, by_func, by_autograd, by_backward], ids=lambda f: f.__name__)
def test_gradients_of_every_kind_are_summed_in_float32(how) -> None:
    mesh = cf.Mesh(dp=4, topology="8xa100-80g")
    p, b = {"w": torch.ones(8, 4), "b": torch.ones(4)}, {"x": cf.abstract((1 << 20, 8))}
    low = cf.precision(cf.shard(how, mesh, in_specs=(None, "(dp b) ...")), "bf16").lower(p, b)
    assert set().union(*(wires(low).get(k, set()) for k in ("all_reduce", "reduce_scatter"))) == {F32}


NARROW = ("bf16", cf.Policy(reduce="bf16"), cf.Policy(compute="fp16", reduce="fp16"))


def losses_of_every_policy():
    found = []
    for policy in NARROW:
        torch.manual_seed(0)
        step_fn, state = training(net(), clip=1.0)
        mesh = cf.Mesh(dp=2, topology="ideal")
        step = cf.precision(cf.shard(step_fn, mesh, zero3, in_specs=(None, "(dp b) ...")), policy)
        state = step.init(state, batch())
        for _ in range(2):
            state, metrics = step(state, batch())
            found.append(float(metrics["loss"]))
    return found


@pytest.mark.dist
def test_real_ranks_move_narrow_numbers() -> None:
    """gloo has its own kernels for sums of bfloat16 and float16; a sum of two has one order."""
    assert cf.launch(losses_of_every_policy, 2) == [losses_of_every_policy()] * 2


def test_the_planner_pays_for_gradients_what_their_sums_will_cost() -> None:
    wide, narrow = lowered("bf16"), lowered(cf.Policy(reduce="bf16"))
    more_bytes = wide.cost().bytes["reduce_scatter", "dp"] - narrow.cost().bytes["reduce_scatter", "dp"]
    more_s = wide.plan.communication_s - narrow.plan.communication_s
    bandwidth = wide.mesh.topology.levels[0].bandwidth_bytes_per_s
    assert more_s == pytest.approx(more_bytes / bandwidth, rel=0.01)


class Scaled(nn.Module):
    """A norm's weight before a column-parallel layer: its gradient is a sum over an activation's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4096))
        self.up, self.down = nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False)

    def forward(self, x):
        return self.down(self.up(x * self.scale).relu())


def test_sums_of_activations_over_a_tensor_parallel_axis_stay_narrow() -> None:
    with torch.device("meta"):
        model = cf.functional(Scaled())
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())
    wishes = {"up.weight": "(tp o) i", "down.weight": "o (tp i)", "scale": "i"}
    step = cf.precision(cf.shard(step_fn, cf.Mesh(tp=2, topology="8xa100-80g"), wishes, in_specs=(None, "b i")), "bf16")
    low = step.lower(state, cf.abstract((4, 4096), BF16))
    reductions = ("colofunc.reduce_scatter_start", "colofunc.all_reduce_start")
    sums = [low.program.values[n.refs[0]] for n in low.program.nodes if n.target in reductions]
    assert {v.dtype for v in sums if v.shape} == {BF16}
