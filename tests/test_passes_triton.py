"""Passes over memory on a card, float8 and experts': numbers in Triton's interpreter, code for cards, and which calls get them."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colofunc.ops import fp8, grouped_device, triton_use
from colofunc.ops.experts_parts import ExpertWeights
from colofunc.ops.kernels import KernelCall, Like, choose
from colofunc.ops.small_floats import E4M3, E5M2, LARGEST

MAXIMUM, CAST = "colofunc.abs_max", "colofunc.fp8_cast"


def test_the_kernels_give_the_numbers_of_torch() -> None:
    """In Triton's interpreter: shapes, dtypes, every number of 16 bits, what is not finite, groups without rows."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("passes_interpreted.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "120 casts"


@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernels_are_compiled_for_a_card(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from colofunc.ops import experts_triton, fp8_triton

    all_names = [(module, name) for module in (experts_triton, fp8_triton) for name in vars(module) if name.endswith("_kernel")]
    written = {name: getattr(module, name) for module, name in all_names}
    if any(kernel.__class__.__name__ != "JITFunction" for kernel in written.values()):
        pytest.skip("Triton's interpreter is on")
    card = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32), get_current_device=lambda: arch, get_current_stream=lambda device: 0
    )  # fmt: skip
    monkeypatch.setattr(triton.runtime.driver, "_active", card)
    made = {}
    for name, kernel in written.items():

        def compiled(*args: Any, name: str = name, run: Any = kernel.run, **options: Any) -> None:
            made[name] = run(*args, **{**options, "warmup": True})

        monkeypatch.setattr(kernel, "run", compiled)
    x, bits = torch.zeros(64, 256, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.uint8)
    ends = torch.zeros(4, dtype=torch.int32)
    fp8_triton.abs_max(x, (1,))
    fp8_triton.abs_max(x, (0,))
    fp8_triton.cast(x, torch.ones(()), torch.float8_e4m3fn, "one")
    fp8_triton.cast(x.t(), torch.ones(256, 1), torch.float8_e4m3fn, "rows")
    fp8_triton.cast(x.view(4, 16, 8, 32).permute(2, 1, 0, 3), torch.ones(32), torch.float8_e4m3fn, "columns")
    fp8_triton.transposed(bits)
    experts_triton.gated(x)
    experts_triton.gated_backward(x[:, :128].contiguous(), x[:, :1].contiguous(), x)
    experts_triton.zero_rows(x, ends)
    assert made.keys() == written.keys() and all(kernel.asm["cubin"] for kernel in made.values())


def test_a_cast_of_up_to_4_dims_is_one_launch() -> None:
    """In whatever strides; of more dims some index, and never a row."""
    launches = pytest.importorskip("colofunc.ops.fp8_triton")._launches
    x = torch.empty(2, 64, 8, 16, 32, device="meta")
    of_4 = (x[0].permute(2, 1, 0, 3), x[0].transpose(0, 1), x[0, :, ::2].mT)
    for view in (*of_4, x[0, 0].transpose(0, 1), x[0, 0, 0].t(), x[0, 0, 0, 0], x):
        assert len(list(launches(view))) == 1
    assert len(list(launches(x.permute(0, 3, 2, 1, 4)))) == 2


