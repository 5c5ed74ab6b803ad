"""Rules and strategies of the larger families, each tried by brute force on real parts (see rule_oracle)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rule_oracle import cases, close, make_call, mesh_of, run, spread, verify

from colofunc.executors.simulated import SimulatedProgram
from colofunc.ops import attention, random  # noqa: F401 - registers the operators
from colofunc.program.ir import Node, Program, Value
from colofunc.program.lower import Choice, lower
from colofunc.program.tracing.trace import record_local
from colofunc.spec.parts import join
from colofunc.spec.rule import Call
from colofunc.spec.rules import rule_for, strategies_for
from colofunc.spec.strategies import enumerate_strategies

f64 = torch.float64


GEN = torch.Generator().manual_seed(0)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=f64, generator=GEN)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=GEN)


def check(call: Call, tensors: list[torch.Tensor]) -> set[str]:
    """Everything that the call's rule claims; returns the factors that were split."""
    rule = rule_for(call)
    assert rule is not None, f"{call.target} has no rule"
    rule.check(call)
    assert rule.undecided() == ()
    whole = run(call.target, call.args, call.kwargs, tensors)
    done = set()
    for strategy, mesh, (factor, _, kind) in cases(rule, call):
        verify(call, rule, strategy, mesh, tensors, whole)
        if kind != "pending" and " " not in factor and not factor.startswith(("sum", "max")):
            done.add(factor)
    return done


def conv(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, **options: Any) -> tuple[Any, ...]:
    n = x.dim() - 2
    get = lambda name, default: [options.get(name, default)] * n  # noqa: E731
    return (
        "aten.convolution.default",
        x,
        w,
        b,
        get("stride", 1),
        get("padding", 0),
        get("dilation", 1),
        options.get("transposed", False),
        get("output_padding", 0),
        options.get("groups", 1),
    )


def conv_back(
    x: torch.Tensor, w: torch.Tensor, mask: tuple[bool, ...] = (True, True, True), **options: Any
) -> tuple[Any, ...]:
    _, _, _, _, *rest = conv(x, w, None, **options)
    out = torch.ops.aten.convolution.default(x, w, None, *rest)
    return ("aten.convolution_backward.default", r(*out.shape), x, w, [out.shape[1]], *rest, list(mask))


