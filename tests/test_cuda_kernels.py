"""What programs are made of has kernels for CUDA, and inductor writes Triton for what is compiled; no card is needed to know."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from cuda_code import allocated_bytes, in_a_process
from pretended import Machine
from pretended.kernels import BUILT_WITH_CUDA, runs_on_a_card

import colofunc as cf
import colofunc.compiler.step_compiler  # which brings along the operators that only passes use
from colofunc.ops.define import KERNELS
from colofunc.ops.quantizers import BUILT_IN
from colofunc.ops.targets import overload
from colofunc.ops.update_packed import _tables, block_of, packed_moment
from colofunc.ops.wire import wire_pack
from colofunc.program.facts import kind_of
from colofunc.program.ir import Node, Program

pytestmark = pytest.mark.skipif(not BUILT_WITH_CUDA, reason="this torch was built without CUDA: nobody knows which kernels there would be")

QUICK = (
    "gpt2", "llama", "layer_lstm", "layer_gru_both_ways", "layer_transformer", "layer_conv1d", "layer_conv2d", "layer_norms", "layer_bag",
    "layer_activations", "layer_route", "layer_sample", "layer_gumbel", "layer_scatter", "layer_distances", "layer_scans", "layer_spectrum",
    "layer_resizes", "layer_losses", "kind_noisy",
)  # fmt: skip


def without_kernel(program: Program) -> Iterator[str]:
    """Operators of torch in a program that have no kernel for CUDA."""
    for node in program.nodes:
        if node.loop is not None:
            yield from without_kernel(node.loop.body)
        elif node.target.startswith("aten.") and not runs_on_a_card(overload(node.target)):
            yield node.target


def assert_all_have_kernels(name: str) -> None:
    step_fn, state, batch = zoo.step_of(name, torch.float32)
    program = cf.shard(step_fn, cf.Mesh()).lower(state, batch).program
    assert not set(without_kernel(program))
    assert not {node.target for node in program.nodes} - {"colofunc.loop"} - {t for t in map(known, targets(program)) if t}


def targets(program: Program) -> list[str]:
    return [node.target for node in program.nodes]


def known(target: str) -> str | None:
    """The target, where it is torch's, one of ours that is tried here or elsewhere, or what an executor does itself."""
    is_tried = target in OWN or target in TRIED_ELSEWHERE
    return target if target.startswith("aten.") or is_tried or kind_of(Node(target, (), (), ())) is not None else None


@pytest.mark.parametrize("name", QUICK)
def test_every_operator_has_a_kernel(name: str) -> None:
    assert_all_have_kernels(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in zoo.ALL if name not in QUICK])
def test_every_operator_of_the_zoo_has_a_kernel(name: str) -> None:
    assert_all_have_kernels(name)


def test_operators_of_a_cpu_alone_are_found() -> None:
    aten: Any = torch.ops.aten
    assert not runs_on_a_card(aten.mkldnn_rnn_layer.default)
    assert all(map(runs_on_a_card, (aten.mul.out, aten._to_copy.default, aten._fused_adamw_.tensor_lr, aten.lstm.input)))
    with Machine(seed=0):
        x = torch.randn(3, 4, device="cuda")
        with pytest.raises(NotImplementedError, match=r"aten\.mkldnn_max_pool2d\.default has no kernel for CUDA"):
            aten.mkldnn_max_pool2d.default(x.reshape(1, 1, 3, 4), (2, 2))


# ---- operators of our own ----


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def seed() -> torch.Tensor:
    return torch.tensor(5)


def moments() -> list[torch.Tensor]:
    return [r(4, 3), r(4, 3), r(4, 3), r(4, 3).abs()]


def moments_in_bf16() -> list[torch.Tensor]:
    return [x.bfloat16() for x in moments()]


def moments_in_8_bits() -> list[torch.Tensor]:
    blocks = block_of((64, 64))
    assert blocks is not None
    return [r(64, 64), r(64, 64), *packed_moment(r(64, 64), blocks, True), *packed_moment(r(64, 64).abs(), blocks, False)]


def bits(*shape: int) -> torch.Tensor:
    """Numbers in float8, as they are kept."""
    return r(*shape).to(torch.float8_e4m3fn).view(torch.uint8)


def whole(*shape: int) -> torch.Tensor:
    """Numbers in int8."""
    return (127 * r(*shape)).clamp(-127, 127).to(torch.int8)


