"""Weights as torchao saves them in safetensors: read bit for bit, written back, and by torchao itself where it is installed."""

import json
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from colofunc_plugins import tensor, zero
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import colofunc as cf
from colofunc.errors import CheckpointError
from colofunc.program.lazy import make

SHAPES = {"up": (256, 256), "down": (64, 256)}
MESH = cf.Mesh(dp=2, tp=2)
SCHEMES = {"torchao-int8": "int8", "torchao-float8": "fp8", "torchao-int4": "int4-g128"}
CONFIGS = {"torchao-int8": "Int8WeightOnlyConfig", "torchao-float8": "Float8WeightOnlyConfig", "torchao-int4": "IntxWeightOnlyConfig"}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = {name: nn.Linear(columns, rows, bias=False, dtype=dtype) for name, (rows, columns) in SHAPES.items()}
    return nn.Sequential(OrderedDict(layers))


def unbuilt(dtype: torch.dtype = torch.float32) -> Any:
    return cf.functional(cf.lazy(partial(net, dtype)))


def forward(model: Any) -> Any:
    return lambda params, x: model.apply(params, model.buffers, x)[0]


def layer(layout: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of one weight, and what they stand for."""
    draw = torch.Generator().manual_seed(rows)
    if layout == "torchao-int4":
        numbers = torch.randint(-8, 8, (rows, columns), generator=draw)
        zeros = torch.randint(-8, 8, (rows, columns // 128), generator=draw)
        scale = torch.rand(zeros.shape, generator=draw).bfloat16()
        wide = (numbers - zeros.repeat_interleave(128, 1)) * scale.float().repeat_interleave(128, 1)
        return {"qdata": numbers.to(torch.int8), "scale": scale, "zero_point": zeros.to(torch.int8)}, wide
    numbers = torch.randint(-127, 128, (rows, columns), generator=draw)
    scale = torch.rand(rows, 1, generator=draw)
    if layout == "torchao-int8":
        found = {"qdata": numbers.to(torch.int8), "scale": scale, "zero_point": torch.zeros(rows, 1, dtype=torch.int8)}
        return found, numbers * scale
    narrow = (numbers / 16).to(torch.float8_e4m3fn)
    return {"qdata": narrow, "scale": scale}, narrow.float() * scale


def written(layout: str, folder: Path) -> dict[str, Tensor]:
    """A folder in a layout; the weights that it stands for."""
    tensors: dict[str, Tensor] = {}
    weights = {}
    for name, shape in SHAPES.items():
        parts, weights[f"{name}.weight"] = layer(layout, *shape)
        tensors |= {f"{name}._weight_{key}": x for key, x in parts.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return weights


def inputs() -> Tensor:
    return torch.randn(4, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layout", SCHEMES)
def test_a_step_reads_its_numbers_as_they_are_on_any_mesh(tmp_path: Path, layout: str) -> None:
    weights = written(layout, tmp_path / "a")
    model = cf.load(tmp_path / "a", model=unbuilt())
    assert all(torch.equal(make(model.params[key]), weight) for key, weight in weights.items())
    for plans in ((tensor("1d", "tp"),), (zero(3, "dp"),)):
        step = cf.quantize(cf.shard(forward(model), MESH, *plans), SCHEMES[layout])
        state = step.init(model.params, inputs())
        assert all(torch.equal(state[key].dequantize().full(), weight) for key, weight in weights.items())
        want = inputs() @ weights["up.weight"].T @ weights["down.weight"].T
        torch.testing.assert_close(step(state, inputs()).full(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("layout", SCHEMES)
def test_it_is_written_as_it_was_with_what_torchao_asks_of_a_header(tmp_path: Path, layout: str) -> None:
    written(layout, tmp_path / "a")
    model = cf.load(tmp_path / "a", model=unbuilt())
    cf.save_pretrained(model, None, tmp_path / "c", layout=layout)
    before, after = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "c" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, x in before.items():
        assert torch.equal(after[key].float(), x.float()), key  # scales are written in float32
    with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        said = file.metadata()
    assert json.loads(said["tensor_names"]) == [f"{name}.weight" for name in SHAPES]
    about = json.loads(said["up.weight"])
    assert about["_data"]["block_size"] == [1, 128 if layout == "torchao-int4" else 256]
    assert {f"up._weight_{name}" for name in about["_tensor_data_names"]} == {key for key in after if key.startswith("up.")}


MISTAKES: dict[str, tuple[str, str, Any, str]] = {
    "zeros of int8": ("torchao-int8", "zero_point", lambda x: x + 1, "shifts numbers, which no format in 8 bits here has"),
    "misshapen": ("torchao-float8", "scale", lambda x: x[:7], "has shape (7, 1), and should have (256, 1)"),
    "not finite": ("torchao-int8", "scale", lambda x: x * float("nan"), "has NaN or infinite scales"),
    "8 bits": ("torchao-int4", "qdata", lambda x: x * 2, "has numbers of more than 4 bits"),
    "groups of 32": ("torchao-int4", "scale", lambda x: x.repeat(1, 4), "has 8 groups of 256 columns"),
    "another class": ("torchao-int8", "qdata", lambda x: x.view(torch.uint8), "is no layout of quantized weights that is known"),
    "missing": ("torchao-int4", "zero_point", None, "is missing, without which torchao-int4 weights cannot be read"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_it_says_what_is_wrong_with_a_folder(tmp_path: Path, name: str) -> None:
    layout, key, change, says = MISTAKES[name]
    written(layout, tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    whole = tensors.pop(f"up._weight_{key}")
    if change is not None:
        tensors[f"up._weight_{key}"] = change(whole).contiguous()
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        make(cf.load(tmp_path / "a", model=unbuilt()).params["up.weight"])
    said = str(caught.value)
    assert said.startswith(f"{path}: 'up._weight_") and says in said and ". Try: " in said, said


# ---- blocks with scales of 8 bits, which are read ----

NARROW = {"mxfp8": (1, 32, torch.float8_e8m0fnu), "nvfp4": (2, 16, torch.float8_e4m3fn)}
"""Scheme -> numbers in a byte, columns of a block, dtype of scales."""
HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def in_tiles(scale: Tensor) -> Tensor:
    """Scales in the order of a card, number by number: the offset of (row, block) is what the manual of cuBLAS says it is."""
    rows, blocks = scale.shape
    down, across = -(-rows // 128), -(-blocks // 4)
    flat = torch.zeros(down * across * 512, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            tile = (row // 128) * across + block // 4
            flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] = scale.view(torch.uint8)[row, block]
    return flat.view(32 * down, 16 * across).view(scale.dtype)


def narrow_layer(scheme: str, rows: int, columns: int, tiled: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of one weight, and what they stand for."""
    per_byte, width, dtype = NARROW[scheme]
    draw = torch.Generator().manual_seed(rows)
    shape = (rows, columns // width)
    scale = (2.0 ** torch.randint(-3, 4, shape, generator=draw)).to(dtype)
    whole: dict[str, Tensor] = {}
    if per_byte == 1:
        data = torch.randint(-31, 32, (rows, columns), generator=draw).mul(0.25).to(torch.float8_e4m3fn)
        numbers = data.float()
    else:
        codes = torch.randint(0, 16, (rows, columns), generator=draw)
        numbers = torch.tensor([*HALVES, *(-x for x in HALVES)])[codes]
        data = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        whole = {"per_tensor_scale": torch.tensor(0.125)}
    wide = numbers * scale.float().repeat_interleave(width, 1) * whole.get("per_tensor_scale", 1.0)
    return {"qdata": data, "scale": in_tiles(scale) if tiled else scale, **whole}, wide


def narrow_folder(scheme: str, tiled: bool, folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    weights = {}
    for name, shape in SHAPES.items():
        parts, weights[f"{name}.weight"] = narrow_layer(scheme, *shape, tiled)
        tensors |= {f"{name}._weight_{key}": x for key, x in parts.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return weights


@pytest.mark.parametrize("tiled", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize("scheme", NARROW)
def test_blocks_with_narrow_scales_are_read_as_they_are_on_any_mesh(tmp_path: Path, scheme: str, tiled: bool) -> None:
    weights = narrow_folder(scheme, tiled, tmp_path / "a")
    model = cf.load(tmp_path / "a", model=unbuilt())
    assert all(torch.equal(make(model.params[key]), weight) for key, weight in weights.items())
    for plans in ((tensor("1d", "tp"),), (zero(3, "dp"),)):
        state = cf.quantize(cf.shard(forward(model), MESH, *plans), scheme).init(model.params, inputs())
        assert all(torch.equal(state[key].dequantize().full(), weight) for key, weight in weights.items())


NARROW_MISTAKES: dict[str, tuple[str, str, Any, str]] = {
    "misshapen": ("mxfp8", "scale", lambda x: x[:7], "has shape (7, 32), and should have (256, 8) or, in tiles, (64, 32)"),
    "not finite": ("mxfp8", "scale", lambda x: (x.view(torch.uint8) | 255).view(x.dtype), "has NaN or infinite scales"),
    "inputs": ("nvfp4", "act_per_tensor_scale", lambda x: torch.ones(1), "is about inputs, and is not read"),
    "two numbers": ("nvfp4", "per_tensor_scale", lambda x: torch.ones(2), "has shape (2,), and should be one number"),
    "odd columns": ("mxfp8", "qdata", lambda x: x[:, :40], "has 40 columns, and blocks have 32"),
}


@pytest.mark.parametrize("name", NARROW_MISTAKES)
def test_it_says_what_is_wrong_with_blocks_of_narrow_scales(tmp_path: Path, name: str) -> None:
    scheme, key, change, says = NARROW_MISTAKES[name]
    narrow_folder(scheme, True, tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"up._weight_{key}"] = change(tensors.get(f"up._weight_{key}")).contiguous()
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        make(cf.load(tmp_path / "a", model=unbuilt()).params["up.weight"])
    said = str(caught.value)
    assert said.startswith(f"{path}: 'up._weight_{key}'") and says in said and ". Try: " in said, said


def test_torchaos_own_blocks_are_read(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    wide = {name: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for name, shape in SHAPES.items()}
    for scheme in NARROW:
        tensors, wanted = {}, {}
        for name, weight in wide.items():
            if scheme == "mxfp8":
                theirs = MXTensor.to_mx(weight, torch.float8_e4m3fn, 32, is_swizzled_scales=True)
                parts = {"qdata": theirs.qdata, "scale": theirs.scale}
            else:
                whole = per_tensor_amax_to_scale(weight.abs().amax())
                theirs = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=whole, is_swizzled_scales=True)
                parts = {"qdata": theirs.qdata, "scale": theirs.scale, "per_tensor_scale": theirs.per_tensor_scale}
            tensors |= {f"{name}._weight_{key}": x.contiguous() for key, x in parts.items()}
            wanted[f"{name}.weight"] = theirs.dequantize(torch.float32)
        (tmp_path / scheme).mkdir()
        save_file(tensors, tmp_path / scheme / "model.safetensors")
        model = cf.load(tmp_path / scheme, model=unbuilt())
        for name, weight in wanted.items():
            # theirs multiplies both scales first, which rounds once more
            apart = 0.0 if scheme == "mxfp8" else 2.0**-23
            torch.testing.assert_close(make(model.params[name]), weight, rtol=apart, atol=0.0)


def test_scales_of_inputs_are_refused(tmp_path: Path) -> None:
    written("torchao-int8", tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    save_file({**load_file(path), "up._weight_act_quant_scale": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"'up\._weight_act_quant_scale' is about inputs, and is not read\. Try: "):
        cf.load(tmp_path / "a", model=unbuilt())


def test_a_single_group_of_four_bits_is_not_written(tmp_path: Path) -> None:
    model = cf.functional(nn.Sequential(nn.Linear(128, 64)))
    state = cf.quantize(forward(model), "int4-g128").init(model.params, torch.ones(2, 128))
    with pytest.raises(CheckpointError, match=r"'0\.weight' has a single group of 128 columns.*Try: layout='pack-quantized'"):
        cf.save_pretrained(model, {"params": state}, tmp_path / "a", layout="torchao-int4")


@pytest.mark.parametrize("layout", SCHEMES)
def test_torchao_reads_what_is_written_and_the_other_way(tmp_path: Path, layout: str) -> None:
    ao = pytest.importorskip("torchao")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict

    made_by = getattr(ao.quantization, CONFIGS[layout])
    options = {"weight_dtype": torch.int4, "granularity": ao.quantization.PerGroup(128)} if layout == "torchao-int4" else {}
    theirs = net(torch.bfloat16)
    ao.quantization.quantize_(theirs, made_by(**options))
    (tmp_path / "theirs").mkdir()
    tensors, header = flatten_tensor_state_dict(theirs.state_dict())
    save_file(tensors, tmp_path / "theirs" / "model.safetensors", metadata=header)
    model = cf.load(tmp_path / "theirs", model=unbuilt(torch.bfloat16))
    wide = {name: x.dequantize() for name, x in theirs.state_dict().items()}
    # torchao multiplies 4 bits in bfloat16, numbers that have no more than 8 bits with a scale of 8: rounded once, as here.
    assert all(torch.equal(make(model.params[name]), x) for name, x in wide.items())
    cf.save_pretrained(model, None, tmp_path / "ours", layout=layout)
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        given = load_file(tmp_path / "ours" / "model.safetensors")
        back, left = unflatten_tensor_state_dict(given, file.metadata())
    assert not left
    assert all(torch.equal(back[name].dequantize().to(torch.bfloat16), x) for name, x in wide.items())
