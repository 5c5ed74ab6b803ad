"""Updates of a float32 parameter by a bfloat16 gradient in the memory of the host, beside what torch has for it.

torch's pieces are the cast of the gradient and its fused kernel, or `torch.optim.AdamW(foreach=True)`; of Lion and LAMB, which torch does
not have, its `_foreach` functions as other libraries put them together. The cast makes a new tensor, as torch does; where a buffer is
kept for it, which costs four bytes an element, there is a row of its own. Ours are the operators that an offloaded step calls
(`colofunc.adamw_`, `sgd_`, `lion_`, `lamb_direction_`), with their kernel in C++ and without.

DeepSpeed's CPUAdam has rows where it is installed, which colofunc does not need: `pip install deepspeed` beside this torch, in an
environment of its own, and `DS_ACCELERATOR=cpu python -m bench native_updates` there. It takes a gradient of the parameter's dtype.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from bench import Row, Section, pairs, ratio, seconds
from colofunc.ops import native
from colofunc.ops.update import adamw_, sgd_
from colofunc.ops.update_lamb import lamb_direction_, trust_ratios
from colofunc.ops.update_lion import lion_

SIZES = (1 << 16, 1 << 20, 1 << 25)
LEAST_ELEMENTS = 1 << 22  # that one measurement updates, in several calls of a small size
TARGET = 1.5
AT_LEAST_DEEPSPEED = 1.0
LR, BETA1, BETA2, EPS, DECAY, MOMENTUM = 1e-3, 0.9, 0.999, 1e-8, 0.01, 0.9


def deepspeeds_kernel() -> Any:
    """DeepSpeed's CPUAdam with its one optimizer, number 0; None where it is not installed."""
    if find_spec("deepspeed") is None:
        return None
    from deepspeed.ops.op_builder import CPUAdamBuilder  # not there everywhere

    kernel = CPUAdamBuilder().load()
    kernel.create_adam(0, LR, BETA1, BETA2, EPS, DECAY, True, False)
    return kernel


class Operands:
    """A parameter of `numel` elements with its gradient and two states, and a float32 buffer of that size."""

    def __init__(self, numel: int) -> None:
        self.param, self.grad = torch.randn(numel), torch.randn(numel).bfloat16()
        self.first, self.second, self.buffer = torch.zeros(numel), torch.zeros(numel), torch.empty(numel)
        self.foreach = torch.optim.AdamW([self.param], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, foreach=True)
        self.step, self.lr = torch.tensor(3.0), torch.tensor(LR)

    def fused_adamw(self, grad: Tensor) -> None:
        torch._fused_adamw_(
            [self.param], [grad], [self.first], [self.second], [], [self.step], lr=LR, beta1=BETA1, beta2=BETA2, weight_decay=DECAY,
            eps=EPS, amsgrad=False, maximize=False,
        )  # fmt: skip

    def foreach_adamw(self, grad: Tensor) -> None:
        self.param.grad = grad
        self.foreach.step()
        self.param.grad = None

    def deepspeed_adamw(self, kernel: Any, grad: Tensor) -> None:
        kernel.adam_update(0, 3, LR, BETA1, BETA2, EPS, DECAY, True, self.param, grad, self.first, self.second)

    def fused_sgd(self, grad: Tensor) -> None:
        torch._fused_sgd_(
            [self.param], [grad], [self.first], weight_decay=DECAY, momentum=MOMENTUM, lr=LR, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False,
        )  # fmt: skip

    def our_adamw(self, grad: Tensor) -> None:
        adamw_.kernel(self.param, grad, self.first, self.second, self.step, self.lr, BETA1, BETA2, EPS, DECAY, True)

    def our_sgd(self, grad: Tensor) -> None:
        sgd_.kernel(self.param, grad, self.first, self.step, self.lr, MOMENTUM, 0.0, DECAY, False)

    def foreach_lion(self, grad: Tensor) -> None:
        params, grads, means = [self.param], [grad], [self.first]
        torch._foreach_mul_(params, 1 - LR * DECAY)
        toward = torch._foreach_mul(means, BETA1)
        torch._foreach_add_(toward, grads, alpha=1 - BETA1)
        torch._foreach_sign_(toward)
        torch._foreach_add_(params, toward, alpha=-LR)
        torch._foreach_lerp_(means, grads, 1 - BETA2)

    def our_lion(self, grad: Tensor) -> None:
        lion_.kernel(self.param, grad, self.first, self.lr, BETA1, BETA2, DECAY)

    def foreach_lamb(self, grad: Tensor) -> None:
        params, grads, means, squares = [self.param], [grad], [self.first], [self.second]
        torch._foreach_lerp_(means, grads, 1 - BETA1)
        torch._foreach_mul_(squares, BETA2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - BETA2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1 - BETA2**3) ** 0.5)
        torch._foreach_add_(denominators, EPS)
        directions = torch._foreach_div(means, 1 - BETA1**3)
        torch._foreach_div_(directions, denominators)
        torch._foreach_add_(directions, params, alpha=DECAY)
        ratios = torch._foreach_div(torch._foreach_norm(params), torch._foreach_norm(directions))
        torch._foreach_mul_(directions, ratios)
        torch._foreach_add_(params, directions, alpha=-LR)

    def our_lamb(self, grad: Tensor) -> None:
        direction, squares = lamb_direction_.kernel(
            self.param, grad, self.first, self.second, self.step, BETA1, BETA2, EPS, DECAY
        )  # fmt: skip
        sgd_.kernel(self.param, direction, None, self.step, self.lr * trust_ratios([squares])[0], 0.0, 0.0, 0.0, False)


