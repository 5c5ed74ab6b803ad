"""State and what a step captures: frozen weights as hidden sharded inputs, init from examples, writes to captured tensors."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_bytes import measure
from torch import nn

import colofunc as cf
from colofunc.dtensor.placed import SHELF, place
from colofunc.errors import InputError
from colofunc.executors.backend import backend_for
from colofunc.executors.launch import launch
from colofunc.testing import check
from colofunc.testing.models import Language, Mlp

D = torch.float64


def head_only(module: nn.Module | None = None, trainable: str = "fc2.*") -> tuple[Callable[..., Any], dict[str, Any], cf.Model]:
    torch.manual_seed(0)
    model = cf.functional((module or Mlp(16, 64)).double(), trainable=trainable)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), loss=lambda out: (out**2).mean())
    return step_fn, state, model


def rows() -> torch.Tensor:
    return torch.randn(8, 16, dtype=D, generator=torch.Generator().manual_seed(1))


def hidden_names(low: Any) -> dict[str, Any]:
    values = [low.program.values[i] for i in low.program.inputs]
    return {v.name: v.layout for v in values if v.role == "frozen"}


def test_frozen_weights_are_inputs_that_are_sharded() -> None:
    step_fn, state, _ = head_only()
    step = cf.shard(step_fn, cf.Mesh(dp=2, tp=2, topology="ideal"), {"*.fc1.weight": "(tp o) (dp i)", "norm.weight": "(dp tp d)"})
    low = step.lower(state, rows())
    found = hidden_names(low)
    assert sorted(found) == ["frozen.fc1.bias", "frozen.fc1.weight", "frozen.norm.bias", "frozen.norm.weight"]
    assert found["frozen.fc1.weight"].local_shape == (32, 8) and found["frozen.norm.weight"].local_shape == (4,)
    assert not set(found) & {low.program.values[i].name for i in low.program.constants}
    assert any(live.name == "frozen.fc1.weight" and live.nbytes == 32 * 8 * 8 for live in low.memory().at_peak)
    assert check(step, state, rows(), steps=3).worst <= 1e-10


def test_the_accountant_counts_parts_of_frozen_weights() -> None:
    step_fn, state, _ = head_only()
    mesh = cf.Mesh(dp=2, tp=2)
    step = cf.shard(step_fn, mesh, {"*.fc1.weight": "(tp o) (dp i)"})
    low = step.lower(state, rows())
    leaves = low.traced.pack((state, rows()))
    inputs = [place(x, layout, mesh, backend_for(mesh)) for x, layout in zip(leaves, low.input_layouts, strict=False)]
    apart = [[s.clone() for s in shards] for shards in (*inputs, *low.hidden_parts(backend_for(mesh)))]
    assert measure(low.program, mesh, apart).timeline == dict(low.memory().timeline)


def test_frozen_weights_have_no_moments_and_come_back_unchanged() -> None:
    step_fn, state, model = head_only()
    before = copy.deepcopy(model.frozen)
    step = cf.shard(step_fn, cf.Mesh(dp=4))
    placed = step.init(state, rows())
    for _ in range(2):
        placed, _ = step(placed, rows())
    assert sorted(placed["opt"]["exp_avg"]) == ["fc2.bias", "fc2.weight"]
    assert all(torch.equal(before[n], t) for n, t in model.frozen.items())


def test_two_steps_share_one_placement() -> None:
    step_fn, state, model = head_only()
    mesh = cf.Mesh(dp=2, tp=2)
    step = cf.shard(step_fn, mesh, {"fc1.weight": "(dp tp o) i"})
    evaluate = cf.shard(lambda params, x: model.apply(params, {}, x)[0], mesh)
    placed = step.init(state, rows())
    ready = next(iter(step.compiler._ready.values()))[0]
    low = evaluate.lower(placed["params"], rows())
    assert hidden_names(low)["frozen.fc1.weight"].local_shape == (16, 16)
    evaluate(placed["params"], rows())
    other = next(iter(evaluate.compiler._ready.values()))[0]
    ours, theirs = dict(zip(hidden_names(ready.low), ready.hidden())), dict(zip(hidden_names(low), other.hidden()))
    assert all(a is b for name in ours for a, b in zip(ours[name], theirs[name], strict=True))
    placed, _ = step(placed, rows())  # and training goes on where it was


def test_a_plan_that_speaks_of_a_placed_weight_wins() -> None:
    _, state, model = head_only()
    mesh, fn = cf.Mesh(tp=2), lambda params, x: model.apply(params, {}, x)[0]
    one = cf.shard(fn, mesh, {"fc1.weight": "(tp o) i"})(state["params"], rows())
    other = cf.shard(fn, mesh, {"fc1.weight": "o (tp i)"})
    assert hidden_names(other.lower(state["params"], rows()))["frozen.fc1.weight"].local_shape == (64, 8)
    torch.testing.assert_close(other(state["params"], rows()).full(), one.full())


def test_a_write_to_a_frozen_weight_is_seen_without_another_trace() -> None:
    _, state, model = head_only()
    step = cf.shard(lambda params, x: model.apply(params, {}, x)[0], cf.Mesh(tp=2), {"fc1.weight": "o (tp i)"})
    step(state["params"], rows())
    model.frozen["fc1.weight"].mul_(-3)
    torch.testing.assert_close(step(state["params"], rows()).full(), model.apply(state["params"], {}, rows())[0])
    assert sum(len(some) for some in step.compiler._ready.values()) == 1


def test_another_tensor_as_a_frozen_weight_is_seen() -> None:
    _, state, model = head_only()
    step = cf.shard(lambda params, x: model.apply(params, {}, x)[0], cf.Mesh(tp=2))
    step(state["params"], rows())
    model.frozen["fc1.weight"] = model.frozen["fc1.weight"] * 2
    torch.testing.assert_close(step(state["params"], rows()).full(), model.apply(state["params"], {}, rows())[0])


DROPPED = nn.Dropout(0.5)


def forward_of_this_file(x: torch.Tensor) -> torch.Tensor:
    return DROPPED(x)


def test_the_mode_of_a_module_that_is_a_global_is_seen() -> None:
    step = cf.shard(lambda x: forward_of_this_file(x), cf.Mesh(dp=2))
    x = torch.ones(64, dtype=D)
    assert (step(x).full() == 0).any()
    DROPPED.eval()
    assert torch.equal(step(x).full(), x)
    DROPPED.train()
    assert (step(x).full() == 0).any()


@pytest.mark.parametrize("size", [4, 128])  # a constant of the program, a hidden input
def test_a_write_to_a_captured_tensor_is_seen(size: int, capfd: pytest.CaptureFixture[str]) -> None:
    table = torch.ones(size, size, dtype=D)
    step = cf.shard(lambda x: x @ table, cf.Mesh(dp=2))
    x = torch.eye(size, dtype=D)
    step(x)
    table.add_(x)
    assert torch.equal(step(x).full(), table)
    assert "traced again: a tensor that it captured was written to" in capfd.readouterr().err


READS = """
import torch