CASES = {
    "conv2d": (conv(r(6, 4, 5, 5), r(10, 4, 3, 3), r(10), padding=1), "n c o"),
    "conv2d plain": (conv(r(6, 4, 5, 5), r(10, 4, 3, 3), stride=2), "n c o"),
    "conv1d": (conv(r(2, 6, 7), r(4, 6, 3), r(4)), "n c o"),
    "conv3d": (conv(r(2, 2, 3, 3, 3), r(4, 2, 2, 2, 2), r(4)), "n c o"),
    "conv groups": (conv(r(2, 24, 5), r(12, 4, 3), r(12), groups=6), "n c o g"),
    "conv depthwise": (conv(r(2, 6, 5, 5), r(6, 1, 3, 3), r(6), groups=6, padding=1), "n g"),
    "conv transposed": (conv(r(2, 6, 5), r(6, 4, 3), r(4), transposed=True, stride=2), "n c o"),
    "conv transposed groups": (conv(r(2, 12, 5), r(12, 4, 3), r(24), transposed=True, groups=6), "n c o g"),
    "conv transposed patches": (conv(r(2, 6, 4), r(6, 4, 2), r(4), transposed=True, stride=2), "n c o p0"),
    "conv patches": (conv(r(2, 3, 8, 12), r(4, 3, 2, 2), r(4), stride=2), "n c o p0 p1"),
    "conv pointwise": (conv(r(2, 3, 4, 6), r(4, 3, 1, 1), r(4)), "n c o p0 p1"),
    "conv back": (conv_back(r(6, 4, 5, 5), r(10, 4, 3, 3), padding=1), "n c o"),
    "conv back weight": (conv_back(r(6, 4, 5), r(10, 4, 3), (False, True, False)), "n c o"),
    "conv back input": (conv_back(r(6, 4, 5), r(10, 4, 3), (True, False, False)), "n c o"),
    "conv back groups": (conv_back(r(2, 24, 5), r(12, 4, 3), groups=6), "n c o g"),
    "conv back depthwise": (conv_back(r(2, 6, 5, 5), r(6, 1, 3, 3), groups=6), "n g"),
    "conv back transposed": (conv_back(r(2, 12, 5), r(12, 4, 3), transposed=True, groups=6), "n c o g"),
    "conv back patches": (conv_back(r(2, 3, 8, 12), r(4, 3, 2, 2), stride=2), "n c o p0 p1"),
    "conv back transposed patches": (conv_back(r(2, 3, 4), r(3, 4, 2), stride=2, transposed=True), "n c o p0"),
    "max_pool2d": (("aten.max_pool2d_with_indices.default", r(4, 6, 5, 5), [2, 2]), "b0 b1"),
    "max_pool2d back": (
        (
            "aten.max_pool2d_with_indices_backward.default",
            r(4, 6, 2, 2),
            r(4, 6, 4, 4),
            [2, 2],
            [2, 2],
            [0, 0],
            [1, 1],
            False,
            torch.nn.functional.max_pool2d(r(4, 6, 4, 4), 2, return_indices=True)[1],
        ),
        "b0 b1",
    ),
    "avg_pool2d": (("aten.avg_pool2d.default", r(4, 6, 5, 5), [2, 2]), "b0 b1"),
    "adaptive_avg": (("aten._adaptive_avg_pool2d.default", r(4, 6, 5, 5), [2, 3]), "b0 b1"),
    "adaptive_avg unbatched": (("aten._adaptive_avg_pool2d.default", r(6, 5, 5), [2, 3]), "b0"),
    "fractional": (
        ("aten.fractional_max_pool2d.default", r(4, 6, 6, 6), [2, 2], [3, 3], torch.rand(4, 6, 2, dtype=f64)),
        "b0 b1",
    ),
    "embedding": (("aten.embedding.default", r(12, 6), ints(12, 4, 3), 2), "i0 i1 e"),
    "embedding back": (("aten.embedding_dense_backward.default", r(4, 3, 6), ints(12, 4, 3), 12, 2, False), "i0 i1 e"),
    "embedding back by frequency": (("aten.embedding_dense_backward.default", r(4, 6), ints(12, 4), 12, -1, True), "e"),
    "embedding_bag": (("aten._embedding_bag.default", r(12, 6), ints(12, 8), torch.tensor([0, 3, 5])), "e"),
    "gather": (("aten.gather.default", r(6, 5), 1, ints(5, 6, 4)), "d0 j"),
    "gather corner": (("aten.gather.default", r(6, 5), 1, ints(5, 4, 4)), "j"),
    "gather first": (("aten.gather.default", r(6, 4), 0, ints(6, 10, 4)), "d1 j"),
    "scatter src": (("aten.scatter.src", r(6, 5), 1, ints(5, 6, 1), r(6, 1)), "d0"),
    "scatter value": (("aten.scatter.value", r(6, 5), 1, ints(5, 6, 4), 2.0), "d0"),
    "scatter zero": (("aten.scatter.value", r(6, 5), 1, ints(5, 6, 4), 0), "d0"),
    "scatter reduce add": (("aten.scatter.reduce", r(6, 5), 1, ints(5, 6, 4), r(6, 4), {"reduce": "add"}), "d0 j"),
    "scatter_add": (("aten.scatter_add.default", r(6, 5), 1, ints(5, 6, 4), r(6, 4)), "d0 j"),
    "scatter_add longer source": (("aten.scatter_add.default", r(6, 5), 1, ints(5, 6, 4), r(6, 6)), "d0"),
    "scatter_reduce sum": (("aten.scatter_reduce.two", r(6, 5), 1, ints(5, 6, 4), r(6, 4), "sum"), "d0 j"),
    "scatter_reduce amax": (("aten.scatter_reduce.two", r(6, 5), 1, ints(5, 6, 4), r(6, 4), "amax"), "d0 j"),
    "scatter_reduce mean": (("aten.scatter_reduce.two", r(6, 5), 1, ints(5, 6, 4), r(6, 4), "mean"), "d0"),
    "index_select": (("aten.index_select.default", r(6, 5, 4), 1, ints(5, 10)), "d0 j d2"),
    "index_add": (("aten.index_add.default", r(6, 5, 4), 1, ints(5, 10), r(6, 10, 4)), "d0 j d2"),
    "index_copy": (("aten.index_copy.default", r(6, 5, 4), 1, torch.tensor([0, 3]), r(6, 2, 4)), "d0 d2"),
    "index_reduce": (("aten.index_reduce.default", r(6, 5, 4), 1, ints(5, 3), r(6, 3, 4), "amax"), "d0 d2"),
    "index_fill": (("aten.index_fill.int_Scalar", r(6, 5, 4), 1, torch.tensor([0, 3]), 0), "d0 d2"),
    "take": (("aten.take.default", r(6, 5), ints(30, 4, 6)), "i0 i1"),
    "index": (("aten.index.Tensor", r(6, 5, 4), [None, ints(5, 2, 3)]), "d0 i0 i1 d2"),
    "index two": (("aten.index.Tensor", r(6, 5, 4), [ints(6, 2, 1), ints(5, 3)]), "i0 i1 d2"),
    "index apart": (("aten.index.Tensor", r(6, 4, 5), [ints(6, 2, 3), None, ints(5, 3)]), "i0 i1 d1"),
    "index_put": (("aten.index_put.default", r(6, 5, 4), [None, torch.tensor([1, 3])], r(6, 2, 4)), "d0 d2"),
    "index_put add": (
        ("aten.index_put.default", r(6, 5, 4), [None, ints(5, 2, 3)], r(6, 2, 3, 4), True),
        "d0 i0 i1 d2",
    ),
    "index_put add one": (("aten.index_put.default", r(6, 5, 4), [ints(6, 10)], r(1), True), "d1 d2 i0"),
    "index_put add scalar": (
        ("aten.index_put.default", r(6, 4), [ints(6, 10)], torch.tensor(2.0, dtype=f64), True),
        "d1 i0",
    ),
    "index_put mask": (("aten.index_put.default", r(6, 4), [r(6, 4) > 0], torch.tensor(2.0, dtype=f64)), "d0 d1"),
    "masked index": (("aten._unsafe_masked_index.default", r(6, 4), r(10, 1) > 0, [ints(6, 10)], 0), "i0 d1"),
    "masked index put": (
        ("aten._unsafe_masked_index_put_accumulate.default", r(6, 4), r(10, 1) > 0, [ints(6, 10)], r(10, 4)),
        "i0 d1",
    ),
    "searchsorted": (("aten.searchsorted.Tensor", torch.arange(5.0), r(6, 4).float()), "d0 d1"),
    "searchsorted rows": (("aten.searchsorted.Tensor", r(6, 5).sort(-1)[0], r(6, 4)), "d0 j"),
    "bucketize": (("aten.bucketize.Tensor", r(6, 4), torch.arange(5.0, dtype=f64)), "d0 d1"),
}


