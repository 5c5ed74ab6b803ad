"""What inductor writes for a card, run on the host: its Triton kernels in Triton's interpreter, on numbers.

    differences("causal documents", (2, 200, 160))      # of a call of attention by FlexAttention, from the same in float64

`cuda_code` has the code written; around the kernels it allocates memory and launches them, which is replaced here. Memory that is
allocated holds NaN. For a process of its own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

import torch
from cuda_code import Sizes, as_if_there_were_a_card, code_of, flex_call, in_own_process, loaded
from torch import Tensor

from colofunc.compat import FakeTensorMode
from colofunc.ops import attention_flex as flexible

# Elements of a block of a kernel that is no template, in each of its dims.
POINTS, REDUCED = 16, 64
REPLACED = r"^(empty_strided_cuda|copy_if_misaligned|assert_size_stride\w*) = .*$|^from torch\._C import .* as get_raw_stream$"
COMPILED = r"^@triton_heuristics\.\w+\(.*?^\)$|triton_helpers\.set_driver_to_gpu\(\)"


class Kernel:
    """A kernel as a code has it, without what would compile it."""

    def __init__(self, name: str, source: str) -> None:
        plain = re.sub(COMPILED, "", source, flags=re.DOTALL | re.MULTILINE)
        self.function = loaded(name, plain)
        self.names = list(inspect.signature(self.function.fn).parameters)

    def run(self, *args: Any, stream: int) -> None:
        """A template is given the sizes of its grid behind its arguments; others have blocks of so many points."""
        given, grid = args[: len(self.names)], args[len(self.names) :]
        blocks = {}
        for name in sorted(self.names[len(given) :]):  # R0BLOCK, XBLOCK, YBLOCK: the grid's first dim is x
            blocks[name] = REDUCED if name.startswith("R0") else POINTS
            if not name.startswith("R0"):
                count = given[self.names.index(f"{name[0].lower()}numel")]
                grid = (*grid, -(-count // POINTS))
        self.function[grid](*given, **blocks)


class Kernels:
    """In place of what compiles kernels."""

    def triton(self, name: str, source: str, device_str: str) -> Kernel:
        return Kernel(name, source)

    def wait(self, scope: Any) -> None: ...


def _spoiled(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    room = torch.empty_strided(shape, stride, dtype=dtype)
    return room.fill_(torch.nan) if dtype.is_floating_point else room.fill_(1)


def runnable(code: str) -> Any:
    """The function of a code, for tensors of the host."""
    text = re.sub(REPLACED, "", code, flags=re.MULTILINE).replace("= AsyncCompile()", "= Kernels()")
    text = re.sub(r"with torch\.cuda\._DeviceGuard\(\d+\):", "if True:", text)
    scope: dict[str, Any] = {
        "Kernels": Kernels, "empty_strided_cuda": _spoiled, "get_raw_stream": lambda index: 0, "copy_if_misaligned": lambda x: x,
        "assert_size_stride": lambda *args: None, "assert_size_stride_grouped": lambda *args: None,
    }  # fmt: skip
    exec(compile(text, "code", "exec"), scope)
    return scope["call"]


def _drawn(kind: str, sizes: Sizes, backward: bool) -> dict[str, Tensor]:
    """Numbers for `flex_call`."""
    with FakeTensorMode():
        like = flex_call(kind, sizes, backward)
    x = {}
    for name, fake in like.items():
        x[name] = torch.empty_strided(fake.shape, fake.stride(), dtype=torch.float32)
        if fake.dtype == torch.bool:
            x[name] = torch.rand(fake.shape) < 0.5
        elif fake.dtype.is_floating_point:
            x[name].normal_()
        elif name in ("row", "column"):
            x[name] = torch.arange(len(fake)) + (40 if name == "row" else 3)
        else:
            x[name] = torch.randint(0, 5, fake.shape).sort(-1).values
    return x


def _both(function: Any, results: int, kind: str, x: dict[str, Tensor]) -> tuple[Any, Any]:
    """What the kernels give, and what the function gives in float64."""
    told = flexible.FlexKind(tuple(x), 0.25, "causal" in kind, 100 if "window" in kind else 0)
    with FakeTensorMode():
        fakes = [torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="cuda:0") for y in x.values()]
        code = code_of(flexible.graph_of(function, told, results), fakes)
    wide = [y.double() if y.is_floating_point() else y for y in x.values()]
    return runnable(code)(list(x.values())), function(told, *wide)


def _let_loops_count() -> None:
    """Triton before 3.9 counts loops by arrays of one element, which numpy no longer takes for integers."""
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched  # type: ignore[attr-defined]


def differences(kind: str, sizes: Sizes) -> dict[str, float]:
    """By result: the largest difference, of operands in float32."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch._inductor.config as settings

    as_if_there_were_a_card()
    _let_loops_count()
    settings.compile_threads = 1
    torch.manual_seed(0)
    x = _drawn(kind, sizes, True)
    first = {name: y for name, y in x.items() if name not in ("out", "lse", "grad_out", "grad_lse")}
    found, wanted = _both(flexible.forward_function, 2, kind, first)
    back, slopes = _both(flexible.backward_function, 3, kind, x | {"out": found[0], "lse": found[1]})
    pairs = zip(("out", "lse", "dq", "dk", "dv"), (*found, *back), (*wanted, *slopes), strict=True)
    return {name: _difference(got, right) for name, got, right in pairs}


def _difference(got: Tensor, right: Tensor) -> float:
    """NaN where one of them is -inf alone."""
    blind = got == -torch.inf
    if not blind.equal(right == -torch.inf):
        return torch.nan
    return float((got.double() - right).masked_fill(blind, 0.0).abs().max())


def differences_in_a_process(kind: str, sizes: Sizes) -> dict[str, float]:
    found: dict[str, float] = in_own_process(differences, kind, sizes)
    return found