def without_kernel(update: Callable[[Tensor], None], grad: Tensor) -> None:
    """What an update is where there is no compiler."""
    os.environ["COLOFUNC_NATIVE"] = "off"
    update(grad)
    os.environ["COLOFUNC_NATIVE"] = "require"


def repeated(update: Callable[[], Any], numel: int) -> Callable[[], None]:
    """As many updates as one measurement takes."""
    times = max(1, LEAST_ELEMENTS // numel)

    def run() -> None:
        for _ in range(times):
            update()

    return run


def check_deepspeed(kernel: Any) -> None:
    """That the two update alike."""
    ours, theirs = Operands(1000), Operands(1000)
    theirs.param.copy_(ours.param)
    for _ in range(2):
        ours.our_adamw(ours.grad)
        theirs.deepspeed_adamw(kernel, ours.grad.float())
    torch.testing.assert_close(ours.param, theirs.param, rtol=1e-5, atol=1e-6)


def rows_of(numel: int, deepspeed: Any) -> list[Row]:
    x = Operands(numel)
    ways = {
        "adamw": lambda: x.our_adamw(x.grad),
        "adamw of torch": lambda: x.fused_adamw(x.grad.float()),
        "adamw of torch, cast to a kept buffer": lambda: x.fused_adamw(x.buffer.copy_(x.grad)),
        "adamw of torch, foreach": lambda: x.foreach_adamw(x.grad.float()),
        "adamw without a compiler": lambda: without_kernel(x.our_adamw, x.grad),
        "adamw with a float32 gradient": lambda: x.fused_adamw(x.buffer),
        "sgd": lambda: x.our_sgd(x.grad),
        "sgd of torch": lambda: x.fused_sgd(x.grad.float()),
        "sgd of torch, cast to a kept buffer": lambda: x.fused_sgd(x.buffer.copy_(x.grad)),
        "lion": lambda: x.our_lion(x.grad),
        "lion of torch": lambda: x.foreach_lion(x.grad.float()),
        "lion without a compiler": lambda: without_kernel(x.our_lion, x.grad),
        "lion with a float32 gradient": lambda: x.our_lion(x.buffer),
        "lion of torch, no cast": lambda: x.foreach_lion(x.buffer),
        "lamb": lambda: x.our_lamb(x.grad),
        "lamb of torch": lambda: x.foreach_lamb(x.grad.float()),
        "adamw, float32": lambda: x.our_adamw(x.buffer),
    }
    if deepspeed is not None:
        ways["adamw of deepspeed"] = lambda: x.deepspeed_adamw(deepspeed, x.grad.float())
        ways["adamw of deepspeed, float32"] = lambda: x.deepspeed_adamw(deepspeed, x.buffer)
    times = pairs(*(repeated(way, numel) for way in ways.values()), count=11, warm=2)
    column = {name: k for k, name in enumerate(ways)}
    calls = max(1, LEAST_ELEMENTS // numel)

    def row(above: str, below: str, what: str, target: float | None = None) -> Row:
        middle, text = ratio(times, column[above], column[below])
        said = ("", None) if target is None else (f"at least {target}", middle >= target)
        return Row(f"{numel:,} elements: {what}", text, *said)

    beside = []
    if deepspeed is not None:
        beside = [
            row("adamw of deepspeed", "adamw", "AdamW, cast and DeepSpeed's CPUAdam / ours", AT_LEAST_DEEPSPEED),
            row(
                "adamw of deepspeed, float32", "adamw, float32",
                "AdamW with a float32 gradient, DeepSpeed's CPUAdam / ours",
            ),
        ]  # fmt: skip
    return [
        Row(f"{numel:,} elements: CPU seconds of {calls} AdamW update(s), ours", seconds(times, column["adamw"])),
        row("adamw of torch", "adamw", "AdamW, cast and torch's fused kernel / ours", TARGET),
        row("adamw of torch, foreach", "adamw", "AdamW, cast and torch's foreach / ours", TARGET),
        row("sgd of torch", "sgd", "SGD with momentum, cast and torch's fused kernel / ours", TARGET),
        row("adamw of torch, cast to a kept buffer", "adamw", "AdamW, cast to a kept buffer and torch's fused kernel / ours"),
        row("sgd of torch, cast to a kept buffer", "sgd", "SGD with momentum, cast to a kept buffer and torch's fused kernel / ours"),
        row("adamw of torch", "adamw without a compiler", "AdamW, cast and torch's fused kernel / ours without a compiler"),
        row("adamw with a float32 gradient", "adamw", "AdamW, torch's fused kernel with a float32 gradient, no cast / ours"),
        row("adamw with a float32 gradient", "adamw, float32", "AdamW with a float32 gradient, torch's fused kernel / ours"),
        Row(f"{numel:,} elements: CPU seconds of {calls} Lion update(s), ours", seconds(times, column["lion"])),
        row("lion of torch", "lion", "Lion, cast and torch's foreach / ours", TARGET),
        row("lion of torch, no cast", "lion with a float32 gradient", "Lion with a float32 gradient, torch's foreach / ours", TARGET),
        row("lion of torch", "lion without a compiler", "Lion, cast and torch's foreach / ours without a compiler"),
        row("lamb of torch", "lamb", "LAMB, cast and torch's foreach / ours"),
        *beside,
    ]


def bench() -> Section:
    os.environ["COLOFUNC_NATIVE"] = "require"  # what runs where there is a compiler
    native.ready("cpu")
    deepspeed = deepspeeds_kernel()
    if deepspeed is not None:
        check_deepspeed(deepspeed)
    rows = [row for numel in SIZES for row in rows_of(numel, deepspeed)]
    theirs = "DeepSpeed is not installed" if deepspeed is None else f"DeepSpeed {version('deepspeed')}, compiled for this processor"
    return Section(
        "Updates on the host",
        f"float32 parameter and states, bfloat16 gradient, {torch.get_num_threads()} thread(s), torch {torch.__version__}, load average "
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores. With a float32 gradient colofunc calls torch's fused kernel of SGD, and "
        "of AdamW below 65,536 elements. torch's norms in LAMB are running sums in float32, ours are of rows that are summed in float64. "
        f"The loop of AdamW over 65,536 elements is bound by the processor's divider (docs/native.md). {theirs}",
        rows,
    )
