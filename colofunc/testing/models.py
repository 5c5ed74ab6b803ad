"""Small models with names, for tests of steps, plugins and transforms: each shows one family of operators.

    Mlp         linear layers, a norm            x (b, i)
    Attention   one pre-norm transformer block   x (b, s, d)
    ConvNet     convolution, batch norm, pooling x (b, c, h, w)
    Language    embedding tied to the output     tokens (b, s)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """(b, width) -> (b, classes)"""

    def __init__(self, width: int = 16, hidden: int = 32, classes: int = 8) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


class Attention(nn.Module):
    """(b, s, width) -> the same: causal self-attention and a feed-forward net, each on a norm and a residual."""

    def __init__(self, width: int = 16, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (b, h, s, d)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ConvNet(nn.Module):
    """(b, c, h, w) -> (b, classes)"""

    def __init__(self, channels: int = 4, width: int = 8, classes: int = 8) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.last = nn.Conv2d(width, width, 3, stride=2, groups=2), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.conv1(x))), 2)
        return self.last(torch.relu(self.conv2(x)).mean((2, 3)))


class Language(nn.Module):
    """(b, s) tokens -> (b, s, vocabulary): embedding, one block, the embedding again as output layer."""

    def __init__(self, vocabulary: int = 32, width: int = 16, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(64, width))
        self.block, self.norm = Attention(width, heads, dropout), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.block(x)))
