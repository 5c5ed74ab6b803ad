"""Several functions on one state: training, evaluating, sampling; nothing is moved, nothing is planned twice. And `step.eager`."""

import functools
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import colofunc as cf
from colofunc.dtensor import eager as conversions
from colofunc.executors.launch import launch
from colofunc.testing import models

MESHES = [cf.Mesh(dp=2, topology="ideal"), cf.Mesh(dp=2, tp=2, topology="ideal")]
COSTLY = cf.Mesh(dp=2, tp=2)
WISH = {"*.weight": "(tp dp o) ..."}
ZERO = {"*.weight": "(dp o) ..."}


def tokens(rows: int = 4, length: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(seed))


def language(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return cf.functional(models.Language(dropout=dropout).double())


def next_token(out: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def training(mesh: cf.Mesh, model: Any) -> tuple[Any, Any, Any, Any]:
    """(model, training function, its state, training step)"""
    train_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), loss=next_token, inputs=lambda batch: ((batch,), {}))
    plans = (ZERO,) if "tp" not in mesh.shape else (WISH,)
    return model, train_fn, state, cf.shard(train_fn, mesh, *plans)


@functools.cache
def language_on(mesh: cf.Mesh) -> tuple[Any, Any, Any, Any]:
    """Planned once for all tests: a step keeps no state, and `init` copies."""
    return training(mesh, language())


def steps(mesh: cf.Mesh, model: Any = None) -> tuple[Any, Any, Any, Any]:
    """(training step, its placed state, evaluation, the functions) on one state."""
    model, train_fn, state, train = training(mesh, model) if model else language_on(mesh)

    def evaluate(state: Any, batch: torch.Tensor) -> torch.Tensor:
        out, _ = model.apply(state["params"], state["buffers"], batch)
        return next_token(out, batch)

    return train, train.init(state, tokens()), cf.shard(evaluate, mesh), (train_fn, evaluate, state)


