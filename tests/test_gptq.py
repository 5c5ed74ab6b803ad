"""gptq: against its equations, on every mesh, better than the nearest levels, and what it says to mistakes."""

from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from quantize_matrix import WHERE, Net, step_of, tokens
from torch import nn

import colofunc as cf
from colofunc.compiler.quantized_weights import packed
from colofunc.ops.gptq import factor, rounded_int4
from colofunc.ops.quantized import FORMATS
from colofunc.ops.quantizers import BUILT_IN
from colofunc.program.lazy import lazy_tensor


def inputs(rows: int = 512, columns: int = 256) -> torch.Tensor:
    """Correlated ones, as those of layers are: few directions and some noise."""
    draw = torch.Generator().manual_seed(0)
    few = torch.randn(rows, 24, dtype=torch.float64, generator=draw) @ torch.randn(24, columns, dtype=torch.float64, generator=draw)
    return few + 0.3 * torch.randn(rows, columns, dtype=torch.float64, generator=draw)


def weight(rows: int = 12, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def test_each_column_is_rounded_and_the_rest_is_moved_to_the_least_change_of_outputs() -> None:
    """Against least squares solved anew after each column: which rest keeps the outputs nearest, given what is rounded so far."""
    x, w = inputs(), weight(4)
    moments = x.T @ x
    damped = moments + 0.01 * moments.diagonal().mean() * torch.eye(256, dtype=torch.float64)
    parts = rounded_int4(w, factor(moments, 0.01))
    found = FORMATS["int4"].widen((parts["data"], parts["scale"], parts["zero"]), torch.float64)
    rest = w.double()
    for column in range(256):
        group = column // 128
        scale, zero = parts["scale"][:, group].double(), parts["zero"][:, group].double()
        nearest = (((rest[:, column] / scale).round() + zero).clamp(0, 15) - zero) * scale
        torch.testing.assert_close(found[:, column], nearest, rtol=1e-9, atol=1e-9)
        off = rest[:, column] - nearest
        # The rest moves by d with: damped[rest, rest] d = damped[rest, column] off
        behind = slice(column + 1, 256)
        if column < 255:
            moved = torch.linalg.solve(damped[behind, behind], damped[behind, column : column + 1])
            rest = torch.cat((rest[:, : column + 1], rest[:, behind] + off.unsqueeze(1) * moved.T), 1)


def test_outputs_are_nearer_than_with_the_nearest_levels() -> None:
    x, w = inputs(), weight()
    scheme = cf.gptq({"w": x.T @ x}).named("w")
    exact = x @ w.double().T
    errors = []
    for one in (scheme, BUILT_IN["int4-g128"]):
        errors.append(float((x @ one.pack(w).dequantize(torch.float64).T - exact).norm() / exact.norm()))
    assert errors[0] < 0.5 * errors[1], errors


def test_inputs_that_do_not_correlate_give_the_nearest_levels() -> None:
    found = cf.gptq({"w": torch.eye(256)}).named("w").pack(weight())
    for mine, nearest in zip(found.parts, BUILT_IN["int4-g128"].pack(weight().double()).parts, strict=True):
        assert torch.equal(mine, nearest)


def forward(net: Any = Net) -> tuple[Any, dict[str, torch.Tensor]]:
    step_fn, params, _ = step_of("arguments", net)
    return step_fn, params


@pytest.mark.parametrize("plan", ["zero3", "columns", "auto"])
def test_moments_on_a_mesh_are_those_of_one_device(plan: str) -> None:
    step_fn, params = forward()
    plans = {"zero3": [zero(3, "dp")], "columns": [{"up.weight": "(tp o) i"}], "auto": []}[plan]
    step = cf.shard(cf.input_moments(step_fn, where=WHERE), cf.Mesh(dp=2, tp=2), *plans)
    with cf.testing.float64():
        cf.testing.check(step, params, tokens(), steps=1)
    found = step(params, tokens())
    assert {name: tuple(x.shape) for name, x in found.items()} == {"up.weight": (128, 128), "down.weight": (256, 256)}
    net = Net()
    net.load_state_dict(params)
    seen: list[torch.Tensor] = []
    net.up.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    net(tokens())
    torch.testing.assert_close(found["up.weight"].full(), seen[0].T @ seen[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["arguments", "adapters"])
def test_a_step_reads_weights_that_were_calibrated(kind: str) -> None:
    """Moments of a forward-only step, for it and for training adapters; the packed tensors are those of one device."""
    calibration, params = forward()
    on_ranks = cf.shard(cf.input_moments(calibration, where=WHERE), cf.Mesh(dp=2))
    scheme = cf.gptq([on_ranks(params, tokens()), cf.input_moments(calibration, where=WHERE)(params, tokens()[:3])])
    step_fn, state, _ = step_of(kind)
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp")), scheme, where=WHERE)
    with cf.testing.float64():
        assert cf.testing.check(step, state, tokens()).worst <= 1e-10
    if kind == "arguments":
        placed = step.init(state, tokens())
        wanted = scheme.named("up.weight").pack(params["up.weight"])
        assert placed["up.weight"].scheme == "gptq"
        assert all(torch.equal(mine.full(), one) for mine, one in zip(placed["up.weight"].parts, wanted.parts, strict=True))
        lying = {"up.weight": cf.distribute(params["up.weight"], "a (dp b)", cf.Mesh(dp=2))}
        again = cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2)), scheme, where=WHERE).init({**params, **lying}, tokens())
        assert all(torch.equal(mine.full(), one) for mine, one in zip(again["up.weight"].parts, wanted.parts, strict=True))


