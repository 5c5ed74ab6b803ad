"""Inputs rounded to int8 while a step runs: against the definition in whole numbers, where they are rounded, and what for."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero
from quantize_matrix import WHERE, step_of, tokens
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from colofunc.ops.quantized import Quantized
from colofunc.ops.quantized_inputs import rounded_rows
from colofunc.ops.quantizers import BUILT_IN
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.passes.packed_gathers import gathered_packed
from colofunc.testing import check


def rows(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """(4, 3, 128), a column of which is large in most rows."""
    x = torch.randn(4, 3, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[..., 7] *= 40
    return x.to(dtype)


def test_a_product_is_one_of_whole_numbers_and_one_of_outliers() -> None:
    x, w = rows(), torch.randn(16, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    packed = BUILT_IN["int8-dynamic"].pack(w)
    large = x.abs() >= 6
    unit = x.masked_fill(large, 0).abs().amax(-1, keepdim=True) / 127
    numbers = (x / unit).round().masked_fill(large, 0).to(torch.int64)
    assert large.any() and not large.all() and int(numbers.abs().max()) == 127
    whole = torch.matmul(numbers, packed.data.to(torch.int64).T) * unit * packed.scale.double()
    wanted = whole + F.linear(x.masked_fill(~large, 0), packed.dequantize(torch.float64))
    got = F.linear(rounded_rows(x, 6.0), packed.dequantize(torch.float64))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_rows_result_depends_on_this_row_only(dtype: torch.dtype) -> None:
    x = rows(dtype)
    together = rounded_rows(x, 6.0)
    assert together.dtype is dtype and torch.equal(together[2, 1:2], rounded_rows(x[2, 1:2], 6.0))
    large = x.abs() >= 6
    assert torch.equal(together[large], x[large])
    assert bool(((together - x).abs() <= 6 / 127 * (0.51 if dtype.itemsize >= 4 else 1.0))[~large].all())


def test_zeros_outliers_alone_and_what_is_no_number_stay_as_they_are() -> None:
    x = torch.zeros(4, 8)
    x[1], x[2, 3], x[3, 0] = 100.0, float("nan"), float("inf")
    torch.testing.assert_close(rounded_rows(x, 6.0), x, rtol=0, atol=0, equal_nan=True)


def test_it_is_registered_right_and_gradients_go_through() -> None:
    x = rows().requires_grad_()
    torch.library.opcheck(rounded_rows.op, (x, 6.0), test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    g = torch.randn_like(x)
    (grad,) = torch.autograd.grad(rounded_rows(x, 6.0), x, g)
    assert torch.equal(grad, g)


@pytest.mark.parametrize("spec", ["(a b) s i", "b (a s) i", "b s (a i)"])
def test_rows_and_columns_on_ranks_are_rounded_as_on_one_device(spec: str) -> None:
    x = torch.cat([rows()] * 4, 1)
    step = cf.shard(lambda x: rounded_rows(x * 1.0, 6.0), cf.Mesh(a=4), in_specs=(spec,), out_specs=spec)
    assert torch.equal(step(x).full(), rounded_rows(x, 6.0))


def test_outliers_are_what_it_is_good_for() -> None:
    """A column 40 times as large: rounded with the rest it takes their digits, kept as it is it takes none."""
    x, w = rows(), torch.randn(16, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact = F.linear(x, w)
    errors = [float((F.linear(rounded_rows(x, threshold), w) - exact).norm() / exact.norm()) for threshold in (6.0, float("inf"))]
    assert errors[0] < 0.1 * errors[1], errors


# ---- in a step ----


def test_megatrons_row_product_takes_split_rows_for_one_number_a_row() -> None:
    step_fn, params, _ = step_of("arguments")
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(tp=2), tensor("1d", "tp")), "int8-dynamic", where=WHERE)
    low = step.lower(params, tokens())
    sent = [(low.program.values[node.outs[0]].shape, node.args[-1]) for node in low.program.nodes if "all_" in node.target]
    assert sent == [((8, 4), "max"), ((8, 4, 128), "sum")]


def rounded_in(step: Any, *args: Any) -> int:
    targets = [node.target for node in step.lower(*args).global_program.nodes]
    return targets.count("colofunc.int8_rows") + targets.count("colofunc.rounded_rows")


@pytest.mark.parametrize("kind", ["arguments", "adapters"])
@pytest.mark.parametrize("order", ["precision first", "precision last"])
def test_casts_of_weights_are_the_weights(kind: str, order: str) -> None:
    step_fn, state, _ = step_of(kind)
    if order == "precision first":
        step = cf.quantize(cf.precision(step_fn, "bf16"), "int8-dynamic", where=WHERE)
    else:
        step = cf.precision(cf.quantize(step_fn, "int8-dynamic", where=WHERE), "bf16")
    program = step.lower(state, tokens()).global_program
    ins = [program.values[node.refs[0]].dtype for node in program.nodes if node.target == "colofunc.int8_rows"]
    assert ins == [torch.bfloat16] * 2


def test_only_inputs_of_quantized_linear_layers_are_rounded() -> None:
    """Not those of other layers, nor of a convolution; those within attention with projections of its own are."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
            self.conv = nn.Conv1d(128, 128, 1)
            self.up, self.kept = nn.Linear(128, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.attention(x, x, x, need_weights=False)[0]
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
            return self.kept(self.up(x))

    model = cf.functional(Layers())

    def step_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return model.apply(params, {}, x)[0]

    x = torch.randn(2, 5, 128)
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2)), "int8-dynamic", where=("*_proj*weight", "conv.weight", "up.weight"))
    assert rounded_in(step, model.params, x) == 3  # in, out, up
    with cf.testing.float64():
        assert cf.testing.check(step, model.params, x, steps=1).worst <= 1e-10


