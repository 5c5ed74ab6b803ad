"""Operators on images: batch and channels are free, pixels are whole where a result looks at its neighbours.

    upsample_bilinear2d    b0 b1 [h] [w] -> b0 b1 [p] [q]                       linear
    pixel_shuffle          n (c [r s]) h w -> n c (h r) (w s)                   linear, pixels free
    grid_sampler_2d        n c [h] [w], n p q [2] -> n c p q                    linear in the image, points free
    im2col                 n c [h] [w] -> n (c [k]) [l]                         linear
    max_pool2d             b0 b1 [h] [w] -> b0 b1 [oh] [ow], b0 b1 [oh] [ow]
    avg_pool2d             b0 b1 [h] [w] -> b0 b1 [oh] [ow]                     linear

Pooled dims are whole, for windows overlap and indices count in a plane.
"""

from __future__ import annotations

from math import prod

from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.build import bind, leading, names, whole
from colofunc.spec.rules.pattern import Args, RuleFn, with_arg


def _sized(index: int, name: str) -> RuleFn:
    """The backward of an upsampling: its argument `index` is the whole shape of the result."""

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        return (call.args, call.kwargs) if outs[0] is None else with_arg(call, index, name, outs[0].local_shape)

    def rule(call: Call) -> Rule | None:
        return leading(len(call.ins[0].shape) - 2, linear=[{0}], localize=localize)(call)

    return rule


def _upsampling() -> dict[str, RuleFn]:
    kinds = {f"{kind}{n}d": n for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)}
    kinds |= {"upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3}
    kinds |= {f"_upsample_{kind}2d_aa": 2 for kind in ("bilinear", "bicubic", "lanczos")}
    rules: dict[str, RuleFn] = {}
    for kind, n in kinds.items():
        rules |= {f"aten.{kind}": leading(n, linear=[{0}]), f"aten.{kind}_backward": _sized(2, "input_size")}
    return rules


# --- pixels to channels and back


def _shuffle(back: bool) -> RuleFn:
    def rule(call: Call) -> Rule | None:
        r = call.arg(1, "downscale_factor" if back else "upscale_factor")
        batch = " ".join(names("b", len(call.ins[0].shape) - 3))
        deep, flat = f"{batch} (c [r] [s]) h w", f"{batch} c (h [r]) (w [s])"
        left, right = (flat, deep) if back else (deep, flat)
        return bind(call, {0: left}, [right], linear=[{0}], sizes={"r": r, "s": r})

    return rule


def channel_shuffle(call: Call) -> Rule:
    """(g c) -> (c g). The groups stay whole: an axis on them would need another number of groups on each rank."""
    pixels = " ".join(names("x", len(call.ins[0].shape) - 2))
    groups = {"g": call.arg(1, "groups")}
    return bind(call, {0: f"n ([g] c) {pixels}"}, [f"n (c [g]) {pixels}"], linear=[{0}], sizes=groups)


def im2col(call: Call) -> Rule:
    return _columns(call, call.ins[0].shape, "[h] [w]", call.arg(1, "kernel_size"), back=False)


def col2im(call: Call) -> Rule:
    return _columns(call, call.ins[0].shape, "[h] [w]", call.arg(2, "kernel_size"), back=True)


def _columns(call: Call, shape: tuple[int, ...], pixels: str, kernel: tuple[int, ...], back: bool) -> Rule:
    batch = "n" if len(shape) == (3 if back else 4) else ""
    image, columns = f"{batch} c {pixels}", f"{batch} (c [k]) [l]"
    left, right = (columns, image) if back else (image, columns)
    k = prod(kernel) if len(kernel) > 1 else kernel[0] ** 2
    return bind(call, {0: left}, [right], linear=[{0}], sizes={"k": k})


# --- sampling at points


def grid_sampler(call: Call) -> Rule:
    n = len(call.ins[0].shape) - 2
    points = " ".join(names("p", n))
    return bind(call, {0: f"n c {' '.join(whole('x', n))}", 1: f"n {points} [k]"}, [f"n c {points}"], linear=[{0}])


def grid_sampler_backward(call: Call) -> Rule:
    n = len(call.ins[0].shape) - 2
    points, image = " ".join(names("p", n)), f"n c {' '.join(whole('x', n))}"
    grid = f"n {points} [k]"
    reduce = dict.fromkeys(("c", *names("p", n)), "sum")
    return bind(call, {0: f"n c {points}", 1: image, 2: grid}, [image, grid], reduce=reduce, linear=[{0}])


def affine_grid(call: Call) -> Rule:
    n = len(call.outs[0].shape) - 2 if call.outs[0] is not None else 0

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        return with_arg(call, 1, "size", (ins[0].local_shape[0], *call.arg(1, "size")[1:]))

    return bind(call, {0: "n [j] [k]"}, [f"n {' '.join(whole('p', n))} [j]"], linear=[{0}], localize=localize)


def _fractional(n: int) -> RuleFn:
    """Fractional pooling: one random sample per image and channel, `b0 b1 [n]` beside `b0 b1 [h] [w]`."""

    def rule(call: Call) -> Rule | None:
        if len(call.ins[0].shape) != n + 2:
            return None
        planes = [" ".join(["b0", "b1", *whole(f"x{k}_", n)]) for k in range(3)]
        return bind(call, {0: planes[0], 1: "b0 b1 [s]"}, planes[1:])

    return rule


def _pools() -> dict[str, RuleFn]:
    rules: dict[str, RuleFn] = {}
    for n in (1, 2, 3):
        rules |= {
            f"aten.max_pool{n}d_with_indices": leading(n),
            f"aten.max_pool{n}d_with_indices_backward": leading(n, linear=[{0}]),
            f"aten.max_pool{n}d": leading(n),
            f"aten.avg_pool{n}d": leading(n, linear=[{0}]),
            f"aten.avg_pool{n}d_backward": leading(n, linear=[{0}]),
            f"aten._adaptive_avg_pool{n}d": leading(n, linear=[{0}]),
            f"aten.adaptive_avg_pool{n}d": leading(n, linear=[{0}]),
            f"aten._adaptive_avg_pool{n}d_backward": leading(n, linear=[{0}]),
            f"aten.adaptive_max_pool{n}d": leading(n),
            f"aten.adaptive_max_pool{n}d_backward": leading(n, linear=[{0}]),
            f"aten.max_unpool{n}d": leading(n),
            f"aten.fractional_max_pool{n}d": _fractional(n),
            f"aten.fractional_max_pool{n}d_backward": leading(n, linear=[{0}]),
        }
    return rules


RULES: dict[str, RuleFn] = {
    **_pools(),
    **_upsampling(),
    "aten.pixel_shuffle": _shuffle(back=False),
    "aten.pixel_unshuffle": _shuffle(back=True),
    "aten.channel_shuffle": channel_shuffle,
    "aten.native_channel_shuffle": channel_shuffle,
    "aten.im2col": im2col,
    "aten.col2im": col2im,
    "aten.grid_sampler_2d": grid_sampler,
    "aten._grid_sampler_2d_cpu_fallback": grid_sampler,
    "aten.grid_sampler_3d": grid_sampler,
    "aten.grid_sampler_2d_backward": grid_sampler_backward,
    "aten.grid_sampler_3d_backward": grid_sampler_backward,
    "aten.affine_grid_generator": affine_grid,
}
