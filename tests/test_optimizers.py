"""Optimizers and learning rates, against torch's own classes in float64, alone and over meshes."""

import copy
import inspect
from collections.abc import Iterator

import pytest
import torch
from test_functional import bias_free_net, norm_net, same
from torch import nn
from torch.optim import lr_scheduler as L

import colofunc as cf
from colofunc import adapt, clip_by_global_norm, functional, schedule, train_step
from colofunc.errors import InputError
from colofunc.program.tracing.trace import trace

D = torch.float64
IDEAL = cf.Mesh(dp=2, tp=2, topology="ideal")


@pytest.fixture
def double() -> Iterator[None]:
    """Some optimizers of torch keep their own scalars (NAdam's product of momenta) in the default dtype."""
    torch.set_default_dtype(D)
    yield
    torch.set_default_dtype(torch.float32)


# ---- every class ----

O = torch.optim
OPTIMIZERS = [
    (O.SGD, {}), (O.SGD, dict(momentum=0.9, dampening=0.2)), (O.SGD, dict(momentum=0.9, nesterov=True)),
    (O.Adam, {}), (O.AdamW, dict(amsgrad=True)), (O.RMSprop, {}), (O.RMSprop, dict(momentum=0.9, centered=True,
    weight_decay=0.1)),
    (O.Adagrad, dict(lr_decay=0.1, initial_accumulator_value=0.1)), (O.NAdam, {}), (O.NAdam,
    dict(decoupled_weight_decay=True, weight_decay=0.1)),
    (O.Adamax, {}), (O.Adadelta, {}), (O.RAdam, {}), (O.RAdam, dict(weight_decay=0.1, decoupled_weight_decay=True)),
    (O.Rprop, {}), (O.Rprop, dict(etas=(0.4, 1.3), step_sizes=(1e-4, 0.02), maximize=True)), (O.ASGD, dict(t0=3)),
    (O.ASGD, dict(lambd=0.01, weight_decay=0.1, maximize=True)), (O.Muon, {}), (O.Muon, dict(weight_decay=0.2, nesterov=False)),
    (O.Adagrad, dict(weight_decay=0.1, maximize=True)), (O.Adadelta, dict(rho=0.7, weight_decay=0.1, maximize=True)),
    (O.Adamax, dict(betas=(0.8, 0.9), weight_decay=0.1, maximize=True)), (O.RMSprop, dict(momentum=0.5, maximize=True)),
    (O.RMSprop, dict(centered=True)), (O.NAdam, dict(weight_decay=0.1, momentum_decay=0.1, maximize=True)),
    (O.RAdam, dict(weight_decay=0.1, maximize=True)), (O.Adam, dict(weight_decay=0.1, decoupled_weight_decay=True)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "options"), OPTIMIZERS, ids=lambda v: v.__name__ if isinstance(v, type) else "-".join(v)
)
def test_a_training_step_is_torchs(cls, options, double) -> None:
    """Nine steps with clipping: long enough for RAdam to leave its warm-up."""
    net = bias_free_net() if cls is O.Muon else norm_net()
    ref = copy.deepcopy(net)
    opt = cls(ref.parameters(), lr=1e-2, **options)
    step, state = train_step(
        functional(net), adapt(cls, lr=1e-2, **options), loss=lambda out: (out**2).mean(), clip=0.5
    )
    for _ in range(9):
        x = torch.randn(8, 3, dtype=D)
        loss = (ref(x) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(ref.parameters(), 0.5)
        opt.step()
        state, metrics = step(state, x)
        torch.testing.assert_close(metrics, {"loss": loss.detach(), "grad_norm": norm}, rtol=1e-12, atol=1e-12)
    same(state["params"], dict(ref.named_parameters()))
    same(state["buffers"], dict(ref.named_buffers()))
    assert state["opt"]["step"] == 9


def test_every_class_of_torch_is_adapted_or_refused_by_name() -> None:
    every = {c for c in vars(O).values() if inspect.isclass(c) and issubclass(c, O.Optimizer) and c is not O.Optimizer}
    refused = set()
    for cls in every:
        try:
            adapt(cls, lr=0.1)
        except InputError as error:
            assert str(error).startswith(f"optimizer {cls.__name__} cannot be adapted: it")
            refused.add(cls)
    assert refused == {O.LBFGS, O.SparseAdam, O.Adafactor}
    assert every - refused == {cls for cls, _ in OPTIMIZERS}


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=lambda v: v.__name__ if isinstance(v, type) else "-".join(v))
def test_every_optimizer_is_one_operator_per_parameter(cls, options) -> None:
    net = bias_free_net() if cls is O.Muon else norm_net()
    step, state = train_step(functional(net), adapt(cls, lr=1e-2, **options), loss=lambda out: (out**2).mean())
    program = trace(step, (state, torch.randn(8, 3, dtype=D))).program
    updates = [n.target for n in program.nodes if n.target in ("colofunc.adamw", "colofunc.sgd", "colofunc.update")]
    # Muon multiplies whole matrices: its update is aten.
    assert len(updates) == (0 if cls is O.Muon else len(state["params"]))
    assert {n.phase for n in program.nodes} == {"forward", "backward", "update"}


