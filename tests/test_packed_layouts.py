"""Weights that other libraries have quantized: read bit for bit, on one device and on a mesh, written back, and refused where they must be.

What a library's tensors mean is written out here once more, plainly, from their documentation. The same formulas were compared with what
bitsandbytes 0.50, GPTQModel 7.7 and compressed-tensors 0.20 dequantize themselves.
"""

import json
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers as tr
from colofunc_plugins import tensor, zero
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import colofunc as cf
from colofunc.compiler.quantized_weights import packed
from colofunc.errors import CheckpointError
from colofunc.functional.checkpoint import files, packed_layouts
from colofunc.functional.checkpoint.disk import fetch
from colofunc.functional.checkpoint.libraries import library_of
from colofunc.functional.checkpoint.packed_layouts import layouts, packed_entries
from colofunc.integrations import formats
from colofunc.ops.quantized import NF4_LEVELS
from colofunc.ops.quantizers import BUILT_IN
from colofunc.plugins import build_registry
from colofunc.program.lazy import make, make_parts
from colofunc.program.lazy_packed import stored_in

MESH = cf.Mesh(dp=2, tp=2)
SHAPES = {"up": (256, 128), "down": (64, 256)}
Made = tuple[dict[str, Tensor], Tensor]


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = {name: nn.Linear(columns, rows, bias=False, dtype=dtype) for name, (rows, columns) in SHAPES.items()}
    return nn.Sequential(OrderedDict(layers))


def unbuilt(dtype: torch.dtype = torch.float32) -> Any:
    return cf.functional(cf.lazy(partial(net, dtype)))


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(len(name))


def integers(low: int, high: int, shape: tuple[int, ...], made: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=made)


# ---- what the libraries write, and the weight that it stands for ----


