"""Forms of products: how one operator call reads as Y = X W, and the strategies of a pattern for it.

Problem: forward and both gradients are the same three matrices X: (b, i), W: (i, o) and Y: (b, o), of which two are
given and one is wanted, but every operator writes them in another order, with other names. Idea: a `Form` names the
factors b, i and o of one call; a pattern says once where an axis lies in X, in W and in Y. See `products` for how plans
use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from math import lcm, prod

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.planner.wishes.factor_strategies import ways
from colofunc.program.facts import facts_of
from colofunc.spec.layout import Layout, make_layout
from colofunc.spec.rule import Call, Strategy

_NAMES = {"b i": "x", "i b": "x", "i o": "w", "o i": "w", "b o": "y", "o b": "y", "o": "bias"}
"""Text of a matrix -> which one it is."""

FactorAxes = Mapping[str, Mapping[str, str]]
""" "x", "w", "y", "bias" -> factor -> the axes in it: {"x": {"b": "z y", "i": "x"}}."""
AxisWords = Sequence[tuple[str, str]]
"""(axis, what a wish calls its part)."""


@attrs.frozen
class Form:
    """One operator call as a product.

    `ins`, `out`: texts such as "b i"; `factors`: b, i, o -> names in the operator's rule.
    """

    ins: tuple[str, ...]
    out: str
    factors: Mapping[str, str]
    batch: frozenset[str]  # the rule's factors that b stands for
    width: int  # of i

    @property
    def wanted(self) -> str:
        """Which matrix the call gives: "x", "w" or "y"."""
        return _NAMES[self.out]

    def own(self, text: str, lies: FactorAxes, stripes: int) -> dict[str, str]:
        """Factor of the rule -> what `cf.ext.ways` is told; o in so many stripes."""
        texts = {}
        for factor, axes in lies[_NAMES[text]].items():
            in_stripes = f"{stripes} " if factor == "o" and stripes > 1 else ""
            texts[self.factors[factor]] = f"{in_stripes}{axes} _"
        return texts

    def matrices(self, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """ "x": (b, i), "w": (i, o), "y": (b, o), "bias": (o), as views; leading dims of b are folded."""
        matrices = {}
        for text, shard in zip(self.ins, shards, strict=True):
            is_vector = len(text) == 1
            flat = shard if is_vector or shard.dim() == 2 else shard.reshape(-1, shard.shape[-1])
            matrices[_NAMES[text]] = flat.t() if text in ("i b", "o b", "o i") else flat
        return matrices

    def product(self, matrices: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The matrix that is wanted, of those that are given; without the bias."""
        if self.wanted == "y":
            return torch.mm(matrices["x"], matrices["w"])
        if self.wanted == "x":
            return torch.mm(matrices["y"], matrices["w"].t())
        return torch.mm(matrices["x"].t(), matrices["y"])

    def given(self, matrix: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The result, from a matrix that stands as "b i", "i o" or "b o"."""
        turned = matrix.t() if self.out == "o i" else matrix
        return turned.contiguous().reshape(shape)

    def part_bytes(self, call: Call, way: Strategy) -> dict[str, int]:
        """ "x", "w", "y" -> bytes of a rank's part."""
        element_bytes = call.ins[-1].dtype.itemsize
        part_bytes = {}
        for text, layout in zip((*self.ins, self.out), (*way.ins, *way.outs), strict=True):
            if layout is not None:
                part_bytes[_NAMES[text]] = layout.local_numel * element_bytes
        return part_bytes

    def wire(
        self, call: Call, way: Strategy, mesh: Mesh, along: Mapping[str, str], panels: int = 1, standing: int = 1
    ) -> tuple[float, int]:
        """(seconds on the wire, bytes of buffers) of matrices that are split once more where they are stored.

        along: name of such a matrix -> axis. Those that are given are gathered, what is wanted is scattered; in so many
        panels, of which `standing` are there at once.
        """
        part_bytes = self.part_bytes(call, way)
        wire_s, buffer_bytes = 0.0, 0
        for name, axis in along.items():
            panel_bytes = part_bytes[name] * mesh.axis_size(axis) // panels
            kind = "reduce_scatter" if name == self.wanted else "all_gather"
            wire_s += panels * mesh.collective_s(kind, panel_bytes, (axis,))
            buffer_bytes += standing * panel_bytes
        return wire_s, buffer_bytes


def forms(call: Call) -> Iterator[Form]:
    """How a call can be read as a product."""
    types = (*call.ins, *call.outs)
    given = sum(arg is not None for arg in call.args)
    if call.kwargs or given != len(call.ins) or None in types:
        return  # addmm with alpha or beta
    if len({type_.dtype for type_ in types if type_ is not None}) > 1:
        return  # one that casts as well
    shapes = [type_.shape for type_ in types if type_ is not None]
    for text in facts_of(call.target).as_products:
        left, out = (side.strip() for side in text.split("->"))
        ins = tuple(word.strip() for word in left.split(","))[: len(call.ins)]
        matrices = list(zip((*ins, out), shapes, strict=True))
        if not all(_has_dims(word, shape) for word, shape in matrices):
            continue
        width = next(shape[word.split().index("i") - 2] for word, shape in matrices if "i" in word)
        if not call.target.startswith("aten."):
            most_dims = max(len(shape) for shape in shapes)
            batch = frozenset(f"b{number}" for number in range(most_dims - 1))
            yield Form(ins, out, {"b": "b0", "i": "i", "o": "o"}, batch, width)
            continue
        # The rule of torch's products is `m k, k n -> m n`.
        first, second = out.split()
        summed = next(factor for factor in "bio" if factor not in (first, second))
        factors = {first: "m", second: "n", summed: "k"}
        yield Form(ins, out, factors, frozenset({factors["b"]}), width)


def _has_dims(word: str, shape: tuple[int, ...]) -> bool:
    """Whether a shape can be what a word of a form says: "o" one dim, "b i" at least two."""
    return len(shape) == 1 if len(word) == 1 else len(shape) >= 2


Costs = Callable[[Form, Strategy], tuple[float, int]]
"""Of a form under a strategy: seconds on the wire, peak bytes of buffers."""
FormCode = Callable[[Form, Strategy], Callable[..., torch.Tensor]]
"""The code that a rank runs for a form under a strategy."""


def strategies(
    call: Call, mesh: Mesh, lies: FactorAxes, words: AxisWords, cost: Costs, local: FormCode,
    *, stripes: int = 1, depth: AxisWords = (), hidden: Sequence[str] = (), sort: bool = False,
) -> Iterator[Strategy]:  # fmt: skip
    """The strategies of one pattern, for every form of the call, with the mesh's other axes on b or nowhere.

    `stripes`: into how many parts o is cut, each of which is split (a fused weight of query, key and value: 3).
    `depth`: axes that lie on b as others may, but always. `hidden`: axes that are left out. `sort`: the axes on b stand
    in the mesh's order (the pattern does not care); otherwise other axes stand before its own.
    """
    words, depth = split_words(words, mesh), split_words(depth, mesh)
    open_axes = [axis for axis in mesh.axis_names if axis not in hidden]
    for form in forms(call):
        ins = [form.own(text, lies, stripes) for text in form.ins]
        outs = [form.own(form.out, lies, stripes)]
        for way in ways(call, mesh, ins, outs, open=open_axes):
            others = dict(way.axes)
            if not set(others.values()) <= form.batch or any(layout.pending for layout in way.ins):
                continue
            if any(others.pop(axis, None) != form.factors["b"] for axis, _ in depth):
                continue
            rest = "{" + ", ".join(f"{axis}: {factor}" for axis, factor in others.items()) + "}"
            way = attrs.evolve(way, name=rest, axes=tuple(others.items()))
            if sort:
                into = tuple(_in_order(layout, mesh) for layout in way.ins)
                out = tuple(layout and _in_order(layout, mesh) for layout in way.outs)
                way = attrs.evolve(way, ins=into, outs=out)
            seconds, peak = cost(form, way)
            yield way.with_pattern((*words, *depth), local(form, way), extra_s=seconds, peak_bytes=peak)


def split_words(words: AxisWords, mesh: Mesh) -> list[tuple[str, str]]:
    """The words of the axes that split something: those of more than one rank."""
    return [(axis, word) for axis, word in words if mesh.axis_size(axis) > 1]


def parts(mesh: Mesh, lies: FactorAxes, factor: str) -> int:
    """How many parts a factor must fall into, so that every matrix can lie as a pattern says."""
    counts = []
    for matrix in lies.values():
        if factor in matrix:
            counts.append(prod(mesh.axis_size(axis) for axis in matrix[factor].split()))
    return lcm(*counts)


def _in_order(layout: Layout, mesh: Mesh) -> Layout:
    """The layout with the axes that lead a dim in the mesh's order."""
    dims = []
    for dim in layout.dims:
        leading = [(size, axis) for size, axis in takewhile(lambda atom: atom[1] is not None, dim) if axis is not None]
        dims.append((*sorted(leading, key=lambda atom: mesh.axis_names.index(atom[1])), *dim[len(leading) :]))
    return make_layout(tuple(dims), layout.shape, layout.pending)


def dim(axes: str, factor: str, stripes: int = 1) -> str:
    """One dim of a weight's spec: axes on a factor, in so many stripes: "(tp o)", "(3 tp o)"."""
    return f"({stripes} {axes} {factor})" if stripes > 1 else f"({axes} {factor})"