def spd(*shape: int) -> torch.Tensor:
    """Well-conditioned symmetric positive definite matrices."""
    x = r(*shape)
    return x @ x.mT + 4 * torch.eye(shape[-1], dtype=f64)


def cplx(*shape: int) -> torch.Tensor:
    return torch.complex(r(*shape), r(*shape))


BAG = torch.ops.aten._embedding_bag(r(12, 6), ints(12, 8), torch.tensor([0, 3, 5]))
A, L = spd(6, 3, 3), torch.linalg.cholesky(spd(6, 3, 3))
LU, PIV, _ = torch.ops.aten.linalg_lu_factor_ex(A)

CASES |= {
    "embedding_bag back": (
        ("aten._embedding_bag_dense_backward.default", r(3, 6), ints(12, 8), *BAG[1:], 12, False, 0, None),
        "e",
    ),
    "nearest": (("aten.upsample_nearest2d.default", r(4, 6, 3, 3), [6, 6]), "b0 b1"),
    "nearest vec": (("aten.upsample_nearest2d.vec", r(4, 6, 3, 3), None, [2.0, 2.0]), "b0 b1"),
    "bilinear": (("aten.upsample_bilinear2d.vec", r(4, 6, 3, 3), [6, 6], False, None), "b0 b1"),
    "bicubic back": (("aten.upsample_bicubic2d_backward.default", r(4, 6, 6, 6), [6, 6], [4, 6, 3, 3], False), "b0 b1"),
    "trilinear": (("aten.upsample_trilinear3d.default", r(2, 3, 2, 2, 2), [4, 4, 4], True), "b0 b1"),
    "linear1d": (("aten.upsample_linear1d.default", r(2, 3, 4), [8], True), "b0 b1"),
    "exact": (("aten._upsample_nearest_exact2d.default", r(4, 6, 3, 3), [5, 6]), "b0 b1"),
    "exact back": (("aten._upsample_nearest_exact1d_backward.default", r(4, 6, 6), [6], [4, 6, 3]), "b0 b1"),
    "aa": (("aten._upsample_bilinear2d_aa.default", r(4, 6, 5, 5), [3, 3], False), "b0 b1"),
    "pixel_shuffle": (("aten.pixel_shuffle.default", r(4, 24, 2, 3), 2), "b0 c h w"),
    "pixel_unshuffle": (("aten.pixel_unshuffle.default", r(6, 4, 6), 2), "c h w"),
    "channel_shuffle": (("aten.native_channel_shuffle.default", r(2, 12, 3, 4), 2), "n c x0 x1"),
    "im2col": (("aten.im2col.default", r(4, 6, 5, 5), [2, 3], [1, 1], [0, 0], [1, 1]), "n c"),
    "col2im": (("aten.col2im.default", r(4, 36, 12), [5, 5], [2, 3], [1, 1], [0, 0], [1, 1]), "n c"),
    "grid": (("aten.grid_sampler_2d.default", r(2, 6, 5, 5), r(2, 3, 4, 2), 0, 0, False), "n c p0 p1"),
    "grid back": (
        (
            "aten.grid_sampler_2d_backward.default",
            r(2, 6, 3, 4),
            r(2, 6, 5, 5),
            r(2, 3, 4, 2),
            0,
            0,
            False,
            [True, True],
        ),
        "n c p0 p1",
    ),
    "grid 3d": (("aten.grid_sampler_3d.default", r(2, 6, 3, 3, 3), r(2, 2, 3, 4, 3), 0, 0, False), "n c p0 p1 p2"),
    "affine": (("aten.affine_grid_generator.default", r(6, 2, 3), [6, 3, 4, 4], False), "n"),
    "fft c2c": (("aten._fft_c2c.default", cplx(4, 5, 6), [1], 0, True), "d0 d2"),
    "fft r2c": (("aten._fft_r2c.default", r(4, 5, 6), [0, 2], 0, True), "d1"),
    "fft c2r": (("aten._fft_c2r.default", cplx(4, 5, 6), [1], 2, 8), "d0 d2"),
    "sort": (("aten.sort.default", r(4, 6, 5), 1), "d0 d2"),
    "sort stable": (("aten.sort.stable", r(4, 6), {"stable": True, "dim": 0}), "d1"),
    "argsort": (("aten.argsort.default", r(4, 6), 0), "d1"),
    "topk": (("aten.topk.default", r(4, 6, 10), 3, -1), "d0 d1"),
    "kthvalue": (("aten.kthvalue.default", r(4, 6, 10), 3, 1), "d0 d2"),
    "median": (("aten.median.dim", r(4, 6, 10), 1, True), "d0 d2"),
    "mode": (("aten.mode.default", ints(3, 4, 6, 10), 0), "d1 d2"),
    "cumsum": (("aten.cumsum.default", r(4, 6, 5), 1), "d0 d2"),
    "cumsum of ints": (("aten.cumsum.default", ints(3, 4, 6).int(), 1), "d0"),
    "isin": (("aten.isin.Tensor_Tensor", ints(9, 4, 6), ints(9, 3)), "d0 d1"),
    "multilinear": (
        ("aten._trilinear.default", r(4, 6), r(3, 6, 5), r(4, 5), [1, 3], [0], [1, 2], [2, 3]),
        "d0 d1 d2 d3",
    ),
    "cumprod": (("aten.cumprod.default", r(4, 6), 0), "d1"),
    "cummax": (("aten.cummax.default", r(4, 6), 1), "d0"),
    "logcumsumexp": (("aten.logcumsumexp.default", r(4, 6), 1), "d0"),
    "inv": (("aten.linalg_inv_ex.default", A), "b0"),
    "cholesky": (("aten.linalg_cholesky_ex.default", spd(4, 3, 3, 3)), "b0 b1"),
    "cholesky_solve": (("aten.cholesky_solve.default", r(6, 3, 2), L), "b0"),
    "det": (("aten._linalg_det.default", A), "b0"),
    "slogdet": (("aten._linalg_slogdet.default", A), "b0"),
    "solve": (("aten._linalg_solve_ex.default", A, r(6, 3, 2)), "b0"),
    "solve vectors": (("aten._linalg_solve_ex.default", A, r(6, 3)), "b0"),
    "eigh": (("aten._linalg_eigh.default", A), "b0"),
    "eigvalsh": (("aten._linalg_eigh.default", A, "L", False), "b0"),
    "eig": (("aten.linalg_eig.default", A), "b0"),
    "svd": (("aten._linalg_svd.default", A), "b0"),
    "svdvals": (("aten._linalg_svd.default", A, False, False), "b0"),
    "qr": (("aten.linalg_qr.default", A), "b0"),
    "qr r": (("aten.linalg_qr.default", A, "r"), "b0"),
    "lu": (("aten.linalg_lu.default", A), "b0"),
    "lu_solve": (("aten.linalg_lu_solve.default", LU, PIV, r(6, 3, 2)), "b0"),
    "lu_unpack": (("aten.lu_unpack.default", LU, PIV), "b0"),
    "triangular": (("aten.linalg_solve_triangular.default", L, r(6, 3, 2), {"upper": False}), "b0"),
    "ldl": (("aten.linalg_ldl_factor_ex.default", A), "b0"),
    "pinv": (("aten.linalg_pinv.atol_rtol_tensor", A, {"rtol": torch.tensor(1e-9, dtype=f64)}), "b0"),
    "lstsq": (("aten.linalg_lstsq.default", r(6, 4, 3), r(6, 4, 2), {"driver": "gelsd"}), "b0"),
    "matrix_exp": (("aten.linalg_matrix_exp.default", A), "b0"),
    "cross": (("aten.linalg_cross.default", r(4, 3, 6), r(4, 3, 6), {"dim": 1}), "d0 d2"),
    "cdist": (("aten._cdist_forward.default", r(2, 4, 3), r(2, 6, 3), 2.0, None), "b0 p q"),
    "cdist by products": (("aten._euclidean_dist.default", r(2, 4, 3), r(2, 6, 3)), "b0 p q"),
    "cdist back": (
        ("aten._cdist_backward.default", r(2, 4, 6), r(2, 4, 3), r(2, 6, 3), 1.0, r(2, 4, 6).abs()),
        "b0 p q",
    ),
    "weight_norm": (("aten._weight_norm_interface.default", r(6, 4, 3), r(6, 1, 1), 0), "c"),
    "weight_norm back": (
        ("aten._weight_norm_interface_backward.default", r(4, 6), r(4, 6), r(1, 6), r(1, 6).abs() + 1, 1),
        "c",
    ),
    "ctc": (("colofunc.ctc_loss", r(5, 6, 4), ints(4, 6, 3), ints(3, 6) + 3, ints(4, 6), 0, True), "n"),
    "lstm": (("colofunc.lstm", r(3, 6, 8), r(6, 2), r(6, 2), r(8, 2)), "b"),
    "lstm back": (("colofunc.lstm_backward", r(3, 6, 2), r(6, 2), r(6, 2), r(8, 2), r(3, 6, 2), r(3, 6, 8)), "b"),
    "ctc back": (("colofunc.ctc_loss_backward", r(6), r(5, 6, 4), ints(4, 6, 3), ints(3, 6) + 3, ints(4, 6), 0, True), "n"),
    "renorm": (("aten.renorm.default", r(6, 4, 3), 2, 0, 1.0), "c"),
}


