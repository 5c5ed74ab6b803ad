"""awq and smoothquant: against their equations, on every mesh, what they are good for, and what they say to mistakes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero
from quantize_matrix import MODES, WHERE, Net, scheme_of, step_of, tokens
from torch import nn

import colofunc as cf
from colofunc.compiler.quantized_weights import packed
from colofunc.functional.checkpoint.index import index_bytes
from colofunc.ops.input_scales import ALPHAS
from colofunc.ops.quantized import Quantized, unpacked
from colofunc.ops.quantized_inputs import rounded_rows
from colofunc.ops.quantizers import BUILT_IN, int4
from colofunc.program.lazy import lazy_tensor

SCALED = ("awq", "smoothquant")
"""The calibrated schemes whose weights keep a scale of inputs; gptq's do not."""
NO_OUTLIERS_KEPT = cf.ext.Quantizer("w8a8", form="int8", quantize=BUILT_IN["int8"].quantize, outliers=float("inf"))
"""W8A8 that rounds all inputs."""


def inputs(rows: int = 512, columns: int = 256, seed: int = 0) -> torch.Tensor:
    """Inputs of which a few channels are 20 to 60 times as large as the others."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, dtype=torch.float64, generator=draw)
    x[:, [3, 40, 77, 200]] *= torch.tensor([20.0, 60.0, 30.0, 40.0], dtype=torch.float64)
    return x


def weight(rows: int = 12, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def scheme_for(name: str, x: torch.Tensor) -> cf.ext.Quantizer:
    """Calibrated with inputs (rows, i) of a weight "w"."""
    scheme = cf.awq({"w": x.T @ x}) if name == "awq" else cf.smoothquant({"w": x.abs().amax(0)})
    return scheme.named("w")


def input_scale(weight: Quantized) -> torch.Tensor:
    assert weight.input_scale is not None
    return weight.input_scale


# ---- the equations ----


def kept(x: torch.Tensor) -> torch.Tensor:
    """As scales are kept: in float32."""
    return x.float().double()


def test_awq_has_the_exponent_with_the_least_error_of_outputs() -> None:
    """Against outputs on the calibration inputs themselves, every exponent played in full."""
    x, w = inputs(), weight()
    size = x.square().mean(0).sqrt()
    played = []
    for alpha in ALPHAS:
        s = size**alpha
        s = kept(s / (s.max() * s.min()).sqrt())
        numbers, wide = torch.empty_like(w), torch.empty_like(w)
        for first in (0, 128):
            group = (w * s)[:, first : first + 128]
            least, largest = group.min(1, keepdim=True).values, group.max(1, keepdim=True).values
            scale = kept((largest - least) / 15)
            zero = (-least / scale).round()
            own = ((group / scale).round() + zero).clamp(0, 15)
            numbers[:, first : first + 128] = own
            wide[:, first : first + 128] = (own - zero) * scale
        error = F.linear(x, wide / s - w).square().sum()
        played.append((float(error), s, numbers, wide / s))
    best = min(played, key=lambda one: one[0])
    assert best[0] < 0.5 * played[0][0]  # nothing scaled
    found = scheme_for("awq", x).pack(w)
    torch.testing.assert_close(input_scale(found).double(), best[1], rtol=1e-7, atol=0)
    assert torch.equal(unpacked(found.data).double(), best[2])
    torch.testing.assert_close(found.dequantize(), best[3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.75, 1.0])
def test_smoothquant_has_its_equation(alpha: float) -> None:
    """s to a constant, which no rounding sees; the numbers; and the product as one of whole numbers."""
    x, w = inputs(), weight()
    found = cf.smoothquant({"w": x.abs().amax(0)}, alpha).named("w").pack(w)
    s = input_scale(found).double()
    ratio = s / (x.abs().amax(0) ** alpha / w.abs().amax(0) ** (1 - alpha))
    torch.testing.assert_close(ratio, ratio[0].expand(256), rtol=1e-6, atol=0)
    if alpha == 0.5:  # as hard to round on both sides
        sides = (x / s).abs().amax(0) / (w * s).abs().amax(0)
        torch.testing.assert_close(sides, sides[0].expand(256), rtol=1e-6, atol=0)
    unit = kept((w * s).abs().amax(1) / 127)
    numbers = (w * s / unit.unsqueeze(1)).round()
    assert torch.equal(found.data.double(), numbers)
    rows = (x / s).abs().amax(1, keepdim=True) / 127
    wanted = ((x / s / rows).round().long() @ numbers.long().T) * rows * unit
    got = F.linear(rounded_rows(x / s, float("inf")), found.for_divided_inputs(torch.float64))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SCALED)
def test_channels_that_calibration_has_not_seen_are_rounded_as_others(name: str) -> None:
    x, w = inputs(), weight()
    x[:, 10:20], w[:, 30] = 0, 0
    wide = scheme_for(name, x).pack(w).dequantize()
    assert not wide[:, 30].any()
    off = (wide - w).square().mean(0)
    assert float(off[10:20].max()) < 4 * float(off.median())
    nothing_seen = scheme_for(name, torch.zeros_like(x)).pack(w)
    if name == "awq":  # then nothing is scaled
        for mine, one in zip(nothing_seen.parts, BUILT_IN["int4-g128"].pack(w).parts, strict=True):
            assert torch.equal(mine, one)
    assert float((nothing_seen.dequantize() - w).abs().max()) < 0.5


# ---- calibration ----


@pytest.mark.parametrize("plan", ["zero3", "columns", "auto"])
def test_maxima_on_a_mesh_are_those_of_one_device(plan: str) -> None:
    step_fn, params, _ = step_of("arguments")
    plans = {"zero3": [zero(3, "dp")], "columns": [{"up.weight": "(tp o) i"}], "auto": []}[plan]
    step = cf.shard(cf.input_maxima(step_fn, where=WHERE), cf.Mesh(dp=2, tp=2), *plans)
    with cf.testing.float64():
        cf.testing.check(step, params, tokens(), steps=1)
    found = step(params, tokens())
    net = Net()
    net.load_state_dict(params)
    seen: dict[str, torch.Tensor] = {}
    for name in ("up", "down"):
        net.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].flatten(0, 1)}))
    net(tokens())
    assert found.keys() == set(WHERE)
    for name in ("up", "down"):
        torch.testing.assert_close(found[f"{name}.weight"].full(), seen[name].abs().amax(0))


# Spelt out: of what is measured alone the last product is not computed, so a calibration step of this net has no pair for tensor("1d").
MEGATRON = {"up.weight": "(tp o) i", "down.weight": "o (tp i)"}
MESHES = {
    "one device": lambda step: cf.shard(step, cf.Mesh()),
    "tp=2": lambda step: cf.shard(step, cf.Mesh(tp=2), MEGATRON),
    "dp=2, tp=2": lambda step: cf.shard(step, cf.Mesh(dp=2, tp=2), zero(1, "dp"), MEGATRON),
}


@pytest.mark.parametrize("name", SCALED)
def test_calibration_and_packing_are_bit_equal_on_every_mesh(name: str) -> None:
    """From the calibration step to the packed tensors, calibrated and quantized on the same mesh."""
    step_fn, params, _ = step_of("arguments")
    measure, make = (cf.input_moments, cf.awq) if name == "awq" else (cf.input_maxima, cf.smoothquant)
    on_mesh = {}
    for mesh, place in MESHES.items():
        with cf.testing.float64():
            measured = [place(measure(step_fn, where=WHERE))(params, batch) for batch in (tokens(), tokens().flip(0)[:4])]
        scheme = make(measured)
        placed = cf.quantize(place(step_fn), scheme, where=WHERE).init(params, tokens())
        on_mesh[mesh] = [tensor.full() for weight in WHERE for tensor in placed[weight].tensors]
    alone = on_mesh.pop("one device")
    assert len(alone) == (8 if name == "awq" else 6)
    for mesh, tensors in on_mesh.items():
        assert all(torch.equal(mine, one) for mine, one in zip(tensors, alone, strict=True)), mesh


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("spec", ["(a o) i", "o (a i)"])
def test_a_weight_on_ranks_is_packed_as_on_one_device(name: str, spec: str) -> None:
    scheme, w = scheme_for(name, inputs()), weight().float()
    found = packed(scheme, cf.distribute(w, spec, cf.Mesh(a=2)))
    for mine, whole in zip(found.tensors, scheme.pack(w).tensors, strict=True):
        assert torch.equal(mine, whole)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("in_parts", [True, False])
def test_a_lazy_weight_is_scaled_by_all_of_its_rows(name: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, w, read = scheme_for(name, inputs()), weight().float(), []
    whole = scheme.pack(w)
    monkeypatch.setattr("colofunc.ops.quantizers.BLOCK_BYTES", 5 * 256 * 4)

    def rows(box: tuple[slice, ...]) -> torch.Tensor:
        read.append(box[0])
        return w[box]

    lazy = lazy_tensor(w.shape, w.dtype, partial(torch.clone, w), rows if in_parts else None)
    found = packed(scheme, lazy)
    assert not read
    for mine, one in zip(found.tensors, whole.tensors, strict=True):
        assert torch.equal(cf.distribute(mine, "(a o) ..." if mine.dim() == 2 else "(a o)", cf.Mesh(a=2)).full(), one)
    assert not in_parts or max(rows.stop - rows.start for rows in read) <= 5
    assert sum(rows.stop - rows.start for rows in read) == (24 if in_parts else 0)  # for the scale, and to be packed


# ---- in a step ----


def test_inputs_are_divided_in_front_of_packed_products() -> None:
    """And Megatron's pair sends what it sends without scales."""
    step_fn, params, _ = step_of("arguments")
    for name, sum_and_more in (("awq", ["sum"]), ("smoothquant", ["max", "sum"])):
        low = cf.quantize(MODES["tensor"].place(step_fn), scheme_of(name), where=WHERE).lower(params, tokens())
        targets = [node.target for node in low.global_program.nodes]
        assert targets.count("aten.div.Tensor") == 2 and not any("dequantize" in target for target in targets)
        assert [node.args[-1] for node in low.program.nodes if "all_" in node.target] == sum_and_more


