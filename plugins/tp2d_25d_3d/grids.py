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


@attrs.frozen
class Form:
    """One operator call as a product. `ins`, `out`: texts such as "b i"; `factors`: b, i, o -> names in the operator's rule."""

    ins: tuple[str, ...]
    out: str
    factors: Mapping[str, str]
    batch: frozenset[str]  # the rule's factors that b stands for
    width: int  # of i

    def own(self, text: str, lies: Lies) -> dict[str, str]:
        """Factor of the rule -> what `cf.ways` is told."""
        return {self.factors[f]: f"{axes} {self.factors[f]}" for f, axes in lies[NAMES[text]].items()}

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


Code = Callable[[Form, cf.Strategy], Callable[..., torch.Tensor]]
Extra = Callable[[Form, cf.Strategy], tuple[float, int]]  # seconds on the wire, peak bytes of buffers


def patterns(call: Any, mesh: cf.Mesh, lies: Callable[[int], Lies], words: Callable[[int], tuple[tuple[str, str], ...]],
             code: Code, extra: Extra) -> Iterator[cf.Strategy]:  # fmt: skip
    """The strategies of one pattern, for every form of the call and number of stripes, with the other axes on b or nowhere."""
    for form in forms(call):
        for stripes in STRIPES:
            where = lies(stripes)
            ins, outs = [form.own(text, where) for text in form.ins], [form.own(form.out, where)]
            for way in cf.ways(call, mesh, ins, outs):
                if any(f not in form.batch for _, f in way.axes) or any(lay.pending for lay in way.ins):
                    continue
                named = (*words(stripes), *way.axes)
                name = "{" + ", ".join(f"{axis}: {word}" for axis, word in named) + "}"
                seconds, peak = extra(form, way)
                cost = attrs.evolve(way.cost, extra_s=seconds, peak_bytes=peak)
                yield attrs.evolve(way, name=name, axes=named, cost=cost, local=code(form, way))


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