@pytest.mark.parametrize("name", CASES)
def test_rule_holds_and_splits(name: str) -> None:
    (target, *args), factors = CASES[name]
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    split = check(*make_call(target, tuple(args), kwargs))
    assert split == set(factors.split())


# --- random numbers and attention: local code that knows where its part lies

SEED = torch.tensor(7)
B, H, G, S, T, E, F = 2, 12, 6, 6, 10, 4, 3


def attend(
    bias: torch.Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    t: int = T,
) -> tuple[Any, ...]:
    return (
        "colofunc.attention",
        r(B, H, S, E),
        r(B, G, t, E),
        r(B, G, t, F),
        bias,
        0.5,
        causal,
        window,
        dropout,
        seed,
        3,
        offset,
    )


def attend_back(
    bias: torch.Tensor | None = None, *rest: Any, need_dbias: bool = False, box: Sequence[Any] = (None,) * 3, **options: Any
) -> tuple[Any, ...]:
    _, q, k, v, bias, *options_ = attend(bias, *rest, **options)
    out, lse = torch.ops.colofunc.attention(q, k, v, bias, *options_, None, [], [], None, *box)
    tail = [None, [], [], None, *box, need_dbias, None]
    return ("colofunc.attention_backward", r(*out.shape), q, k, v, bias, out, lse, *options_, *tail)