ONE, RATE = torch.tensor(1.0), torch.tensor(0.1, dtype=torch.float64)
SLOTS = torch.tensor([[0, 1], [1, 2], [2, 0]])
OWN: dict[str, tuple[Any, ...]] = {
    "colofunc.linear": (r(2, 3), r(4, 3), r(4)),
    "colofunc.linear_dx": (r(2, 4), r(4, 3)),
    "colofunc.linear_dw": (r(2, 4), r(2, 3)),
    "colofunc.rms_norm": (r(2, 3), (3,), r(3), 1e-5),
    "colofunc.rms_norm_dx": (r(2, 3), r(2, 3), (3,), r(2, 1).abs(), r(3)),
    "colofunc.rms_norm_dw": (r(2, 3), r(2, 3), (3,), r(2, 1).abs()),
    "colofunc.lstm": (r(3, 2, 8), r(2, 2), r(2, 2), r(8, 2)),
    "colofunc.lstm_backward": (r(3, 2, 2), r(2, 2), r(2, 2), r(8, 2), r(3, 2, 2), r(3, 2, 8)),
    "colofunc.attention": (r(1, 2, 8, 16), r(1, 2, 8, 16), r(1, 2, 8, 16), None, 0.25, True, 0),
    "colofunc.attention_backward": (
        r(1, 2, 8, 16), r(1, 2, 8, 16), r(1, 2, 8, 16), r(1, 2, 8, 16), None, r(1, 2, 8, 16), r(1, 2, 8), 0.25, True, 0,
    ),
    "colofunc.shift": (r(3, 5), 1, -1, 0.0),
    "colofunc.pack_saved": (r(3, 4), 1, 2, torch.int8),
    "colofunc.widen_saved": (torch.ones(3, 4, dtype=torch.int8), r(3, 2), torch.int8, torch.float32),
    "colofunc.embedding_bag": (r(5, 3), SLOTS, r(3, 2), 1),
    "colofunc.embedding_bag_backward": (r(3, 4), SLOTS, None, 5, -1),
    "colofunc.embedding_bag_factors_backward": (r(3, 4), r(5, 4), SLOTS, 2),
    "colofunc.fit": (r(3, 5), (4, 2)),
    "colofunc.slice_scatter_": (r(3, 5), r(3, 2), 1, 1, 3),
    "colofunc.select_scatter_": (r(3, 5), r(3), 1, -1),
    "colofunc.diagonal_scatter_": (r(3, 5), r(3), 1),
    "colofunc.pack": ((r(4), r(2, 3)), 0, torch.float32),
    "colofunc.write_": (r(2, 3), r(6)),
    "colofunc.log_softmax_": (r(3, 5), 1),
    "colofunc.cross_entropy_dx_": (r(3, 5), ONE, torch.tensor([0, 1, 2]), 1, -100, torch.tensor(3.0)),
    "colofunc.embedding_add_": (r(5, 3), r(4, 3), torch.tensor([0, 1, 1, 2]), -1),
    "colofunc.random_bits": (seed(), 0, (4, 3)),
    "colofunc.random_uniform": (seed(), 0, (4, 3), torch.float32),
    "colofunc.random_normal": (seed(), 0, (4, 3), torch.float32),
    "colofunc.random_bernoulli": (seed(), 0, (4, 3), torch.float32, 0.5),
    "colofunc.dropout": (r(4, 3), seed(), 0, 0.5),
    "colofunc.ctc_loss": (r(7, 2, 5).log_softmax(-1), torch.tensor([[1, 2], [3, 1]]), torch.tensor([7, 7]), torch.tensor([2, 1]), 0, True),
    "colofunc.expert_position": (SLOTS, 3),
    "colofunc.grouped_mm": (r(4, 3), r(2, 3, 5), torch.tensor([1, 4], dtype=torch.int32)),
    "colofunc.grouped_mm_dw": (r(4, 3), r(4, 5), torch.tensor([1, 4], dtype=torch.int32)),
    "colofunc.adamw": (*moments(), ONE, RATE, 0.9, 0.999, 1e-8, 0.01, True),
    "colofunc.adamw_": (*moments(), ONE, RATE, 0.9, 0.999, 1e-8, 0.01, True),
    "colofunc.adamw8": (*moments_in_8_bits(), ONE, RATE, 0.9, 0.999, 1e-8, 0.01, True),
    "colofunc.adamw8_": (*moments_in_8_bits(), ONE, RATE, 0.9, 0.999, 1e-8, 0.01, True),
    "colofunc.adamw_rounded": (*moments_in_bf16(), ONE, RATE, 0.9, 0.999, 1e-8, 0.01, True, False, None, 3),
    "colofunc.adamw_rounded_": (*moments_in_bf16(), ONE, RATE, 0.9, 0.999, 1e-8, 0.01, True, False, None, 3),
    "colofunc.rounded_rows": (10 * r(3, 5), 6.0),
    "colofunc.row_size": (10 * r(3, 5), 6.0),
    "colofunc.int8_rows": (10 * r(3, 5), 6 * torch.ones(3), 6.0),
    "colofunc.int8_rows_linear": (whole(3, 8), whole(4, 8), r(4), 6 * torch.ones(3), 10 * r(3, 8), 6.0, r(4), torch.float32),
    "colofunc.abs_max": (r(3, 5), (0,)),
    "colofunc.fp8_scale": (r(3, 1), 448.0, True),
    "colofunc.fp8_cast": (r(3, 5), ONE, torch.float8_e4m3fn),
    "colofunc.scaled_linear": (bits(2, 3), bits(4, 3), ONE, ONE, r(4), torch.float32),
    "colofunc.scaled_groups_linear": (bits(2, 6), bits(4, 6), r(2, 2), r(4, 2), r(4), torch.float32),
    "colofunc.scaled_linear_dx": (bits(2, 4), bits(4, 3), ONE, ONE, torch.float8_e5m2, torch.float32),
    "colofunc.scaled_linear_dw": (bits(2, 4), bits(2, 3), ONE, ONE, torch.float8_e5m2, torch.float32),
    "colofunc.sgd": (*moments()[:3], ONE, RATE, 0.9, 0.0, 0.0, False),
    "colofunc.sgd_": (*moments()[:3], ONE, RATE, 0.9, 0.0, 0.0, False),
    "colofunc.sum_of_squares": (r(3, 700),),
    "colofunc.lion": (*moments()[:3], RATE, 0.9, 0.99, 0.01),
    "colofunc.lion_": (*moments()[:3], RATE, 0.9, 0.99, 0.01),
    "colofunc.lamb_direction": (*moments(), ONE, 0.9, 0.999, 1e-6, 0.01),
    "colofunc.lamb_direction_": (*moments(), ONE, 0.9, 0.999, 1e-6, 0.01),
}  # fmt: skip


