"""Grids: a product of two tensors over two or three mesh axes, whatever operator it stands in.

    colofunc.linear      b i, o i, o -> b o          Y = X W          X: b i    (activations)
    colofunc.linear_dx   b o, o i -> b i             dX = dY W^T      W: i o    (weights)
    colofunc.linear_dw   b o, b i -> o i             dW = X^T dY      Y: b o    (results)
    aten.addmm           o, b i, i o -> b o
    aten.mm              b i, i o -> b o, and the gradients: b o, o i -> b i; i b, b o -> i o; o b, b i -> o i

Problem: forward and both gradients are the same three matrices X, W and Y, of which two are given and one is wanted, but
every operator writes them in another order, with other names. Idea: name the three factors b, i and o; say once per
pattern where an axis lies in X, in W and in Y; and let every operator find its own operands in that. So a pattern fits
together by itself: what forward gives is what the next product, and its own backward, take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from math import lcm
from typing import Any

import attrs
import torch

import colofunc as cf

FORMS = {
    "colofunc.linear": ("b i, o i, o -> b o",),
    "colofunc.linear_dx": ("b o, o i -> b i",),
    "colofunc.linear_dw": ("b o, b i -> o i",),
    "aten.addmm.default": ("o, b i, i o -> b o",),
    "aten.mm.default": ("b i, i o -> b o", "b o, o i -> b i", "i b, b o -> i o", "o b, b i -> o i"),
}
NAMES = {"b i": "x", "i b": "x", "i o": "w", "o i": "w", "b o": "y", "o b": "y", "o": "bias"}
STRIPES = (1, 2, 3)
"""Into how many parts a fused weight may be cut (query, key, value: 3), each of which is split over the axis."""

Lies = Mapping[str, Mapping[str, str]]  # "x", "w", "y", "bias" -> factor -> the axes in it: {"x": {"b": "z y", "i": "x"}}
Words = tuple[tuple[str, str], ...]  # (axis, what a wish calls its part)


@attrs.frozen
class Form:
    """One operator call as a product. `ins`, `out`: texts such as "b i"; `factors`: b, i, o -> names in the operator's rule."""

    ins: tuple[str, ...]
    out: str
    factors: Mapping[str, str]
    batch: frozenset[str]  # the rule's factors that b stands for
    width: int  # of i

    def own(self, text: str, lies: Lies, stripes: int) -> dict[str, str]:
        """Factor of the rule -> what `cf.ways` is told; o in so many stripes."""
        cut = {"o": f"{stripes} "} if stripes > 1 else {}
        return {self.factors[f]: f"{cut.get(f, '')}{axes} {self.factors[f]}" for f, axes in lies[NAMES[text]].items()}

    def matrices(self, shards: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """ "x": (b, i), "w": (i, o), "y": (b, o), "bias": (o), as views; leading dims of b are folded."""
        found = {}
        for text, shard in zip(self.ins, shards, strict=True):
            flat = shard if len(text) == 1 or shard.dim() == 2 else shard.reshape(-1, shard.shape[-1])
            found[NAMES[text]] = flat.t() if text in ("i b", "o b", "o i") else flat
        return found

    def given(self, matrix: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The result, from a matrix that stands as "b i", "i o" or "b o"."""
        turned = matrix.t() if self.out == "o i" else matrix
        return turned.contiguous().reshape(shape)


def forms(call: Any) -> Iterator[Form]:
    """How a call can be read as a product."""
    types = (*call.ins, *call.outs)
    if call.kwargs or sum(a is not None for a in call.args) != len(call.ins) or any(t is None for t in types):
        return  # addmm with alpha or beta
    for text in FORMS.get(call.target, ()):
        left, out = (side.strip() for side in text.split("->"))
        ins = tuple(word.strip() for word in left.split(","))[: len(call.ins)]
        if any(len(t.shape) < 2 if len(word) > 1 else len(t.shape) != 1 for word, t in zip((*ins, out), types, strict=True)):
            continue
        width = next(t.shape[word.split().index("i") - 2] for word, t in zip((*ins, out), types, strict=True) if "i" in word)
        if call.target.startswith("colofunc."):
            rank = max(len(t.shape) for t in types)
            yield Form(ins, out, {"b": "b0", "i": "i", "o": "o"}, frozenset(f"b{k}" for k in range(rank - 1)), width)
            continue
        m, n = out.split()
        k = next(f for f in "bio" if f not in (m, n))
        factors = {m: "m", n: "n", k: "k"}
        yield Form(ins, out, factors, frozenset({factors["b"]}), width)


Cost = Callable[[Form, cf.Strategy], tuple[float, int]]  # seconds on the wire, peak bytes of buffers
Local = Callable[[Form, cf.Strategy], Callable[..., torch.Tensor]]


def patterns(
    call: Any, mesh: cf.Mesh, stripes: int, lies: Lies, words: Words, cost: Cost, local: Local,
    *, depth: Words = (), hidden: tuple[str, ...] = (), sort: bool = False,
) -> Iterator[cf.Strategy]:  # fmt: skip
    """The strategies of one pattern, for every form of the call, with the mesh's other axes on b or nowhere.

    `depth`: axes that lie on b as others may, but always. `hidden`: axes that are left out. `sort`: the axes on b stand in
    the mesh's order (the pattern does not care); otherwise other axes stand before its own.
    """
    words, depth = (tuple((axis, word) for axis, word in some if mesh.axis_size(axis) > 1) for some in (words, depth))
    for form in forms(call):
        ins, outs = [form.own(text, lies, stripes) for text in form.ins], [form.own(form.out, lies, stripes)]
        for way in cf.ways(call, mesh, ins, outs, open=[a for a in mesh.axis_names if a not in hidden]):
            others = dict(way.axes)
            if not set(others.values()) <= form.batch or any(lay.pending for lay in way.ins):
                continue
            if any(others.pop(axis, None) != form.factors["b"] for axis, _ in depth):
                continue
            if sort:
                into, out = (tuple(in_order(lay, mesh) for lay in some) for some in (way.ins, way.outs))
                way = attrs.evolve(way, ins=into, outs=out)
            axes = (*words, *depth, *others.items())
            seconds, peak = cost(form, way)
            yield attrs.evolve(
                way,
                name="{" + ", ".join(f"{axis}: {word}" for axis, word in axes) + "}",
                axes=axes,
                cost=attrs.evolve(way.cost, extra_s=seconds, peak_bytes=peak),
                local=local(form, way),
            )


def in_order(layout: cf.Layout, mesh: cf.Mesh) -> cf.Layout:
    """The layout with the axes that lead a dim in the mesh's order."""
    words = []
    for dim in layout.dims:
        lead = [axis for _, axis in takewhile(lambda atom: atom[1] is not None, dim)]
        rest = [axis or str(size) for size, axis in dim[len(lead) :]]
        words.append("(" + " ".join([*sorted(lead, key=mesh.axis_names.index), *rest]) + ")" if dim else "1")
    words += [f"+{axis}" for axis, _ in layout.pending]
    return cf.Spec(" ".join(words)).bind(mesh, layout.shape)


def parts(form: Form, way: cf.Strategy, call: Any) -> dict[str, int]:
    """ "x", "w", "y" -> bytes of a rank's part."""
    size = call.ins[-1].dtype.itemsize
    every = zip((*form.ins, form.out), (*way.ins, *way.outs), strict=True)
    return {NAMES[text]: lay.local_numel * size for text, lay in every if lay is not None}


def panels(width: int, rows: int, columns: int) -> int:
    """How many panels: i falls into lcm(rows, columns) blocks, each of which gives a slice to every panel.

    As many as there are blocks, or the next number that divides a block.
    """
    blocks = lcm(rows, columns)
    block = width // blocks
    return next((n for n in range(blocks, block) if block % n == 0), block)