def test_without_a_compiler_torch_computes_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("colofunc.ops.fp8_triton")

    def fails(bits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler.\nMore words")

    monkeypatch.setattr(module, "transposed", fails)
    triton_use._compiles.cache_clear()
    with pytest.warns(UserWarning, match=r"no kernel on cpu \(RuntimeError: Failed to find C compiler\.\).*Try: a C compiler"):
        assert not triton_use._compiles(torch.device("cpu"))
    assert not triton_use._compiles(torch.device("cpu"))  # and says nothing more
    triton_use._compiles.cache_clear()


def call_of(target: str, shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> KernelCall:
    return KernelCall(target, tuple({"x": Like(shape, dtype), **options}.items()), (9, 0))


@pytest.mark.parametrize(
    ("dtype", "dims", "taken"),
    [
        (torch.bfloat16, None, True),
        (torch.bfloat16, (-1,), True),
        (torch.float32, (0, 1), True),
        (torch.float32, (1, 0), True),
        (torch.float16, (0,), False),
        (torch.float64, None, False),
    ],
)
def test_a_maximum_is_one_pass_of_all_dims_the_last_or_all_others(dtype: torch.dtype, dims: Any, taken: bool) -> None:
    maxima = [kernel for kernel in fp8.CUDA_KERNELS if kernel.target == MAXIMUM]
    assert (choose(maxima, call_of(MAXIMUM, (2, 3, 4), dtype, dims=dims)) is not None) == taken


@pytest.mark.parametrize(
    ("scale", "of"), [((), "one"), ((1, 1, 1), "one"), ((2, 3, 1), "rows"), ((1, 1, 4), "columns"), ((4,), None), ((2, 1, 4), None)]
)
def test_a_cast_takes_scales_of_rows_of_columns_or_one(scale: tuple[int, ...], of: str | None) -> None:
    assert fp8.scales_of((2, 3, 4), scale) == of
    casts = [kernel for kernel in fp8.CUDA_KERNELS if kernel.target == CAST]
    call = call_of(CAST, (2, 3, 4), torch.bfloat16, scale=Like(scale, torch.float32))
    assert (choose(casts, call) is not None) == (of is not None)


# ---- on a card that there is ----


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [None, (-1,), (0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maxima_and_casts_have_the_bits_of_the_cpu(dtype: torch.dtype, dims: Any) -> None:
    x = (torch.randn(3, 301, 1030) * torch.exp(3 * torch.randn(3, 301, 1030))).to(dtype)
    (maximum,) = (kernel.fn for kernel in fp8.CUDA_KERNELS if kernel.target == MAXIMUM)
    (cast,) = (kernel.fn for kernel in fp8.CUDA_KERNELS if kernel.target == CAST)
    amax = fp8.abs_max.kernel(x, dims)
    assert torch.equal(maximum(x.cuda(), dims).cpu(), amax)
    for format in (E4M3, E5M2):
        scale = fp8.fp8_scale.kernel(amax, LARGEST[format], False)
        assert torch.equal(cast(x.cuda(), scale.cuda(), format).cpu(), fp8.fp8_cast.kernel(x, scale, format))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [None, (-1,), (0, 1)])
def test_operands_that_lie_in_other_strides_are_not_copied(dims: Any) -> None:
    x = torch.randn(64, 301, 1030, dtype=torch.bfloat16).permute(1, 0, 2)
    (maximum,) = (kernel.fn for kernel in fp8.CUDA_KERNELS if kernel.target == MAXIMUM)
    (cast,) = (kernel.fn for kernel in fp8.CUDA_KERNELS if kernel.target == CAST)
    there, amax = x.cuda(), fp8.abs_max.kernel(x, dims)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    assert torch.equal(maximum(there, dims).cpu(), amax)
    scale = fp8.fp8_scale.kernel(amax, LARGEST[E4M3], False)
    bits = cast(there, scale.cuda(), E4M3)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * bits.nbytes
    assert torch.equal(bits.cpu(), fp8.fp8_cast.kernel(x, scale, E4M3))


@pytest.mark.gpu
def test_bytes_are_turned_around_and_units_are_those_of_torch() -> None:
    from colofunc.ops.experts_triton import gated, gated_backward
    from colofunc.ops.fp8_triton import transposed

    bits = torch.randint(0, 256, (1000, 3001), dtype=torch.uint8, device="cuda")
    assert torch.equal(transposed(bits), bits.t())
    h, da, scale = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((500, 2060), (500, 1030), (500, 1)))
    w = ExpertWeights(h[:0], h[:0], None, None, "silu", gated=True, transposed=False)
    units, dh, dots = gated_backward(da, scale, h)
    want = w.activated(h)
    near = {"rtol": 2**-6, "atol": 2**-7}
    torch.testing.assert_close(gated(h), want, **near)
    torch.testing.assert_close(units, want, **near)
    torch.testing.assert_close(dh, w.activated_backward(da * scale, h), **near)
    torch.testing.assert_close(dots, (da.float() * want.float()).sum(-1), rtol=1e-2, atol=1e-1)


@pytest.mark.gpu
@pytest.mark.parametrize("ends", [[2, 2, 5], [0, 0, 0], [7, 7, 7]])
def test_nobodys_rows_and_empty_groups_are_zero(ends: list[int]) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch's grouped product is for Hopper")
    x, w, g = (torch.ones(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((7, 64), (3, 64, 2048), (7, 2048)))
    of = torch.tensor(ends, dtype=torch.int32, device="cuda")
    poison = torch.full((7, 2048), torch.nan, dtype=torch.bfloat16, device="cuda")
    del poison  # what the result is likely to be given
    rows = grouped_device.grouped(x, w, of)
    assert rows[:, 0].tolist() == [64.0 * (row < ends[-1]) for row in range(7)] and not rows.isnan().any()
    groups = grouped_device.grouped_of_groups(x, g, of)
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    assert groups[:, 0, 0].tolist() == [float(size) for size in sizes] and not groups.isnan().any()