BOUNDS = (ints(5, B, 2, T), ints(3, 1, 2, S), ints(3, 1, 2, S) + 2)
"""Two codes of columns, and their least and most for each row, of which all of a batch have the same."""

PLACED = {
    "bits": (("colofunc.random_bits", SEED, 3, [4, 6, 5]), "d0 d1 d2"),
    "uniform": (("colofunc.random_uniform", SEED, 3, [4, 12], f64), "d0 d1"),
    "normal": (("colofunc.random_normal", SEED, 3, [12, 10], torch.float32), "d0 d1"),
    "bernoulli": (("colofunc.random_bernoulli", SEED, 3, [12, 10], torch.bool, 0.3), "d0 d1"),
    "dropout": (("colofunc.dropout", r(4, 6, 10), SEED, 3, 0.3), "d0 d1 d2"),
    "attention": (attend(), "b g r s"),
    "attention causal": (attend(causal=True, t=S), "b g r s"),
    "attention window": (attend(window=3, causal=True, t=S, offset=torch.tensor(1)), "b g r s"),
    "attention listed rows": (attend(causal=True, offset=torch.tensor([3, 1, 0, 2, 5, 4])), "b g r s"),
    "attention bias": (attend(r(1, H, S, T)), "b g r s"),
    "attention mask": (attend(r(B, 1, S, T) > -1), "b g r s"),
    "attention row mask": (attend(r(S, T) > -1), "b g r s"),
    "attention dropout": (attend(None, True, 0, 0.3, SEED, t=S), "b g r s"),
    "attention bounds": ((*attend(), None, [], [], None, *BOUNDS), "b g r s"),
    "attention causal bounds": ((*attend(None, True, t=S), None, [], [], None, BOUNDS[1], *BOUNDS[1:]), "b g r s"),
    "attention back bounds": (attend_back(box=BOUNDS), "b g r s"),
    "attention back": (attend_back(), "b g r s"),
    "attention back causal": (attend_back(causal=True, t=S), "b g r s"),
    "attention back bias": (attend_back(r(1, H, S, T), need_dbias=True), "b g r s"),
    "attention back bias of heads": (attend_back(r(H, 1, T), need_dbias=True), "b g r s"),
    "attention back dropout": (attend_back(None, True, 0, 0.3, SEED, t=S), "b g r s"),
}