class Moves:
    """Counts conversions of arguments, outside of programs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = conversions._conversion_program

        def counted(*args: Any) -> Any:
            self.count += 1
            return original(*args)

        monkeypatch.setattr(conversions, "_conversion_program", counted)


def layouts(state: Any) -> dict[str, Any]:
    return {k: v.sharding for k, v in state["params"].items()}


def memory(state: Any) -> dict[str, list[int]]:
    return {k: [x.data_ptr() for x in v.parts] for k, v in state["params"].items()}


@pytest.mark.parametrize("mesh", [*MESHES, COSTLY])
def test_train_evaluate_train_moves_nothing(mesh: cf.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    train, state, evaluate, _ = steps(mesh)
    low = train.lower(state, tokens())
    state, _ = train(state, tokens())
    lies, moves = layouts(state), Moves(monkeypatch)
    before = memory(state)
    evaluate(state, tokens(seed=1))
    assert layouts(state) == lies and memory(state) == before  # not consumed, not copied
    assert train.lower(state, tokens()) is low  # the same program as before
    state, _ = train(state, tokens())
    evaluate(state, tokens(seed=1))
    assert moves.count == 0
    assert layouts(state) == lies
    low = evaluate.lower(state, tokens())
    given = dict(zip(low.traced.names, low.input_layouts, strict=False))
    assert all(given[f"state.params.{name}"] is layout for name, layout in lies.items())
    state["params"]["position"].redistribute("a (dp b)")
    assert moves.count == 1  # what moves is counted


@pytest.mark.parametrize("mesh", MESHES)
def test_numbers_are_those_of_one_device(mesh: cf.Mesh) -> None:
    train, state, evaluate, (train_fn, evaluate_fn, plain) = steps(mesh)
    for n in range(3):
        state, metrics = train(state, tokens(seed=n))
        plain, expected = train_fn(plain, tokens(seed=n))
        torch.testing.assert_close(float(metrics["loss"]), float(expected["loss"]), rtol=0, atol=1e-10)
        torch.testing.assert_close(float(evaluate(state, tokens(seed=9))), float(evaluate_fn(plain, tokens(seed=9))), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(2, 8), (6, 8), (4, 12), (1, 5)])
def test_another_batch_or_length(shape: tuple[int, int]) -> None:
    train, state, evaluate, (_, evaluate_fn, plain) = steps(MESHES[1])
    lies = layouts(state)
    torch.testing.assert_close(float(evaluate(state, tokens(*shape))), float(evaluate_fn(plain, tokens(*shape))), rtol=0, atol=1e-10)
    assert layouts(state) == lies
    train(state, tokens())  # still there


def test_another_resolution() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = cf.functional(net.double())
    fit = lambda out, batch: F.cross_entropy(out, batch["y"])  # noqa: E731
    train_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=fit, inputs=lambda b: ((b["x"],), {}))
    small = {"x": torch.randn(4, 3, 8, 8, dtype=torch.float64), "y": torch.arange(4)}
    large = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    train = cf.shard(train_fn, MESHES[1])
    predict = cf.shard(lambda state, x: model.apply(state["params"], state["buffers"], x)[0].argmax(-1), MESHES[1])
    placed, _ = train(train.init(state, small), small)
    expected, _ = train_fn(state, small)
    want = model.apply(expected["params"], expected["buffers"], large)[0].argmax(-1)
    assert torch.equal(predict(placed, large).full(), want)
    train(placed, small)


def test_sampling_with_growing_and_with_static_length() -> None:
    train, state, _, (_, _, plain) = steps(MESHES[0])
    model = language()

    def following(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return model.apply(params, {}, batch)[0][:, -1].argmax(-1)

    def at(params: Any, batch: torch.Tensor, position: torch.Tensor) -> Any:
        logits = model.apply(params, {}, batch)[0]
        chosen = logits.gather(1, position.expand(len(batch), 1, logits.shape[2])).argmax(-1)
        return torch.where(torch.arange(batch.shape[1]) == position + 1, chosen, batch)

    grow, static = cf.shard(following, MESHES[0]), cf.shard(at, MESHES[0])
    growing, expected = tokens(2, 4), tokens(2, 4)
    fixed: Any = F.pad(tokens(2, 4), (0, 4))
    for n in range(4):
        growing = torch.cat([growing, grow(state["params"], growing).full()[:, None]], 1)
        expected = torch.cat([expected, following(plain["params"], expected)[:, None]], 1)
        fixed = static(state["params"], fixed, torch.tensor(3 + n))
    assert torch.equal(growing, expected)
    assert torch.equal(fixed.full(), expected)
    assert len(static.compiler._ready) <= 2  # the prompt, then one program for all lengths
    train(state, tokens())


def test_another_function_that_wants_other_layouts_converts_inside() -> None:
    mesh = MESHES[1]
    w = cf.distribute(torch.randn(8, 8, dtype=torch.float64), "(dp tp a) b", mesh)
    low_fn = cf.shard(lambda w, x: torch.softmax(w, 0) @ x, mesh, in_specs=(None, "a (tp b)"))  # softmax wants dim 0 whole
    x = torch.randn(8, 8, dtype=torch.float64)
    out, low = low_fn(w, x), low_fn.lower(w, x)
    assert low.input_layouts[0] is w.sharding
    assert any(calls for (kind, _), calls in low.cost().calls.items() if kind in ("all_gather", "all_to_all", "all_reduce"))
    torch.testing.assert_close(out.full(), torch.softmax(w.full(), 0) @ x, rtol=0, atol=1e-12)
    assert not w.is_consumed


@pytest.mark.parametrize("mesh", MESHES)
def test_an_evaluation_that_returns_the_state_beside_its_loss_keeps_it(mesh: cf.Mesh) -> None:
    train, state, _, (_, evaluate_fn, _) = steps(mesh)
    evaluate = cf.shard(lambda state, batch: (evaluate_fn(state, batch), state["params"]), mesh)
    loss, params = evaluate(state, tokens())
    assert not any(v.is_consumed for v in state["params"].values())
    assert layouts({"params": params}) == layouts(state)
    train(state, tokens())
    kept = {k: v.full() for k, v in params.items()}  # its own memory: training has written over the state's
    assert all(torch.isfinite(v).all() for v in kept.values()) and float(loss) > 0


def test_train_or_eval_mode_is_part_of_the_key() -> None:
    model = language(dropout=0.5)
    module = model.module
    _, state, evaluate, _ = steps(MESHES[0], model)
    module.train()
    torch.manual_seed(1)
    noisy = float(evaluate(state, tokens()))
    module.eval()
    torch.manual_seed(1)
    still = float(evaluate(state, tokens()))
    torch.manual_seed(2)
    assert float(evaluate(state, tokens())) == still != noisy
    module.train()
    torch.manual_seed(1)
    assert float(evaluate(state, tokens())) == noisy
    assert sum(len(known) for known in evaluate.compiler._ready.values()) == 2


MODEL: Any = None


def evaluate_global(params: Any, batch: torch.Tensor) -> torch.Tensor:
    return next_token(MODEL.apply(params, {}, batch)[0], batch)


def test_the_mode_of_a_model_that_a_script_holds_in_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "MODEL", language(dropout=0.5))
    evaluate = cf.shard(evaluate_global, MESHES[0])
    losses = []
    for training in (True, False, True):
        MODEL.module.train(training)
        torch.manual_seed(1)
        losses.append(float(evaluate(MODEL.params, tokens())))
    assert losses[0] == losses[2] != losses[1]


ELSEWHERE = [cf.Mesh(dp=4), cf.Mesh(tp=2), cf.Mesh(b=2), cf.Mesh(), cf.Mesh(dp=2), *MESHES[1:]]


@pytest.mark.parametrize("mesh", ELSEWHERE, ids=repr)
def test_a_state_of_another_mesh_is_refused_by_whoever_reads_it_and_placed_anew_by_init(mesh: cf.Mesh) -> None:
    _, state, evaluate, (train_fn, _, _) = steps(MESHES[0])
    other = cf.shard(train_fn, mesh)
    for read in (other, other.lower, other.compare):
        with pytest.raises(cf.InputError, match=r"argument 'state\..*' lies on .*, the step runs on .* Try: step.init\(state"):
            read(state, tokens())
    assert float(evaluate(state, tokens())) > 0  # nothing was consumed
    placed = other.init(state, tokens())
    assert all(leaf.mesh == mesh and torch.equal(leaf.full(), state["params"][name].full()) for name, leaf in placed["params"].items())
    moved = cf.distribute(state["params"]["position"], "_ _", mesh)
    assert moved.mesh == mesh and torch.equal(moved.full(), state["params"]["position"].full())


# ---- eager ----


def test_eager_takes_the_placed_state_and_gives_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    train, state, _, (_, _, plain) = steps(MESHES[1])
    stops: list[Any] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1).f_locals["x"]))

    def stopping(state: Any, x: torch.Tensor) -> torch.Tensor:
        breakpoint()
        return x * state["params"]["position"].sum()

    out = cf.shard(stopping, MESHES[1]).eager(state, cf.distribute(torch.ones(4), "(dp b)", MESHES[1]))
    assert type(out) is torch.Tensor and type(stops[0]) is torch.Tensor and stops[0].tolist() == [1.0] * 4
    new, metrics = train.eager(state, tokens())
    expected, _ = train.eager(plain, tokens())
    assert all(type(v) is torch.Tensor for v in new["params"].values())
    for name, value in expected["params"].items():
        torch.testing.assert_close(new["params"][name], value, rtol=0, atol=1e-12)
    _, same = train(state, tokens())  # eager has consumed nothing
    torch.testing.assert_close(float(same["loss"]), float(metrics["loss"]), rtol=0, atol=1e-10)


def test_eager_draws_the_numbers_of_the_staged_step() -> None:
    step = cf.shard(lambda x: F.dropout(x, 0.5), MESHES[1])
    x = torch.ones(8, 8)
    torch.manual_seed(3)
    eager = step.eager(x)
    torch.manual_seed(3)
    assert torch.equal(step(x).full(), eager)


def test_eager_of_a_chain_has_what_the_transforms_add() -> None:
    train, _, _, (_, _, state) = steps(MESHES[0])
    mixed = cf.precision(train, "bf16")
    placed = mixed.init(state, tokens())
    new, metrics = mixed.eager(placed, tokens())
    assert all(type(v) is torch.Tensor for v in new["params"].values())
    _, same = mixed(placed, tokens())
    torch.testing.assert_close(float(same["loss"]), float(metrics["loss"]), rtol=2e-2, atol=0)


# ---- real ranks ----


def on_two_ranks() -> Any:
    train, state, evaluate, _ = steps(MESHES[0])
    losses = []
    for n in range(2):
        state, metrics = train(state, tokens(seed=n))
        losses += [float(metrics["loss"]), float(evaluate(state, tokens(seed=9)))]
    return losses, float(train.eager(state, tokens())[1]["loss"])


@pytest.mark.dist
def test_real_ranks() -> None:
    one, other = launch(on_two_ranks, 2, timeout_s=120)
    assert one == other
    losses, eager = on_two_ranks()
    torch.testing.assert_close(one[0], losses, rtol=0, atol=1e-10)
    assert abs(one[1] - eager) < 1e-10


# ---- one step's tiers and another's ----


def with_frozen() -> tuple[Any, Any, Any]:
    """(model, training step, state) of a model of which little is trained."""
    model = cf.functional(models.Language().double(), trainable="*.qkv.*")
    made = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), loss=next_token, inputs=lambda batch: ((batch,), {}))
    return model, *made


@functools.cache
def offloaded_step() -> tuple[Any, Any, Any]:
    """(training function, state, offloaded step), planned once for all tests of what comes beside it."""
    _, train_fn, state = with_frozen()
    return train_fn, state, cf.offload(cf.shard(train_fn, MESHES[0]), policy="host")


def tiers(step: Any, state: Any) -> dict[str, str]:
    low = step.lower(state, tokens())
    names = [low.program.values[i].name for i in low.program.inputs]
    return {name: layout.tier for name, layout in zip(names, low.input_layouts, strict=True)}


OTHERS: dict[str, Any] = {
    "shard": lambda fn: cf.shard(fn, MESHES[0]),
    "accumulate": lambda fn: cf.accumulate(cf.shard(fn, MESHES[0]), microbatches=2),
    "checkpoint": lambda fn: cf.checkpoint(cf.shard(fn, MESHES[0]), policy="nothing"),
    "precision": lambda fn: cf.precision(cf.shard(fn, MESHES[0]), "bf16"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_offloaded_step_decides_no_tier_of_another(other: str) -> None:
    train_fn, state, offloaded = offloaded_step()
    placed, _ = offloaded(offloaded.init(state, tokens()), tokens())
    assert "host" in tiers(offloaded, placed).values()
    step = OTHERS[other](train_fn)
    assert set(tiers(step, state).values()) == {"device"}
    assert set(tiers(offloaded, placed).values()) == {"host", "device"}  # where it was
    step(step.init(state, tokens()), tokens())


def test_an_evaluation_of_offloaded_state_takes_it_where_it_lies() -> None:
    model, train_fn, state = with_frozen()
    offloaded = cf.offload(cf.shard(train_fn, MESHES[0]), policy="host")
    placed, _ = offloaded(offloaded.init(state, tokens()), tokens())
    evaluate = cf.shard(lambda state, batch: next_token(model.apply(state["params"], {}, batch)[0], batch), MESHES[0])
    lies, before = tiers(evaluate, placed), tiers(offloaded, placed)
    assert all(lies[name] == before[name] for name in lies if name.startswith(("state.", "frozen.")))
    assert "host" in lies.values()


def test_what_one_leaf_is_told_moves_no_other() -> None:
    _, train_fn, state = with_frozen()
    specs = {"params": {"block.qkv.weight": "a b @host", "block.qkv.bias": None}, "buffers": None, "opt": None}
    found = tiers(cf.shard(train_fn, MESHES[0], in_specs=(specs, None)), state)
    assert [name for name, tier in found.items() if tier != "device"] == ["state.params.block.qkv.weight"]