def test_a_scheme_of_4_bits_may_round_inputs_too() -> None:
    step_fn, params, _ = step_of("arguments")
    scheme = cf.ext.Quantizer("w4a8", form="int4", quantize=BUILT_IN["int4-g128"].quantize, outliers=4.0)
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2)), scheme, where=WHERE)
    assert rounded_in(step, params, tokens()) == 2
    weights_alone = cf.quantize(step_fn, "int4-g128", where=WHERE)
    assert rounded_in(weights_alone, params, tokens()) == 0
    off = (step(params, tokens()).full() - weights_alone(params, tokens()).full()).abs().max()
    assert 0 < float(off) < 0.05


@pytest.mark.parametrize("outliers", [0.0, -1.0, float("nan")])
def test_a_threshold_that_rounds_nothing_is_named(outliers: float) -> None:
    with pytest.raises(cf.InputError, match=r"Quantizer 'mine': outliers=.* rounds no input\. Try: 6\.0, or None for inputs as they are"):
        cf.ext.Quantizer("mine", form="int8", quantize=dict, outliers=outliers)


def turned() -> tuple[Any, Any]:
    """A step that reads GPT-2's weights, which stand (in, out), and its parameters."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=128, n_head=2, vocab_size=64, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = cf.functional(GPT2LMHeadModel(config).double().eval())

    def logits(params: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.apply(params, model.buffers, input_ids=ids)[0].logits

    return logits, model.params


@pytest.mark.parametrize("scheme", ["int8", "nf4", "int4-g128"])
def test_weights_that_stand_turned_are_split_in_pairs_though_they_are_widened_first(scheme: str) -> None:
    """GPT-2 keeps its weights (in, out), so no product reads the packed rows: each is widened in front of it."""
    logits, params = turned()
    step = cf.quantize(cf.shard(logits, cf.Mesh(tp=2), tensor("1d", "tp")), scheme, where="*.c_*.weight")
    ids = torch.arange(32).view(4, 8)
    low = step.lower(params, ids)
    lies = {v.name.removeprefix("params.transformer.h.0."): v.layout for v in map(low.program.values.__getitem__, low.program.inputs)}
    assert all("tp" in str(lies[f"{part}.c_proj.weight"].dims[0]) for part in ("attn", "mlp"))
    assert all("tp" in str(lies[f"{part}.weight"].dims[1]) for part in ("attn.c_attn", "mlp.c_fc"))
    with cf.testing.float64():
        check(step, params, ids)


def test_weights_are_widened_in_each_microbatch() -> None:
    """All of them would lie beside the loop otherwise."""
    logits, params = turned()
    step, ids = cf.accumulate(cf.quantize(logits, "int8", where="*.c_*.weight"), 2), torch.arange(32).view(4, 8)
    nodes = step.lower(params, ids).program.nodes
    (loop,) = [node.loop for node in nodes if node.loop is not None]
    counts = [sum("dequantize" in node.target for node in some) for some in (nodes, loop.body.nodes)]
    assert counts == [0, 4]
    with cf.testing.float64():
        check(step, params, ids)


@pytest.mark.parametrize(("scheme", "again"), [("int8", False), ("nf4", True)])
def test_weights_that_are_widened_are_gathered_packed_for_microbatches(scheme: str, again: bool) -> None:
    """Of the widened ones all would lie beside the loop, and their gathers would send 4 to 8 times the bytes."""
    logits, params = turned()
    place = cf.shard(cf.quantize(logits, scheme, where="*.c_*.weight"), cf.Mesh(dp=2), zero(3, "dp", regather=again), in_specs=None)
    step, ids = cf.accumulate(place, 2), torch.arange(32).view(4, 8)
    low, held = step.lower(params, ids), step.init(params, ids)
    sent = low.cost().bytes["all_gather", "dp"]
    packed_bytes = sum(part.nbytes for leaf in held.values() if isinstance(leaf, Quantized) for part in leaf.parts)
    plain_bytes = sum(leaf.nbytes for leaf in held.values() if not isinstance(leaf, Quantized))
    (loop,) = [node.loop for node in low.program.nodes if node.loop is not None]
    inside = [target for node in loop.body.nodes if "all_gather" in (target := node.target)]
    assert sent <= (packed_bytes + plain_bytes) // 2 * (2 if again else 1) and bool(inside) == again
    assert sum("dequantize" in node.target for node in loop.body.nodes) == 4
    with cf.testing.float64():
        check(step, params, ids)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_weights_that_are_widened_are_gathered_packed_in_one_batch_too(scheme: str, compute: str) -> None:
    """Also where the clock of the search, which prices one collective at a time, would widen a shard: buckets join the packed ones."""
    torch.manual_seed(0)
    model = cf.functional(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Tanh(), nn.Conv2d(64, 64, 3, padding=1)))

    def forward(params: Any, x: torch.Tensor) -> torch.Tensor:
        return model.apply(params, model.buffers, x)[0]

    mesh, x = cf.Mesh(dp=2, topology="8xa100-80g"), torch.randn(4, 64, 4, 4)
    sharded = cf.precision(cf.shard(forward, mesh, zero(3, "dp")), compute)
    step = cf.quantize(sharded, scheme)
    program = step.lower(model.params, x).program
    gathered = [program.values[node.refs[0]] for node in program.nodes if node.target == "colofunc.all_gather_start"]
    packed_dtype = torch.int8 if scheme == "int8" else torch.uint8
    half_bytes = 64 * 64 * 9 if scheme == "int8" else 64 * 64 * 9 // 2
    assert sum(value.nbytes for value in gathered if value.dtype is packed_dtype) >= half_bytes
    assert all(value.dtype is packed_dtype or value.nbytes < 1024 for value in gathered)
    check(step, model.params, x)


@pytest.mark.parametrize("again", [False, True])
def test_backward_widens_weights_in_each_microbatch_too(again: bool) -> None:
    """It reads them turned: `dequantize`, then `t`. The turn follows into the loop, and behind a gather of packed tensors."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=128, n_head=2, vocab_size=64, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = cf.lora(cf.functional(GPT2LMHeadModel(config).double()), where="*.c_attn", rank=4)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.loss)
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp", regather=again)), "int8", where="*.c_*.weight")
    step, ids = cf.accumulate(step, 2), torch.arange(32).view(4, 8)
    batch = {"input_ids": ids, "labels": ids}
    nodes = step.lower(state, batch).program.nodes
    bodies = [node.loop.body for node in nodes if node.loop is not None]
    inside = [node for body in bodies for node in body.nodes]
    gathered = [body.values[node.refs[0]] for body in bodies for node in body.nodes if node.target == "colofunc.all_gather"]
    packed_bytes = sum(value.nbytes for value in gathered if value.dtype is torch.int8)
    float_bytes = sum(value.nbytes for value in gathered if value.dtype.is_floating_point)
    assert [sum("dequantize" in node.target for node in some) for some in (nodes, inside)] == [0, 7]
    # Forward reads 12 blocks of 128 x 128, backward the 9 that are not beside an adapter; tables, scales and biases are few floats.
    assert packed_bytes == (21 * 128 * 128 // 2 if again else 0) and float_bytes <= packed_bytes
    with cf.testing.float64():
        check(step, state, batch, steps=2)


def test_packed_tensors_are_gathered_in_front_of_all_that_read_them() -> None:
    """Two gathers of one weight, the second `dequantize` of which is gathered first, and turned."""
    mesh = cf.Mesh(dp=2)
    stripes, rows = (cf.Spec(spec).bind(mesh, shape) for spec, shape in (("(dp o) i", (8, 4)), ("(dp o)", (8,))))
    whole, turned_whole = cf.Spec("o i").bind(mesh, (8, 4)), cf.Spec("i o").bind(mesh, (4, 8))
    values = [
        Value(0, (4, 4), torch.int8, layout=stripes), Value(1, (4,), torch.float32, layout=rows),
        Value(2, (4, 4), torch.float32, layout=stripes), Value(3, (4, 4), torch.float32, layout=stripes), Value(4, (4, 4), torch.float32),
        Value(5, (2, 4, 4), torch.float32), Value(6, (4, 8), torch.float32, layout=turned_whole),
        Value(7, (2, 4, 4), torch.float32), Value(8, (8, 4), torch.float32, layout=whole),
    ]  # fmt: skip

    def node(target: str, args: tuple[Any, ...], out: int) -> Node:
        return Node(target, args, (), (out,), line="step.py:1")

    nodes = (
        node("colofunc.int8_dequantize", (Ref(0), Ref(1), torch.float32), 2),
        node("colofunc.int8_dequantize", (Ref(0), Ref(1), torch.float32), 3),
        node("aten.t.default", (Ref(3),), 4),
        node("colofunc.all_gather", (Ref(4), ("dp",), 2), 5),
        node("colofunc.rearrange", (Ref(5), "a b c -> b (a c)", (), ()), 6),
        node("colofunc.all_gather", (Ref(2), ("dp",), 2), 7),
        node("colofunc.rearrange", (Ref(7), "a b c -> (a b) c", (), ()), 8),
    )
    program = Program((0, 1), nodes, (6, 8), {value.id: value for value in values}, stage="local")
    gathered = gathered_packed(program)
    assert [node.target.split(".")[1] for node in gathered.nodes] == [
        "all_gather", "rearrange", "all_gather", "rearrange", "int8_dequantize", "t", "int8_dequantize",
    ]  # fmt: skip
    gathered.in_order()
