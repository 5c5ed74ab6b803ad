"""Kernels in CUDA: that they compile, link and load anywhere; on a card, their bounds against float64 and the bits of the CPU's kernels."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_native_linear import DTYPES, MISTAKES, SCHEMES, SHAPES, bound, weight
from test_native_linear import operands as linear_operands
from test_update_narrow import BF16, F16, U, check_adam, check_sgd, laid, operands, step_of
from torch import Tensor

from colofunc import env
from colofunc.errors import InputError, NativeError
from colofunc.ops import experts_native, native, native_build, quantized, update_device
from colofunc.ops.experts import experts, experts_backward, experts_input_gradients, experts_weight_gradients
from colofunc.ops.experts_native import add_choices_, sort_choices_
from colofunc.ops.quantized import OPERATORS, Quantized, packed_linear_
from colofunc.ops.update import adamw_, sgd_
from colofunc.ops.update_device import adamw_device_, sgd_device_
from colofunc.ops.update_fused import fused_adamw_, fused_sgd_
from colofunc.ops.update_lamb import lamb_device_, lamb_direction_
from colofunc.ops.update_lion import lion_, lion_device_, lion_host_

F32 = torch.float32
KERNELS = ("adamw_device_", "sgd_device_", "lion_device_", "lamb_device_", "packed_linear_", "sort_choices_", "add_choices_")
can_compile = pytest.mark.skipif(
    torch.version.cuda is None or not any(map(shutil.which, env.cuda_compilers())), reason="there is no nvcc, or no CUDA in this torch"
)


# ---- without a card: compiled, linked, loaded; and all that may be missing ----


@can_compile
@pytest.mark.sweep
def test_the_library_compiles_links_and_registers_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run, so nothing is optimised: half of the time. `.ci/run` compiles it as users get it, by `tools/compile_cuda.py`."""
    unoptimised = ("-O0", "-Xcicc", "-O0", "-Xptxas", "-O0")
    monkeypatch.setattr(native_build, "CUDA_FLAGS", (*(flag for flag in native_build.CUDA_FLAGS if flag != "-O3"), *unoptimised))
    path = native_build.build(tmp_path, native_build.cuda(("90",)))
    assert path.name.startswith("cuda-90-") and native_build.build(tmp_path, native_build.cuda(("90",))) == path
    code = (
        "import ctypes, torch, colofunc.ops.experts, colofunc.ops.quantized, colofunc.ops.update_lamb, colofunc.ops.update_lion\n"
        f"library = ctypes.CDLL({str(path)!r})\n"
        "library.colofunc_device_lacks.restype = ctypes.c_char_p\n"
        f"print(all(torch._C._dispatch_has_kernel_for_dispatch_key('colofunc::' + name, 'CUDA') for name in {KERNELS}))\n"
        "print(torch.cuda.is_available() or bool(library.colofunc_device_lacks()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_without_a_card_nothing_is_compiled_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "architectures", lambda: ())
    monkeypatch.setattr(native_build, "build", lambda *args: pytest.fail("something is compiled"))
    monkeypatch.setattr(native, "_LIBRARIES", {})
    for mode in ("auto", "require", "off"):
        monkeypatch.setenv("COLOFUNC_NATIVE", mode)
        assert not native.ready("cuda") and not native.ready("meta")


@pytest.fixture
def a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An H100, as far as the loader asks."""
    monkeypatch.setattr(native_build, "architectures", lambda: ("90",))
    monkeypatch.setattr(native, "_LIBRARIES", {})
    monkeypatch.setattr(native, "_FAILED", {})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("COLOFUNC_CACHE", str(tmp_path))
    monkeypatch.setenv("COLOFUNC_QUIET", "1")
    monkeypatch.delenv("COLOFUNC_NATIVE", raising=False)
    return monkeypatch


def test_without_nvcc_one_warning_says_what_runs_instead(a_card: pytest.MonkeyPatch) -> None:
    a_card.setenv("CUDA_HOME", "/nowhere")
    said = r"there is no CUDA compiler \(/nowhere/bin/nvcc\)\. Try: install the CUDA toolkit.*widen the weight.*COLOFUNC_NATIVE=off"
    with pytest.warns(RuntimeWarning, match=said) as told:
        assert not native.ready("cuda") and not native.ready("cuda")
    assert len(told) == 1
    a_card.setenv("COLOFUNC_NATIVE", "require")
    with pytest.raises(NativeError, match="COLOFUNC_NATIVE=require, and there is no CUDA compiler"):
        native.ready("cuda")


def test_an_nvcc_that_fails_is_named_with_its_log(a_card: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho no such architecture\nexit 1\n")
    nvcc.chmod(0o755)
    a_card.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    with pytest.warns(RuntimeWarning, match=r"nvcc could not compile the kernels; what it said is in .*build\.log\. Try: another CUDA"):
        assert not native.ready("cuda")
    text = (tmp_path / "native" / "build.log").read_text()
    assert "no such architecture" in text and "-gencode=arch=compute_90,code=sm_90" in text
    assert not list((tmp_path / "native").glob("build-*"))


def test_a_card_or_a_torch_without_such_kernels_is_named(a_card: pytest.MonkeyPatch) -> None:
    with pytest.raises(NativeError, match=r"kernels for GPUs take compute capability 8\.0 or later, not 7\.5\. Try: COLOFUNC_NATIVE=off"):
        native_build.cuda(("75", "90"))
    a_card.setattr(torch.version, "cuda", None)
    with pytest.raises(NativeError, match="this torch was built without CUDA"):
        native_build.cuda(("90",))


def test_a_card_that_cannot_run_the_library_says_why(a_card: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacks = Mock(return_value=b"CUDA driver version is insufficient for CUDA runtime version")
    a_card.setattr(native_build, "build", lambda *args: tmp_path / "library.so")
    a_card.setattr(native.ctypes, "CDLL", lambda name: SimpleNamespace(colofunc_device_lacks=lacks))
    said = "this GPU cannot run the compiled kernels: CUDA driver version is insufficient"
    with pytest.warns(RuntimeWarning, match=f"{said}.*Try: a CUDA toolkit as old as the driver, in CUDA_HOME"):
        assert not native.ready("cuda")
    # One in a wheel is asked first, whatever CUDA_HOME says.
    wheel = tmp_path / "cuda-90-1.so"
    wheel.touch(0o644)
    a_card.setattr(native_build, "shipped", lambda library: wheel)
    a_card.setattr(native, "_FAILED", {})
    with pytest.warns(RuntimeWarning, match=rf"{said}.*Try: a later driver, or another process after `rm {wheel}`, which compiles them"):
        assert not native.ready("cuda")


def test_a_library_of_a_wheel_that_others_may_write_is_passed_over_aloud(
    a_card: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel, python = tmp_path / "cuda-90-1.so", tmp_path / "native_build.py"
    for path, mode in ((wheel, 0o666), (python, 0o644)):
        path.touch()
        path.chmod(mode)
    a_card.setattr(native_build, "shipped", lambda library: wheel)
    a_card.setattr(native, "PYTHON", python)
    a_card.setenv("COLOFUNC_QUIET", "0")
    a_card.setenv("CUDA_HOME", "/nowhere")
    with pytest.warns(RuntimeWarning, match="there is no CUDA compiler"):
        assert not native.ready("cuda")
    assert f"passed over: {wheel} is a link, or more users may write it than may write {python}" in capsys.readouterr().err


def test_what_is_prebuilt(a_card: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_card.setattr(native_build, "build", lambda folder, library=native_build.CPU: Path(library.prefix))
    assert list(map(str, native.prebuild("cpu"))) == ["cpu"] and list(map(str, native.prebuild("cuda"))) == ["cuda-90"]
    a_card.setattr(native_build, "architectures", lambda: ())
    assert list(map(str, native.prebuild("cuda"))) == ["cuda-80", "cuda-90"]
    with pytest.raises(NativeError, match=r"there are kernels for cpu and cuda, not for 'tpu'\. Try: python -m colofunc native cpu"):
        native.prebuild("tpu")
    a_card.setenv("COLOFUNC_CACHE", "off")
    with pytest.raises(NativeError, match="COLOFUNC_CACHE=off keeps nothing"):
        native.prebuild("cuda")


# ---- without a card: the references ----


def sorted_by(index: Tensor, count: int, sort: Any) -> tuple[Tensor, ...]:
    """order, key, place, ends."""
    device, n = index.device, index.numel()
    made = [torch.full((n,), -7, device=device) for _ in range(3)] + [torch.full((count,), -7, device=device)]
    counts = torch.full(((count + 1) * (n // experts_native.TILE + 2),), -7, dtype=torch.int32, device=device)
    sort(*made, counts, index)
    return tuple(x.cpu() for x in made)


def brute(index: Tensor, count: int) -> tuple[Tensor, ...]:
    """The same, one choice after the other."""
    keys = [i if 0 <= i < count else count for i in index.tolist()]
    order = sorted(range(len(keys)), key=lambda choice: keys[choice])
    place = [-1] * len(keys)
    for at, choice in enumerate(order):
        place[choice] = at if keys[choice] < count else -1
    ends = [sum(key <= expert for key in keys) for expert in range(count)]
    return tuple(torch.tensor(x, dtype=torch.int64) for x in (order, [keys[c] for c in order], place, ends))


def assert_sorts(index: Tensor, count: int, sort: Any) -> None:
    assert all(map(torch.equal, sorted_by(index, count, sort), brute(index, count)))


def choices(numel: int, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Some of them nobody's."""
    return torch.randint(-2, count + 2, (numel,), dtype=dtype)


def test_references_of_experts_are_what_they_say() -> None:
    for numel, count in ((0, 3), (1, 1), (40, 5), (300, 64)):
        assert_sorts(choices(numel, count), count, sort_choices_.kernel)
    index = choices(14, 5).view(7, 2)
    order, _, place, _ = (x.view(-1) for x in brute(index.flatten(), 5))
    rows, scale = torch.randn(14, 3), torch.randn(7, 2)
    total = torch.randn(7, 3)
    want = total.clone()
    for at, choice in enumerate(order.tolist()):
        if place[choice] >= 0 and 3 <= at < 9:
            want[choice // 2] += rows[at] * scale.view(-1)[choice]
    add_choices_.kernel(total, rows[3:9], place.view(7, 2), scale, 3)
    assert torch.equal(total, want)
    with pytest.raises(InputError, match=r"total, rows and place are \(7, 3\), \(14, 2\), \(7, 2\)"):
        add_choices_.kernel(total, rows[:, :2], place.view(7, 2), scale, 3)


def test_references_of_updates_are_torchs_on_a_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOFUNC_NATIVE", "off")
    p, g, m, v = operands(50, BF16)
    made, want = ([x.clone() for x in (p, m, v)] for _ in range(2))
    for finite in (None, torch.tensor(False), torch.tensor(True)):
        adamw_device_(made[0], g, made[1], made[2], *step_of(3, 1e-2), 0.9, 0.99, 1e-8, 0.1, True, False, finite)
        fused_adamw_([want[0]], [g.float()], [want[1]], [want[2]], [], *step_of(3, 1e-2), 0.9, 0.99, 1e-8, 0.1, True, False, finite)
        sgd_device_(made[0], g, made[1], step_of(3, 1e-2)[1], 0.9, 0.1, True, False, finite)
        fused_sgd_([want[0]], [g.float()], [want[1]], step_of(3, 1e-2)[1], 0.9, 0.1, True, False, finite)
        assert all(map(torch.equal, made, want))
        lion_device_(made[0], g, made[1], torch.tensor(1e-2, dtype=torch.float64), 0.9, 0.99, 0.1, False, finite)
        if finite is None or finite:
            lion_host_.kernel(want[0], g, want[1], 1e-2, 0.9, 0.99, 0.1, False)
        assert all(map(torch.equal, made, want))
        direction = torch.full_like(p, 7.0)
        lamb_device_(direction, made[0], g, *made[1:], step_of(3, 1e-2)[0], 0.9, 0.99, 1e-6, 0.1, False, finite)
        along, _ = lamb_direction_.kernel(want[0], g, *want[1:], step_of(3, 1e-2)[0], 0.9, 0.99, 1e-6, 0.1, False, finite)
        assert torch.equal(direction, along if finite is None or finite else torch.full_like(p, 7.0))
        assert all(map(torch.equal, made, want))


def opchecks(device: str) -> None:
    p, g, m, v = (x.to(device) for x in operands(40, BF16))
    step, lr = step_of(7, 1e-2, device)
    torch.library.opcheck(adamw_device_.op, (p, g, m, v, step, lr, 0.9, 0.999, 1e-8, 0.1, True, False, None))
    torch.library.opcheck(sgd_device_.op, (p, g, None, lr, 0.0, 0.1, False, False, torch.tensor(True, device=device)))
    torch.library.opcheck(lion_device_.op, (p, g, m, lr, 0.9, 0.99, 0.1, False, None))
    torch.library.opcheck(lamb_device_.op, (torch.empty_like(p), p, g, m, v, step, 0.9, 0.999, 1e-6, 0.1, False, None))
    whole = [torch.empty(n, dtype=torch.int64, device=device) for n in (6, 6, 6, 4)]
    counts = torch.empty(10, dtype=torch.int32, device=device)
    torch.library.opcheck(sort_choices_.op, (*whole, counts, torch.tensor([3, 1, 9, 1, 0, -1], device=device)))
    place = torch.tensor([[0, 2], [1, -1]], device=device)
    torch.library.opcheck(add_choices_.op, (p[:6].view(2, 3).clone(), p[:9].view(3, 3).clone(), place, None, 0))


def test_the_operators_are_what_they_say() -> None:
    opchecks("cpu")


# ---- on a card ----


@pytest.fixture(scope="session")
def cuda_folder(kernels_folder: Path) -> Path:
    """A cache folder with the libraries for the CPU and for the card that is here."""
    native_build.build(kernels_folder / "native", native_build.cuda(native_build.architectures()))
    return kernels_folder


@pytest.fixture
def on_card(cuda_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("COLOFUNC_CACHE", str(cuda_folder))
    monkeypatch.setenv("COLOFUNC_NATIVE", "require")
    monkeypatch.setattr(native, "_LIBRARIES", {})
    assert native.ready("cuda")
    for name in KERNELS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"colofunc::{name}", "CUDA")
    torch.manual_seed(0)
    yield monkeypatch
    torch.cuda.synchronize()


def there(*tensors: Tensor) -> list[Tensor]:
    return [x.cuda() for x in tensors]


def misaligned(x: Tensor) -> Tensor:
    """On the card, one element beyond a multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check_adam, check_sgd])
def test_an_update_is_within_its_bound_of_float64(check: Any, on_card: pytest.MonkeyPatch) -> None:
    on_card.setattr(update_device, "fused_adamw_", lambda *args: pytest.fail("the reference runs"))

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def within(data: st.DataObject) -> None:
        check(data, "cuda")

    within()


@pytest.mark.gpu
@pytest.mark.parametrize("lies", [lambda x: x.cuda(), misaligned], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("numel", [0, 1, 3, 4, 5, 1023, 70_001, 3_000_001])
def test_updates_have_the_bits_of_the_cpus_kernel(numel: int, dtype: torch.dtype, lies: Any, on_card: Any) -> None:
    """A gradient in float32 is Lion's and LAMB's alone."""
    p, g, m, v = operands(numel, dtype)
    p2, g2, m2, v2 = (lies(x) for x in (p, g, m, v))
    _, lr = step_of(3, 1e-2, "cuda")
    lion_.kernel(p2, g2, m2, lr, 0.9, 0.99, 0.1, maximize=True)
    lion_.kernel(p, g, m, lr.cpu(), 0.9, 0.99, 0.1, maximize=True)
    assert torch.equal(p2.cpu(), p) and torch.equal(m2.cpu(), m)
    direction, _ = lamb_direction_.kernel(p2, g2, m2, v2, step_of(3, 1e-2, "cuda")[0], 0.9, 0.999, 1e-6, 0.1)
    here, _ = lamb_direction_.kernel(p, g, m, v, step_of(3, 1e-2)[0], 0.9, 0.999, 1e-6, 0.1)
    assert torch.equal(m2.cpu(), m) and torch.equal(v2.cpu(), v)
    torch.testing.assert_close(direction.cpu(), here, rtol=8 * U, atol=8 * U)  # where powers differ in a last bit
    if dtype != F32:
        buffer, buffer2 = v.clone(), lies(v)
        for buffers, momentum, nesterov in (
            ((buffer, buffer2), 0.9, True), ((buffer, buffer2), 0.9, False), ((None, None), 0.0, False),
        ):  # fmt: skip
            sgd_.kernel(p2, g2, buffers[1], *step_of(3, 1e-2, "cuda"), momentum, 0.0, 0.1, nesterov)
            sgd_.kernel(p, g, buffers[0], *step_of(3, 1e-2), momentum, 0.0, 0.1, nesterov)
            assert torch.equal(p2.cpu(), p) and torch.equal(buffer2.cpu(), buffer)
        adamw_.kernel(p2, g2, m2, v2, *step_of(7, 1e-2, "cuda"), 0.9, 0.999, 1e-8, 0.1, True)
        adamw_.kernel(p, g, m, v, *step_of(7, 1e-2), 0.9, 0.999, 1e-8, 0.1, True)
        assert torch.equal(m2.cpu(), m) and torch.equal(v2.cpu(), v)
        torch.testing.assert_close(p2.cpu(), p, rtol=8 * U, atol=8 * U)  # where powers differ in a last bit


@pytest.mark.gpu
@pytest.mark.parametrize("param, grad", [("plain", "transposed"), ("transposed", "plain"), ("transposed", "gaps"), ("gaps", "plain")])
def test_operands_that_lie_apart_meet_element_by_element(param: str, grad: str, on_card: Any) -> None:
    p, g, m, v = (x.view(37, 129) for x in there(*operands(37 * 129, BF16)))
    want = [x.clone() for x in (p, m, v)]
    adamw_.kernel(want[0], g, *want[1:], *step_of(7, 1e-2, "cuda"), 0.9, 0.999, 1e-8, 0.1, True)
    lion_.kernel(want[0], g, want[1], step_of(7, 1e-2, "cuda")[1], 0.9, 0.99, 0.1)
    made = [laid(x.clone(), param) for x in (p, m, v)]
    adamw_.kernel(made[0], laid(g, grad), *made[1:], *step_of(7, 1e-2, "cuda"), 0.9, 0.999, 1e-8, 0.1, True)
    lion_.kernel(made[0], laid(g, grad), made[1], step_of(7, 1e-2, "cuda")[1], 0.9, 0.99, 0.1)
    for x, gradient in ((want, g), (made, laid(g, grad))):
        direction, squares = lamb_direction_.kernel(x[0], gradient, *x[1:], step_of(7, 1e-2, "cuda")[0], 0.9, 0.999, 1e-6, 0.1)
        torch.testing.assert_close(squares[1], direction.double().square().sum(), rtol=1e-4, atol=0.0)
        x.append(direction)
    torch.testing.assert_close(made, want, rtol=16 * U, atol=16 * U)


@pytest.mark.gpu
def test_the_host_waits_for_nothing_and_a_step_that_is_not_finite_changes_nothing(on_card: Any) -> None:
    p, g, m, v = there(*operands(4000, F16))
    before = [x.clone() for x in (p, m, v)]
    step, lr = step_of(1, 1e-2, "cuda")
    flags = there(torch.tensor(False), torch.tensor(True))
    g[3] = float("nan")
    kept = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for finite in flags:
            kept.append([x.clone() for x in (p, m, v)])
            adamw_.kernel(p, g, m, v, step, lr, 0.9, 0.999, 1e-8, 0.0, True, finite=finite)
            sgd_.kernel(p, g, m, step, lr, 0.9, 0.0, 0.0, False, finite=finite)
            lion_.kernel(p, g, m, lr, 0.9, 0.99, 0.0, finite=finite)
            lamb_direction_.kernel(p, g, m, v, step, 0.9, 0.999, 1e-6, 0.1, finite=finite)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, kept[0], before)) and all(map(torch.equal, kept[1], before))
    lost = p.isnan()
    assert bool(lost[3]) and int(lost.sum()) == 1 and not torch.equal(p[4:], before[0][4:])


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(on_card: Any) -> None:
    """Of SGD without momentum: 13 GB."""
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("the card has too little free memory")
    numel = 2**31 + 5
    p, g = torch.ones(numel, device="cuda"), torch.zeros(numel, dtype=BF16, device="cuda")
    marks = torch.tensor([0, 1, 2**31 - 1, 2**31, numel - 2, numel - 1], device="cuda")
    g[marks] = 2.0
    sgd_.kernel(p, g, None, *step_of(1, 0.25, "cuda"), 0.0, 0.0, 0.0, False)
    assert p[marks].tolist() == [0.5] * 6 and int((p != 1.0).sum()) == 6


# ---- products ----


def weight_there(scheme: str, rows: int, columns: int) -> tuple[Quantized, list[Tensor]]:
    w = weight(scheme, rows, columns)
    return w, there(*w.parts)


def assert_product(w: Quantized, parts: Any, x: Tensor, bias: Tensor, x_there: Tensor) -> None:
    want = x.double() @ w.dequantize(torch.float64).T + bias.double()
    found = OPERATORS[w.form].linear.kernel(x_there, *parts, bias.cuda()).cpu()
    error = (found.double() - want).abs()
    assert bool((error <= bound(w, x, bias, want)).all()), (tuple(x.shape), x.dtype, float((error / bound(w, x, bias, want)).max()))


@pytest.mark.gpu
@pytest.mark.parametrize("lies", [lambda x: x.cuda(), misaligned], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_product_keeps_the_stated_bound(scheme: str, dtype: torch.dtype, lies: Any, on_card: Any) -> None:
    for rows, columns in [*SHAPES[scheme], (130, 4096), (16, 11008), (4096, 1024)]:
        w, parts = weight_there(scheme, rows, columns)
        for count in (1, 2, 3, 7, 8, 9, 15, 16):
            x, bias = torch.randn(count, columns).to(dtype), torch.randn(rows).to(dtype)
            assert_product(w, parts, x, bias, lies(x))
        assert_product(w, [misaligned(parts[0]), *parts[1:]], x, bias, lies(x))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_product_is_as_exact_as_the_reference(scheme: str, on_card: pytest.MonkeyPatch) -> None:
    w, parts = weight_there(scheme, 64, 1024)
    for dtype in DTYPES:
        x = torch.randn(16, 1024).to(dtype)
        made = OPERATORS[w.form].linear.kernel(x.cuda(), *parts, None).cpu()
        with on_card.context() as without:
            without.setenv("COLOFUNC_NATIVE", "off")
            reference = OPERATORS[w.form].linear.kernel(x.cuda(), *parts, None).cpu()
        want = x.double() @ w.dequantize(torch.float64).T
        assert float((made - want).square().sum()) <= 1.1 * float((reference - want).square().sum())


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_however_operands_lie_the_product_is_the_same(scheme: str, on_card: Any) -> None:
    w, parts = weight_there(scheme, 24, 512)
    linear = OPERATORS[w.form].linear.kernel
    x = torch.randn(2, 3, 512).to("cuda", BF16)
    want = linear(x.flatten(0, 1), *parts, None)
    assert torch.equal(linear(x, *parts, None), want.unflatten(0, (2, 3)))
    assert torch.equal(linear(x.flatten(0, 1).t().contiguous().t(), *parts, None), want)
    wide = torch.randn(6, 600).to("cuda", BF16)
    wide[:, 20:532] = x.flatten(0, 1)
    assert torch.equal(linear(wide[:, 20:532], *parts, None), want)
    for rows in (slice(5, 17), slice(1, 24, 2)):
        assert torch.equal(linear(x.flatten(0, 1), *(part[rows] for part in parts), None), want[:, rows])
    assert linear(x[:, :0], *parts, None).shape == (2, 0, 24)
    assert linear(x, *(part[:0] for part in parts), None).shape == (2, 3, 0)
    form = w.format
    halves = [linear(x[..., a:b], *form.columns_of(parts, a, b), None) for a, b in ((0, 256), (256, 512))]
    torch.testing.assert_close((halves[0] + halves[1]).flatten(0, 1), want, rtol=0.02, atol=0.2)


@pytest.mark.gpu
def test_zeros_of_a_group_may_be_any_byte(on_card: Any) -> None:
    w = weight("int4-g128", 24, 512)
    zero = torch.randint(0, 256, (24, 4), dtype=torch.uint8)
    other = Quantized(w.scheme, w.form, w.shape, w.dtype, w.data, w.scale, zero)
    for dtype in DTYPES:
        x = torch.randn(5, 512).to(dtype)
        assert_product(other, there(*other.parts), x, torch.zeros(24, dtype=dtype), x.cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_that_are_not_finite_change_only_their_own_rows(scheme: str, dtype: torch.dtype, on_card: Any) -> None:
    w, parts = weight_there(scheme, 40, 640)
    linear = OPERATORS[w.form].linear.kernel
    x = torch.randn(12, 640).to("cuda", dtype)
    one = linear(x, *parts, None)
    x[3, 5], x[9, 0] = math.nan, math.inf
    made = linear(x, *parts, None)
    assert bool(made[3].isnan().all())
    column = w.dequantize(torch.float64)[:, 0]
    torch.testing.assert_close(made[9].cpu().double(), column.sign() * math.inf, equal_nan=True)  # 0 times infinity is no number
    rest = [row for row in range(12) if row not in (3, 9)]
    assert torch.equal(made[rest], one[rest])


@pytest.mark.gpu
def test_float32_is_split_without_loss_at_its_ends(on_card: Any) -> None:
    _, parts = weight_there("int8", 3, 64)
    data = torch.zeros_like(parts[0])
    data[:, 0] = torch.tensor([1, -1, 0])
    for number in (torch.finfo(F32).max, torch.finfo(F32).tiny * 2**40, 1 + 2.0**-23, -(2 - 2.0**-23)):
        x = torch.zeros(1, 64, device="cuda")
        x[0, 0] = number
        found = OPERATORS["int8"].linear.kernel(x, data, torch.ones(3, device="cuda"), None)
        assert found.tolist() == [[float(x[0, 0]), -float(x[0, 0]), 0.0]]


@pytest.mark.gpu
def test_more_rows_are_as_before_and_the_operator_takes_any(on_card: pytest.MonkeyPatch) -> None:
    w, parts = weight_there("int8", 40, 640)
    x = torch.randn(100, 640)
    want = x.double() @ w.dequantize(torch.float64).T
    out = torch.empty(100, 40, device="cuda")
    packed_linear_(out, x.cuda(), *parts, None, None)
    assert bool(((out.cpu() - want).abs() <= bound(w, x, torch.zeros(40), want)).all())
    on_card.setattr(quantized, "_by_kernel", lambda *args: pytest.fail("the kernel was called"))
    for other in (x[:17].cuda(), x[:2].cuda().double()):
        found = OPERATORS["int8"].linear.kernel(other, *parts, None)
        torch.testing.assert_close(found.cpu().double(), want[: len(other)], rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("scheme", "place", "wrong", "said"), MISTAKES)
def test_operands_that_do_not_fit_are_named(scheme: str, place: int, wrong: Tensor, said: str, on_card: Any) -> None:
    given = [x if x is None else x.cuda() for x in linear_operands(scheme)]
    given[place] = torch.empty_strided(wrong.shape, wrong.stride(), dtype=wrong.dtype, device="cuda")
    with pytest.raises(RuntimeError) as caught:
        packed_linear_(*given)
    assert f"packed_linear_: {said}" in str(caught.value)
    given = [x if x is None else x.cuda() for x in linear_operands(scheme)]
    given[3] = linear_operands(scheme)[3]
    with pytest.raises(RuntimeError, match="packed_linear_: tensors lie on several devices"):
        packed_linear_(*given)


@pytest.mark.gpu
def test_updates_name_operands_that_do_not_fit(on_card: Any) -> None:
    p, g, m, _ = there(*operands(40, BF16))
    lr = torch.tensor(1e-2, device="cuda")
    for what, wrong in {
        "not contiguous, or not of the parameter's size": (p, g[1:], m, lr, None),
        "neither parameter nor states may be other than float32": (p, g, m.double(), lr, None),
        "a gradient is bfloat16 or float16": (p, g.float(), m, lr, None),
        "step and lr are float32, float64 or int64": (p, g, m, lr.half(), None),
        "tensors lie on several devices": (p, g.cpu(), m, lr, None),
        "finite is one bool": (p, g, m, lr, lr),
    }.items():
        *tensors, finite = wrong
        with pytest.raises(RuntimeError, match=f"sgd_device_: {what}"):
            sgd_device_(*tensors, 0.9, 0.1, True, False, finite)


# ---- experts ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("numel", [1, 31, 255, 256, 257, 5000, 70_000])
@pytest.mark.parametrize("count", [1, 3, 64, 1000])
def test_choices_are_sorted(count: int, numel: int, dtype: torch.dtype, on_card: Any) -> None:
    index = choices(numel, count, dtype)
    want = sorted_by(index, count, sort_choices_.kernel)
    assert all(map(torch.equal, sorted_by(index.cuda(), count, sort_choices_), want))


@pytest.mark.gpu
def test_choices_that_are_all_alike_and_none(on_card: Any) -> None:
    for index in (torch.full((1000,), 2), torch.full((1000,), -1), torch.empty(0, dtype=torch.int64)):
        assert all(map(torch.equal, sorted_by(index.cuda(), 4, sort_choices_), brute(index, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "d"), [(7, 2, 3), (100, 8, 512), (33, 64, 5), (5, 1, 4097)])
def test_rows_are_summed_in_the_order_of_experts(tokens: int, k: int, d: int, dtype: torch.dtype, on_card: Any) -> None:
    index = choices(tokens * k, 16)
    place = sorted_by(index, 16, sort_choices_.kernel)[2].view(tokens, k)
    s = tokens * k
    for first, end in ((0, s), (s // 3, s // 2 + 1)):
        rows, scale = torch.randn(end - first, d).to(dtype), torch.randn(tokens, k).to(dtype)
        for weights in (scale, None):
            total = torch.randn(tokens, d)
            made, unaligned = total.cuda(), misaligned(total)
            operands_there = [rows.cuda(), place.cuda(), None if weights is None else weights.cuda(), first]
            add_choices_(made, *operands_there)
            add_choices_(unaligned, *operands_there)
            add_choices_.kernel(total, rows, place, weights, first)
            assert torch.equal(made.cpu(), total) and torch.equal(unaligned.cpu(), total)


def layer(dtype: torch.dtype, e: int = 8, d: int = 64, f: int = 32, tokens: int = 200, k: int = 2) -> list[Any]:
    x, up, down = (torch.randn(*shape) / 8 for shape in ((tokens, d), (e, 2 * f, d), (e, d, f)))
    index = torch.stack([torch.randperm(e)[:k] for _ in range(tokens)])
    index[5, 0] = -1
    share = torch.rand(tokens, k)
    return [x.to(dtype), index, share.to(dtype), up.to(dtype), down.to(dtype), None, None, "silu"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_layer_is_what_it_is_without_the_kernels(dtype: torch.dtype, on_card: pytest.MonkeyPatch) -> None:
    given = [x.cuda() if isinstance(x, Tensor) else x for x in layer(dtype)]
    g = torch.randn_like(given[0])

    def run() -> list[Tensor]:
        *of_tokens, dh, a = experts_input_gradients.kernel(g, *given)
        apart = [*of_tokens, *experts_weight_gradients.kernel(dh, a, g, *given)[:2]]
        return [experts.kernel(*given), *experts_backward.kernel(g, *given)[:4], *apart]

    made = run()
    with on_card.context() as without:
        without.setenv("COLOFUNC_NATIVE", "off")
        want = run()
    for one, other in zip(made, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5 if dtype == F32 else 1e-2, atol=1e-5 if dtype == F32 else 1e-2)
    wide = [x.double().cpu() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
    wide[1] = given[1].cpu()
    torch.testing.assert_close(made[0].cpu().double(), experts.kernel(*wide), rtol=3e-2, atol=1e-4 if dtype == F32 else 2e-2)


# ---- streams ----


@pytest.mark.gpu
def test_the_operators_are_what_they_say_on_a_card(on_card: Any) -> None:
    opchecks("cuda")
    given = [x if x is None else x.cuda() for x in linear_operands("int8")]
    torch.library.opcheck(packed_linear_.op, tuple(given))


@pytest.mark.gpu
def test_kernels_run_on_the_current_stream_and_a_graph_captures_them(on_card: Any) -> None:
    _, parts = weight_there("int8", 64, 512)
    p, g, m, v = there(*operands(5000, BF16))
    x, out = torch.randn(4, 512, device="cuda"), torch.empty(4, 64, device="cuda")
    step, lr = step_of(1, 1e-2, "cuda")
    index = choices(4000, 8).cuda()
    made = [torch.empty(4000, dtype=torch.int64, device="cuda") for _ in range(3)] + [torch.empty(8, dtype=torch.int64, device="cuda")]
    counts = torch.empty(9 * 20, dtype=torch.int32, device="cuda")

    def run() -> None:
        packed_linear_(out, x, *parts, None, None)
        adamw_.kernel(p, g, m, v, step, lr, 0.9, 0.999, 1e-8, 0.1, True)
        lion_.kernel(p, g, m, lr, 0.9, 0.99, 0.1)
        sgd_.kernel(p, lamb_direction_.kernel(p, g, m, v, step, 0.9, 0.999, 1e-6, 0.1)[0], None, step, lr, 0.0, 0.0, 0.0, False)
        sort_choices_(*made, counts, index)

    start = [t.clone() for t in (p, m, v)]
    run()
    run()
    want = [t.clone() for t in (p, m, v, out, *made)]
    for t, old in zip((p, m, v), start, strict=True):
        t.copy_(old)
    for t in (out, *made):
        t.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    assert all(map(torch.equal, (p, m, v), start)) and not out.any()  # captured, not run
    graph.replay()
    graph.replay()
    assert all(map(torch.equal, (p, m, v, out, *made), want))


@pytest.mark.gpu
def test_the_first_call_compiles_once_and_a_second_process_finds_it(cuda_folder: Path) -> None:
    code = "import torch; from colofunc.ops import native; print(native.ready('cuda'))"
    env_there = {**os.environ, "COLOFUNC_CACHE": str(cuda_folder), "COLOFUNC_NATIVE": "require", "CUDA_HOME": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env_there)
    assert done.stdout.strip() == "True", done.stderr
