"""Batch norm per rank: against the function run on each rank's rows by itself, which is what plain data parallelism does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import colofunc as cf
from colofunc.errors import InputError, PlanError
from colofunc.program.facts import is_wire
from colofunc.program.tracing.tree import flatten
from colofunc.testing import models, programs

DP = cf.Mesh(dp=2)
ROWS = (None, "(dp b) ...")


def conv_step(rows=8):
    """A convolutional net with batch norm under plain SGD, so that a step of averaged gradients is the average of steps."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(rows, 4, 8, 8, dtype=torch.float64), "y": torch.randint(0, 8, (rows,))}
    return programs.training(models.ConvNet().double(), batch, programs.class_loss, torch.optim.SGD)


def by_hand(step, state, batch, parts):
    """The mean over consecutive parts of what the plain function makes of each: F.batch_norm, no colofunc transform."""
    chunks = {k: v.chunk(parts) for k, v in batch.items()}
    outs = [flatten(step(state, {k: v[r] for k, v in chunks.items()}))[0] for r in range(parts)]
    return [sum(each) / parts if each[0].is_floating_point() else each[0] for each in zip(*outs, strict=True)]


def assert_same(out, wanted):
    got = [x.full() if isinstance(x, cf.DTensor) else x for x in flatten(out)[0]]
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(1.0, b.abs().max())