@pytest.mark.parametrize("rows_of_a_block", [1, 5])
def test_a_lazy_weight_is_rounded_while_it_is_read(rows_of_a_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = inputs(), weight()
    scheme = cf.gptq({"w": x.T @ x}).named("w")
    whole = scheme.pack(w)
    monkeypatch.setattr("colofunc.ops.quantizers.BLOCK_BYTES", rows_of_a_block * 256 * 4)
    lazy = lazy_tensor(w.shape, w.dtype, lambda: pytest.fail("the whole was made"), w.__getitem__)
    for mine, one in zip(packed(scheme, lazy).parts, whole.parts, strict=True):
        assert torch.equal(cf.distribute(mine, "(a o) ...", cf.Mesh(a=2)).full(), one)


def test_two_calibrations_of_a_weight_are_two_schemes() -> None:
    step_fn, params = forward()
    draw = torch.Generator().manual_seed(5)
    codes = []
    for _ in range(2):
        x = torch.randn(64, 128, generator=draw) @ torch.randn(128, 128, generator=draw)
        step = cf.quantize(step_fn, cf.gptq({"up.weight": x.T @ x}), where="up.weight")
        codes.append(step.init(params, tokens())["up.weight"].data.full())
    assert not torch.equal(*codes)


def test_a_weight_that_is_used_twice_has_moments_of_both() -> None:
    layer = nn.Linear(128, 128)
    model = cf.functional(nn.Sequential(layer, nn.Tanh(), layer))
    x = torch.randn(8, 128)
    found = cf.input_moments(lambda params, x: model.apply(params, {}, x)[0])(model.params, x)
    between = torch.tanh(layer(x)).detach()
    torch.testing.assert_close(found["0.weight"], x.T @ x + between.T @ between)


# ---- what it says to mistakes ----


def test_moments_that_do_not_fit_are_named() -> None:
    good = torch.eye(128)
    step_fn, params = forward()

    def quantized(moments: Any) -> Any:
        return cf.quantize(step_fn, cf.gptq(moments), where="up.weight").lower(params, tokens())

    with pytest.raises(cf.InputError, match=r"cf\.gptq: there are no moments\. Try: those that a step of cf\.input_moments"):
        cf.gptq([])
    with pytest.raises(cf.InputError, match=r"cf\.gptq\(damping=0\.0\): moments of few rows have no inverse"):
        cf.gptq({"w": good}, damping=0.0)
    with pytest.raises(cf.InputError, match=r"cf\.gptq: moments of 'w' are \(2, 3\), and \(i, i\) of a weight \(o, i\)"):
        cf.gptq({"w": torch.ones(2, 3)})
    with pytest.raises(cf.InputError, match=r"there are no moments of 'up\.weight'; did you mean 'upp\.weight'\?.*Try: cf\.input_moments"):
        quantized({"upp.weight": good})
    with pytest.raises(cf.InputError, match=r"cf\.gptq: 'up\.weight' has 128 columns, and its moments are \(64, 64\)"):
        quantized({"up.weight": torch.eye(64)})


def test_a_calibration_batch_of_no_numbers_is_named() -> None:
    model = cf.functional(nn.Linear(128, 8))
    step = cf.shard(cf.input_moments(lambda params, x: model.apply(params, {}, x)[0], where="weight"), cf.Mesh(dp=2))
    x = torch.randn(4, 128)
    x[1, 5] = float("nan")
    with pytest.raises(cf.InputError, match=r"the moments of 'weight' have NaN or infinite numbers, so its inputs had\. Try: a cali"):
        cf.gptq(step(model.params, x))


def test_steps_that_cannot_be_calibrated_are_named() -> None:
    step_fn, params = forward()
    with pytest.raises(cf.InputError, match=r"cf\.input_moments takes the step function itself\. Try: cf\.shard\(cf\.input_moments"):
        cf.input_moments(cf.shard(step_fn, cf.Mesh()))
    with pytest.raises(cf.InputError, match=r"where='norm\.\*' matches no weight that a linear layer reads"):
        cf.input_moments(step_fn, where="norm.*")(params, tokens())
    with pytest.raises(cf.InputError, match=r"cf\.input_moments\(where=\[\]\): give a glob"):
        cf.input_moments(step_fn, where=[])


def test_a_scheme_does_not_print_what_was_measured() -> None:
    scheme = repr(cf.gptq({"up.weight": torch.eye(64)}))
    assert "of 1 weights" in scheme and "tensor" not in scheme