@pytest.mark.parametrize("kind", ["arguments", "adapters"])
def test_the_scale_is_frozen_and_named_after_its_weight(kind: str) -> None:
    step_fn, state, _ = step_of(kind)
    program = cf.quantize(step_fn, scheme_of("smoothquant"), where=WHERE).lower(state, tokens()).global_program
    roles = {program.values[id].name: program.values[id].role for id in program.inputs}
    prefix = "params" if kind == "arguments" else "frozen"
    assert {name: roles.get(name) for name in (f"{prefix}.{w}.input_scale" for w in WHERE)} == {
        f"{prefix}.up.weight.input_scale": "frozen", f"{prefix}.down.weight.input_scale": "frozen",
    }  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_it_is_one_leaf_that_is_saved_and_loaded_onto_another_mesh(name: str, tmp_path: Path) -> None:
    step_fn, params, _ = step_of("arguments")
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp")), scheme_of(name), where=WHERE)
    placed = step.init(params, tokens())
    size = {"awq": 18_176, "smoothquant": 34_304}[name]
    assert repr(placed["up.weight"]) == f"Quantized('{name}', (256, 128), float32, {size:,} bytes)"
    cf.save(tmp_path / "state", placed)
    plain = cf.load(tmp_path / "state")
    other = cf.quantize(cf.shard(step_fn, cf.Mesh(tp=2), tensor("1d", "tp")), scheme_of(name), where=WHERE)
    loaded = cf.load(tmp_path / "state", like=other.init(params, tokens()))
    for mine, one, again in zip(placed["up.weight"].tensors, plain["up.weight"].tensors, loaded["up.weight"].tensors, strict=True):
        assert torch.equal(mine.full(), one) and torch.equal(again.full(), one)
    torch.testing.assert_close(other(loaded, tokens()).full(), step(placed, tokens()).full(), rtol=1e-3, atol=1e-3)