CHAINS = {
    "outside": lambda step: cf.local_stats(cf.shard(step, DP, in_specs=ROWS)),
    "inside": lambda step: cf.shard(cf.local_stats(step), DP, in_specs=ROWS),
    "decorator": lambda step: cf.shard(cf.local_stats(axes="dp")(step), DP, in_specs=ROWS),
    "two axes": lambda step: cf.local_stats(cf.shard(step, cf.Mesh(dp=2, tp=2), in_specs=ROWS), axes="dp"),
    "searched": lambda step: cf.shard(cf.local_stats(step), DP),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_rank_is_a_device_of_its_own(chain):
    step, state, batch = conv_step()
    assert_same(CHAINS[chain](step)(state, batch), by_hand(step, state, batch, 2))


def test_it_is_not_the_statistics_of_the_whole_batch():
    step, state, batch = conv_step()
    local, whole = CHAINS["outside"](step)(state, batch), by_hand(step, state, batch, 1)
    with pytest.raises(AssertionError):
        assert_same(local, whole)
    assert_same(cf.shard(step, DP, in_specs=ROWS)(state, batch), whole)


def test_one_rank_is_one_device():
    step, state, batch = conv_step()
    assert_same(cf.local_stats(step)(state, batch), by_hand(step, state, batch, 1))


@pytest.mark.parametrize("mixing", ["error", "per-microbatch"])
@pytest.mark.parametrize("order", ["local last", "local first"])
def test_microbatches_have_their_own(mixing, order):
    step, state, batch = conv_step()
    if order == "local last":
        staged = cf.local_stats(cf.accumulate(cf.shard(step, DP, in_specs=ROWS), 2, mixing=mixing))
    else:
        staged = cf.shard(cf.accumulate(cf.local_stats(step), 2, mixing=mixing), DP, in_specs=ROWS)
    assert_same(staged(state, batch), by_hand(step, state, batch, 4))


def test_microbatches_alone():
    step, state, batch = conv_step()
    assert_same(cf.local_stats(cf.accumulate(step, 4))(state, batch), by_hand(step, state, batch, 4))


def test_equal_to_one_device_and_eager():
    step, state, batch = programs.conv_net(8)
    staged = CHAINS["outside"](step)
    cf.testing.check(staged, state, batch, steps=2)
    assert_same(staged(state, batch), flatten(staged.eager(state, batch))[0])


class Two(nn.Module):
    """Two norms, of which one may be named."""

    def __init__(self):
        super().__init__()
        self.body, self.first, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.last(torch.tanh(self.first(self.body(x))))


def two_norms(apart):
    """Outputs of `Two` where the norms of `apart` see halves of the rows, written with F.batch_norm alone."""
    torch.manual_seed(1)
    module, x = Two().double(), torch.randn(8, 4, dtype=torch.float64)

    def norm(name, x):
        parts = x.chunk(2) if name in apart else (x,)
        return torch.cat([F.batch_norm(p, None, None, *getattr(module, name).parameters(), training=True) for p in parts])

    return cf.functional(module), x, norm("last", torch.tanh(norm("first", module.body(x)))).detach()


@pytest.mark.parametrize("where", ["first", "l*t", "*", ("first", "last")])
def test_globs_choose_modules(where):
    apart = {"first": ["first"], "l*t": ["last"]}.get(where, ["first", "last"])
    model, x, wanted = two_norms(apart)
    step = cf.local_stats(cf.shard(lambda p, x: model.apply(p, model.buffers, x)[0], DP, in_specs=ROWS), where=where)
    assert_same(step(model.params, x), [wanted])
    assert_same(step.eager(model.params, x), [wanted])


def test_evaluation_is_untouched():
    model, x, _ = two_norms([])
    model.module.eval()
    step = cf.local_stats(cf.shard(lambda p, x: model.apply(p, model.buffers, x)[0], DP), where="none.*")
    assert_same(step(model.params, x), [model.module(x).detach()])


def test_statistics_cost_no_communication():
    def step(x):
        return F.batch_norm(x, None, None, training=True)

    sharded, x = cf.shard(step, DP, in_specs="(dp b) c", out_specs="(dp b) c"), torch.randn(8, 3)
    assert any(is_wire(n) for n in sharded.lower(x).program.nodes)
    assert not any(is_wire(n) for n in cf.local_stats(sharded).lower(x).program.nodes)


def test_half_precision_keeps_wide_statistics():
    torch.manual_seed(0)
    x, w, b = torch.randn(8, 3) + 50, torch.rand(3) + 1, torch.randn(3)

    def step(x):
        return F.batch_norm(x, None, None, w, b, training=True)

    halves = [F.batch_norm(p.bfloat16().float(), None, None, w, b, training=True) for p in x.chunk(2)]
    got = cf.local_stats(cf.shard(step, DP))(x.bfloat16()).full()
    assert got.dtype == torch.bfloat16
    assert (got.float() - torch.cat(halves)).abs().max() <= 2**-8 * torch.cat(halves).abs().max()


@pytest.mark.parametrize("order", ["outer", "inner"])
def test_with_mixed_precision(order):
    step, state, batch = programs.conv_net(8, dtype=torch.float32)
    staged = cf.shard(step, DP, in_specs=ROWS)
    staged = cf.local_stats(cf.precision(staged, "bf16")) if order == "outer" else cf.precision(cf.local_stats(staged), "bf16")
    (new, loss), whole = staged(state, batch), by_hand(step, state, batch, 2)
    assert new["buffers"]["norm.running_mean"].dtype == torch.float32
    assert abs(float(loss) - float(whole[-1])) < 0.02


MISTAKES = {
    "axes": (lambda s: cf.local_stats(cf.shard(s, cf.Mesh(dp=2, tp=2))), PlanError, r"which axes .* write axes='dp'"),
    "unknown axis": (lambda s: cf.local_stats(cf.shard(s, DP), axes="pd"), PlanError, "axes='pd' is no axis.*dp"),
    "glob": (lambda s: cf.local_stats(s, where="nrom"), InputError, "where='nrom' matches no batch norm.*norm"),
    "rows": (lambda s: cf.local_stats(cf.shard(s, cf.Mesh(dp=3))), InputError, "8 rows of batch norm 'norm' do not come in 3"),
    "twice": (lambda s: cf.local_stats(cf.local_stats(s)), PlanError, "applied twice"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_say_what_to_do(name):
    make, error, says = MISTAKES[name]
    step, state, batch = conv_step()
    with pytest.raises(error, match=says):
        make(step).lower(state, batch)


def test_one_value_has_no_variance():
    model, x, _ = two_norms([])
    with pytest.raises(InputError, match=r"1 value.* per channel and run"):
        cf.local_stats(cf.shard(lambda p, x: model.apply(p, model.buffers, x)[0], DP)).lower(model.params, x[:2])


def by_backward(fn, w, x):
    w = w.clone().requires_grad_()
    fn(w, x).backward()
    return w.grad


@pytest.mark.parametrize("grad", [lambda fn, w, x: torch.func.grad(fn)(w, x), by_backward], ids=["func", "backward"])
def test_every_way_to_differentiate(grad):
    torch.manual_seed(0)
    w, x = (torch.randn(n, 3, dtype=torch.float64) for n in (1, 8))

    def loss(w, x):
        return (F.batch_norm(x * w[0].sigmoid(), None, None, w[0], training=True) * x.cos()).sum()

    step = cf.local_stats(cf.shard(lambda w, x: grad(loss, w, x), DP))
    assert_same(step(w, x), [sum(by_backward(loss, w, half) for half in x.chunk(2))])
