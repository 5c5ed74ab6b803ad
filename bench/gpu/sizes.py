"""How large everything is: `REAL` on a card, `TINY` where a test runs all of it on a card that is pretended."""

from __future__ import annotations

import attrs
import torch


@attrs.frozen
class Shape:
    """A decoder of transformer blocks. `ffn`: width between the products; `kv_heads`: heads of keys and values."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int

    @property
    def head(self) -> int:
        return self.width // self.heads


@attrs.frozen
class Training:
    """A training step: rows x length tokens of a model."""

    shape: Shape
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@attrs.frozen
class Sizes:
    """What each slice measures. `steps`: timed steps of a model; `repeats`: timed runs of an operator."""

    steps: int
    repeats: int
    workers: int  # processes that try models of the zoo at once; 0: this one
    zoo: tuple[str, ...]  # empty: all there are
    zoo_chunks: int
    narrow: Training  # as many nodes as a model has, each as short as can be: what the host takes
    leaves: int
    llama: Training
    heads: tuple[int, int, int]  # query heads, key heads, width of one
    lengths: tuple[int, ...]  # of attention
    rated: tuple[int, ...]  # lengths whose rates a device's file has
    rated_width: int  # tokens of a call, in rows of such lengths
    numbers: tuple[int, int]  # random numbers drawn at once
    memory: Training
    grouped: tuple[int, int, int, int]  # tokens, experts, width, width of an expert
    updated: int  # elements of a parameter
    packed: tuple[int, int]  # rows and columns of a packed weight
    adapters: Training
    gradient: int  # numbers of a gradient that is sent
    clock: tuple[Training, ...]
    profile_s: float
    products: tuple[tuple[int, int, int], ...]  # m, n, k
    offload: Training
    offload_budget: str
    disk: Training
    disk_budget: str
    disk_host: str
    compiled: Training
    dtype: torch.dtype = torch.bfloat16


LLAMA = Shape(layers=8, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
"""LLaMA-3 8B, of whose 32 layers 8."""
OPT_6_7B = Shape(layers=32, width=4096, heads=32, kv_heads=32, ffn=16384, vocabulary=50272)
OPT_13B = Shape(layers=40, width=5120, heads=40, kv_heads=40, ffn=20480, vocabulary=50272)

REAL = Sizes(
    steps=5,
    repeats=20,
    workers=8,
    zoo=(),
    zoo_chunks=4,
    narrow=Training(Shape(layers=16, width=64, heads=4, kv_heads=2, ffn=128, vocabulary=256), rows=2, length=64),
    leaves=1000,
    llama=Training(LLAMA, rows=1, length=8192),
    heads=(32, 8, 128),
    lengths=(1024, 4096, 8192),
    rated=(512, 1024, 2048, 4096, 8192, 16384),
    rated_width=16384,
    numbers=(8192, 4096),
    memory=Training(attrs.evolve(LLAMA, layers=4, vocabulary=32000), rows=4, length=4096),
    grouped=(16384, 8, 4096, 14336),
    updated=1 << 26,
    packed=(14336, 4096),
    adapters=Training(attrs.evolve(LLAMA, vocabulary=32000), rows=1, length=2048),
    gradient=1 << 28,
    clock=(
        Training(attrs.evolve(LLAMA, layers=4), rows=1, length=8192),
        Training(Shape(layers=12, width=768, heads=12, kv_heads=12, ffn=3072, vocabulary=50304), rows=8, length=1024),
        Training(attrs.evolve(OPT_6_7B, layers=4), rows=8, length=2048),
    ),
    profile_s=20.0,
    products=(
        (512, 256, 256), (1024, 256, 1024), (256, 1024, 4096), (4096, 512, 512), (256, 4096, 2048), (1024, 1024, 2048), (4096, 4096, 256),
        (4096, 2048, 512), (1024, 2048, 2048), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 4096, 4096), (8192, 14336, 4096),
        (8192, 128256, 4096),
    ),  # the first eleven are of XLA's table, from which the preset was fitted
    offload=Training(OPT_6_7B, rows=24, length=1024),
    offload_budget="40GB",
    disk=Training(OPT_13B, rows=16, length=1024),
    disk_budget="40GB",
    disk_host="32GiB",
    compiled=Training(LLAMA, rows=1, length=8192),
)

_TINY = Shape(layers=1, width=32, heads=2, kv_heads=1, ffn=64, vocabulary=64)
_SHORT = Training(_TINY, rows=2, length=16)
_WIDER = Training(attrs.evolve(_TINY, width=64), rows=2, length=16)  # nf4 has groups of 64 columns
TINY = Sizes(
    steps=1,
    repeats=1,
    workers=0,
    zoo=("kind_noisy",),
    zoo_chunks=2,
    narrow=_WIDER,
    leaves=8,
    llama=_SHORT,
    heads=(2, 1, 16),
    lengths=(32,),
    rated=(32,),
    rated_width=32,
    numbers=(64, 32),
    # Two layers: of one, its attention's workspace is all that a budget could save on.
    memory=attrs.evolve(_SHORT, rows=8, shape=attrs.evolve(_TINY, layers=2)),
    grouped=(32, 2, 16, 16),
    updated=64,
    packed=(16, 128),
    adapters=_WIDER,
    gradient=1 << 12,
    clock=(_SHORT,),
    profile_s=0.2,
    products=((32, 16, 16),),
    offload=attrs.evolve(_SHORT, shape=attrs.evolve(_TINY, kv_heads=2)),
    offload_budget="96KiB",
    disk=attrs.evolve(_SHORT, shape=attrs.evolve(_TINY, kv_heads=2)),
    disk_budget="96KiB",
    disk_host="64KiB",
    compiled=_SHORT,
)
