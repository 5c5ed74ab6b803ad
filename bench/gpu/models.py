"""Models of the benches: a LLaMA and an OPT, small enough to be read, in plain torch with `F.scaled_dot_product_attention`.

They need no library beside torch. Weights are cut from one block of random numbers: drawing billions would take longer than a slice, and
all equal ones would be computed with faster than real ones (less power).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colofunc as cf
from bench.gpu.sizes import Shape

BLOCK = 65521  # a prime, so that rows differ


def weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Normal with deviation 0.02, repeated every `BLOCK` numbers."""
    count = math.prod(shape)
    numbers = torch.randn(BLOCK).mul(0.02).to(dtype)
    return nn.Parameter(numbers.repeat(-(-count // BLOCK))[:count].view(shape))


def linear(columns: int, rows: int, dtype: torch.dtype) -> nn.Linear:
    """A layer without a bias, which adapters can be put beside."""
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = weight(rows, columns, dtype=dtype)
    return layer


def ones(width: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.ones(width, dtype=dtype))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. x: (b, h, s, e)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Llama(nn.Module):
    """Pre-norm blocks with rotary positions, grouped heads and SwiGLU; gives the mean cross entropy of the next tokens."""

    def __init__(self, shape: Shape, dtype: torch.dtype, theta: float = 5e5) -> None:
        super().__init__()
        self.embed = weight(shape.vocabulary, shape.width, dtype=dtype)
        self.blocks = nn.ModuleList(LlamaBlock(shape, dtype) for _ in range(shape.layers))
        self.norm, self.head = ones(shape.width, dtype), weight(shape.vocabulary, shape.width, dtype=dtype)
        self.width, self.theta = shape.head, theta

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.embed)
        frequencies = self.theta ** -(torch.arange(0, self.width, 2, device=ids.device).float() / self.width)
        angle = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(), frequencies).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = F.rms_norm(x, x.shape[-1:], self.norm, 1e-5)
        return next_tokens(F.linear(x, self.head), ids)


class LlamaBlock(nn.Module):
    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        d, kv = shape.width, shape.kv_heads * shape.head
        self.shape = shape
        self.q, self.k, self.v, self.o = (linear(d, n, dtype) for n in (d, kv, kv, d))
        self.gate, self.up, self.down = linear(d, shape.ffn, dtype), linear(d, shape.ffn, dtype), linear(shape.ffn, d, dtype)
        self.first, self.second = ones(d, dtype), ones(d, dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], self.first, 1e-5)
        q, k, v = (layer(y).unflatten(-1, (-1, self.shape.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        grouped = self.shape.heads != self.shape.kv_heads
        y = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = F.rms_norm(x, x.shape[-1:], self.second, 1e-5)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Opt(nn.Module):
    """Pre-norm blocks with learned positions, biases, ReLU and a tied head. p: dropout behind attention and behind the products."""

    def __init__(self, shape: Shape, dtype: torch.dtype, length: int, p: float = 0.0) -> None:
        super().__init__()
        self.embed = weight(shape.vocabulary, shape.width, dtype=dtype)
        self.positions = weight(length, shape.width, dtype=dtype)
        self.blocks = nn.ModuleList(OptBlock(shape, dtype, p) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.embed) + self.positions
        for block in self.blocks:
            x = block(x)
        return next_tokens(F.linear(self.norm(x), self.embed), ids)


class OptBlock(nn.Module):
    def __init__(self, shape: Shape, dtype: torch.dtype, p: float) -> None:
        super().__init__()
        d = shape.width
        self.head, self.p = shape.head, p
        self.qkv, self.o = weight(3 * d, d, dtype=dtype), weight(d, d, dtype=dtype)
        self.up, self.down = weight(shape.ffn, d, dtype=dtype), weight(d, shape.ffn, dtype=dtype)
        widths = {"qkv": 3 * d, "o": d, "up": shape.ffn, "down": d}
        self.biases = nn.ParameterDict({name: nn.Parameter(torch.zeros(n, dtype=dtype)) for name, n in widths.items()})
        self.first, self.second = nn.LayerNorm(d, dtype=dtype), nn.LayerNorm(d, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.first(x), self.qkv, self.biases["qkv"])
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in y.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(F.linear(y, self.o, self.biases["o"]), self.p)
        y = F.relu(F.linear(self.second(x), self.up, self.biases["up"]))
        return x + F.dropout(F.linear(y, self.down, self.biases["down"]), self.p)


def next_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Mixture(nn.Module):
    """LLaMA's blocks without attention, each with four experts of which a token takes two."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        d, experts = shape.width, 4
        self.embed = weight(shape.vocabulary, d, dtype=dtype)
        self.routers = nn.ParameterList(weight(experts, d, dtype=dtype) for _ in range(shape.layers))
        self.ups = nn.ParameterList(weight(experts, 2 * shape.ffn, d, dtype=dtype) for _ in range(shape.layers))
        self.downs = nn.ParameterList(weight(experts, d, shape.ffn, dtype=dtype) for _ in range(shape.layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.embed)
        for router, up, down in zip(self.routers, self.ups, self.downs, strict=True):
            index, share, _ = cf.moe.route(F.linear(x, router), k=2)
            x = x + cf.moe.experts(x, index, share.to(x.dtype), up, down)
        return next_tokens(F.linear(x, self.embed), ids)
