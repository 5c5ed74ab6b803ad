"""Calls of attention by name, as arguments of our operators, and which kernel of CUDA takes them."""

from __future__ import annotations

import random
from typing import Any

import torch
from pretended import Machine, on_card
from torch import Tensor

from colofunc.ops.attention import CUDA_KERNELS
from colofunc.ops.kernels import Kernel, bound, choose, describe, run_of, table_of

FORWARD, BACKWARD = "colofunc.attention", "colofunc.attention_backward"
TABLE = table_of(CUDA_KERNELS)


def generated(drawn: random.Random) -> dict[str, Any]:
    """A call of attention by name: sizes, masks, positions, grouped heads, bias."""
    b, g, r = drawn.choice([1, 2]), drawn.choice([1, 2]), drawn.choice([1, 2, 3])
    s, t, e = drawn.choice([1, 5, 17, 32]), drawn.choice([1, 6, 17, 40]), drawn.choice([3, 8, 16])
    f = drawn.choice([e, 4, 24])
    call: dict[str, Any] = {"scale": 0.3, "causal": drawn.random() < 0.6, "window": drawn.choice([0, 0, 3, 9])}
    make = lambda n, width, h: torch.randn(b, n, h, width, dtype=torch.float64).transpose(1, 2)  # noqa: E731
    call["q"], call["k"], call["v"] = make(s, e, g * r), make(t, e, g), make(t, f, g)
    where = drawn.choice(["start", "start", "offsets", "stripes", "stripe", "anywhere"])
    if where == "offsets":
        call["q_offset"], call["k_offset"] = (torch.tensor(drawn.choice([0, 3, 20])) for _ in range(2))
    elif where == "stripes":
        call["q_offset"], call["k_offset"] = torch.arange(s) * 3 + drawn.randrange(3), torch.arange(t) * 3 + drawn.randrange(3)
    elif where == "stripe":
        call["q_offset"] = torch.arange(s) * 3 + drawn.randrange(3)
    elif where == "anywhere":
        call["q_offset"], call["k_offset"] = torch.randperm(40)[:s].sort().values, torch.randperm(40)[:t].sort().values
    if drawn.random() < 0.2:
        return {"scale": 0.3, "causal": call["causal"], "q": make(17, 8, g * r), "k": make(17, 8, g), "v": make(17, 16, g)}
    kind = drawn.choice(["none", "none", "bias", "bool", "documents"])
    if kind == "bias":
        call["bias"] = torch.randn(*drawn.choice([(b, g * r, s, t), (1, g * r, s, t), (b, 1, 1, t), (s, t)]), dtype=torch.float64)
        if drawn.random() < 0.5:  # heads last in memory, as a table of positions gives it
            call["bias"] = call["bias"].mT.contiguous().mT
    elif kind == "bool":
        call["bias"] = torch.rand(b, 1, s, t) < 0.7
    elif kind == "documents":
        call["code"] = torch.randint(0, 3, (drawn.choice([1, b]), 1, t))
        call["least"] = torch.randint(0, 3, (call["code"].shape[0], 1, s))
        call["most"] = call["least"] + drawn.choice([0, 1])
    return call


def forward_args(call: dict[str, Any]) -> tuple[Any, ...]:
    return bound(FORWARD, [call.get("q"), call["k"], call["v"], call.get("bias"), call["scale"]], call)


def backward_args(
    call: dict[str, Any], grad: Tensor, out: Tensor, lse: Tensor, dbias: bool = False, grad_lse: Tensor | None = None
) -> tuple[Any, ...]:
    first = [grad, call["q"], call["k"], call["v"], call.get("bias"), out, lse, call["scale"]]
    return bound(BACKWARD, first, {**call, "need_dbias": dbias, "grad_lse": grad_lse})


def takers(target: str, args: tuple[Any, ...], capability: tuple[int, int] = (9, 0)) -> list[Kernel]:
    call = describe(target, args, capability)
    return [kernel for kernel in TABLE[target, "cuda"] if kernel.guard(call)]


def compare(found: Any, wanted: Any, what: Any) -> None:
    for name, got, right in zip(("out", "lse") if len(wanted) == 2 else ("dq", "dk", "dv", "dbias"), found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{what}, {name}: {text}")


def eight_billion(s: int = 8192, **more: Any) -> dict[str, Any]:
    """A layer of an 8B model: 32 query heads, 8 key heads of 128."""
    make = lambda h: torch.empty(1, s, h, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)  # noqa: E731
    return {"q": make(32), "k": make(8), "v": make(8), "scale": 128**-0.5, "causal": True, **more}


def chosen(call: dict[str, Any], capability: tuple[int, int] = (9, 0), backward: bool = False, **more: Any) -> str:
    call = call | more
    lse = torch.empty(call["q"].shape[:3], device="meta")
    args = backward_args(call, call["q"], call["q"], lse) if backward else forward_args(call)
    target = BACKWARD if backward else FORWARD
    kernel = choose(TABLE[target, "cuda"], describe(target, args, capability))
    assert kernel is not None
    return kernel.fn.__name__


def on_the_card(machine: Machine, call: dict[str, Any]) -> dict[str, Any]:
    """Its tensors on the card, but for positions that the host knows."""
    known = [name for name in ("q_offset", "k_offset") if name in call and run_of(call[name]) is not None]
    return {name: on_card(machine, x) if name not in known and isinstance(x, Tensor) else x for name, x in call.items()}
