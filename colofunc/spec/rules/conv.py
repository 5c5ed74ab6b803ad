"""Convolutions of any number of dims, plain, grouped, depthwise, transposed, and their backward.

    convolution             n (g c) [h], (g o) c [k], (g o) -> n (g o) [p]      c summed, the bias added once
      transposed            n (g c) [h], (g c) o [k], (g o) -> n (g o) [p]
      patches               n (g c) (p k), (g o) c [k], (g o) -> n (g o) p      stride = kernel, no padding
    convolution_backward    gradients of input, weight and bias: o, (n p), (n p) summed

Groups, channels within groups and batch split independently; a depthwise convolution is the case c = o = 1, all
channels in g. Spatial dims are whole because windows overlap; where they do not (1x1 convolutions, patch embeddings),
the window number p splits like a batch.
"""

from __future__ import annotations

from math import prod

import attrs

from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.build import Texts, at, bind, local_sizes
from colofunc.spec.rules.pattern import Args, RuleFn, with_arg

Shape = tuple[int, ...]


@attrs.frozen
class _Geometry:
    """Texts of the spatial dims of the larger side (what windows slide over), the kernel and the smaller side."""

    windows: str
    kernel: str
    points: str
    free: tuple[str, ...]  # window numbers that may be split
    sizes: dict[str, int]


def _spread(values: tuple[int, ...] | list[int], n: int) -> list[int]:
    return list(values) * n if len(values) == 1 else list(values)


def _geometry(large: Shape, kernel: Shape, small: Shape, call: Call, first: int) -> _Geometry:
    n = len(kernel)
    stride = _spread(call.arg(first, "stride"), n)
    padding = _spread(call.arg(first + 1, "padding"), n)
    windows, points, free = [], [], []
    sizes: dict[str, int] = {}
    for d in range(n):
        if stride[d] == kernel[d] and padding[d] == 0 and large[d] == small[d] * kernel[d]:
            windows.append(f"(p{d} [k{d}])")
            points.append(f"p{d}")
            free.append(f"p{d}")
            sizes |= {f"p{d}": small[d], f"k{d}": kernel[d]}
        else:
            windows.append(f"[h{d}]")
            points.append(f"[p{d}]")
    return _Geometry(" ".join(windows), " ".join(f"[k{d}]" for d in range(n)), " ".join(points), tuple(free), sizes)


def convolution(call: Call) -> Rule | None:
    x, w, out = call.ins[0].shape, call.ins[1].shape, call.outs[0]
    if len(x) != len(w) or out is None:
        return None
    bias, transposed, groups = at(call, 2, "bias"), call.arg(6, "transposed"), call.arg(8, "groups")
    small, large = (x, out.shape) if transposed else (out.shape, x)
    geo = _geometry(large[2:], w[2:], small[2:], call, 3)
    texts: Texts = {
        0: f"n (g c) {geo.points if transposed else geo.windows}",
        1: f"(g c) o {geo.kernel}" if transposed else f"(g o) c {geo.kernel}",
        bias: "(g o)",
    }
    return bind(
        call,
        texts,
        [f"n (g o) {geo.windows if transposed else geo.points}"],
        reduce={"c": "sum"},
        linear=[{0, bias}, {1, bias}],
        addends=[bias],
        localize=_local_convolution,
        flops=2 * prod(small) * prod(w[1:]),
        sizes={**geo.sizes, **_channels(w, transposed, groups)},
    )


def _channels(w: tuple[int, ...], transposed: bool, groups: int) -> dict[str, int]:
    inner, outer = w[0] // groups, w[1]
    return {"g": groups, "c": inner, "o": outer} if transposed else {"g": groups, "o": inner, "c": outer}


def _local_convolution(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
    rule = convolution(call)
    return with_arg(call, 8, "groups", 1 if rule is None else local_sizes(rule, ins, outs)["g"])


def convolution_backward(call: Call) -> Rule | None:
    grad, x, w = (t.shape for t in call.ins[:3])
    if len(x) != len(w):
        return None
    transposed, groups = call.arg(7, "transposed"), call.arg(9, "groups")
    small, large = (x, grad) if transposed else (grad, x)
    geo = _geometry(large[2:], w[2:], small[2:], call, 4)
    out_dims, in_dims = (geo.windows, geo.points) if transposed else (geo.points, geo.windows)
    weight = f"(g c) o {geo.kernel}" if transposed else f"(g o) c {geo.kernel}"
    made = [k for k, t in enumerate(call.outs) if t is not None]
    linear: list[set[int | None]] = [{0}]
    if len(made) == 1 and made[0] in (0, 1):
        linear.append({2} if made == [0] else {1})
    return bind(
        call,
        {0: f"n (g o) {out_dims}", 1: f"n (g c) {in_dims}", 2: weight},
        [f"n (g c) {in_dims}", weight, "(g o)"],
        reduce=dict.fromkeys(("n", "o", *geo.free), "sum"),
        copied=[(2, "c")],
        linear=linear,
        localize=_local_backward,
        flops=2 * prod(small) * prod(w[1:]) * max(1, len([k for k in made if k < 2])),
        sizes={**geo.sizes, **_channels(w, transposed, groups)},
    )


def _local_backward(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
    rule = convolution_backward(call)
    groups = call.arg(9, "groups") if rule is None else local_sizes(rule, ins, outs)["g"]
    args, kwargs = with_arg(call, 9, "groups", groups)
    changed = attrs.evolve(call, args=args, kwargs=kwargs)
    if call.arg(3, "bias_sizes") is None:
        return args, kwargs
    return with_arg(changed, 3, "bias_sizes", (ins[0].local_shape[1],))


RULES: dict[str, RuleFn] = {
    "aten.convolution": convolution,
    "aten.convolution_backward": convolution_backward,
}
