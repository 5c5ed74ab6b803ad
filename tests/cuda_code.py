"""The code that inductor writes for a CUDA device, on a machine without one: nothing is run.

    codes = in_a_process("layer_norms")       # of each compiled segment of a training step of the zoo: Python with Triton kernels

Inductor asks torch and Triton what device there is; here an H100 answers. The answers stay in caches all over torch, so this runs in a
process of its own (`in_a_process`).
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import re
import tempfile
import types
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

import colofunc as cf
from colofunc.compat import FakeTensorMode
from colofunc.executors.compiled import compile_segments, graph_of
from colofunc.program.ir import Program

DEADLINE_S = 300.0
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32, warpSize=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, type="cuda", index=0, cc=90, gcnArchName="", is_integrated=0,
    is_multi_gpu_board=0, clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120,
)  # fmt: skip


class Driver:
    """What Triton asks."""

    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}
    )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def is_active(self) -> bool:
        return True


def as_if_there_were_a_card() -> None:
    """For the rest of this process."""
    import triton

    torch._C._ensureCUDADeviceGuardSet()
    cuda: Any = torch.cuda
    cuda._initialized = True
    cuda.is_available = lambda: True
    cuda.is_bf16_supported = lambda *args, **kwargs: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = cuda._get_device_properties = lambda device=None: H100
    for name in ("_lazy_init", "synchronize", "set_device"):
        setattr(cuda, name, lambda *args: None)
    for name in ("_exchange_device", "_maybe_exchange_device"):
        setattr(cuda, name, lambda device: 0)
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # type: ignore[attr-defined]
    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = cuda.random.set_rng_state = lambda *args, **kwargs: None
    # Torch before 2.15 makes a real tensor of the device first.
    fake_tensor: Any = torch._subclasses.fake_tensor
    fake_tensor.init_gpu_context = lambda device: None
    triton.runtime.driver.set_active(Driver())


class _Written(BaseException):
    """The code is there; to load it would take a device."""


def code_of(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> str:
    """What inductor writes for a graph on fake inputs; "" where nothing is left of it."""
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    codegen: Any = GraphLowering.codegen

    def written(self: Any) -> Any:
        result = codegen(self)[0]
        codes.append(getattr(result, "value", result))
        raise _Written

    def compiler(graph: Any, inputs: Any) -> Any:
        return compile_fx_inner(graph, inputs)

    with patch.object(GraphLowering, "codegen", written), torch.no_grad():
        try:
            tables: Any = select_decomp_table()
            aot_module_simplified(graph, inputs, compiler, decompositions=tables, keep_inference_input_mutations=True)  # type: ignore[arg-type]
        except _Written:
            pass
    return codes[0] if codes else ""


def codes_of(program: Program) -> list[str]:
    """Of each compiled function of a program, for a CUDA device and contiguous operands."""
    import torch._inductor.config as settings

    settings.compile_threads = 1
    fakes = FakeTensorMode()
    codes = []
    for segment in compile_segments(program)[1].values():
        graph = graph_of(segment.piece, torch.device("cuda", 0))  # type: ignore[attr-defined]
        with fakes:
            values = [program.values[i] for i in segment.piece.ins]  # type: ignore[attr-defined]
            inputs = [torch.empty(value.shape, dtype=value.dtype, device="cuda:0") for value in values]
            inputs += [torch.empty((), dtype=torch.int64) for _ in segment.piece.numbers]  # type: ignore[attr-defined]
            codes.append(code_of(graph, inputs))
    return codes


def of_layers() -> Program:
    """A training step of a few layers, which is much faster to import and to compile than a model of the zoo."""
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16))
    step_fn, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=0.1), loss=lambda out: (out**2).mean(), clip=1.0)
    return cf.shard(step_fn, cf.Mesh()).lower(state, torch.zeros(4, 16)).program


def of_the_zoo(name: str) -> Program:
    """A training step of a model."""
    import zoo

    step_fn, state, batch = zoo.step_of(name, torch.float32)
    return cf.shard(step_fn, cf.Mesh()).lower(state, batch).program


def of_dropout() -> Program:
    """A gradient through what stands around a dropout: an activation before it, a residual behind it."""

    def step(x: torch.Tensor, residual: torch.Tensor) -> Any:
        return cf.value_and_grad(lambda x: (residual + F.dropout(F.gelu(x), 0.1)).square().sum())(x)

    x = torch.zeros(64, 256)
    return cf.shard(step, cf.Mesh()).lower(x, x).program


SMALL = {"layers": of_layers, "dropout": of_dropout}


def triton_of(name: str) -> list[str]:
    """Of the compiled functions of one of `SMALL` or of a training step of a model of the zoo. For a process of its own."""
    warnings.simplefilter("ignore")
    program = SMALL[name]() if name in SMALL else of_the_zoo(name)
    as_if_there_were_a_card()
    return codes_of(program)


def in_a_process(name: str) -> list[str]:
    """`triton_of` in a process of its own."""
    return in_own_process(triton_of, name)


def in_own_process(function: Any, *args: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(function, *args).result(DEADLINE_S)


# ---- attention by FlexAttention ----

# (b, h, g, rows, columns, elements of a head of keys, of values)
Sizes = tuple[int, int, int, int, int, int, int]


def flex_call(kind: str, sizes: Sizes, backward: bool) -> dict[str, torch.Tensor]:
    """Empty operands on a card, of the words in `kind`: documents, mask, bias, positions, grad_lse. For fake tensors."""
    b, h, g, s, t, e, f = sizes

    def heads(n: int, length: int, width: int) -> torch.Tensor:
        return torch.empty(b, length, n, width, dtype=torch.bfloat16, device="cuda:0").transpose(1, 2)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="cuda:0")

    x = {"q": heads(h, s, e), "k": heads(g, t, e), "v": heads(g, t, f)}
    if "mask" in kind:
        x["bias"] = torch.empty(b, 1, s, t, dtype=torch.bool, device="cuda:0")
    if "bias" in kind:
        x["bias"] = torch.empty(1, h, s, t, dtype=torch.bfloat16, device="cuda:0")
    if "documents" in kind:
        x |= {"code": integers(b, 1, t), "least": integers(b, 1, s), "most": integers(b, 1, s)}
    if "positions" in kind:
        x |= {"row": integers(s), "column": integers(t)}
    if backward:
        x |= {"out": heads(h, s, f), "lse": torch.empty(b, h, s, device="cuda:0"), "grad_out": heads(h, s, f)}
    if backward and "grad_lse" in kind:
        x["grad_lse"] = torch.empty(b, h, s, device="cuda:0")
    return x


def flex_codes(kinds: list[str], sizes: Sizes, assembled: bool) -> list[str]:
    """Of each kind, forward and backward; `assembled`: and their kernels are compiled to the card's code. For a process of its own."""
    import torch._inductor.config as settings

    from colofunc.ops import attention_flex as flexible

    as_if_there_were_a_card()
    settings.compile_threads = 1
    codes = []
    for kind in kinds:
        for function, results in ((flexible.forward_function, 2), (flexible.backward_function, 3)):
            with FakeTensorMode():
                x = flex_call(kind, sizes, results == 3)
                told = flexible.FlexKind(tuple(x), 0.125, "causal" in kind, 300 if "window" in kind else 0)
                codes.append(code_of(flexible.graph_of(function, told, results), list(x.values())))
            if assembled:
                assemble(codes[-1])
    return codes


