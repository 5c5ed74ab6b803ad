"""Whole steps on two real gloo ranks: the numbers of one device, and what ranks must agree on."""

import time

import pytest
import torch
from colofunc_plugins import stages, zero
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from colofunc.errors import CollectiveError, FaultError
from colofunc.executors.backend import backend_for
from colofunc.executors.launch import launch
from colofunc.executors.watch import meet
from colofunc.testing.numerics import float64

pytestmark = pytest.mark.dist
SMALL = dict(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)


def gpt2(dropout=0.0):
    torch.manual_seed(0)
    config = GPT2Config(**SMALL, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0)
    return cf.functional(GPT2LMHeadModel(config).double())


def batch_at(n):
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(n))
    return {"input_ids": ids, "labels": torch.where(torch.arange(4)[:, None] * 4 > torch.arange(16), -100, ids)}


def train(mesh, dropout, steps=3):
    """Losses and parameters of a few steps on `mesh`, or of the function itself for None."""
    with float64():
        step_fn, state = cf.train_step(gpt2(dropout), cf.adapt(torch.optim.AdamW, lr=1e-2), clip=1.0)
        step, losses = step_fn, []
        if mesh is not None:
            step = cf.shard(step_fn, mesh)
            state = step.init(state, batch_at(0))
        # Ranks other than 0 have another generator: the seed of a step is rank 0's.
        torch.manual_seed(7 + (mesh.rank if mesh is not None else 0))
        for n in range(steps):
            state, metrics = step(state, batch_at(n))
            losses.append(float(metrics["loss"]))
        if mesh is None:
            return losses, state["params"]
        return losses, {k: v.full() for k, v in state["params"].items()}


def train_on_ranks(axes):
    losses, params = train(cf.Mesh(**axes, topology="ideal"), 0.0)
    noisy, _ = train(cf.Mesh(**axes), 0.2, steps=1)
    return losses, params, noisy