COMPLEX = [*OPTIMIZERS, (cf.Lion, {}), (cf.LAMB, {})]


@pytest.mark.parametrize(("cls", "options"), COMPLEX, ids=lambda v: v.__name__ if isinstance(v, type) else "-".join(v))
def test_complex_parameters_are_updated_as_torch_does_or_refused(cls, options, double) -> None:
    params = {"w": torch.randn(4, 5, dtype=torch.complex128)}
    opt = adapt(cls, lr=1e-2, **options)
    if cls not in (O.SGD, O.ASGD):
        said = rf"^{cls.__name__} has no update of complex parameters, and 'w' is one\. Try: a real parameter of shape \(4, 5, 2\)"
        with pytest.raises(InputError, match=said):
            opt.init(params)
        with pytest.raises(InputError, match=said):
            opt.update(params, {}, params)
        by_name = adapt(cls, lr=1e-2, groups={"w": adapt(O.SGD, lr=1e-2)}, **options)
        assert by_name.init(params).keys() == {"step"}
        return
    leaf = params["w"].clone().requires_grad_()
    theirs, state = cls([leaf], lr=1e-2, **options), opt.init(params)
    for _ in range(9):
        leaf.grad = torch.randn(4, 5, dtype=torch.complex128)
        params, state = opt.update({"w": leaf.grad.clone()}, state, params)
        theirs.step()
    torch.testing.assert_close(params["w"], leaf.detach(), rtol=1e-12, atol=1e-12)


ONE_EACH = [(O.RMSprop, dict(momentum=0.9, centered=True)), (O.NAdam, {}), (O.ASGD, {}), (O.Adagrad, {}), (O.Rprop, {}), (O.RAdam, {}),
            (O.Adamax, {}), (O.Adadelta, {}), (O.Muon, {})]  # fmt: skip


@pytest.mark.parametrize(("cls", "options"), ONE_EACH, ids=lambda v: v.__name__ if isinstance(v, type) else "")
def test_every_optimizer_shards_and_is_updated_in_place(cls, options, double) -> None:
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    step, state = train_step(functional(net), adapt(cls, lr=1e-2, **options), loss=lambda out: (out**2).mean())
    sharded = cf.shard(step, IDEAL, {"0.weight": "(tp o) i", "2.weight": "(dp o) i"})
    x = torch.randn(8, 4)
    # Muon orthogonalises in bf16 by name, so that a sum in another order changes its update (lr in size) by some 2^-8.
    cf.testing.check(sharded, state, x, steps=3, tolerance=1e-3 if cls is O.Muon else None)
    targets = [n.target for n in sharded.lower(state, x).program.nodes]
    assert targets.count("colofunc.update_") == (0 if cls is O.Muon else 2) and "colofunc.update" not in targets