@pytest.mark.parametrize("name", PLACED)
def test_parts_that_know_where_they_lie(name: str) -> None:
    (target, *args), factors = PLACED[name]
    assert check(*make_call(target, tuple(args), {})) == set(factors.split())


# --- strategies that split what the rule keeps whole

SPLIT = {
    "embedding": ("aten.embedding.default", r(12, 6), ints(12, 4, 3), 2),
    "embedding int32": ("aten.embedding.default", r(12, 6), ints(12, 4, 3).int(), -1),
    "embedding back": ("aten.embedding_dense_backward.default", r(4, 3, 6), ints(12, 4, 3), 12, 2, False),
    "gather": ("aten.gather.default", r(4, 6, 2), 1, ints(6, 4, 6, 2)),
    "gather last": ("aten.gather.default", r(4, 6), -1, ints(6, 4, 1)),
    "index_select": ("aten.index_select.default", r(4, 6, 2), 1, ints(6, 10)),
    "scatter_add": ("aten.scatter_add.default", r(4, 6), 1, ints(6, 4, 6), r(4, 6)),
    "scatter_add longer source": ("aten.scatter_add.default", r(4, 6), 1, ints(6, 4, 3), r(4, 5)),
    "cumsum": ("aten.cumsum.default", r(4, 6, 2), 1),
    "cumsum of masks": ("aten.cumsum.default", r(4, 6) > 0, -1),
    "index_add": ("aten.index_add.default", r(4, 6), 1, ints(6, 4), r(4, 4), {"alpha": 2}),
}