scale, power, table, unused = 2.0, 1, torch.ones(4), torch.ones(4)

def curve(x):
    return x ** power

def step(x):
    return curve(x) * scale + table
"""


def test_names_that_are_bound_anew_are_seen(capfd: pytest.CaptureFixture[str]) -> None:
    script: dict[str, Any] = {}
    exec(READS, script)
    x = torch.full((4,), 3.0)
    step = cf.shard(script["step"], cf.Mesh(dp=2))

    def says(expected: float, line: str = "") -> None:
        assert step(x).full().tolist() == [expected] * 4
        said = capfd.readouterr().err
        assert line in said and ("traced again" in said) == bool(line)

    says(7.0)
    script["unused"], script["x"] = torch.zeros(4), torch.zeros(4)  # not read by the function
    says(7.0)
    script["scale"] = 4.0
    says(13.0, "step is traced again: global 'scale' was 2.0 and is 4.0")
    script["table"] = torch.full((4,), 2.0)
    says(14.0, "global 'table' was bound to another value")
    with pytest.warns(UserWarning, match=r"step has been traced 4 times because static values change \(global 'power' was 1 and is 2\)"):
        script["power"] = 2
        says(38.0, "global 'power' was 1 and is 2")  # read by a function that the step calls
    exec("def curve(x):\n    return -x", script)
    says(-10.0, "global 'curve' was bound to another function")


def test_names_of_the_function_around_are_seen_and_own_counters_are_not(capfd: pytest.CaptureFixture[str]) -> None:
    calls, factor = 0, 2

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * factor

    staged, x = cf.shard(step, cf.Mesh(dp=2)), torch.ones(4)
    assert float(staged(x).full().sum()) == 8.0
    calls = 7
    staged(x)
    assert "traced again" not in capfd.readouterr().err and calls == 7
    factor = 3
    assert float(staged(x).full().sum()) == 12.0 and calls == 8
    assert "'factor' of the function around was 2 and is 3" in capfd.readouterr().err


def test_large_captured_tensors_are_hidden_inputs_and_small_ones_constants() -> None:
    large, small = torch.randn(128, 128, dtype=D), torch.randn(4, dtype=D)
    low = cf.shard(lambda x: (x @ large)[:, :4] + small, cf.Mesh(dp=2)).lower(torch.ones(8, 128, dtype=D))
    assert list(hidden_names(low)) == ["captured.0"] and len(low.hidden) == 1 and low.hidden[0] is large
    assert [t.shape for t in low.program.constants.values()] == [(4,)]


def test_a_captured_causal_mask_is_still_recognised() -> None:
    mask = torch.ones(512, 512, dtype=torch.bool).tril()
    low = cf.shard(
        lambda q: nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask), cf.Mesh(dp=2)
    ).lower(torch.ones(2, 2, 512, 8))
    assert low.hidden == () and not low.program.constants


def test_placed_parts_die_with_the_tensor() -> None:
    mesh = cf.Mesh(dp=2)

    def used_once() -> int:
        weight = torch.randn(128, 128, dtype=D)
        cf.shard(lambda x: x @ weight, mesh)(torch.ones(4, 128, dtype=D))
        assert SHELF.layout(weight, mesh) is not None
        return len(SHELF._kept)

    gc.collect()
    held = used_once()
    gc.collect()
    assert len(SHELF._kept) == held - 1


def test_a_lowered_program_with_hidden_inputs_has_none_of_their_values() -> None:
    step_fn, state, _ = head_only()
    low = cf.shard(step_fn, cf.Mesh(dp=2)).lower(state, rows())
    assert low.hidden and sum(value.nbytes for value in low.program.constants.values()) < 1000


def test_compare_sees_hidden_inputs() -> None:
    step_fn, state, _ = head_only()
    assert cf.shard(step_fn, cf.Mesh(dp=2, tp=2)).lower(state, rows()).compare(state, rows()).equal


def test_a_teacher_and_a_student_of_the_same_names() -> None:
    torch.manual_seed(0)
    teacher = cf.functional(Mlp(16, 32).double(), trainable=())
    first, second = cf.functional(Mlp(16, 32).double(), trainable="fc2.*"), teacher

    def step_fn(params: Any, x: torch.Tensor) -> Any:
        def loss(p: Any) -> torch.Tensor:
            return ((first.apply(p, {}, x)[0] - second.apply({}, {}, x)[0]) ** 2).mean()

        return cf.value_and_grad(loss)(params)

    step = cf.shard(step_fn, cf.Mesh(dp=2, tp=2))
    assert check(step, first.params, rows()).worst <= 1e-10
    names = list(hidden_names(step.lower(first.params, rows())))
    assert len(set(names)) == len(names) == 4 + 6 and "frozen2.fc1.weight" in names


def test_init_from_examples_without_data() -> None:
    torch.manual_seed(0)
    model = cf.functional(Language(32, 16).double())
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: (out**2).mean(), inputs=None)
    mesh, tokens = cf.Mesh(dp=2, tp=2), torch.randint(0, 32, (4, 8))
    from_real = cf.shard(step_fn, mesh).init(state, tokens)
    from_abstract = cf.shard(step_fn, mesh).init(state, cf.abstract((4, 8), torch.int64))
    for name, one in from_real["params"].items():
        assert one.sharding is from_abstract["params"][name].sharding
        assert torch.equal(from_abstract["params"][name].full(), state["params"][name])


def test_a_state_leaf_without_data_is_named() -> None:
    step_fn, state, _ = head_only()
    state["params"]["fc2.bias"] = state["params"]["fc2.bias"].to("meta")
    with pytest.raises(InputError, match=r"argument 'state.params.fc2.bias' of shape \(8,\) has no data"):
        cf.shard(step_fn, cf.Mesh(dp=2)).init(state, rows())


def test_to_module_from_dtensors() -> None:
    step_fn, state, model = head_only()
    step = cf.shard(step_fn, cf.Mesh(dp=2, tp=2))
    placed, _ = step(step.init(state, rows()), rows())
    made = model.to_module(placed["params"])
    assert type(made) is Mlp and torch.equal(made.fc1.weight, model.frozen["fc1.weight"])
    assert torch.equal(made.fc2.weight, placed["params"]["fc2.weight"].full())
    torch.testing.assert_close(made(rows()), model.apply({n: p.full() for n, p in placed["params"].items()}, {}, rows())[0])


def on_real_ranks() -> list[Any]:
    step_fn, state, model = head_only()
    step = cf.shard(step_fn, cf.Mesh(dp=2), {"fc1.weight": "(dp o) i"})
    placed, _ = step(step.init(state, rows()), rows())
    (kept,) = SHELF._kept[model.frozen["fc1.weight"]].values()
    made = model.to_module(placed["params"])
    return [kept[0].shards[0].untyped_storage().nbytes(), made.fc2.weight.detach()]


@pytest.mark.dist
def test_a_real_rank_keeps_its_part() -> None:
    step_fn, state, _ = head_only()
    want = step_fn(state, rows())[0]["params"]["fc2.weight"]
    for nbytes, got in launch(on_real_ranks, 2):
        assert nbytes == 32 * 16 * 8
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