def test_groups_and_schedules_are_torchs() -> None:
    net = norm_net()
    ref = copy.deepcopy(net)
    rate = lambda step: 1e-2 / (1 + step)  # noqa: E731
    decayed, plain = ([p for n, p in ref.named_parameters() if n.endswith("bias") is flag] for flag in (False, True))
    opt = O.AdamW([dict(params=decayed), dict(params=plain, weight_decay=0.0)], lr=1e-2, weight_decay=0.3)
    schedule = O.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    ours = adapt(O.AdamW, lr=rate, weight_decay=0.3, groups={"*.bias": dict(weight_decay=0)})
    step, state = train_step(functional(net), ours, loss=lambda out: (out**2).mean())
    for _ in range(4):
        x = torch.randn(8, 3, dtype=D)
        opt.zero_grad()
        (ref(x) ** 2).mean().backward()
        opt.step()
        schedule.step()
        state, _ = step(state, x)
    same(state["params"], dict(ref.named_parameters()))


def test_missing_gradients_count_as_zeros() -> None:
    params = {"w": torch.randn(3, dtype=D)}
    opt = adapt(O.AdamW, lr=0.1, weight_decay=0.5)
    state = opt.init(params)
    with_none, _ = opt.update({"w": None}, state, params)
    torch.testing.assert_close(with_none["w"], params["w"] * (1 - 0.1 * 0.5))
    with pytest.raises(InputError, match=r"no gradient for \['w'\], no parameter for \['v'\]"):
        opt.update({"v": params["w"]}, state, params)


def test_update_changes_nothing_that_is_passed_in() -> None:
    for cls in (O.AdamW, O.SGD, O.RMSprop, O.NAdam):
        params = {"w": torch.randn(3, dtype=D)}
        opt = adapt(cls, lr=0.1)
        state = opt.init(params)
        grads = {"w": torch.randn(3, dtype=D)}
        before = copy.deepcopy((grads, state, params))
        opt.update(grads, state, params)
        torch.testing.assert_close((grads, state, params), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (O.LBFGS, {}, "LBFGS cannot be adapted: it evaluates the loss"),
        (O.Adafactor, {}, "Adafactor cannot be adapted: its step size"),
        (O.AdamW, dict(betaz=1), "AdamW has no option 'betaz'; did you mean 'betas'"),
        (O.AdamW, dict(lr=-1.0), "AdamW refuses its options: Invalid learning rate"),
        (O.AdamW, dict(groups={"*": dict(weight_deca=1)}), "no option 'weight_deca'; did you mean 'weight_decay'"),
    ],
)
def test_refused(cls, options, message) -> None:
    with pytest.raises(InputError, match=message):
        adapt(cls, **{"lr": 0.1, **options})


def test_a_group_that_matches_nothing() -> None:
    with pytest.raises(InputError, match=r"groups: '\*.bais' matches no parameter"):
        adapt(O.AdamW, lr=0.1, groups={"*.bais": {}}).init({"a.bias": torch.ones(1)})


def test_a_group_may_have_an_optimizer_of_its_own(double) -> None:
    net = norm_net()
    ref = copy.deepcopy(net)
    matrices, rest = ([p for p in ref.parameters() if (p.dim() == 2) is flag] for flag in (True, False))
    theirs = [O.Muon(matrices, lr=0.02), O.AdamW(rest, lr=1e-3, weight_decay=0.0)]
    others = adapt(O.AdamW, lr=1e-3, weight_decay=0.0)
    ours = adapt(O.Muon, lr=0.02, groups={"*.bias": others, "2.*": others})
    step, state = train_step(functional(net), ours, loss=lambda out: (out**2).mean())
    for _ in range(3):
        x = torch.randn(8, 3)
        ref.zero_grad()
        (ref(x) ** 2).mean().backward()
        for opt in theirs:
            opt.step()
        state, _ = step(state, x)
    same(state["params"], dict(ref.named_parameters()))
    cf.testing.check(cf.shard(step, IDEAL), state, torch.randn(8, 3), tolerance=1e-3)  # Muon's bf16, as above


def test_muon_names_what_is_no_matrix() -> None:
    with pytest.raises(InputError, match=r"Muon updates matrices only, and '0.bias' has shape \(4,\). Try: another optimizer"):
        adapt(O.Muon, lr=0.1).init(functional(norm_net()).params)