@pytest.mark.parametrize("axes", [{"dp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.sweep)])
def test_training_equals_one_device(axes):
    want, params = train(None, 0.0)
    with float64():
        expected, _ = train(cf.Mesh(dp=1), 0.2, steps=1)
    for losses, ours, noisy in launch(train_on_ranks, 2, axes, timeout_s=200):
        torch.testing.assert_close(losses, want, atol=1e-10, rtol=0)
        torch.testing.assert_close(ours, params, atol=1e-10, rtol=0)
        torch.testing.assert_close(noisy, expected, atol=1e-10, rtol=0)


def caught(fn, *args):
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def disagree():
    """One launch for several disagreements: each is an exception on every rank, after which both go on."""
    mesh = cf.Mesh(dp=2)
    x = torch.arange(8.0).reshape(4, 2)

    def double(state, x):
        return state * 2 + x.sum()

    def by_rank(x):
        return x * 2 if mesh.rank else x * 3

    mine = torch.full((3,), float(mesh.rank))

    def captures(x):
        return x.sum() * mine

    def fails_on_1(x):
        if mesh.rank == 1:
            raise ValueError("this rank has no data")
        return x * 2

    found = [
        caught(cf.shard(double, mesh), x, torch.full((3,), float(mesh.rank))),
        caught(cf.shard(by_rank, mesh), x),
        caught(cf.shard(fails_on_1, mesh), x),
        caught(cf.shard(double, mesh, in_specs=("(dp a) b", "nonsense((")), x, x),
        caught(cf.shard(captures, mesh), x),
    ]
    y = cf.shard(double, mesh)(x, x)
    return found, y.full()


def test_disagreements_are_errors_on_every_rank():
    ranks = launch(disagree, 2, timeout_s=200)
    x = torch.arange(8.0).reshape(4, 2)
    for found, y in ranks:
        assert "InputError: argument 'x' (3,) is a plain tensor" in found[0] and "ranks [1] hold other numbers" in found[0]
        assert found[1].startswith("CollectiveError: the traced program differs between ranks: ranks [1]")
        assert found[3].startswith("SpecError") or found[3].startswith("InputError")
        assert found[4].startswith("InputError: the step captures a tensor") and "(3,) (used at test_real_ranks.py" in found[4]
        assert "ranks [1] hold other numbers" in found[4]
        assert torch.equal(y, x * 2 + x.sum())
    assert "the traced program failed on rank 1" in ranks[0][0][2] and "this rank has no data" in ranks[0][0][2]
    assert "this rank has no data" in ranks[1][0][2] and "failed on rank" not in ranks[1][0][2]


def fails_in_a_step():
    mesh = cf.Mesh(dp=2)
    step = cf.shard(lambda x: x @ x.T, mesh, in_specs=("(dp a) b",), out_specs="a b")
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    step(x)
    began = time.monotonic()
    try:
        with cf.testing.fail(rank=1, at="all_gather"):
            step(x)
            time.sleep(30)  # the watch ends this rank
    finally:
        assert time.monotonic() - began < 10


def test_a_failing_rank_ends_the_step_on_all():
    with pytest.raises(FaultError) as caught_here:
        launch(fails_in_a_step, 2, timeout_s=200)
    assert "on rank 1" in caught_here.value.__notes__[-1]


def stepping(x):
    return x @ x.T


def step_of_two():
    mesh = cf.Mesh(dp=2)
    step = cf.shard(stepping, mesh, in_specs=("(dp a) b",), out_specs="a b")
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    step(x)
    return mesh, step, x


def full_on_rank_0_only():
    mesh, _, x = step_of_two()
    y = cf.distribute(x, "(dp a) b", mesh)
    y.full()
    cf.join(mesh, limit_s=2.0)
    if mesh.rank == 0:
        y.full()
    time.sleep(40)  # ended by the watch


def test_full_on_one_rank_ends_and_names_both_lines():
    began = time.monotonic()
    with pytest.raises(CollectiveError) as caught_here:
        launch(full_on_rank_0_only, 2, timeout_s=100)
    text = str(caught_here.value)
    assert "full() of a DTensor (4, 4) '(dp a) b' at test_real_ranks.py" in text and "in full_on_rank_0_only" in text
    assert "rank 0 waited 2 s for ranks [1]" in text
    assert "rank 1: after step 1 (stepping) at test_real_ranks.py" in text and "in step_of_two" in text
    assert time.monotonic() - began < 35


def one_step_more_on_rank_0():
    mesh, step, x = step_of_two()
    if mesh.rank == 0:
        step(x)


def test_a_step_too_many_is_our_error():
    with pytest.raises(CollectiveError) as caught_here:
        launch(one_step_more_on_rank_0, 2, timeout_s=100)
    text = str(caught_here.value)
    assert "rank 0, in step 2 (stepping) at test_real_ranks.py" in text and "in one_step_more_on_rank_0" in text
    assert "rank 1: after step 1 (stepping) at test_real_ranks.py" in text and "gloo" not in text


def different_histories():
    mesh, _, x = step_of_two()
    y = cf.distribute(x, "(dp a) b", mesh)
    y.full()
    if mesh.rank == 0:  # as if rank 0 had run one collective more that happened to find a partner
        backend_for(mesh).watch.advance("another program")
    return caught(y.full), caught(meet, backend_for(mesh).watch, f"a checkpoint of rank {mesh.rank}")


def test_points_where_ranks_meet_compare_what_they_ran():
    for rank, (unequal, elsewhere) in enumerate(launch(different_histories, 2, timeout_s=100)):
        assert "the ranks have not run the same steps before it" in unequal and "full()" in unequal
        assert f"rank {rank} has come to a checkpoint of rank {rank} at test_real_ranks.py" in elsewhere
        assert f"rank {1 - rank} to a checkpoint of rank {1 - rank} at" in elsewhere


def doubled_steps():
    """State of float32 under a mode that doubles factories: buffers that are received into are as large as what is sent."""
    torch.manual_seed(0)
    net = cf.functional(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)))
    step, state = cf.train_step(net, cf.adapt(torch.optim.AdamW, lr=1e-2), lambda out, b: out.pow(2).mean(), inputs=lambda b: ((b,), {}))
    batch, found = torch.linspace(-1, 1, 128).reshape(8, 16), []
    with float64():
        for plan in (zero(3, "dp"), stages("dp", {"0.*": 0, "2.*": 1})):
            sharded, one, losses = cf.shard(step, cf.Mesh(dp=2), plan), state, []
            mine = sharded.init(state, batch)
            for _ in range(2):
                mine, metrics = sharded(mine, batch)
                one, expected = step(one, batch)
                losses.append((float(metrics["loss"]), float(expected["loss"])))
            found.append(losses)
    return found


def test_float32_state_under_doubled_factories():
    for found in launch(doubled_steps, 2, timeout_s=100):
        for losses in found:
            for mine, one in losses:
                assert mine == pytest.approx(one, rel=1e-6)