def test_a_weight_that_was_saved_before_there_were_scales_is_loaded(tmp_path: Path) -> None:
    """Its index does not have the field."""
    w = BUILT_IN["int8"].pack(weight().float())
    cf.save(tmp_path / "state", {"weight": w})
    index = tmp_path / "state" / "colofunc.json"
    checkpoint = json.loads(index.read_bytes())["checkpoint"]
    fields = checkpoint["state"]["dict"]["weight"]["record"]
    fields.remove([{"value": "input_scale"}, {"value": None}])
    index.write_bytes(index_bytes(checkpoint))
    for loaded in (cf.load(tmp_path / "state"), cf.load(tmp_path / "state", like={"weight": w})):
        assert isinstance(loaded["weight"], Quantized) and loaded["weight"].input_scale is None
        assert torch.equal(loaded["weight"].dequantize(), w.dequantize())
    scaled = scheme_for("smoothquant", inputs()).pack(weight().float())
    with pytest.raises(cf.CheckpointError, match=r"missing 'weight\.input_scale'"):
        cf.load(tmp_path / "state", like={"weight": scaled})


def test_saved_weights_need_no_calibration() -> None:
    """A scheme of the same name reads them packed, from what is kept in them."""
    step_fn, params, _ = step_of("arguments")
    state = {**params, **{name: scheme_of("awq").named(name).pack(params[name]) for name in WHERE}}
    reads = cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2)), cf.ext.Quantizer("awq", form="int4", quantize=int4), where=WHERE)
    targets = [node.target for node in reads.lower(state, tokens()).global_program.nodes]
    assert targets.count("colofunc.int4_linear") == 2 and targets.count("aten.div.Tensor") == 2
    wanted = cf.quantize(step_fn, scheme_of("awq"), where=WHERE)(params, tokens())
    torch.testing.assert_close(reads(state, tokens()).full(), wanted.full())