def flex_in_a_process(kinds: list[str], sizes: Sizes, assembled: bool) -> list[str]:
    """`flex_codes` in a process of its own."""
    found: list[str] = in_own_process(flex_codes, kinds, sizes, assembled)
    return found


def assemble(code: str) -> None:
    """Compile the Triton kernels that a code has, down to a binary for the card; raises what Triton or its assembler say."""
    from torch._inductor.runtime import triton_helpers

    helpers: Any = triton_helpers
    helpers.set_driver_to_gpu = lambda: None  # it looks for a driver's library
    found = re.findall(r"async_compile\.triton\('(\w+)', '{3}(.*?)'{3}", code, re.DOTALL)
    assert found, "no kernel"
    for name, source in found:
        loaded(name, source).precompile(warm_cache_only=True)


def loaded(name: str, source: str) -> Any:
    """A kernel from a file of its own, because Triton reads its source there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("kernel", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)


def allocated_bytes(code: str) -> int:
    """What a code allocates on the card, all together."""
    found = re.findall(r"empty_strided_cuda\(\(([\d, ]*)\), \(([\d, ]*)\), torch\.(\w+)\)", code)
    total = 0
    for shape, _, dtype in found:
        total += math.prod(int(n) for n in shape.split(",") if n.strip()) * getattr(torch, dtype).itemsize
    return total