def test_an_optimizer_with_code_of_its_own_is_refused() -> None:
    class Mine(O.SGD):
        pass

    with pytest.raises(InputError, match=r"Mine cannot be adapted: it is not a class of torch.optim"):
        adapt(Mine, lr=0.1)


# ---- learning rates ----


def test_a_rate_that_changes_every_call_is_an_argument_and_needs_no_retrace() -> None:
    opt = adapt(O.SGD, lr=0.1)
    traced = []

    def fn(state, x, lr):
        traced.append("once")
        grads = cf.value_and_grad(lambda p: (p["w"] * x).sum())(state["p"])[1]
        params, opt_state = opt.update(grads, state["opt"], state["p"], lr=lr)
        return {"p": params, "opt": opt_state}, lr

    step = cf.shard(fn, cf.Mesh(dp=2, topology="ideal"))
    params = {"w": torch.zeros(4, dtype=D)}
    state, x = {"p": params, "opt": opt.init(params)}, torch.ones(4, dtype=D)
    for rate in (0.5, 0.25, 0.125):
        state, _ = step(state, x, rate)
    assert len(traced) == 1
    torch.testing.assert_close(state["p"]["w"].full(), torch.full((4,), -0.875, dtype=D), rtol=0, atol=0)


FACTORIES = {
    "LambdaLR": lambda o: L.LambdaLR(o, lambda n: 1 / (1 + n)),
    "MultiplicativeLR": lambda o: L.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: L.StepLR(o, 3),
    "MultiStepLR": lambda o: L.MultiStepLR(o, [2, 5, 6]),
    "ConstantLR": lambda o: L.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: L.LinearLR(o, 0.1, 1.0, 6),
    "ExponentialLR": lambda o: L.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: L.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: L.CosineAnnealingLR(o, 10, 0.01),
    "CosineAnnealingWarmRestarts": lambda o: L.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: L.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: L.OneCycleLR(o, 0.3, 12, cycle_momentum=False),
    "ChainedScheduler": lambda o: L.ChainedScheduler([L.ExponentialLR(o, 0.9), L.StepLR(o, 4)]),
    "SequentialLR": lambda o: L.SequentialLR(o, [L.LinearLR(o, 0.1, 1.0, 4), L.CosineAnnealingLR(o, 8)], [4]),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    every = {n for n, c in vars(L).items() if inspect.isclass(c) and issubclass(c, L.LRScheduler) and not n.startswith(("LR", "_"))}
    assert every - {"ReduceLROnPlateau"} == set(FACTORIES)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_schedule_is_torchs_step_by_step(name) -> None:
    p = torch.zeros(2, dtype=D, requires_grad=True)
    opt = O.SGD([p], lr=0.2)
    scheduler = FACTORIES[name](opt)
    ours = adapt(O.SGD, lr=schedule(FACTORIES[name], lr=0.2, steps=12))
    params = {"p": torch.zeros(2, dtype=D)}
    state = ours.init(params)
    for _ in range(12):
        p.grad = torch.ones(2, dtype=D)
        opt.step()
        scheduler.step()
        params, state = ours.update({"p": torch.ones(2, dtype=D)}, state, params)
        torch.testing.assert_close(params["p"], p.detach(), rtol=1e-15, atol=0)


def test_the_last_rate_holds_and_the_position_is_in_the_state() -> None:
    rates = schedule(lambda o: L.StepLR(o, 1, 0.5), lr=1.0, steps=3)
    ours = adapt(O.SGD, lr=rates)

    def fn(state, g):
        params, opt = ours.update({"p": g}, state["opt"], state["p"])
        return {"p": params, "opt": opt}

    params = {"p": torch.zeros(4, dtype=D)}
    step, state = cf.shard(fn, IDEAL), {"p": params, "opt": ours.init(params)}
    seen = []
    for _ in range(5):
        state = step(state, -torch.ones(4, dtype=D))
        seen.append(float(state["p"]["p"].full()[0]))
    assert seen == [1.0, 1.5, 1.75, 2.0, 2.25] and float(state["opt"]["step"]) == 5


@pytest.mark.parametrize(
    ("factory", "steps", "message"),
    [
        (lambda o: L.ReduceLROnPlateau(o), 3, "ReduceLROnPlateau decides on a metric of the host"),
        (lambda o: L.OneCycleLR(o, 0.3, 5, cycle_momentum=False), 9, r"OneCycleLR ends after 6 updates .*Try: steps=6"),
        (lambda o: L.OneCycleLR(o, 0.3, 5), 5, "changes momenta, which are constants of a step. Try: cycle_momentum=False"),
        (lambda o: 0.1, 3, "the factory returned float. Try: lambda opt"),
        (lambda o: L.StepLR(o, 3), 0, "steps=0 is no positive number"),
    ],
)
def test_schedules_that_are_refused(factory, steps, message) -> None:
    with pytest.raises(InputError, match=message):
        schedule(factory, steps=steps)


# ---- clipping ----


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_norm_that_is_not_finite_does_what_torchs_does(bad) -> None:
    grads = {"a": torch.tensor([1.0, bad]), "b": torch.tensor([2.0])}
    leaves = [torch.zeros_like(g).requires_grad_() for g in grads.values()]
    for leaf, g in zip(leaves, grads.values(), strict=True):
        leaf.grad = g.clone()
    want = nn.utils.clip_grad_norm_(leaves, 1.0)
    clipped, norm = clip_by_global_norm(grads, 1.0)
    torch.testing.assert_close(norm, want, equal_nan=True)
    torch.testing.assert_close(list(clipped.values()), [leaf.grad for leaf in leaves], equal_nan=True)


@pytest.mark.parametrize("cls", [O.AdamW, O.RMSprop, O.Muon, cf.Lion, cf.LAMB], ids=lambda c: c.__name__)
def test_state_of_large_parameters_is_made_where_it_is_placed(cls) -> None:
    params = {"w": torch.ones(1024, 512)}
    opt = adapt(cls, lr=0.1)
    state = opt.init(params)
    assert not any(type(t) is torch.Tensor for k, part in state.items() if k != "step" for t in part.values())
    step = cf.shard(lambda s, g: opt.update(g, s, params)[1], cf.Mesh(dp=2, topology="ideal"))
    placed = step.init(state, params)
    assert all(torch.equal(t.full(), torch.zeros(1024, 512)) for k, part in placed.items() if k != "step" for t in part.values())


P = {"w": torch.ones(2, 2)}
SGD, ADAM = cf.adapt(torch.optim.SGD, lr=0.1), cf.adapt(torch.optim.AdamW, lr=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cf.adapt("adamw"), "wants a class of torch.optim, not 'adamw'"),
        (lambda: cf.adapt(torch.optim.SGD([torch.ones(1)])), "wants a class of torch.optim, not SGD"),
        (lambda: cf.adapt(torch.optim.SGD, lr=torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 3)), "Try: cf.schedule"),
        (lambda: cf.adapt(torch.optim.AdamW, groups={"w": dict(weight_decay=-3)}), r"groups\['w'\]: AdamW refuses.*weight_decay value: -3"),
        (lambda: cf.adapt(torch.optim.AdamW, groups=[dict(params=["w"])]), "is no mapping to options"),
        (lambda: ADAM.init(torch.ones(2)), "there is a Tensor. Try: model.params"),
        (lambda: ADAM.init({"layer": P | {"scale": 1.0}}), "'layer.scale' is a float"),
        (lambda: ADAM.init({"a": {"b": P["w"]}, "a.b": P["w"]}), "two parameters are called 'a.b'. Try: keys without dots"),
        (lambda: ADAM.update({"w": "g"}, ADAM.init(P), P), "the gradient of 'w' is a str"),
        (lambda: ADAM.update(P, SGD.init(P), P), r"not that of AdamW.*missing \['exp_avg\.w\'"),
        (lambda: SGD.update(P, ADAM.init(P), P), r"not that of SGD.*unknown \['exp_avg\.w\'"),
        (lambda: SGD.update([P["w"]], SGD.init(P), P), r"no gradient for \['w'\]"),
    ],
)
def test_what_is_given_in_place_of_an_optimizer_s_own(call, message) -> None:
    with pytest.raises(cf.InputError, match=message):
        call()