def on_packed_weights() -> dict[str, tuple[Any, ...]]:
    """Products with a packed weight, forward and backward, and what it is as a plain one."""
    found: dict[str, tuple[Any, ...]] = {"colofunc.fp8_bits": (r(3, 4),), "colofunc.mxfp8_numbers": (r(6, 128),)}
    found["colofunc.fp8_e5m2_bits"] = (r(3, 4),)
    found["colofunc.nvfp4_numbers"] = (r(6, 128), ONE)
    for quantizer in BUILT_IN.values():
        parts = quantizer.pack(r(6, 128)).parts
        form = f"colofunc.{quantizer.form}"
        found[f"{form}_linear"] = (r(2, 128), *parts, r(6))
        found[f"{form}_linear_dx"] = (r(2, 6), *parts)
        found[f"{form}_dequantize"] = (*parts, torch.float32)
    return found


def messages() -> dict[str, tuple[Any, ...]]:
    """Gradients on the wire: a tensor as a message, what is made of it again, and what is left."""
    x, message = r(3, 16), wire_pack(r(3, 16), "int8-g8", 3)
    return {
        "colofunc.wire_pack": (x, "int8-g8", 3),
        "colofunc.wire_open": (message, (3, 16), torch.float32, "int8-g8"),
        "colofunc.wire_sum": (message, (16,), torch.float32, "int8-g8"),
        "colofunc.wire_left": (x, message, "int8-g8", r(16), wire_pack(r(16), "int8-g8", 1), torch.tensor(1)),
        "colofunc.carry": (x, r(3, 16)),
        "colofunc.residual": (x, "params.w"),
    }


