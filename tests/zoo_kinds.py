"""Small modules with one difficulty each, and layers of each family: name -> maker of (module, batch, loss)."""

# One line per layer, to be read beside one another.
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from zoo_batches import (
    BATCH,
    CLASSES,
    SEQ,
    VOCAB,
    Built,
    class_loss,
    ids,
    image,
)


class Tied(nn.Module):
    """One weight as embedding and as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(x)))).mean(1)  # type: ignore[no-any-return]


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(F.gelu(self.again(F.relu(self.first(x))))))  # type: ignore[no-any-return]


class Hung(nn.Module):
    """Parameters on a module that has children; a table computed in forward; a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.prefix = nn.Parameter(torch.ones(16)), nn.Parameter(torch.randn(1, 4, 16))
        self.inner, self.last = nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.cat([self.prefix.expand(x.shape[0], -1, -1), x[:, None]], 1) * self.scale
        return self.last(self.inner(x).relu().mean(1))  # type: ignore[no-any-return]


class Unused(nn.Module):
    """Parameters without a gradient, a frozen one, and one of which only a part is read."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(16, CLASSES), nn.Linear(16, 4), nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(12, 16))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.frozen(x) + self.table[3]) + self.table[5:6, :CLASSES]  # type: ignore[no-any-return]


class Uneven(nn.Module):
    """Sizes that 2 does not divide: heads, widths, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.last = nn.Linear(15, 45), nn.Linear(15, 15), nn.Linear(15, 7)
        self.inp, self.norm = nn.Linear(16, 5 * 15), nn.LayerNorm(15)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x).unflatten(1, (5, 15))
        q, k, v = (t.unflatten(2, (3, 5)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.last(x.mean(1))  # type: ignore[no-any-return]


class Statistics(nn.Module):
    """BatchNorm in train mode over a sharded batch, in 1 and 2 dims, with momentums."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm2 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc, self.norm1, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=0.3), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm2(self.conv(x))), 2).mean((2, 3))
        return self.last(F.relu(self.norm1(self.fc(x))))  # type: ignore[no-any-return]


class Noisy(nn.Module):
    """Dropout of three kinds, attention dropout, and whole rows dropped as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 32), nn.Dropout(0.3), nn.Linear(32, CLASSES)
        self.alpha, self.channels = nn.AlphaDropout(0.2), nn.Dropout1d(0.25)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.gelu(self.first(x))).unflatten(1, (4, 8))
        x = x + self.attend(x, x, x, need_weights=False)[0]
        keep = x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.8)
        return self.last(self.channels(self.alpha(x * keep / 0.8)).flatten(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A cell applied in a Python loop, with views written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(4, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (4, 4))
        h = x.new_zeros(x.shape[0], 16)
        states = x.new_zeros(x.shape[0], 4, 16)
        for t in range(4):
            h = self.cell(x[:, t], h)
            states[:, t] = h
        return self.last(states.max(1).values)  # type: ignore[no-any-return]


def _kind(module: Callable[[], nn.Module], batch: Callable[[], Tensor]) -> Callable[[], Built]:
    return lambda: (module(), {"x": batch(), "_target": torch.randint(0, 7, (BATCH,))}, class_loss)


def _rows() -> Tensor:
    return torch.randn(BATCH, 16)


KINDS = {
    "kind_tied": _kind(Tied, ids),
    "kind_called_twice": _kind(Twice, _rows),
    "kind_hung": _kind(Hung, _rows),
    "kind_unused": _kind(Unused, _rows),
    "kind_uneven": _kind(Uneven, _rows),
    "kind_statistics": _kind(Statistics, lambda: image(8)),
    "kind_noisy": _kind(Noisy, _rows),
    "kind_recurrent": _kind(Recurrent, _rows),
}

# ---- one family of layers each ----


class Wrap(nn.Module):
    """Layers in a row, then the mean over all dims but the first and a classifier."""

    def __init__(self, features: int, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(layers), nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.last(x.flatten(2).mean(2) if x.dim() > 3 else x.mean(1) if x.dim() == 3 else x)  # type: ignore[no-any-return]


class Fn(nn.Module):
    """A function of its input and of weights of the given shapes."""

    def __init__(self, fn: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.fn, self.weights = fn, nn.ParameterList(nn.Parameter(torch.randn(s) / 4) for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, *self.weights)


def _layer(features: int, batch: Callable[[], Tensor], *layers: Callable[[], nn.Module]) -> Callable[[], Built]:
    return _kind(lambda: Wrap(features, *(make() for make in layers)), batch)


def _fn(fn: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: Fn(fn, *shapes)


def _sequence() -> Tensor:
    return torch.randn(BATCH, SEQ, 16)


def _volume() -> Tensor:
    return torch.randn(BATCH, 4, 4, 8, 8)


def _picture() -> Tensor:
    return torch.randn(BATCH, 8, 8, 8)


def _route(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Top-2 of 4 experts, each run on all tokens."""
    weight, chosen = (x @ gate).softmax(-1).topk(2, -1)
    share = torch.zeros(*x.shape[:2], 4, dtype=x.dtype).scatter(-1, chosen, weight)
    return torch.einsum("bse,bsed->bsd", share, torch.einsum("bseh,ehd->bsed", torch.einsum("bsd,edh->bseh", x, up).relu(), down))


def _rotary(x: Tensor) -> Tensor:
    """Complex rotation by position."""
    angle = torch.outer(torch.arange(SEQ, dtype=x.dtype), 10.0 ** -torch.arange(8, dtype=x.dtype))
    turned = torch.view_as_complex(x.unflatten(-1, (8, 2))) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def _sample(x: Tensor, theta: Tensor) -> Tensor:
    grid = F.affine_grid(theta.expand(x.shape[0], 2, 3) + torch.eye(2, 3, dtype=x.dtype), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _gumbel(x: Tensor) -> Tensor:
    return F.gumbel_softmax(x, tau=0.7, dim=-1) + torch.rand_like(x) + 0.1 * torch.randn_like(x)


def _scatter(x: Tensor, table: Tensor) -> Tensor:
    index = (x > 0).long().cumsum(1)
    out = torch.zeros_like(x).scatter_add(1, index.clamp(max=SEQ - 1), x)
    out = out.index_add(1, torch.tensor([0, 2, 0]), x[:, :3]) + table[index[..., 0] % 4]
    out[:, 1] = out[:, 1] * 2
    out[x < -1] = 0.5
    return out.masked_fill(x > 2, -1.0) + torch.where(x > 0, x, table[0])


def _distances(x: Tensor, centres: Tensor) -> Tensor:
    near = torch.cdist(x, centres) + F.cosine_similarity(x[:, :, None], centres, dim=-1)
    return near.logsumexp(-1, keepdim=True) * x + x.var(-1, keepdim=True) + x.norm(dim=-1, keepdim=True)


def _scans(x: Tensor) -> Tensor:
    return x.cumsum(1) + x.sigmoid().cumprod(1) + x.logcumsumexp(1) + x.cummax(1).values + x.flip(1) + x.roll(2, 1) + x.sort(1).values


def _spectrum(x: Tensor, filters: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * filters, n=SEQ, dim=1) + torch.fft.fft2(x).real


def _windows(x: Tensor) -> Tensor:
    blocks = F.unfold(x, 3, padding=1).softmax(1)
    return F.fold(blocks, (8, 8), 3, padding=1) + F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2)


def _resizes(x: Tensor) -> Tensor:
    out = F.interpolate(x, scale_factor=2, mode="bilinear") + F.interpolate(x, size=(16, 16), mode="nearest")
    out = out + F.interpolate(x, size=16, mode="bicubic", align_corners=True)
    return F.avg_pool2d(F.pad(out, (1, 1, 2, 2), mode="reflect"), 3, 2) + F.adaptive_max_pool2d(x, (9, 8)) + F.adaptive_avg_pool2d(x, (1, 1))


def _losses(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).sigmoid(), x[:, :, :8]
    each = [F.smooth_l1_loss(a, b), F.huber_loss(a, b), F.binary_cross_entropy(a, b.sigmoid()), F.kl_div(a.log(), b.softmax(-1), reduction="batchmean")]
    each += [F.binary_cross_entropy_with_logits(a, b.sigmoid()), F.l1_loss(a, b), F.triplet_margin_loss(a[:, 0], b[:, 0], b[:, 1])]
    return a + torch.stack(each).sum() + F.nll_loss(a.flatten(0, 1).log_softmax(-1), b.flatten(0, 1).argmax(-1))


LAYERS = {
    "layer_lstm": _layer(16, _sequence, lambda: nn.LSTM(16, 16, num_layers=2, batch_first=True)),
    "layer_gru_both_ways": _layer(16, _sequence, lambda: nn.GRU(16, 8, bidirectional=True)),
    "layer_rnn": _layer(16, _sequence, lambda: nn.RNN(16, 16, batch_first=True)),
    "layer_transformer": _layer(16, _sequence, lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), lambda: nn.TransformerEncoderLayer(16, 4, 32, norm_first=True)),
    "layer_attention_weights": _layer(16, _sequence, _fn(lambda x, w, o: F.multi_head_attention_forward(x, x, x, 16, 4, w, None, None, None, False, 0.0, o, None)[0], (48, 16), (16, 16))),
    "layer_conv1d": _layer(8, _sequence, lambda: nn.Conv1d(SEQ, 8, 3, padding="same"), lambda: nn.ConvTranspose1d(8, 8, 4, 2), lambda: nn.MaxPool1d(2), lambda: nn.AvgPool1d(2), lambda: nn.Flatten(2), _fn(lambda x: x.transpose(1, 2))),
    "layer_conv2d": _layer(8, _picture, lambda: nn.Conv2d(8, 8, 3, groups=8), lambda: nn.ConvTranspose2d(8, 8, 3, 2, output_padding=1), lambda: nn.Conv2d(8, 8, 3, dilation=2, padding_mode="reflect", padding=1)),
    "layer_conv3d": _layer(8, _volume, lambda: nn.Conv3d(4, 8, 3, padding=1), lambda: nn.BatchNorm3d(8), lambda: nn.AvgPool3d(2), lambda: nn.ConvTranspose3d(8, 8, 2)),
    "layer_norms": _layer(8, _picture, lambda: nn.GroupNorm(4, 8), lambda: nn.InstanceNorm2d(8, affine=True), lambda: nn.LocalResponseNorm(3), lambda: nn.LayerNorm((8, 8)), lambda: nn.RMSNorm((8,)), lambda: nn.BatchNorm2d(8, track_running_stats=False)),
    "layer_parametrized": _layer(16, _sequence, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), lambda: nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))),
    "layer_activations": _layer(16, _sequence, nn.Mish, nn.Hardswish, nn.SELU, nn.Softplus, lambda: nn.PReLU(SEQ), nn.GELU, nn.Softsign, lambda: nn.RReLU(0.1, 0.3), _fn(lambda x: torch.cat([x, x], -1)), nn.GLU, nn.ELU, nn.LogSigmoid),
    "layer_bilinear": _layer(16, _sequence, _fn(lambda x, w, b: F.bilinear(x, x.flip(1), w, b), (16, 16, 16), (16,))),
    "layer_bag": _layer(16, ids, lambda: nn.EmbeddingBag(VOCAB, 16, mode="mean")),
    "layer_route": _layer(16, _sequence, _fn(_route, (16, 4), (4, 16, 32), (4, 32, 16))),
    "layer_rotary": _layer(16, _sequence, _fn(_rotary)),
    "layer_sample": _layer(8, _picture, _fn(_sample, (1, 2, 3))),
    "layer_gumbel": _layer(16, _sequence, _fn(_gumbel)),
    "layer_scatter": _layer(16, _sequence, _fn(_scatter, (4, 16))),
    "layer_distances": _layer(16, _sequence, _fn(_distances, (8, 16))),
    "layer_scans": _layer(16, _sequence, _fn(_scans)),
    "layer_spectrum": _layer(16, _sequence, _fn(_spectrum, (SEQ // 2 + 1, 16))),
    "layer_windows": _layer(8, _picture, _fn(_windows)),
    "layer_resizes": _layer(8, _picture, _fn(_resizes)),
    "layer_losses": _layer(8, _sequence, _fn(_losses, (16, 8))),
    "layer_checkpointed": _layer(16, _sequence, _fn(lambda x, a, b: torch.utils.checkpoint.checkpoint(lambda y: F.dropout(torch.tanh(y @ a) @ b, 0.2), x, use_reentrant=False), (16, 32), (32, 16))),
    "layer_mapped": _layer(16, _sequence, _fn(lambda x, w: torch.func.vmap(lambda row: torch.tanh(row @ w))(x), (16, 16))),
    "layer_inplace": _layer(16, _sequence, nn.Sequential, lambda: nn.Linear(16, 16), lambda: nn.ReLU(inplace=True), lambda: nn.Linear(16, 16), lambda: nn.Dropout(0.2, inplace=True), nn.Sigmoid),
}  # fmt: skip