def nf4(name: str, shape: tuple[int, int], block: int = 64, twice: bool = False) -> Made:
    made = generator(name)
    rows, columns = shape
    numbers = integers(0, 16, (rows * columns,), made)
    count = rows * columns // block
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    found = {f"{name}.weight.quant_map": torch.tensor(NF4_LEVELS)}
    if twice:
        codes, values, outer = integers(0, 256, (count,), made), torch.linspace(-1, 1, 256), torch.rand(-(-count // 256), generator=made)
        state |= {"nested_blocksize": 256, "nested_offset": 1.25, "nested_dtype": "float32"}
        scales = torch.stack([values[codes[k]] * outer[k // 256] + 1.25 for k in range(count)])
        found |= {f"{name}.weight.absmax": codes.to(torch.uint8)}
        found |= {f"{name}.weight.nested_absmax": outer, f"{name}.weight.nested_quant_map": values}
    else:
        scales = torch.rand(count, generator=made)
        found[f"{name}.weight.absmax"] = scales
    found[f"{name}.weight"] = (numbers[0::2] * 16 + numbers[1::2]).to(torch.uint8).unsqueeze(1)
    found[f"{name}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    weight = torch.tensor(NF4_LEVELS)[numbers] * scales.repeat_interleave(block)
    return found, weight.reshape(shape)


def int8(name: str, shape: tuple[int, int]) -> Made:
    made = generator(name)
    numbers, largest = integers(-127, 128, shape, made).to(torch.int8), torch.rand(shape[0], generator=made)
    found = {f"{name}.weight": numbers, f"{name}.SCB": largest, f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return found, numbers * (largest / torch.tensor(127.0)).unsqueeze(1)


def in_words(numbers: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """int32 (a, b) of (a, 8 b): the number `order[k]` of eight in bits 4 k and on."""
    words = sum(numbers[:, order[k] :: 8].to(torch.int64) << (4 * k) for k in range(8))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def four_bits(name: str, shape: tuple[int, int], group: int = 128, least: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(numbers, zeros, scales, the weight)"""
    made = generator(name)
    rows, columns = shape
    numbers, zeros = integers(0, 16, shape, made), integers(least, 16, (rows, columns // group), made)
    scales = torch.rand(zeros.shape, generator=made).to(torch.float16)
    shifted = numbers - zeros.repeat_interleave(group, 1)
    return numbers, zeros, scales, shifted * scales.float().repeat_interleave(group, 1)


def gptq(name: str, shape: tuple[int, int], version: int = 1, whole: bool = False) -> Made:
    group = shape[1] if whole else 128
    numbers, zeros, scales, weight = four_bits(name, shape, group)
    found = {
        f"{name}.qweight": in_words(numbers).T.contiguous(),
        f"{name}.qzeros": in_words(zeros.T - int(version == 1)),
        f"{name}.scales": scales.T.contiguous(),
        f"{name}.g_idx": (torch.arange(shape[1]) // group).to(torch.int32),
    }
    return found, weight


def awq(name: str, shape: tuple[int, int]) -> Made:
    numbers, zeros, scales, weight = four_bits(name, shape, least=0)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    found = {
        f"{name}.qweight": in_words(numbers.T, order),
        f"{name}.qzeros": in_words(zeros.T, order),
        f"{name}.scales": scales.T.contiguous(),
    }
    return found, weight


def pack_quantized(name: str, shape: tuple[int, int], symmetric: bool = False) -> Made:
    numbers, zeros, scales, weight = four_bits(name, shape, least=0)
    found = {f"{name}.weight_packed": in_words(numbers), f"{name}.weight_shape": torch.tensor(shape)}
    found[f"{name}.weight_scale"] = scales.float()
    if symmetric:
        return found, (numbers - 8) * scales.float().repeat_interleave(128, 1)
    found[f"{name}.weight_zero_point"] = in_words(zeros.T).T.contiguous()
    return found, weight


def rows_in_8_bits(name: str, shape: tuple[int, int], dtype: torch.dtype = torch.int8, whole: bool = False) -> Made:
    made = generator(name)
    numbers = integers(-127, 128, shape, made).to(torch.int8)
    if dtype is not torch.int8:
        numbers = (numbers.float() / 16).to(dtype)
    scale = torch.rand(() if whole else (shape[0], 1), generator=made).to(torch.bfloat16)
    return {f"{name}.weight": numbers, f"{name}.weight_scale": scale}, numbers.float() * scale.float()


def blocks_in_float8(name: str, shape: tuple[int, int]) -> Made:
    """A last block of rows may be a part of one."""
    made = generator(name)
    numbers = (integers(-127, 128, shape, made).float() / 16).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), shape[1] // 128, generator=made)
    wide = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)
    return {f"{name}.weight": numbers, f"{name}.weight_scale_inv": scale}, numbers.float() * wide


@attrs.frozen
class Case:
    make: Any
    scheme: str
    layout: str
    config: dict[str, Any] = attrs.field(factory=dict)
    as_written: bool = True  # what is written of it are the tensors that were read


CASES = {
    "nf4": Case(nf4, "nf4-g64", "bitsandbytes-nf4"),
    "nf4 twice": Case(partial(nf4, twice=True), "nf4-g64", "bitsandbytes-nf4", as_written=False),
    "nf4 in blocks of 256": Case(partial(nf4, block=256), "nf4-g64", "bitsandbytes-nf4", as_written=False),
    "int8": Case(int8, "int8", "bitsandbytes-int8", as_written=False),  # some rows' largest have a neighbour with the same scale
    "gptq": Case(gptq, "int4-g128", "gptq"),
    "gptq_v2": Case(partial(gptq, version=2), "int4-g128", "gptq", {"checkpoint_format": "gptq_v2"}, as_written=False),
    "gptq of whole rows": Case(partial(gptq, whole=True), "int4-g128", "gptq", as_written=False),
    "awq": Case(awq, "int4-g128", "awq"),
    "pack-quantized": Case(pack_quantized, "int4-g128", "pack-quantized"),
    "pack-quantized, symmetric": Case(partial(pack_quantized, symmetric=True), "int4-g128", "pack-quantized", as_written=False),
    "int-quantized": Case(rows_in_8_bits, "int8", "int-quantized", as_written=False),  # scales are written in float32
    "float-quantized": Case(partial(rows_in_8_bits, dtype=torch.float8_e4m3fn), "fp8", "float-quantized", as_written=False),
    "finegrained-fp8": Case(blocks_in_float8, "fp8-g128", "finegrained-fp8"),
    "float-quantized, one scale": Case(
        partial(rows_in_8_bits, dtype=torch.float8_e4m3fn, whole=True), "fp8", "float-quantized", as_written=False
    ),
}


def written(case: Case, folder: Path) -> dict[str, Tensor]:
    """The folder of a library; the weights that it stands for."""
    tensors: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, shape in SHAPES.items():
        made, weights[f"{name}.weight"] = case.make(name, shape)
        tensors |= made
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": case.config}))
    return weights


def forward(model: Any) -> Any:
    def step(params: Any, x: Tensor) -> Tensor:
        out: Tensor = model.apply(params, model.buffers, x)[0]
        return out

    return step


def inputs() -> Tensor:
    return torch.randn(4, 128, generator=torch.Generator().manual_seed(0))


def full(part: Tensor) -> Tensor:
    return part.full() if isinstance(part, cf.DTensor) else make(part)


# ---- reading ----


@pytest.mark.parametrize("name", CASES)
def test_a_weight_is_what_the_library_reads(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    weights = written(case, tmp_path / "a")
    for dtype in (torch.float32, torch.bfloat16):
        model = cf.load(tmp_path / "a", model=unbuilt(dtype))
        assert all(torch.equal(make(model.params[key]), weight.to(dtype)) for key, weight in weights.items())
    placed = cf.load(tmp_path / "a", model=unbuilt(), mesh=MESH, specs={"*.weight": "(dp o) (tp i)"})
    assert all(torch.equal(placed.params[key].full(), weight) for key, weight in weights.items())
    plain = cf.load(tmp_path / "a", model=unbuilt(), device="cpu")
    assert all(torch.equal(plain.params[key], weight) for key, weight in weights.items())


@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_its_numbers_as_they_are(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    weights = written(case, tmp_path / "a")
    model = cf.load(tmp_path / "a", model=unbuilt())
    alone = cf.quantize(forward(model), case.scheme)
    held = alone.init(model.params, inputs())
    assert all(torch.equal(full(held[key].dequantize()), weight) for key, weight in weights.items())
    for plans in ((tensor("1d", "tp"),), (zero(3, "dp"),)):
        step = cf.quantize(cf.shard(forward(model), MESH, *plans), case.scheme)
        state = step.init(model.params, inputs())
        for key in weights:
            pairs = zip(state[key].parts, held[key].parts, strict=True)
            assert all(torch.equal(part.full(), full(whole)) for part, whole in pairs), key
        out = step(state, inputs()).full()
        want = inputs() @ weights["up.weight"].T @ weights["down.weight"].T
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize(("name", "scheme"), [("finegrained-fp8", "fp8-g128-dynamic"), ("float-quantized", "fp8-dynamic")])
def test_a_step_multiplies_the_float8_of_a_folder_in_float8(tmp_path: Path, name: str, scheme: str) -> None:
    weights = written(CASES[name], tmp_path / "a")
    model = cf.load(tmp_path / "a", model=unbuilt())
    kept = cf.quantize(forward(model), CASES[name].scheme).init(model.params, inputs())
    step = cf.quantize(cf.shard(forward(model), MESH, tensor("1d", "tp")), scheme)
    state = step.init(model.params, inputs())
    for key in weights:
        assert all(torch.equal(a.full(), full(b)) for a, b in zip(state[key].parts, kept[key].parts, strict=True)), key
    want = inputs() @ weights["up.weight"].T @ weights["down.weight"].T
    off = float((step(state, inputs()).full() - want).norm() / want.norm())
    assert 1e-3 < off < 0.1, "inputs of both layers are rounded, to 3 bits"


def test_a_rank_reads_its_rows_or_columns_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(CASES["nf4"], tmp_path / "a")
    model = cf.load(tmp_path / "a", model=unbuilt())
    found = packed(BUILT_IN["nf4-g64"], model.params["down.weight"], "down.weight")
    monkeypatch.setattr(files, "BLOCK_BYTES", 32)
    read: list[int] = []
    monkeypatch.setattr(files, "fetch", lambda path, blocks, done: read.extend(len(to) for _, to in blocks) or fetch(path, blocks, done))
    for spec in ("(tp o) i", "o (tp i)"):
        read.clear()
        layout = cf.Spec(spec).bind(MESH, tuple(found.data.shape))
        (part,) = make_parts(found.data, layout, MESH, [1])
        assert part.numel() == found.data.numel() // 2 and sum(read) == part.nbytes


class Scaled(nn.Module):
    """A layer that is not quantized, with parameters whose names quantized ones have."""

    def __init__(self, names: Sequence[str], weight: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        keys = ["weight", *names] if weight else names
        for number, name in enumerate(keys):
            self.register_parameter(name, nn.Parameter(torch.full((4, 4), float(number), dtype=dtype)))

    @staticmethod
    def alone(names: Sequence[str], weight: bool, dtype: torch.dtype) -> nn.Module:
        return nn.Sequential(Scaled(names, weight, dtype))


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize(
    "names",
    [
        ["weight_scale"],
        ["SCB", "weight_format"],
        ["qweight", "qzeros", "scales", "g_idx"],
        ["weight_packed", "weight_shape", "weight_scale"],
    ],
)
def test_a_plain_model_may_have_parameters_of_these_names(tmp_path: Path, names: list[str], weight: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = cf.functional(Scaled.alone(names, weight, dtype))
        cf.save_pretrained(model, None, tmp_path / str(dtype))
        again = cf.load(tmp_path / str(dtype), model=cf.functional(cf.lazy(partial(Scaled.alone, names, weight, dtype))))
        assert again.params.keys() == model.params.keys()
        assert all(torch.equal(make(again.params[key]), x) and stored_in(again.params[key]) is None for key, x in model.params.items())


class OwnScale(nn.Module):
    """A layer in 8 bits whose numbers and scales are the model's own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        numbers = torch.arange(-32, 32).reshape(8, 8)
        self.weight = nn.Parameter(numbers.to(dtype), requires_grad=False)
        self.register_buffer("weight_scale", torch.full((8, 1), 0.5))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_numbers_and_scales_that_the_model_has_itself_are_read_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    def built() -> nn.Module:
        return nn.Sequential(OwnScale(dtype))

    model = cf.functional(built())
    cf.save_pretrained(model, None, tmp_path / "a")
    again = cf.load(tmp_path / "a", model=cf.functional(cf.lazy(built)))
    read, scale = make(again.frozen["0.weight"]), make(again.buffers["0.weight_scale"])
    assert read.dtype is dtype and torch.equal(read.view(torch.uint8), model.frozen["0.weight"].view(torch.uint8))
    assert torch.equal(scale, model.buffers["0.weight_scale"])


def test_names_of_transformers_are_those_of_the_model(tmp_path: Path) -> None:
    """A base model's files lack the prefix that the whole model has."""
    config = tr.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    module = tr.GPT2LMHeadModel(config)
    module.transformer.h[0].mlp.register_buffer("weight_scale", torch.ones(8, 1))
    tensors = {"h.0.mlp.weight_scale": torch.full((8, 1), 2.0), "h.0.mlp.weight": torch.ones(8, 8, dtype=torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert packed_entries(tmp_path)["h.0.mlp.weight"].packed is not None
    assert packed_entries(tmp_path, library_of(module).has_name(module))["h.0.mlp.weight"].packed is None


def test_integers_beside_a_plain_weight_are_left_alone(tmp_path: Path) -> None:
    tensors = {f"up.{key}": torch.ones(4, 4, dtype=torch.int32) for key in ("qweight", "qzeros", "weight_packed", "weight_shape")}
    save_file(tensors | {"up.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    entries = packed_entries(tmp_path)
    assert all(entry.packed is None for entry in entries.values()) and entries.keys() == {*tensors, "up.weight"}


@pytest.mark.parametrize(
    ("key", "dtype", "scale"),
    [
        ("weight", torch.uint8, torch.bfloat16),  # BitNet
        ("weight", torch.uint8, torch.float8_e4m3fn),  # NVFP4 of ModelOpt
        ("weight", torch.float8_e5m2, torch.float32),
        ("weight_packed", torch.uint8, torch.float8_e4m3fn),  # NVFP4 of compressed-tensors
    ],
)
def test_a_layout_that_nobody_knows_is_named(tmp_path: Path, key: str, dtype: torch.dtype, scale: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"up.{key}": torch.ones(4, 4).to(dtype), "up.weight_scale": torch.ones(4, 1).to(scale)}, path)
    with pytest.raises(CheckpointError) as caught:
        cf.load(tmp_path, model=unbuilt())
    assert str(caught.value) == (
        f"{path}: 'up.{key}' is {str(dtype).removeprefix('torch.')} beside 'up.weight_scale', which is no layout of quantized weights that "
        "is known; known are bitsandbytes-nf4, bitsandbytes-int8, gptq, awq, pack-quantized, finegrained-fp8, int-quantized, "
        "float-quantized, torchao-int8, torchao-float8, torchao-int4, torchao-mxfp8, torchao-nvfp4. "
        "Try: the folder that it was made of, with its weights unquantized"
    )


def test_rows_of_symmetric_numbers_need_not_fill_words(tmp_path: Path) -> None:
    tensors, weight = pack_quantized("up", (12, 128), symmetric=True)
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)

    def build() -> nn.Module:
        return nn.Sequential(OrderedDict(up=nn.Linear(128, 12, bias=False)))

    model = cf.load(tmp_path, model=cf.functional(cf.lazy(build)))
    assert torch.equal(make(model.params["up.weight"]), weight) and stored_in(model.params["up.weight"]) is not None
    taken = cf.quantize(lambda params, x: x @ params["up.weight"].T, "int4-g128").init(model.params, inputs())["up.weight"]
    assert torch.equal(full(taken.dequantize()), weight)
    for layout in ("gptq", "awq", "pack-quantized"):
        said = rf"'up\.weight' has 12 rows, and the layout {layout!r} packs zeros of eight in an int32\. Try: layout=None"
        with pytest.raises(CheckpointError, match=said):
            cf.save_pretrained(model, None, tmp_path / layout, layout=layout)
    save_file(tensors | {"up.weight_zero_point": torch.zeros(2, 1, dtype=torch.int32)}, path)
    with pytest.raises(CheckpointError, match=r"'up\.weight_zero_point' is of 12 rows, and eight share an int32\. Try: symmetric=True"):
        cf.load(tmp_path, model=cf.functional(cf.lazy(build)))


def test_a_cast_weight_is_still_known(tmp_path: Path) -> None:
    written(CASES["nf4"], tmp_path / "a")
    weight = cf.load(tmp_path / "a", model=unbuilt()).params["up.weight"]
    assert stored_in(weight.detach().to(torch.bfloat16).clone()) is not None
    assert stored_in(weight * 2) is None
    found = packed(BUILT_IN["nf4-g64"], weight.detach().to(torch.bfloat16), "up.weight")
    assert found.dtype is torch.bfloat16 and found.form == "nf4_g64"


def test_tensors_of_a_layer_in_two_files_and_experts_that_are_stacked(tmp_path: Path) -> None:
    config = tr.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2,
        vocab_size=16, max_position_embeddings=8,
    )  # fmt: skip
    tr.MixtralForCausalLM(config).save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    weights = dict(tensors)
    for name in [key.removesuffix(".weight") for key in tensors if "experts" in key or "_proj" in key]:
        made, weights[f"{name}.weight"] = nf4(name, tuple(tensors.pop(f"{name}.weight").shape))
        tensors |= made
    save_file(weights, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "packed").mkdir()
    files_of = {key: f"{number % 2}.safetensors" for number, key in enumerate(sorted(tensors))}
    for file in set(files_of.values()):
        save_file({key: x for key, x in tensors.items() if files_of[key] == file}, tmp_path / "packed" / file)
    (tmp_path / "packed" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files_of}))
    packed_model, plain = (
        cf.load(tmp_path / folder, model=cf.functional(cf.lazy(partial(tr.MixtralForCausalLM, config)))) for folder in ("packed", "plain")
    )
    assert all(torch.equal(make(x), make(plain.params[key])) for key, x in packed_model.params.items())
    kept = [key for key, x in packed_model.params.items() if stored_in(x) is not None]
    assert [key.split(".")[-2] for key in kept] == ["q_proj", "k_proj", "v_proj", "o_proj"]  # experts are stacked from several


def test_adapters_are_trained_beside_it(tmp_path: Path) -> None:
    written(CASES["nf4 twice"], tmp_path / "a")
    losses = []
    for options in ({}, {"device": "cpu"}):
        model = cf.lora(cf.load(tmp_path / "a", model=unbuilt(), **options), where=("up", "down"), rank=2)
        torch.manual_seed(0)
        step_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())
        step = cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp"))
        if not options:
            step = cf.quantize(step, "nf4-g64", where=("up.weight", "down.weight"))
        state = step.init(state, inputs())
        losses.append(step(state, inputs())[1]["loss"].full())
    torch.testing.assert_close(*losses)


# ---- writing ----


@pytest.mark.parametrize("name", CASES)
def test_it_is_written_as_it_was(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    weights = written(case, tmp_path / "a")
    model = cf.load(tmp_path / "a", model=unbuilt())
    step = cf.quantize(cf.shard(forward(model), MESH, tensor("1d", "tp")), case.scheme)
    state = {"params": step.init(model.params, inputs())}
    for given, folder in ((state, "of a mesh"), (None, "of a folder")):
        cf.save_pretrained(model, given, tmp_path / folder, layout=case.layout)
        if case.as_written:
            before, after = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / folder / "model.safetensors")
            # The dtype that a weight had is the module's.
            before, after = ({key: x for key, x in some.items() if "quant_state" not in key} for some in (before, after))
            assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        again = cf.load(tmp_path / folder, model=unbuilt())
        assert all(torch.equal(make(again.params[key]), weight) for key, weight in weights.items())
        assert all(stored_in(x) is not None for x in again.params.values())
    cf.save_pretrained(model, state, tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert plain.keys() == weights.keys() and all(torch.equal(plain[key], weight) for key, weight in weights.items())


@pytest.mark.parametrize(
    ("scheme", "layout"),
    [
        ("nf4", "bitsandbytes-nf4"),
        ("int8", "bitsandbytes-int8"),
        ("int8", "int-quantized"),
        ("fp8", "float-quantized"),
        ("int4-g128", "pack-quantized"),
    ],
)
def test_what_was_quantized_here_is_written(tmp_path: Path, scheme: str, layout: str) -> None:
    model = cf.functional(net())
    state = cf.quantize(forward(model), scheme).init(model.params, inputs())
    cf.save_pretrained(model, {"params": state}, tmp_path / "a", layout=layout)
    again = cf.load(tmp_path / "a", model=unbuilt())
    assert all(torch.equal(make(again.params[key]), full(state[key].dequantize())) for key in state)


def test_the_configuration_says_so(tmp_path: Path) -> None:
    config = tr.LlamaConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=64, max_position_embeddings=32
    )  # fmt: skip
    model = cf.functional(tr.LlamaForCausalLM(config)).eval()
    ids = torch.arange(8).unsqueeze(0)

    def logits(params: Any, ids: Tensor) -> Tensor:
        found: Tensor = model.apply(params, model.buffers, ids)[0].logits
        return found

    step = cf.quantize(logits, "nf4-g64", where="model.layers.*_proj.weight")
    state = step.init(model.params, ids)
    cf.save_pretrained(model, {"params": state}, tmp_path / "a", layout="bitsandbytes-nf4")
    said = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "bitsandbytes" and said["bnb_4bit_quant_type"] == "nf4"
    assert said["llm_int8_skip_modules"] == ["lm_head"]
    again = cf.load(tmp_path / "a", model=cf.functional(cf.lazy(partial(tr.LlamaForCausalLM, config))).eval())
    key = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(make(again.params[key]), full(state[key].dequantize())) and stored_in(again.params["lm_head.weight"]) is None
    cf.save_pretrained(again, None, tmp_path / "a", overwrite=True)
    assert "quantization_config" not in json.loads((tmp_path / "a" / "config.json").read_text())


# ---- what it says to mistakes ----


@attrs.frozen
class Mistake:
    case: str
    says: str
    change: Any = None  # of the tensors of the folder
    config: dict[str, Any] = attrs.field(factory=dict)


def without(key: str) -> Any:
    return lambda tensors: tensors.pop(key)


def with_(key: str, change: Any) -> Any:
    return lambda tensors: tensors.update({key: change(tensors[key])})


STATE = "up.weight.quant_state.bitsandbytes__nf4"


def state_with(**said: Any) -> Any:
    def change(x: Tensor) -> Tensor:
        return torch.tensor(list(json.dumps(json.loads(bytes(x.tolist())) | said).encode()), dtype=torch.uint8)

    return with_(STATE, change)


def to_nan(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan"))


MISTAKES = {
    "no scales": Mistake("nf4", "'up.weight.absmax' is missing, without which bitsandbytes-nf4 weights", without("up.weight.absmax")),
    "no numbers": Mistake("nf4", "'up.weight' is missing, without which bitsandbytes-nf4 weights", without("up.weight")),
    "no state": Mistake("nf4", f"'{STATE}' is missing, without which the shape", without(STATE)),
    "no nested": Mistake("nf4 twice", "'up.weight.nested_absmax' is missing", without("up.weight.nested_absmax")),
    "no nested at all": Mistake(
        "nf4 twice", "'up.weight.nested_absmax' is missing",
        lambda tensors: [tensors.pop(f"up.weight.{key}") for key in ("nested_absmax", "nested_quant_map")],
    ),
    "dtype of scales": Mistake("nf4", "'up.weight.absmax' is int64, and should be float32", with_("up.weight.absmax", Tensor.long)),
    "too few scales": Mistake("nf4", "'up.weight.absmax' has shape (7,), and the weight needs (512,)",
                              with_("up.weight.absmax", lambda x: x[:7].clone())),
    "too few numbers": Mistake("nf4", "'up.weight' has shape (7, 1), and a weight of shape (256, 128) has 16384 bytes",
                               with_("up.weight", lambda x: x[:7].clone())),
    "numbers as bfloat16": Mistake("nf4", "'up.weight' is bfloat16, and should be uint8", with_("up.weight", Tensor.bfloat16)),
    "levels": Mistake("nf4", "'up.weight.quant_map' does not hold the levels of NF4", with_("up.weight.quant_map", lambda x: x * 2)),
    "fp4": Mistake("nf4", "'up.weight.quant_state.bitsandbytes__fp4' says FP4, whose levels no format here has. Try: bnb_4bit_quant_type",
                   lambda tensors: tensors.update({"up.weight.quant_state.bitsandbytes__fp4": tensors[STATE].clone()})),
    "blocks of 32": Mistake("nf4", f"'{STATE}' says blocksize 32, and blocks here are of 64. Try: blocks of 64", state_with(blocksize=32)),
    "blocks over rows": Mistake("nf4", f"'{STATE}' says the shape (1024, 32): blocks of 64 that reach over the ends of rows are in no",
                                state_with(shape=[1024, 32])),
    "no JSON": Mistake("nf4", f"'{STATE}' is no state of bitsandbytes", with_(STATE, lambda x: x[:9].clone())),
    "a shape of words": Mistake("nf4", f"'{STATE}' is no state of bitsandbytes: shape", state_with(shape=["a", 1])),
    "a large state": Mistake("nf4", f"'{STATE}' has 65537 bytes, and at most 65536 are read",
                             with_(STATE, lambda x: torch.full((65537,), ord(" "), dtype=torch.uint8))),
    "no SCB": Mistake("int8", "'up.SCB' is missing, without which bitsandbytes-int8 weights", without("up.SCB")),
    "order of int8": Mistake("int8", "'up.weight_format' is 2, and only 0, rows, is known", with_("up.weight_format", lambda x: x + 2)),
    "no zeros": Mistake("gptq", "'up.qzeros' is missing, without which gptq weights", without("up.qzeros")),
    "act order": Mistake("gptq", "'up.g_idx' has columns that are not in the order of their groups. Try: desc_act=False",
                         with_("up.g_idx", lambda x: x + (torch.arange(128) % 2).int())),
    "8 bits": Mistake("gptq", "'down.qweight' has 8 bits a number by the configuration, and 4 can be read. Try: bits=4", None, {"bits": 8}),
    "groups": Mistake("gptq", "'up.scales' has 2 groups of 128 columns, and the format int4 has groups of 128. Try: group_size=128",
                      with_("up.scales", lambda x: x.repeat(2, 1))),
    "marlin": Mistake("gptq", "'down.qweight' is in the format 'marlin'", None, {"checkpoint_format": "marlin"}),
    "gemv": Mistake("awq", "'down.qweight' is of the version 'gemv'", None, {"quant_method": "awq", "version": "gemv"}),
    "no scale": Mistake("pack-quantized", "'up.weight_scale' is missing", without("up.weight_scale")),
    "no words": Mistake("pack-quantized", "'up.weight_packed' is missing, without which pack-quantized", without("up.weight_packed")),
    "zeros of int8": Mistake("int-quantized", "'up.weight_zero_point' shifts numbers, which no format in 8 bits here has. Try: symmetric",
                             lambda tensors: tensors.update({"up.weight_zero_point": torch.zeros(256, 1, dtype=torch.int8)})),
    "groups of int8": Mistake("int-quantized", "'up.weight_scale' has shape (256, 2), and should have (256, 1). Try: strategy='channel'",
                              with_("up.weight_scale", lambda x: x.repeat(1, 2))),
    "static inputs": Mistake("float-quantized", "'up.input_scale' is for static scales of inputs, which are not read. Try: dynamic=True of",
                             lambda tensors: tensors.update({"up.input_scale": torch.ones(1)})),
    "static inputs of int8": Mistake("int-quantized", "'up.input_zero_point' is for static scales of inputs, which are not read. Try:",
                                     lambda tensors: tensors.update({"up.input_zero_point": torch.zeros(1, dtype=torch.int8)})),
    "static inputs of 4 bits": Mistake("pack-quantized", "'up.input_scale' is for static scales of inputs, which are not read. Try: dyn",
                                       lambda tensors: tensors.update({"up.input_scale": torch.ones(1)})),
    "other blocks": Mistake("finegrained-fp8", "'down.weight_scale_inv' is of blocks of [1, 32] by the configuration, and 128 x 128 can",
                            None, {"weight_block_size": [1, 32]}),
    "one scale of float8": Mistake("finegrained-fp8", "'up.weight_scale_inv' has shape (), and the weight needs (2, 1)",
                                   with_("up.weight_scale_inv", lambda x: torch.tensor(1.0))),
    "static inputs of float8": Mistake("finegrained-fp8", "'up.activation_scale' is for static scales of inputs, which are not read. Try:",
                                       lambda tensors: tensors.update({"up.activation_scale": torch.ones(())})),
    "two layouts": Mistake("finegrained-fp8", "'up.weight_scale' is of the layout 'float-quantized', and beside it is 'up.weight_sc",
                           lambda tensors: tensors.update({"up.weight_scale": torch.ones(256, 1)})),
    "no shape": Mistake("pack-quantized", "'up.weight_shape' is missing", without("up.weight_shape")),
    "another shape": Mistake("pack-quantized", "'up.weight_packed' has shape (256, 16), and a weight of shape (256, 256) in 4 bits",
                             with_("up.weight_shape", lambda x: torch.tensor([256, 256]))),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_it_says_what_is_wrong_with_a_folder(tmp_path: Path, name: str) -> None:
    mistake = MISTAKES[name]
    written(attrs.evolve(CASES[mistake.case], config=mistake.config), tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    if mistake.change is not None:
        tensors = load_file(path)
        mistake.change(tensors)
        save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        cf.load(tmp_path / "a", model=unbuilt())
    said = str(caught.value)
    assert said.startswith(f"{path}: {mistake.says}") and ". Try: " in said, said


SCALES_OF = {"nf4": "weight.absmax", "int8": "SCB", "gptq": "scales", "pack-quantized": "weight_scale", "float-quantized": "weight_scale",
             "finegrained-fp8": "weight_scale_inv"}  # fmt: skip


@pytest.mark.parametrize(("name", "key"), SCALES_OF.items())
def test_scales_that_are_not_finite_are_found_when_they_are_read(tmp_path: Path, name: str, key: str) -> None:
    written(CASES[name], tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    with_(f"up.{key}", to_nan)(tensors)
    save_file(tensors, path)
    model = cf.load(tmp_path / "a", model=unbuilt())
    with pytest.raises(CheckpointError, match=f"'up.{key}' has NaN or infinite scales"):
        cf.quantize(forward(model), CASES[name].scheme).init(model.params, inputs())


def test_the_largest_state_is_read(tmp_path: Path) -> None:
    weights = written(CASES["nf4"], tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    text = bytes(tensors[STATE].tolist()).ljust(65536)
    save_file(tensors | {STATE: torch.tensor(list(text), dtype=torch.uint8)}, path)
    assert torch.equal(make(cf.load(tmp_path / "a", model=unbuilt()).params["up.weight"]), weights["up.weight"])


def test_a_truncated_file_and_a_broken_configuration_are_named(tmp_path: Path) -> None:
    written(CASES["nf4"], tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: .*Try: a copy of the folder"):
        cf.load(tmp_path / "a", model=unbuilt())
    path = tmp_path / "a" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        cf.load(tmp_path / "a", model=unbuilt())


@pytest.mark.parametrize("scheme", ["nf4", "int8", "awq"])
def test_another_scheme_would_round_twice(tmp_path: Path, scheme: str) -> None:
    written(CASES["nf4"], tmp_path / "a")
    model = cf.load(tmp_path / "a", model=unbuilt())
    chosen = cf.awq({"up.weight": torch.eye(128, dtype=torch.float64), "down.weight": torch.eye(256, dtype=torch.float64)})
    with pytest.raises(cf.InputError) as caught:
        cf.quantize(forward(model), chosen if scheme == "awq" else scheme).init(model.params, inputs())
    assert str(caught.value).startswith(
        f"cf.quantize: 'up' in {tmp_path / 'a' / 'model.safetensors'}, as bitsandbytes-nf4 keeps it, holds a weight in the format "
        f"'nf4_g64', and the scheme {scheme!r} would round it a second time. Try: the scheme 'nf4-g64', which takes its numbers as they "
        "are; cf.load(..., device='cpu') for widened weights"
    )


def test_it_says_what_cannot_be_written(tmp_path: Path) -> None:
    model = cf.functional(net())
    with pytest.raises(cf.InputError, match=r"save_pretrained: there is no layout 'gptr'; did you mean 'gptq'"):
        cf.save_pretrained(model, None, tmp_path / "a", layout="gptr")
    with pytest.raises(cf.InputError, match=r"layout='gptq', and no weight is quantized\. Try: the state of a step under cf\.quantize"):
        cf.save_pretrained(model, None, tmp_path / "a", layout="gptq")
    state = {"params": cf.quantize(forward(model), "int4-g128").init(model.params, inputs())}
    said = (
        r"'up\.weight' cannot be written in the layout 'bitsandbytes-nf4': it is in the format 'int4'\. Try: layout='gptq' or 'awq' or "
        r"'pack-quantized' or 'torchao-int4', or layout=None"
    )
    with pytest.raises(cf.InputError, match=said):
        cf.save_pretrained(model, state, tmp_path / "a", layout="bitsandbytes-nf4")
    with pytest.raises(CheckpointError, match=r"'up\.weight' has scales that float16 does not hold.*Try: layout='pack-quantized'"):
        cf.save_pretrained(model, state, tmp_path / "a", layout="awq")
    state = {"params": cf.quantize(forward(model), "fp8-g128").init(model.params, inputs())}
    with pytest.raises(CheckpointError, match=r"scales of single rows, and the layout 'finegrained-fp8'.*layout='float-quantized'"):
        cf.save_pretrained(model, state, tmp_path / "a", layout="finegrained-fp8")
    assert not (tmp_path / "a").exists()


# ---- layouts of plugins ----


PLUGIN = '''
import torch
import colofunc as cf
from colofunc.ext import Quantized, packed_tensors


def read(tensors):
    numbers = tensors.matrix("numbers", (torch.int8,))
    steps = tensors.checked("steps", (torch.float32,), (numbers.shape[0],))
    data = packed_tensors.part(numbers.shape, torch.int8, lambda box: packed_tensors.boxed(numbers, box))
    scale = packed_tensors.part(steps.shape, torch.float32, lambda box: packed_tensors.boxed(steps, box))
    return Quantized("int8", "int8", numbers.shape, torch.float32, data=data, scale=scale)


def write(name, weight):
    return {"numbers": weight.data, "steps": weight.scale}


@cf.hookimpl
def colofunc_packed_layouts():
    return {"mine": LAYOUT, **MORE}

MORE = {}


LAYOUT = packed_tensors.PackedLayout(
    "mine", form="int8", forms=("int8",), marks=("steps",), needs=("numbers", "steps"), keys=("numbers", "steps"), read=read, write=write,
    claims=lambda tensors: tensors.dtype("numbers") is torch.int8,
)
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A plugin with a layout of its own, on the path with an entry point as pip writes it."""
    (tmp_path / "their_layout.py").write_text(PLUGIN)
    about = tmp_path / "their_layout-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-layout\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[colofunc]\nmine = their_layout\n")
    monkeypatch.syspath_prepend(tmp_path)
    build_registry.cache_clear()
    layouts()
    yield sys.modules["their_layout"]
    build_registry.cache_clear()
    del sys.modules["their_layout"]


def test_a_plugins_layout_is_written_and_read(tmp_path: Path, installed: Any) -> None:
    model = cf.functional(net())
    state = cf.quantize(forward(model), "int8").init(model.params, inputs())
    cf.save_pretrained(model, {"params": state}, tmp_path / "a", layout="mine")
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert set(stored) == {f"{name}.{key}" for name in SHAPES for key in ("numbers", "steps")}
    again = cf.load(tmp_path / "a", model=unbuilt())
    kept = cf.quantize(cf.shard(forward(again), MESH, zero(3, "dp")), "int8").init(again.params, inputs())
    for name, weight in state.items():
        assert torch.equal(full(kept[name].data), weight.data.full()) and torch.equal(full(kept[name].scale), weight.scale.full())


def test_the_table_is_made_once_for_all_layers_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cf.functional(net())
    state = cf.quantize(forward(model), "int8").init(model.params, inputs())
    cf.save_pretrained(model, {"params": state}, tmp_path / "a", layout="int-quantized")
    calls = []
    monkeypatch.setattr(packed_layouts, "layouts", lambda: calls.append(1) or layouts())
    assert len([entry for entry in packed_layouts.packed_entries(tmp_path / "a").values() if entry.packed is not None]) == len(SHAPES) > 1
    assert len(calls) == 1


def test_our_layouts_come_first_and_by_the_same_hook(installed: Any) -> None:
    assert list(layouts()) == [*formats.LAYOUTS, "mine"]
    assert set(build_registry((formats,)).packed_layouts) == set(layouts())


def test_of_two_layouts_of_plugins_neither_takes_a_weight_from_the_other(
    tmp_path: Path, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"up.numbers": torch.ones(4, 3, dtype=torch.int8), "up.steps": torch.ones(4)}, tmp_path / "model.safetensors")
    assert packed_entries(tmp_path)["up.weight"].packed is not None
    monkeypatch.setitem(installed.MORE, "another", attrs.evolve(installed.LAYOUT, name="another"))
    build_registry.cache_clear()
    said = r"colofunc_packed_layouts: 'mine' and 'another' both claim the tensors of 'up' in .*model\.safetensors.* Try: claims= in"
    with pytest.raises(cf.PluginError, match=said):
        packed_entries(tmp_path)


def test_our_layouts_are_asked_before_those_of_plugins(tmp_path: Path, installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of tensors in the file by which they know a layer."""
    tensors = {"up.a_mark": torch.ones(1), "up.weight": torch.ones(4, 3, dtype=torch.int8), "up.weight_scale": torch.ones(4, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    greedy = attrs.evolve(installed.LAYOUT, marks=("a_mark",), claims=lambda tensors: True)
    monkeypatch.setattr(installed, "LAYOUT", greedy)
    build_registry.cache_clear()
    packed = packed_entries(tmp_path)["up.weight"].packed
    assert packed is not None and "as int-quantized keeps it" in packed.where


def test_what_is_no_layout_is_named(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        7: "the value of 'mine' is 7; give a cf.ext.packed_tensors.PackedLayout",
        attrs.evolve(installed.LAYOUT, name="other"): "'mine' is a layout of the name 'other' and the form 'int8'; give it its own name",
        attrs.evolve(installed.LAYOUT, form="int3"): "'mine' is a layout of the name 'mine' and the form 'int3'; .* forms int8, fp8",
        attrs.evolve(installed.LAYOUT, forms=("int8", "int3")): r"'mine' has forms=\('int8', 'int3'\) .* no form 'int3'; .* int8, fp8",
    }
    for layout, words in said.items():
        monkeypatch.setattr(installed, "LAYOUT", layout)
        build_registry.cache_clear()
        with pytest.raises(cf.PluginError, match=words):
            layouts()