OWN |= on_packed_weights()
OWN |= messages()
TRIED_ELSEWHERE = {
    "colofunc.random_fill_": "test_native.py",  # by which random numbers are made on a CPU
    "colofunc.packed_linear_": "test_native_linear.py",  # by which products with packed weights are made on a CPU
    "colofunc.adamw_host_": "test_update_narrow.py",  # on the host
    "colofunc.sgd_host_": "test_update_narrow.py",
    "colofunc.adamw_rounded_host_": "test_update_rounded.py",
    "colofunc.adamw8_host_": "test_update_packed.py",
    "colofunc.squares_host_": "test_squares.py",
    "colofunc.lion_host_": "test_lion_lamb.py",
    "colofunc.lamb_host_": "test_lion_lamb.py",
    "colofunc.adamw_device_": "test_native_cuda.py",  # on a card that there is
    "colofunc.sgd_device_": "test_native_cuda.py",
    "colofunc.lion_device_": "test_native_cuda.py",
    "colofunc.lamb_device_": "test_native_cuda.py",
    "colofunc.sort_choices_": "test_native_cuda.py",
    "colofunc.add_choices_": "test_native_cuda.py",
    "colofunc.update": "test_device.py",
    "colofunc.update_": "test_device.py",
    "colofunc.ctc_loss_backward": "below",  # torch has no fake of it, without which no card can be pretended
    "colofunc.experts": "test_moe.py",
    "colofunc.experts_backward": "test_moe.py",
    "colofunc.experts_input_gradients": "test_host_ahead.py",
    "colofunc.experts_weight_gradients": "test_host_ahead.py",
}


def test_every_operator_of_ours_is_tried() -> None:
    ours = {target for target in KERNELS if target.startswith("colofunc.") and kind_of(Node(target, (), (), ())) is None}
    assert ours - set(OWN) == set(TRIED_ELSEWHERE)
    assert runs_on_a_card(torch.ops.aten._ctc_loss_backward.default)


@pytest.fixture
def no_tables_of_an_earlier_card() -> None:
    """What a process keeps on its card for good ends with a pretended one."""
    _tables.cache_clear()


@pytest.mark.usefixtures("no_tables_of_an_earlier_card")
@pytest.mark.parametrize("target", OWN)
def test_our_operators_are_made_of_such(target: str) -> None:
    def on(device: str, tree: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda x: x.clone().to(device) if isinstance(x, torch.Tensor) else x, tree)

    def tensors(tree: Any) -> list[torch.Tensor]:
        return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]

    args = on("cpu", OWN[target])
    want = KERNELS[target](*args)
    with Machine(seed=0):
        on_card = on("cuda", OWN[target])
        got = on("cpu", (KERNELS[target](*on_card), on_card))
    torch.testing.assert_close(tensors(got), tensors((want, args)), rtol=1e-5, atol=1e-5, equal_nan=True)


# ---- what is compiled ----


def assert_triton(name: str) -> None:
    """Kernels in Triton, products and what else torch has kernels for; nothing on the host, nothing that a graph could not capture."""
    codes = in_a_process(name)
    assert codes and any("@triton.jit" in code for code in codes)
    for code in codes:
        call = code[code.index("def call") :] if "def call" in code else code
        assert not re.findall(r"cpp_fused\w*|empty_strided_cpu\w*|torch\.ops\.colofunc\.\w+", call)
        assert not re.findall(r"\.cpu\(\)|_local_scalar_dense", call)
        # Numbers that differ from layer to layer (`define(number=)`) lie on the host, and are read there.
        on_host = re.findall(r"(\w+) = rand_strided\(\(\), \(\), device='cpu', dtype=torch.int64\)", code)
        assert set(re.findall(r"(\w+)\.item\(\)", call)) <= set(on_host)
        others = set(re.findall(r"torch\.ops\.(aten\.\w+\.\w+)", call))
        assert all(runs_on_a_card(overload(target)) for target in others)


OLD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14)


@pytest.mark.skipif(OLD, reason="fake CUDA tensors of an older torch (tried: 2.11) ask for a real device")
def test_a_dropout_is_fused_with_what_stands_before_and_behind_it_forward_and_backward() -> None:
    """Of ten operators with two draws one kernel that reads both operands once; the other adds up the sums of its blocks."""
    (code,) = in_a_process("dropout")
    elementwise, sums = re.findall(r"async_compile\.triton\('(\w+)'", code)
    assert "bitwise_xor" in elementwise and "gelu_backward" in elementwise and "pow" in elementwise
    assert sums.startswith("triton_per") and "xor" not in sums
    assert allocated_bytes(code) < 2 * (64 * 256 * 4)  # the gradient and the sums of blocks: no mask and no activation


@pytest.mark.sweep
@pytest.mark.skipif(OLD, reason="fake CUDA tensors of an older torch (tried: 2.11) ask for a real device")
@pytest.mark.parametrize("name", ["layers", "gpt2", "llama", "layer_lstm", "resnet", "mamba", "layer_losses", "t5", "mixtral_dense"])
def test_inductor_writes_triton(name: str) -> None:
    assert_triton(name)
