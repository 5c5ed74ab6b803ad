"""cf.quantize: packed weights against their definition, as values of a state, and what it says to mistakes."""

import gc
import math
import re
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import tensor, zero
from quantize_matrix import WHERE, Net, step_of, tokens
from test_scheme_choice import Tied
from torch import nn

import colofunc as cf
from colofunc.compiler.quantized_weights import packed
from colofunc.ops.quantized import FORMATS, NF4_LEVELS, OPERATORS, Quantized
from colofunc.ops.quantizers import BUILT_IN
from colofunc.plugins import build_registry
from colofunc.program.lazy import lazy_tensor
from colofunc.program.tracing.trace import trace

SCHEMES = list(BUILT_IN)


def weight(rows: int = 12, columns: int = 256, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


def forward() -> tuple[Any, Any]:
    step_fn, params, _ = step_of("arguments")
    return step_fn, params


# ---- the schemes ----


def test_a_row_of_int8_is_within_half_a_step() -> None:
    w = weight()
    found = BUILT_IN["int8"].pack(w)
    assert found.data.dtype is torch.int8 and int(found.data.abs().max()) == 127
    assert torch.equal(found.scale, w.abs().amax(1) / 127)
    assert bool(((found.dequantize() - w).abs() <= found.scale.unsqueeze(1) * 0.5001).all())


def test_fp8_is_what_torch_rounds_to() -> None:
    w = weight()
    found = BUILT_IN["fp8"].pack(w)
    scale = (w.abs().amax(1) / 448).unsqueeze(1)
    assert torch.equal(found.dequantize(), (w / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale)


def test_fp8_e5m2_is_what_torch_rounds_to_and_reaches_further_down() -> None:
    w = weight()
    w[0, 0], w[0, 1] = 1.0, 2.0**-30
    found = BUILT_IN["fp8-e5m2"].pack(w)
    scale = (w.abs().amax(1) / 57344).unsqueeze(1)
    assert torch.equal(found.dequantize(), (w / scale).to(torch.float8_e5m2).to(torch.float32) * scale)
    assert float(found.dequantize()[0, 1]) > 0 == float(BUILT_IN["fp8"].pack(w).dequantize()[0, 1])
    relative = ((found.dequantize() - w) / w).abs()[:, 2:]
    assert float(relative.max()) <= 0.126, "2 bits behind the leading one"


def test_a_group_of_int4_is_within_a_step_and_keeps_zero() -> None:
    w = weight()
    w[:, 3] = 0
    found = BUILT_IN["int4-g128"].pack(w)
    assert found.data.shape == (12, 128) and found.scale.shape == found.zero.shape == (12, 2)  # type: ignore[union-attr]
    error = (found.dequantize() - w).abs().unflatten(1, (2, 128))
    assert bool((error <= found.scale.unsqueeze(2) * 1.0001).all()) and not found.dequantize()[:, 3].any()


def test_nf4_takes_the_nearest_level() -> None:
    w = weight()
    found = BUILT_IN["nf4"].pack(w)
    assert found.nbytes == 12 * (128 + 4 + 4)  # numbers, scales of four blocks, the row's own
    scale = (found.scale.float() * (found.outer / 255).unsqueeze(1)).unsqueeze(2)  # type: ignore[operator]
    levels = torch.tensor(NF4_LEVELS)
    nearest = levels[((w.unflatten(1, (4, 64)) / scale).unsqueeze(-1) - levels).abs().argmin(-1)] * scale
    torch.testing.assert_close(found.dequantize(), nearest.flatten(1))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_and_tiny_rows_stay_finite(scheme: str) -> None:
    w = weight()
    w[0], w[1] = 0, 1e-40
    wide = BUILT_IN[scheme].pack(w).dequantize()
    assert bool(wide.isfinite().all()) and not wide[0].any()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("spec", ["(a o) i", "o (a i)", "o i"])
def test_rows_and_columns_on_ranks_are_packed_as_on_one_device(scheme: str, spec: str) -> None:
    """From a tensor that lies in shards already: each rank packs what it has, columns meet where a scale needs all of them."""
    w = weight()
    mesh = cf.Mesh(a=4)
    found = packed(BUILT_IN[scheme], cf.distribute(w, spec, mesh))
    for mine, whole in zip(found.parts, BUILT_IN[scheme].pack(w).parts, strict=True):
        assert isinstance(mine, cf.DTensor) and torch.equal(mine.full(), whole)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("first", ["(a o)", "o"])
@pytest.mark.parametrize("rows_of_a_block", [1, 2, 100])
def test_a_lazy_weight_is_packed_while_it_is_read(
    scheme: str, first: str, rows_of_a_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block, and each row once where rows lie on ranks; once more for what is of the whole weight."""
    monkeypatch.setattr("colofunc.ops.quantizers.BLOCK_BYTES", rows_of_a_block * 256 * 4)
    w, read = weight(), []

    def rows(box: tuple[slice, ...]) -> torch.Tensor:
        read.append(box[0])
        return w[box]

    lazy = lazy_tensor(w.shape, w.dtype, lambda: pytest.fail("the whole was made"), rows)
    found = packed(BUILT_IN[scheme], lazy)
    assert not read
    mesh, whole = cf.Mesh(a=2), BUILT_IN[scheme].pack(w)
    for mine, wanted in zip(found.parts, whole.parts, strict=True):
        second = "(a i)" if first == "o" else "i"
        spec = f"{first} {second}" if wanted.dim() == 2 else first
        assert torch.equal(cf.distribute(mine, spec, mesh).full(), wanted)
    assert max(rows.stop - rows.start for rows in read) <= rows_of_a_block
    times = 1 + BUILT_IN[scheme].by_largest
    if first == "(a o)":
        assert Counter(row for rows in read for row in range(rows.start, rows.stop)) == dict.fromkeys(range(12), times)


def test_a_lazy_weight_that_is_made_whole_is_packed_too() -> None:
    w = weight()
    found = packed(BUILT_IN["nf4"], lazy_tensor(w.shape, w.dtype, partial(torch.clone, w)))
    for mine, wanted in zip(found.parts, BUILT_IN["nf4"].pack(w).parts, strict=True):
        assert torch.equal(cf.distribute(mine, "(a o) ..." if mine.dim() == 2 else "(a o)", cf.Mesh(a=4)).full(), wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_is_packed_block_by_block_as_at_once(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BUILT_IN[scheme].pack(weight())
    monkeypatch.setattr("colofunc.ops.quantizers.BLOCK_BYTES", 5 * 256 * 4)
    assert all(torch.equal(a, b) for a, b in zip(BUILT_IN[scheme].pack(weight()).parts, whole.parts, strict=True))


# ---- the operators ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_widened_weight(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colofunc.ops.quantized.WIDENED_BYTES", 1 << 12)  # several cuts
    scheme = next(one for one in BUILT_IN.values() if one.form == name)
    found = scheme.pack(weight())
    x = torch.randn(2, 3, 256, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(12).to(dtype).requires_grad_()
    wide = found.dequantize(torch.promote_types(dtype, torch.float32)).to(dtype)
    want = torch.nn.functional.linear(x, wide, bias)
    got = OPERATORS[name].linear(x, *found.parts, bias)
    exact = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, want, rtol=exact, atol=exact)
    g = torch.randn_like(want)
    for mine, one in zip(torch.autograd.grad(got, (x, bias), g), torch.autograd.grad(want, (x, bias), g), strict=True):
        torch.testing.assert_close(mine, one, rtol=exact, atol=10 * exact)


@pytest.mark.parametrize("name", FORMATS)
def test_operators_are_registered_right(name: str) -> None:
    """Schema, shapes without data, and the gradient of the gradient."""
    scheme = next(one for one in BUILT_IN.values() if one.form == name)
    parts = scheme.pack(weight()).parts
    x = torch.randn(4, 256, dtype=torch.float64, requires_grad=True)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(OPERATORS[name].linear.op, (x, *parts, None), test_utils=checks)
    torch.library.opcheck(OPERATORS[name].linear_dx.op, (torch.randn(4, 12, dtype=torch.float64), *parts), test_utils=checks)
    torch.library.opcheck(OPERATORS[name].dequantize.op, (*parts, torch.float32), test_utils=checks[:2])
    assert torch.autograd.gradgradcheck(lambda x: OPERATORS[name].linear(x, *parts, None).square(), (x[:1].detach().requires_grad_(),))


def test_the_int8_product_has_the_signature_that_kernels_are_written_for() -> None:
    assert str(OPERATORS["int8"].linear.op._schema) == "colofunc::int8_linear(Tensor x, Tensor data, Tensor scale, Tensor? bias) -> Tensor"


def test_a_product_names_what_does_not_fit() -> None:
    found = BUILT_IN["int8"].pack(weight())
    said = r"int8_linear: x \(2, 100\) ends in 100, and a weight with data \(12, 256\) has 256 columns\. Try: x of shape \(2, 256\)"
    with pytest.raises(cf.RuleError, match=said):
        trace(lambda x, d, s: OPERATORS["int8"].linear(x, d, s, None), (torch.ones(2, 100), *found.parts))


# ---- as values of a state ----


def test_packed_weights_are_equal_bit_for_bit() -> None:
    w = weight()
    found = BUILT_IN["nf4"].pack(w)
    assert found.equal(BUILT_IN["nf4"].pack(w.clone())) and not found.equal(BUILT_IN["int8"].pack(w))
    w[0, 0] += 1
    assert not found.equal(BUILT_IN["nf4"].pack(w)) and not found.equal(w)


@pytest.mark.parametrize("use", ["a function", "an operator", "a list", "a method", "a model"])
def test_a_packed_weight_in_a_step_that_is_not_quantized_says_so(use: str) -> None:
    model = cf.functional(nn.Sequential(nn.Linear(8, 4)))
    state = cf.quantize(lambda p, x: model.apply(p, {}, x)[0], "fp8").init(model.params, torch.randn(2, 8))
    uses = {
        "a function": lambda p, x: torch.nn.functional.linear(x, p["0.weight"]),
        "an operator": lambda p, x: x * p["0.weight"],
        "a list": lambda p, x: torch.cat([x, p["0.weight"]]),
        "a method": lambda p, x: x @ p["0.weight"].t(),
        "a model": lambda p, x: model.apply(p, {}, x)[0],
    }
    with pytest.raises((cf.TraceError, AttributeError), match=r"quantized as 'fp8'.* Try: step = cf\.quantize\(step, "):
        cf.shard(uses[use], cf.Mesh())(state, torch.randn(2, 8))


def test_a_plan_says_which_weights_are_packed() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = cf.functional(layer)
    step = cf.quantize(cf.shard(lambda p, x: model.apply(p, {}, x)[0], cf.Mesh(dp=2)), "int8")
    (said,) = [note for note in step.lower(model.params, torch.randn(2, 4, 16)).plan.notes if note.startswith("weights in")]
    # out_proj, linear1, linear2: a byte a number and a scale of 4 a row
    nbytes = 16 * 16 + 2 * 16 * 32 + 4 * (16 + 32 + 16)
    assert said == f"weights in int8: 3, {nbytes / 1024:g} KiB; as they were: 'p.self_attn.in_proj_weight'"


def test_a_plan_takes_no_scale_of_an_unread_weight_for_a_matrix() -> None:
    params = {name: torch.randn(16, 256) for name in ("read.weight", "unread.weight")}
    step = cf.quantize(lambda p, x: x @ p["read.weight"].T, "int4-g128")
    (said,) = [note for note in step.lower(params, torch.randn(2, 256)).plan.notes if note.startswith("weights in")]
    assert said.startswith("weights in int4-g128: 1, ") and "as they were" not in said


def test_a_plan_takes_a_matrix_that_is_called_scale_for_one() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) @ self.scale

    model = cf.functional(Scaled())
    step = cf.quantize(lambda p, x: model.apply(p, {}, x)[0], "int8")
    (said,) = [note for note in step.lower(model.params, torch.randn(2, 8)).plan.notes if note.startswith("weights in")]
    assert said.startswith("weights in int8: 1, ") and said.endswith("; as they were: 'p.scale'")


def test_a_write_to_a_quantized_weight_is_an_error() -> None:
    def halved(params: Any, x: torch.Tensor) -> torch.Tensor:
        params["0.weight"].mul_(0.5)
        return x @ params["0.weight"].T

    with pytest.raises(cf.InputError, match=r"writes in place to a weight of \(12, 256\), and a quantized weight does not change"):
        cf.quantize(halved, "int8")({"0.weight": weight()}, torch.randn(2, 256))


def test_a_write_to_a_frozen_weight_that_is_read_packed_is_an_error() -> None:
    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner.weight.mul_(0.5)
            return self.inner(x)

    model = cf.functional(Halving(), trainable=())
    with pytest.raises(cf.InputError, match=r"writes in place to a weight of \(4, 8\)"):
        cf.quantize(lambda x: model.apply({}, {}, x)[0], "int8")(torch.randn(2, 8))


def test_weights_that_are_neither_given_nor_frozen_are_an_error_that_says_how() -> None:
    module, x = nn.Sequential(nn.Linear(8, 4)), torch.randn(2, 8)
    with pytest.raises(cf.InputError, match=r"matches no weight: .* Try: model = cf\.functional\(module, trainable=\(\)\)"):
        cf.quantize(module, "int8")(x)
    with pytest.raises(cf.InputError, match="matches no weight"):  # a batch is none
        cf.quantize(lambda x: module(x), "int8", where="*")(x)
    frozen = cf.functional(module, trainable=())
    step = cf.quantize(lambda x: frozen.apply({}, frozen.buffers, x)[0], "int8")
    out = step(x).full()
    assert torch.allclose(out, module(x), atol=0.05) and not torch.equal(out, module(x))


def test_a_state_has_one_leaf_in_the_weights_place() -> None:
    step_fn, params = forward()
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp")), "int8", where=WHERE)
    placed = step.init(params, tokens())
    assert placed.keys() == params.keys() and isinstance(placed["up.weight"], Quantized)
    assert repr(placed["up.weight"]) == "Quantized('int8', (256, 128), float32, 33,792 bytes)"
    assert [str(part.spec) for part in placed["up.weight"].parts] == ["(dp a) b", "(dp a)"]
    assert isinstance(placed["up.bias"], cf.DTensor)  # what no glob matches stays
    again = step(placed, tokens())
    torch.testing.assert_close(again.full(), step.eager(params, tokens()))
    assert step.lower(placed, tokens()).text() == step.lower(params, tokens()).text()
    found = step.compare(placed, tokens())
    assert found.equal and found.executed, found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_saved_and_loaded_onto_another_mesh(scheme: str, tmp_path: Path) -> None:
    step_fn, params = forward()
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp")), scheme, where=WHERE)
    placed = step.init(params, tokens())
    cf.save(tmp_path / "state", placed)
    other = cf.quantize(cf.shard(step_fn, cf.Mesh(tp=4)), scheme, where=WHERE)
    plain = cf.load(tmp_path / "state")
    assert isinstance(plain["up.weight"], Quantized) and plain["up.weight"].dtype is torch.float32
    assert all(torch.equal(a, b.full()) for a, b in zip(plain["up.weight"].parts, placed["up.weight"].parts, strict=True))
    like = other.init(params, tokens())
    loaded = cf.load(tmp_path / "state", like=like)
    assert loaded["up.weight"].data.sharding is like["up.weight"].data.sharding
    torch.testing.assert_close(other(loaded, tokens()).full(), step(placed, tokens()).full())


def test_a_state_that_comes_back_is_quantized_as_it_was() -> None:
    step_fn, params = forward()

    def counted(state: Any, batch: torch.Tensor) -> Any:
        return {"w": state["w"], "calls": state["calls"] + 1}, step_fn(state["w"], batch)

    step = cf.quantize(cf.shard(counted, cf.Mesh(dp=2)), "int8", where=WHERE)
    state = step.init({"w": params, "calls": torch.zeros(())}, tokens())
    for _ in range(2):
        state, out = step(state, tokens())
    assert isinstance(state["w"]["up.weight"], Quantized) and float(state["calls"]) == 2
    torch.testing.assert_close(out.full(), step.eager({"w": params, "calls": torch.zeros(())}, tokens())[1])


def test_specs_and_globs_that_mean_the_weight_mean_its_numbers() -> None:
    step_fn, params = forward()
    by_glob = cf.shard(step_fn, cf.Mesh(tp=2), {"up.weight": "(tp o) i"}, auto=False)
    tree = {name: "(tp o) i" if name == "up.weight" else None for name in params}
    by_tree = cf.shard(step_fn, cf.Mesh(tp=2), in_specs=(tree, None), auto=False)
    for sharded in (by_glob, by_tree):
        up = cf.quantize(sharded, "int4-g128", where=WHERE).init(params, tokens())["up.weight"]
        assert [str(part.spec) for part in up.parts] == ["(tp a) b", "(tp a) 1", "(tp a) 1"]


def test_what_is_no_product_reads_the_widened_weight() -> None:
    """A table, a convolution, a transposed product: packed in memory, widened in front of the operator, and of a table what is read."""
    torch.manual_seed(0)

    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 128)
            self.conv = nn.Conv1d(128, 64, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.table(x)
            return self.conv(rows.transpose(1, 2)).sum() + (rows @ self.table.weight.T).square().sum()

    model = cf.functional(Others())

    def step_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return model.apply(params, {}, x)[0]

    step = cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2)), "int8")
    program = step.lower(model.params, tokens()).program
    widened = [program.values[node.results[0]].shape for node in program.nodes if node.target == "colofunc.int8_dequantize"]
    assert len(widened) == 3 and {(16, 128), (64, 384)} <= set(widened)  # rows that were looked up, the table, the convolution
    with cf.testing.float64():
        assert cf.testing.check(step, model.params, tokens(), steps=1).worst <= 1e-10


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_table_over_ranks_is_looked_up_packed(scheme: str) -> None:
    """Only the rows that are found are widened, also where each rank has a part of the table."""
    torch.manual_seed(0)
    model = cf.functional(nn.Embedding(16, 256))
    sharded = cf.shard(lambda params, ids: model.apply(params, {}, ids)[0].square(), cf.Mesh(tp=2), {"weight": "(tp v) i"})
    step = cf.quantize(sharded, scheme, where="weight")
    program = step.lower(model.params, tokens()).program
    widened = [program.values[node.results[0]].shape for node in program.nodes if node.target.endswith("dequantize")]
    assert widened and all(rows <= tokens().numel() for rows, _ in widened)
    assert str(step.init(model.params, tokens())["weight"].data.spec) == "(tp a) b"
    with cf.testing.float64():
        assert cf.testing.check(step, model.params, tokens(), steps=1).worst <= 1e-10


def test_widened_weights_are_held_one_at_a_time() -> None:
    """Of eight convolutions in bf16, and their gradients, the largest is beside the packed ones, in bf16, and never two."""
    model = cf.functional(nn.Sequential(*[nn.Conv1d(64, 64, 3, padding=1) for _ in range(8)]))
    step = cf.quantize(cf.precision(lambda params, x: model.apply(params, {}, x)[0], "bf16"), "int8")
    low = step.lower(model.params, torch.ones(1, 64, 4))
    copies = low.memory().kinds().get("parameter copies", 0)
    assert 0 < copies < 2 * 64 * 192 * 2


def test_a_tied_table_is_looked_up_widened_and_multiplied_packed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 128)
            self.head = nn.Linear(128, 16, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(x))

    model = cf.functional(Tied())
    step = cf.quantize(lambda params, x: model.apply(params, {}, x)[0], "int8")
    low = step.lower(model.params, tokens())
    assert {"colofunc.int8_dequantize", "colofunc.int8_linear"} <= {node.target for node in low.program.nodes}
    torch.testing.assert_close(step(model.params, tokens()).full(), step.eager(model.params, tokens()))


def test_frozen_weights_take_a_quarter_of_the_memory() -> None:
    step_fn, state, model = step_of("adapters")
    plain = cf.shard(step_fn, cf.Mesh()).lower(state, tokens())
    small = cf.quantize(step_fn, "int8", where=WHERE).lower(state, tokens())
    frozen = [sum(v.nbytes for i in low.program.inputs if (v := low.program.values[i]).role == "frozen") for low in (plain, small)]
    saved = sum(model.frozen[name].numel() * 3 - model.frozen[name].shape[0] * 4 for name in WHERE)
    assert frozen[0] - frozen[1] == saved


def test_two_steps_share_what_they_have_packed() -> None:
    step_fn, state, model = step_of("adapters")
    step = cf.quantize(step_fn, "int8", where=WHERE)
    hidden = [{id(x) for x in step.lower(state, batch).hidden} for batch in (tokens(), tokens()[:4])]
    assert hidden[0] == hidden[1] and not hidden[0] & {id(model.frozen[name]) for name in WHERE}
    test = cf.quantize(lambda params, batch: model.apply(params, model.buffers, batch)[0], "int8", where=WHERE)
    assert {id(x) for x in test.lower(state["params"], tokens()).hidden} == hidden[0]


def test_what_is_packed_goes_away_with_its_steps() -> None:
    step_fn, state, model = step_of("adapters")
    low = cf.quantize(step_fn, "int8", where=WHERE).lower(state, tokens())
    packed_parts = [weakref.ref(x) for x in low.hidden if x.dtype is torch.int8]
    assert len(packed_parts) == 2
    del low
    gc.collect()
    assert not any(part() is not None for part in packed_parts) and model.frozen


def test_as_a_decorator() -> None:
    step_fn, params = forward()
    step = cf.quantize("int8", where=WHERE)(step_fn)
    assert isinstance(step.init(params, tokens())["up.weight"], Quantized)


# ---- plugins ----


class Coarse:
    """A plugin with a scheme: int8 of few levels."""

    __name__ = "coarse"

    @cf.hookimpl
    def colofunc_quantizers(self) -> Any:
        def quantize(w: torch.Tensor) -> dict[str, torch.Tensor]:
            scale = w.abs().amax(1).to(torch.float32) / 3
            return {"data": (w / scale.unsqueeze(1)).round().to(torch.int8), "scale": scale}

        return {"coarse": cf.ext.Quantizer("coarse", form="int8", quantize=quantize)}


def test_a_plugin_brings_a_scheme() -> None:
    step_fn, params = forward()
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2)), "coarse", where=WHERE, plugins=[Coarse()])
    placed = step.init(params, tokens())
    assert int(placed["up.weight"].data.full().abs().max()) == 3
    torch.testing.assert_close(step(placed, tokens()).full(), step.eager(params, tokens()))


class Plan:
    """A plan that is a plugin itself, with the same scheme."""

    __name__ = "with coarse"
    axes = ("dp",)
    colofunc_quantizers = Coarse.colofunc_quantizers

    def wishes(self, program: Any, mesh: Any) -> list[Any]:
        return []


@pytest.mark.parametrize("is_plan", [False, True], ids=["plugin", "plan"])
def test_a_scheme_of_the_step_that_it_is_put_around_is_known(is_plan: bool) -> None:
    """As a memory policy and a schedule of its plugins are."""
    step_fn, params = forward()
    mesh = cf.Mesh(dp=2)
    sharded = cf.shard(step_fn, mesh, Plan()) if is_plan else cf.shard(step_fn, mesh, plugins=[Coarse()])
    for step in (cf.quantize(sharded, "coarse", where=WHERE), cf.quantize("coarse", where=WHERE)(sharded)):
        assert int(step.init(params, tokens())["up.weight"].data.full().abs().max()) == 3


def test_a_scheme_of_a_plugin_that_comes_behind_is_asked_for() -> None:
    said = r"no scheme 'coarse'; schemes: .*\. If a plugin has it, shard first, .* or give it here too: cf\.quantize\(\.\.\., plugins="
    with pytest.raises(cf.InputError, match=said):
        cf.shard(cf.quantize(forward()[0], "coarse", where=WHERE), cf.Mesh(dp=2), plugins=[Coarse()])


def test_what_a_plugin_gives_is_looked_at() -> None:
    class Wrong:
        __name__ = "wrong"

        @cf.hookimpl
        def colofunc_quantizers(self) -> Any:
            return {"wrong": 3}

    said = r"colofunc_quantizers of plugin 'wrong': the value of 'wrong' is 3; give a cf\.ext\.Quantizer"
    with pytest.raises(cf.PluginError, match=said):
        build_registry((Wrong(),))
    said = r"Quantizer 'mine': there is no format 'int3'\. Try: one of int8, fp8, fp8_e5m2, fp8_g128, int4, nf4"
    with pytest.raises(cf.InputError, match=said):
        cf.ext.Quantizer("mine", form="int3", quantize=dict)


# ---- what it says to mistakes ----


@attrs.frozen
class Mistake:
    says: str
    options: dict[str, Any] = attrs.field(factory=dict)
    scheme: Any = "int8"


MISTAKES = {
    "scheme": Mistake("cf.quantize: there is no scheme 'int7'; did you mean 'int8'?", scheme="int7"),
    "no scheme": Mistake(
        "cf.quantize(scheme=None): give a scheme (int8, int8-dynamic, int4-g128, nf4, nf4-g64, fp8, fp8-e5m2, fp8-g128, fp8-dynamic, "
        "fp8-g128-dynamic, mxfp8, nvfp4), a cf.ext.Quantizer, or, for something else than weights, activations=, caches=, wire= or "
        "gathers=",
        scheme=None,
    ),
    "no glob": Mistake("cf.quantize(where=[]): give a glob over names of weights, or several. Try: where='*.weight'", {"where": []}),
    "glob": Mistake(
        "cf.quantize: where='upp.weight' matches no weight of the step; "
        "did you mean 'up.weight' or 'norm.weight' or 'down.weight'?",
        {"where": "upp.weight"},
    ),
    "vectors": Mistake(
        "cf.quantize: where='norm.weight' matches 'norm.weight', which is no weight: these have two dims",
        {"where": "norm.weight"},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(mistake: Mistake) -> None:
    step_fn, params = forward()
    with pytest.raises(cf.InputError) as caught:
        cf.quantize(step_fn, mistake.scheme, **mistake.options).lower(params, tokens())
    assert mistake.says in str(caught.value)


GROUPS = {"int4-g128": 128, "nf4": 64, "nf4-g64": 64, "fp8-g128": 128, "fp8-g128-dynamic": 128, "mxfp8": 32, "nvfp4": 16}


def test_every_scheme_in_groups_is_known_here() -> None:
    assert {name: scheme.format.group for name, scheme in BUILT_IN.items() if scheme.format.group > 1} == GROUPS


@pytest.mark.parametrize(("scheme", "group"), GROUPS.items())
def test_a_shape_that_a_scheme_cannot_take_is_named(scheme: str, group: int) -> None:
    model = cf.functional(nn.Linear(100, 8))
    step = cf.quantize(lambda params, x: model.apply(params, {}, x)[0], scheme, where="weight")
    said = (
        f"cf.quantize: 'weight' has shape (8, 100): {scheme} takes groups of {group} columns, and 100 is no multiple of it. Try: globs in "
        "where= that leave it out, or scheme 'int8'"
    )
    with pytest.raises(cf.InputError) as caught:
        step.lower(model.params, torch.ones(2, 100))
    assert str(caught.value) == said


def test_a_weight_that_is_quantized_already_is_named() -> None:
    step_fn, params = forward()
    placed = cf.quantize(step_fn, "int8", where=WHERE).init(params, tokens())
    said = r"cf\.quantize: 'up\.weight' is quantized already, as 'int8', and the step asks for 'nf4'\. Try: the scheme that it has, or"
    with pytest.raises(cf.InputError, match=said):
        cf.quantize(step_fn, "nf4", where=WHERE)(placed, tokens())


@pytest.mark.parametrize("scheme", ["int8", "nf4", "int4-g128"])
@pytest.mark.parametrize("spec", ["(3 tp o) i", "(3 tp dp o) i", "(3 tp o) (dp i)"])
def test_scales_of_striped_rows_lie_with_their_numbers(scheme: str, spec: str) -> None:
    """As of queries, keys and values in one weight."""
    model = cf.functional(nn.Linear(256, 24, bias=False).double())
    step = cf.shard(lambda params, x: model.apply(params, {}, x)[0], cf.Mesh(dp=2, tp=2), in_specs=({"weight": spec}, None))
    quantized, x = cf.quantize(step, scheme, where="weight"), torch.randn(4, 256, dtype=torch.float64)
    held = quantized.init(model.params, x)["weight"]
    rows = cf.Spec(spec).bind(cf.Mesh(dp=2, tp=2), (24, 256)).dims[0]
    assert [part.sharding.dims[0] for part in held.parts] == [rows] * len(held.parts)
    wanted = BUILT_IN[scheme].pack(model.params["weight"]).parts
    assert all(torch.equal(part.full(), whole) for part, whole in zip(held.parts, wanted, strict=True))
    cf.testing.check(quantized, model.params, x, steps=1)


class Fused(nn.Module):
    """Attention whose queries, keys and values are one product, and a product in another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.last = nn.Linear(128, 384), nn.Linear(128, 128), nn.Linear(128, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.last(self.proj(mixed.transpose(1, 2).flatten(2)))


def test_striped_rows_are_linked_beside_stages() -> None:
    """No scale is offered the axis of a pipeline, at whose indices weights exist."""
    model = cf.functional(Fused().double())
    step = cf.shard(lambda params, x: model.apply(params, {}, x)[0], cf.Mesh(pp=2, tp=2), tensor("1d", "tp"))
    step = cf.pipeline(step, microbatches=2, stages={"last.*": 1, "*": 0})
    quantized, x = cf.quantize(step, "nf4"), torch.randn(2, 4, 128, dtype=torch.float64)
    held = quantized.init(model.params, x)["qkv.weight"]
    assert all(part.sharding.dims[0] == held.data.sharding.dims[0] != ((384, None),) for part in held.parts)
    with cf.testing.float64():
        cf.testing.check(quantized, model.params, x, steps=1)


def test_scales_on_disk_keep_their_dtype_in_float64(tmp_path: Path) -> None:
    step_fn, params = forward()
    params = {name: p.double() for name, p in params.items()}
    with cf.testing.float64():
        step = cf.offload(cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2)), "int8", where=WHERE), policy="disk", disk=str(tmp_path))
        assert step.init(params, tokens())["up.weight"].scale.dtype is torch.float32
        cf.testing.check(step, params, tokens())


READ_ALIKE = [("int8", "int8-dynamic"), ("int8-dynamic", "int8"), ("fp8", "fp8-dynamic"), ("fp8-g128-dynamic", "fp8-g128")]


@pytest.mark.parametrize(("held", "asked"), READ_ALIKE)
def test_schemes_with_the_same_numbers_read_one_anothers_weights(held: str, asked: str) -> None:
    """They differ in what they do to inputs; the state stays what it is."""
    step_fn, params = forward()
    step = cf.quantize(step_fn, asked, where=WHERE)
    placed = cf.quantize(step_fn, held, where=WHERE).init(params, tokens())
    assert torch.equal(step(placed, tokens()), step(params, tokens()))
    assert step.init(placed, tokens())["up.weight"].scheme == held


def test_schemes_of_a_plugin_by_hand_read_one_anothers_weights() -> None:
    step_fn, params = forward()
    mine, rounding = (cf.ext.Quantizer(name, form="int8", quantize=BUILT_IN["int8"].quantize) for name in ("mine", "mine-dynamic"))
    rounding = attrs.evolve(rounding, outliers=math.inf)
    plugin = ModuleType("schemes_by_hand")
    plugin.colofunc_quantizers = cf.hookimpl(lambda: {each.name: each for each in (mine, rounding)})  # type: ignore[attr-defined]
    placed = cf.quantize(step_fn, "mine", where=WHERE, plugins=[plugin]).init(params, tokens())
    step = cf.quantize(step_fn, "mine-dynamic", where=WHERE, plugins=[plugin])
    assert torch.equal(step(placed, tokens()), step(params, tokens()))


def test_a_scheme_of_the_same_format_with_other_numbers_is_named() -> None:
    step_fn, params = forward()
    placed = cf.quantize(step_fn, "int8", where=WHERE).init(params, tokens())
    halves = cf.ext.Quantizer("halves", form="int8", quantize=lambda w: BUILT_IN["int8"].quantize(w / 2))
    said = r"'up\.weight' is quantized already, as 'int8', and the step asks for 'halves'\. Try: the scheme"
    with pytest.raises(cf.InputError, match=said):
        cf.quantize(step_fn, halves, where=WHERE)(placed, tokens())


def product() -> Any:
    return cf.shard(lambda params, x: x @ params["a.weight"].T, cf.Mesh(a=4))


def test_a_weight_of_a_scheme_that_is_made_for_each_weight_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers may be any, though it names the function of another scheme."""
    step_fn, params = forward()
    halves = cf.ext.Quantizer("halves", form="int8", quantize=lambda w: BUILT_IN["int8"].quantize(w / 2))
    mine = cf.ext.Quantizer("mine", form="int8", quantize=BUILT_IN["int8"].quantize, by_name=lambda name: attrs.evolve(halves, name="mine"))

    known = SimpleNamespace(quantizers={**BUILT_IN, "mine": mine})  # as an installed plugin brings it
    monkeypatch.setattr("colofunc.transforms.quantize.build_registry", lambda *plugins: known)
    placed = cf.quantize(step_fn, mine, where=WHERE).init(params, tokens())
    with pytest.raises(cf.InputError, match=r"'up\.weight' is quantized already, as 'mine', and the step asks for 'int8'"):
        cf.quantize(step_fn, "int8", where=WHERE)(placed, tokens())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["plain", "on ranks", "lazy"])
def test_a_weight_that_is_not_finite_is_named(scheme: str, kind: str) -> None:
    w = weight()
    w[7, 3] = float("inf" if scheme == "int8" else "nan")
    if kind == "on ranks":
        w = cf.distribute(w, "(a o) i", cf.Mesh(a=4))
    elif kind == "lazy":
        w = lazy_tensor(w.shape, w.dtype, partial(torch.clone, w), w.__getitem__)
    said = r"^cf\.quantize: 'a\.weight' has rows with NaN or infinite numbers, of which no scale can be made\. Try: the weights of an"
    with pytest.raises(cf.InputError, match=said):
        cf.quantize(product(), scheme).init({"a.weight": w}, torch.ones(2, 256))


BROKEN = {
    "dtype": (lambda w: attrs.evolve(w, data=w.data.to(torch.int8)), "its data is int8 (12, 128), and nf4 has uint8 (12, 128)"),
    "scale": (lambda w: attrs.evolve(w, scale=w.scale.float()), "its scale is float32 (12, 4), and nf4 has uint8 (12, 4)"),
    "rows": (lambda w: attrs.evolve(w, data=w.data[:6]), "its data is uint8 (6, 128), and nf4 has uint8 (12, 128)"),
    "part": (lambda w: attrs.evolve(w, outer=None), "it has 2 parts, and nf4 has 3"),
}


@pytest.mark.parametrize(("broken", "says"), BROKEN.values(), ids=BROKEN)
def test_parts_that_do_not_fit_are_named(broken: Any, says: str) -> None:
    with pytest.raises(cf.InputError) as caught:
        cf.quantize(product(), "nf4").lower({"a.weight": broken(BUILT_IN["nf4"].pack(weight()))}, torch.ones(2, 256))
    assert str(caught.value) == (
        f"cf.quantize: 'a.weight' is no weight of shape (12, 256) in 'nf4': {says}. Try: a checkpoint as cf.save writes it, or the weight "
        "that it was quantized from"
    )


def test_a_quantizer_that_breaks_its_format_is_named() -> None:
    wide = cf.ext.Quantizer("wide", form="int8", quantize=lambda w: {"data": w, "scale": w.amax(1)})
    said = (
        r"^cf\.quantize: the quantizer 'wide' gives 'a\.weight' of shape \(12, 256\) wrong parts: its data is float32 \(12, 256\), and "
        r"int8 has int8 \(12, 256\)\. Try: quantize= that returns them so$"
    )
    with pytest.raises(cf.InputError, match=said):
        cf.quantize(product(), wide).lower({"a.weight": weight()}, torch.ones(2, 256))


def test_a_trained_weight_is_named() -> None:
    model = cf.functional(Net())
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())
    said = r"cf\.quantize: the step returns 'params\.up\.weight' changed, and a quantized weight is not trained\. Try: globs in where="
    with pytest.raises(cf.InputError, match=said):
        cf.quantize(step_fn, "int8", where=WHERE).lower(state, tokens())


def test_a_trained_weight_is_named_as_another_output_too() -> None:
    """By an optimizer, whatever its name there, and by a sum; a gradient of its name and shape is none, nor a sum of another name."""
    optimizer = cf.adapt(torch.optim.AdamW, lr=0.1)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, params["up.weight"]).square().mean() + params["up.weight"].square().mean()

    def updated(params: Any, state: Any, x: torch.Tensor) -> Any:
        new, state = optimizer.update(cf.value_and_grad(loss)(params, x)[1], state, params)
        return loss(params, x), list(new.values()), state

    def by_hand(params: Any, x: torch.Tensor) -> Any:
        found, grads = cf.value_and_grad(loss)(params, x)
        return found, {"new": {name: params[name] - 0.1 * grads[name] for name in params}}

    params, x = {"up.weight": weight()}, torch.ones(2, 256)
    said = r"cf\.quantize: the step returns 'params\.up\.weight' changed as output 'out\.1\.%s', and a quantized weight is not trained"
    with pytest.raises(cf.InputError, match=said % "0"):
        cf.quantize(cf.shard(updated, cf.Mesh(dp=2)), "int8").lower(params, optimizer.init(params), x)
    with pytest.raises(cf.InputError, match=said % r"new\.up\.weight"):
        cf.quantize(by_hand, "int8").lower(params, x)
    for fine in (cf.value_and_grad(loss), lambda params, x: (x.sum(), {"down.weight": params["up.weight"] + 1})):
        step = cf.quantize(fine, "int8")
        torch.testing.assert_close(step(params, x)[0].full(), step.eager(params, x)[0])


def test_a_tied_weight_of_which_one_name_is_left_out_is_named() -> None:
    w = torch.ones(8, 128)
    said = r"cf\.quantize: 'a\.weight' is tied to 'b', which where= leaves as it is, so that the two would differ\. Try: globs for both"
    with pytest.raises(cf.InputError, match=said):
        cf.quantize(lambda p, x: x @ p["a.weight"].T + x @ p["b"].T, "int8").lower({"a.weight": w, "b": w}, torch.ones(2, 128))


def test_quantized_twice_is_a_mistake() -> None:
    said = r"quantize is applied twice to one step\. Try: one cf\.quantize with the globs of all weights in where="
    with pytest.raises(cf.PlanError, match=said):
        cf.quantize(cf.quantize(len, "int8"), "nf4")


def test_an_index_with_parts_that_do_not_fit_is_refused(tmp_path: Path) -> None:
    found = BUILT_IN["int8"].pack(weight())
    cf.save(tmp_path / "w", {"w": attrs.evolve(found, form="nf4", scheme="nf4")})
    said = r"the index holds a quantized weight of the format 'nf4' with data, scale, which this version does not know"
    with pytest.raises(cf.CheckpointError, match=said):
        cf.load(tmp_path / "w")


def test_a_tied_weight_that_goes_by_another_name_is_said_by_both() -> None:
    model, ids = cf.functional(Tied()), torch.tensor([[1, 2]])

    def forward(params: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.apply(params, {}, ids)[0]

    says = (
        "cf.quantize: where='head.weight' matches 'head.weight', which is tied to 'table.weight' and goes by that name. "
        "Try: where='table.weight', which quantizes it wherever it is read"
    )
    with pytest.raises(cf.InputError, match=re.escape(says)):
        cf.quantize(forward, "int8", where="head.weight").lower(model.params, ids)
    cf.quantize(forward, "int8", where="table.weight").lower(model.params, ids)


@pytest.mark.parametrize("given", ["params", "parameters", "placed"])
def test_weights_that_say_so_are_quantized_in_any_argument(given: str) -> None:
    torch.manual_seed(0)
    model = cf.functional(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    x = torch.randn(8, 64)

    def first(w, x):
        return model.apply(w, {}, x)[0]

    def second(x, w):
        return model.apply(w, {}, x)[0]

    weights = dict(model.params)
    if given == "parameters":
        weights = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
    if given == "placed":
        weights = cf.shard(first, cf.Mesh(dp=2)).init(weights, x)
    want = cf.quantize(cf.shard(first, cf.Mesh(dp=2)), "int8")(model.params, x).full()
    step = cf.quantize(cf.shard(second, cf.Mesh(dp=2)), "int8")
    assert torch.equal(step(x, weights).full(), want)
    assert {leaf.role for leaf in step.lower(x, weights).plan.inputs if leaf.name.startswith("w.0.weight")} == {"frozen"}


def test_weights_that_say_nothing_are_looked_for_in_argument_0() -> None:
    model = cf.functional(nn.Sequential(nn.Linear(64, 64)))
    weights = {name: value.clone() for name, value in model.params.items()}
    said = (
        r"where='\*.weight' matches '0.weight' of argument 1, which does not say that it is a weight.* "
        r"Try: cf.functional\(module\).params or an nn.Parameter.*or the weights as argument 0"
    )
    with pytest.raises(cf.InputError, match=said):
        cf.quantize(lambda x, w: model.apply(w, {}, x)[0], "int8").lower(torch.randn(8, 64), weights)


def test_a_quantized_state_leaves_weights_beside_it_as_they_are() -> None:
    """What trains beside it has weights of the same names: only the argument with the first ones is meant."""
    base, head = cf.functional(nn.Sequential(nn.Linear(64, 64))), cf.functional(nn.Sequential(nn.Linear(64, 64)))

    def step(frozen, trained, x):
        return cf.value_and_grad(lambda p: head.apply(p, {}, base.apply(frozen, {}, x)[0])[0].square().mean())(trained)

    low = cf.quantize(step, "int8").lower(base.params, head.params, torch.randn(8, 64))
    dtypes = {leaf.name: low.program.values[id].dtype for leaf, id in zip(low.plan.inputs, low.program.inputs)}
    assert dtypes["frozen.0.weight"] is torch.int8 and dtypes["trained.0.weight"] is torch.float32