@pytest.mark.parametrize("policy", [None, "bf16"])
def test_what_is_no_linear_layer_reads_the_weight_itself(policy: str | None) -> None:
    """A table that is looked up, multiplied as a linear layer, and transposed: rows are widened, and for the last the whole table."""
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.tanh(self.table(x))
            return F.linear(rows, self.table.weight) + rows @ self.table.weight.T

    model = cf.functional(Tied())

    def step_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return model.apply(params, {}, x)[0]

    scheme = cf.awq(cf.input_moments(step_fn)(model.params, tokens()))
    w = scheme.named("table.weight").pack(model.params["table.weight"])
    assert float((input_scale(w) - 1).abs().max()) > 0.01
    mixed = step_fn if policy is None else cf.precision(step_fn, policy)
    step = cf.quantize(cf.shard(mixed, cf.Mesh(dp=2)), scheme)
    targets = [node.target for node in step.lower(model.params, tokens()).global_program.nodes]
    assert targets.count("colofunc.int4_dequantize") == 2 and targets.count("colofunc.int4_linear") == 1
    wide = step_fn({"table.weight": w.dequantize()}, tokens())
    exact = 1e-5 if policy is None else 0.2
    torch.testing.assert_close(step(model.params, tokens()).full().float(), wide, rtol=exact, atol=exact)
    if policy is None:
        with cf.testing.float64():
            assert cf.testing.check(step, model.params, tokens(), steps=1).worst <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_table_that_is_tied_only_rows_that_are_found_are_widened(dtype: torch.dtype) -> None:
    def tied(params: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = params["table"].to(dtype)
        rows = F.embedding(x, table)
        return rows, F.linear(rows, table)

    table = torch.randn(500, 128, generator=torch.Generator().manual_seed(3))
    scheme = cf.awq({"table": torch.diag(torch.linspace(1.0, 9.0, 128))})
    w = scheme.named("table").pack(table)
    step = cf.quantize(cf.shard(tied, cf.Mesh(dp=2)), scheme, where="table")
    program = step.lower({"table": table}, tokens()).global_program
    wide = [value for value in program.values.values() if value.shape == (500, 128) and value.dtype.is_floating_point]
    assert not wide
    divided = [program.values[node.results[0]].shape for node in program.nodes if node.target == "aten.div.Tensor"]
    assert sorted(divided) == [(8, 4, 128), (32, 128)]  # inputs of the layer, and rows of the table
    rows, outputs = (x.full() for x in step({"table": table}, tokens()))
    want_rows, want_outputs = tied({"table": w.dequantize()}, tokens())
    assert torch.equal(rows, want_rows)
    if dtype is torch.float32:
        torch.testing.assert_close(outputs, want_outputs, rtol=1e-5, atol=1e-4)


# ---- what it is good for ----


def relative_error(scheme: Any, x: torch.Tensor) -> float:
    """Of the outputs of a net, both of whose layers read a norm with a few channels that are many times as large as the others."""
    torch.manual_seed(3)
    norms = nn.LayerNorm(256), nn.LayerNorm(256)
    with torch.no_grad():
        for norm in norms:
            norm.weight[[3, 40, 77, 200]] = 40.0
    model = cf.functional(nn.Sequential(norms[0], nn.Linear(256, 256), norms[1], nn.Linear(256, 64)))

    def step_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return model.apply(params, {}, x)[0]

    where = ("1.weight", "3.weight")
    seen = torch.randn(512, 256, generator=torch.Generator().manual_seed(7))  # other rows than those that are asked about
    if scheme == "awq":
        scheme = cf.awq(cf.input_moments(step_fn, where)(model.params, seen))
    elif scheme == "smoothquant":
        scheme = cf.smoothquant(cf.input_maxima(step_fn, where)(model.params, seen))
    exact = step_fn(model.params, x)
    return float((cf.quantize(step_fn, scheme, where)(model.params, x).full() - exact).norm() / exact.norm())


def test_awq_is_nearer_than_the_nearest_levels() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(8))
    errors = {scheme: relative_error(scheme, x) for scheme in ("awq", "int4-g128")}
    assert errors["awq"] < 0.75 * errors["int4-g128"], errors