@pytest.mark.parametrize("name", SPLIT)
def test_strategies_split_the_indexed_dim(name: str) -> None:
    target, *args = SPLIT[name]
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    call, tensors = make_call(target, tuple(args), kwargs)
    whole = run(call.target, call.args, call.kwargs, tensors)
    sharded = set()
    for mesh in (mesh_of(2), mesh_of(3), mesh_of(2, 2), mesh_of(2, 3)):
        for strategy in strategies_for(call, mesh):
            verify(call, None, strategy, mesh, tensors, whole)
            sharded |= {factor for _, factor in strategy.axes}
    assert len(sharded & {"v", "s"}) == 1 and len(sharded) > 1


# --- the same as programs: local code recorded, lowered and run by the simulated mesh

TRACED = {
    **{name: call for name, (call, _) in PLACED.items()},
    **SPLIT,
    **{name: CASES[name][0] for name in ("conv back groups", "bicubic back", "index_put add", "affine", "weight_norm")},
}


@pytest.mark.parametrize("name", TRACED)
def test_lowered_calls_equal_the_whole(name: str) -> None:
    target, *args = TRACED[name]
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    call, tensors = make_call(target, tuple(args), kwargs)
    whole = run(call.target, call.args, call.kwargs, tensors)
    mesh, n = mesh_of(2, 3), len(tensors)
    outs = tuple(None if t is None else n + k for k, t in enumerate(call.outs))
    types = {**dict(enumerate(call.ins)), **{o: t for o, t in zip(outs, call.outs, strict=True) if o is not None}}
    values = {i: Value(i, t.shape, t.dtype) for i, t in types.items() if t is not None}
    made = tuple(o for o in outs if o is not None)
    program = Program(tuple(range(n)), (Node(call.target, call.args, call.kwargs, outs),), made, values)
    rule = rule_for(call)
    options = [*enumerate_strategies(call, rule, mesh), *strategies_for(call, mesh)]
    assert len(options) > 1
    for strategy in options:
        layouts = [lay for lay in strategy.outs if lay is not None]
        local = lower(program, [Choice(strategy, rule)], dict(enumerate(strategy.ins)), layouts, mesh, record_local)
        shards = [spread(x, lay, mesh) for x, lay in zip(tensors, strategy.ins, strict=True)]
        results = SimulatedProgram(local, mesh)(shards)
        for got, lay, o in zip(results, layouts, made, strict=True):
            assert close(join(got, lay, mesh), whole[o - n]), f"{strategy.name}: result {o - n}"
