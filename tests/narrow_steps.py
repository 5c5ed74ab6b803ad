"""Small steps that tests of precision share, and every way to differentiate."""

import torch
from torch import nn

import colofunc as cf

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
IDEAL = cf.Mesh(dp=2, tp=2, topology="ideal")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def batch(rows: int = 8) -> dict:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 8), "y": torch.randn(rows, 4)}


def mse(out, b):
    return nn.functional.mse_loss(out, b["y"])


def training(module: nn.Module, **options):
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2)
    return cf.train_step(cf.functional(module), opt, loss=mse, inputs=lambda b: ((b["x"],), {}), **options)


def loss_of(p, b):
    return ((b["x"] @ p["w"]).relu() + p["b"]).pow(2).mean()


def by_value_and_grad(p, b):
    return cf.value_and_grad(loss_of)(p, b)[1]


def by_func(p, b):
    return torch.func.grad(loss_of)(p, b)


def by_autograd(p, b):
    p = {k: v.detach().requires_grad_() for k, v in p.items()}
    return dict(zip(p, torch.autograd.grad(loss_of(p, b), list(p.values())), strict=True))


def by_backward(p, b):
    p = {k: v.detach().requires_grad_() for k, v in p.items()}
    loss_of(p, b).backward()
    return {k: v.grad for k, v in p.items()}


def scaled_step(state, b):
    def loss(p):
        return (b["x"] @ p["w"]).pow(2).sum() * b["gain"]

    value, grads = cf.value_and_grad(loss)(state["p"])
    return {"p": {k: v - 1e-3 * grads[k] for k, v in state["p"].items()}, "n": state["n"] + 1}, {"loss": value}