def test_smoothquant_is_nearer_than_inputs_that_are_rounded_as_they_are() -> None:
    """Than W8A8 of all inputs. `int8-dynamic`, which keeps outliers as they are, is nearer still: it rounds less."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(8))
    smoothed, kept, all_rounded = [relative_error(scheme, x) for scheme in ("smoothquant", "int8-dynamic", NO_OUTLIERS_KEPT)]
    assert kept < smoothed < 0.5 * all_rounded, (smoothed, kept, all_rounded)


# ---- what it says to mistakes ----

GOOD = torch.ones(128)
MISTAKES = {
    "nothing": (lambda: cf.smoothquant([]), "cf.smoothquant: there are no maxima. Try: those that a step of cf.input_maxima returns, or a"),
    "empty": (lambda: cf.awq({}), "cf.awq: there are no moments. Try: those that a step of cf.input_moments returns, or a list of them"),
    "alpha": (
        lambda: cf.smoothquant({"w": GOOD}, alpha=1.5),
        "cf.smoothquant(alpha=1.5): a part of what is moved, from 0 to 1. Try: alpha=0.5",
    ),
    "moments": (
        lambda: cf.smoothquant({"w": torch.eye(128)}),
        "cf.smoothquant: maxima of 'w' are (128, 128), and (i,) of a weight (o, i). Try: cf.input_maxima",
    ),
    "maxima": (lambda: cf.awq({"w": GOOD}), "cf.awq: moments of 'w' are (128,), and (i, i) of a weight (o, i). Try: cf.input_moments"),
    "infinite": (
        lambda: cf.smoothquant([{"w": GOOD}, {"w": GOOD / 0}]),
        "cf.smoothquant: the maxima of 'w' have NaN or infinite numbers, so its inputs had. Try: a calibration batch without them; "
        "low.check_finite(state, batch), which names where they come from",
    ),
}


@pytest.mark.parametrize(("mistake", "says"), MISTAKES.values(), ids=MISTAKES)
def test_measures_that_do_not_fit_are_named(mistake: Any, says: str) -> None:
    with pytest.raises(cf.InputError) as caught:
        mistake()
    assert str(caught.value).startswith(says)


def test_weights_that_were_not_calibrated_are_named() -> None:
    step_fn, params, _ = step_of("arguments")
    mistakes = (
        (
            cf.awq({"upp.weight": torch.eye(128)}),
            "cf.awq: there are no moments of 'up.weight'; did you mean 'upp.weight'? Try: cf.input_moments with the where= of",
        ),
        (cf.smoothquant({"w": GOOD}), "cf.smoothquant: there are no maxima of 'up.weight'"),
        (
            cf.smoothquant({"up.weight": torch.ones(64)}),
            "cf.smoothquant: 'up.weight' has 128 columns, and its maxima are (64,). Try: maxima of this model",
        ),
    )
    for scheme, says in mistakes:
        with pytest.raises(cf.InputError) as caught:
            cf.quantize(step_fn, scheme, where="up.weight").lower(params, tokens())
        assert str(caught.value).startswith(says)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_calibration_batch_of_no_numbers_is_named(bad: float) -> None:
    model = cf.functional(nn.Linear(128, 8))
    x = torch.randn(4, 128)
    x[1, 5] = bad
    for measure, make in ((cf.input_maxima, cf.smoothquant), (cf.input_moments, cf.awq)):
        step = cf.shard(measure(lambda params, x: model.apply(params, {}, x)[0], where="weight"), cf.Mesh(dp=2))
        with pytest.raises(cf.InputError, match=r"of 'weight' have NaN or infinite numbers, so its inputs had\. Try: a calibration batch"):
            make(step(model.params, x))


def test_shapes_and_weights_that_cannot_be_taken_are_named() -> None:
    model = cf.functional(nn.Linear(100, 8))

    def step_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return model.apply(params, {}, x)[0]

    scheme = cf.awq({"weight": torch.eye(100)})
    with pytest.raises(cf.InputError, match=r"'weight' has shape \(8, 100\): awq takes groups of 128 columns, and 100 is no multiple"):
        cf.quantize(step_fn, scheme, where="weight").lower(model.params, torch.ones(2, 100))
    said = r"^cf\.quantize: 'weight' has rows with NaN or infinite numbers, of which no scale can be made"
    for made in (cf.smoothquant({"weight": torch.ones(100)}), cf.awq({"weight": torch.eye(128)})):
        w = torch.ones(8, 128 if made.form == "int4" else 100)
        w[3, 4] = float("nan")
        with pytest.raises(cf.InputError, match=said):
            cf.quantize(lambda p, x: F.linear(x, p["weight"]), made, where="weight").lower({"weight": w}, torch.ones(2, w.shape[1]))


def test_a_scale_that_does_not_fit_is_named() -> None:
    step_fn, params, _ = step_of("arguments")
    w = scheme_of("smoothquant").named("up.weight").pack(params["up.weight"])
    with pytest.raises(cf.InputError) as caught:
        cf.quantize(step_fn, scheme_of("smoothquant"), where="up.weight").lower(
            {**params, "up.weight": attrs.evolve(w, input_scale=input_scale(w)[:64])}, tokens()
        )
    assert str(caught.value).startswith(
        "cf.quantize: 'up.weight' is no weight of shape (256, 128) in 'smoothquant': its input_scale is float32 (64,), and that of 128 "
        "columns is float32 (128,). Try: a checkpoint as cf.save writes it"
    )
