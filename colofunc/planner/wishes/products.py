"""Products for plugins: which of a program's products have a weight, and strategies that lay axes on their three matrices.

    colofunc.linear      b i, o i, o -> b o          Y = X W          X: b i    (activations)
    colofunc.linear_dx   b o, o i -> b i             dX = dY W^T      W: i o    (weights)
    colofunc.linear_dw   b o, b i -> o i             dW = X^T dY      Y: b o    (results)
    aten.addmm           o, b i, i o -> b o
    aten.mm              b i, i o -> b o, and the gradients: b o, o i -> b i; i b, b o -> i o; o b, b i -> o i

Problem: forward and both gradients are the same three matrices X, W and Y, of which two are given and one is wanted, but
every operator writes them in another order, with other names. Idea: name the three factors b, i and o; say once per
pattern where an axis lies in X, in W and in Y; and let every operator find its own operands in that. So a pattern fits
together by itself: what forward gives is what the next product, and its own backward, take.

    lies = {"x": {"b": "dp"}, "w": {"o": "dp"}, "y": {"b": "dp"}, "bias": {}}     # blocks of W pass, rows stay
    yield from cf.ext.products.strategies(call, mesh, lies, (("dp", "streamed"),), cost, local)

with `cost(form, way)` the seconds and bytes of the communication and `local(form, way)` its code, for a `Form`. A plan asks
for the pattern where it wants it, in forward and in both gradients:

    yield from cf.ext.products.wishes(program, mesh, {p: (("dp", "streamed"),) for p in cf.ext.products.weighted(program, rules)}, name)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from math import lcm, prod

import attrs
import torch

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.ops import fp8, int8_products, quantized
from colofunc.planner.sharding.classes import starred
from colofunc.planner.wishes.factor_strategies import ways
from colofunc.planner.wishes.propagation import Rules
from colofunc.planner.wishes.wish import Wish
from colofunc.program.ir import Node, Program
from colofunc.spec.layout import Layout, make_layout
from colofunc.spec.rule import Call, Factors, Rule, Strategy

__all__ = [
    "FORMS", "Form", "Product", "dim", "forms", "gradients", "leaf_of", "parts", "share", "strategies", "weighted", "why_whole",
    "wishes", "work", "worthwhile",
]  # fmt: skip

FORMS = {
    "colofunc.linear": ("b i, o i, o -> b o",),
    "colofunc.linear_dx": ("b o, o i -> b i",),
    "colofunc.linear_dw": ("b o, b i -> o i",),
    "aten.addmm.default": ("o, b i, i o -> b o",),
    "aten.mm.default": ("b i, i o -> b o", "b o, o i -> b i", "i b, b o -> i o", "o b, b i -> o i"),
}
"""Operator -> how it can be read as a product."""

_BACKWARD = {  # of others: aten.mm
    "colofunc.linear": ("colofunc.linear_dx", "colofunc.linear_dw"),
    fp8.PRODUCTS[0]: fp8.PRODUCTS[1:],
    **{name: (f"{name}_dx",) for name in sorted(quantized.PRODUCTS)},
    int8_products.PRODUCT: ("colofunc.int8_linear_dx",),
}
WITH_PACKED = quantized.PRODUCTS | {int8_products.PRODUCT}
"""Products whose second operand is the data of a packed weight."""
_NAMES = {"b i": "x", "i b": "x", "i o": "w", "o i": "w", "b o": "y", "o b": "y", "o": "bias"}
_TRANSPOSES = ("aten.t.default", "aten.transpose.int", "aten.permute.default")
_VIEWS = ("aten.view.", "aten._unsafe_view.", "aten.reshape.", "aten.clone.", "aten._to_copy.", fp8.CAST)

FAIR_SHARE = 0.5
"""A plan that splits products splits at least so much of the work with weights."""
NAMED = 3
"""At most so many operators are named in an error."""

Lies = Mapping[str, Mapping[str, str]]  # "x", "w", "y", "bias" -> factor -> the axes in it: {"x": {"b": "z y", "i": "x"}}
Words = Sequence[tuple[str, str]]  # (axis, what a wish calls its part)


# ---- of one call ----


@attrs.frozen
class Form:
    """One operator call as a product. `ins`, `out`: texts such as "b i"; `factors`: b, i, o -> names in the operator's rule."""

    ins: tuple[str, ...]
    out: str
    factors: Mapping[str, str]
    batch: frozenset[str]  # the rule's factors that b stands for
    width: int  # of i

    @property
    def wanted(self) -> str:
        """Which matrix the call gives: "x", "w" or "y"."""
        return _NAMES[self.out]

    def own(self, text: str, lies: Lies, stripes: int) -> dict[str, str]:
        """Factor of the rule -> what `cf.ext.ways` is told; o in so many stripes."""
        cut = {"o": f"{stripes} "} if stripes > 1 else {}
        return {self.factors[f]: f"{cut.get(f, '')}{axes} _" for f, axes in lies[_NAMES[text]].items()}

    def matrices(self, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """ "x": (b, i), "w": (i, o), "y": (b, o), "bias": (o), as views; leading dims of b are folded."""
        found = {}
        for text, shard in zip(self.ins, shards, strict=True):
            flat = shard if len(text) == 1 or shard.dim() == 2 else shard.reshape(-1, shard.shape[-1])
            found[_NAMES[text]] = flat.t() if text in ("i b", "o b", "o i") else flat
        return found

    def product(self, m: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The matrix that is wanted, of those that are given; without the bias."""
        if self.wanted == "y":
            return torch.mm(m["x"], m["w"])
        return torch.mm(m["y"], m["w"].t()) if self.wanted == "x" else torch.mm(m["x"].t(), m["y"])

    def given(self, matrix: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The result, from a matrix that stands as "b i", "i o" or "b o"."""
        turned = matrix.t() if self.out == "o i" else matrix
        return turned.contiguous().reshape(shape)

    def part_bytes(self, call: Call, way: Strategy) -> dict[str, int]:
        """ "x", "w", "y" -> bytes of a rank's part."""
        size = call.ins[-1].dtype.itemsize
        every = zip((*self.ins, self.out), (*way.ins, *way.outs), strict=True)
        return {_NAMES[text]: lay.local_numel * size for text, lay in every if lay is not None}

    def wire(
        self, call: Call, way: Strategy, mesh: Mesh, along: Mapping[str, str], panels: int = 1, standing: int = 1
    ) -> tuple[float, int]:
        """(seconds on the wire, bytes of buffers) of matrices that are split once more where they are stored: `along`, name -> axis.

        Those that are given are gathered, what is wanted is scattered; in so many panels, of which `standing` are there at once.
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
    if call.kwargs or sum(a is not None for a in call.args) != len(call.ins) or any(t is None for t in types):
        return  # addmm with alpha or beta
    shapes = [t.shape for t in types if t is not None]
    for text in FORMS.get(call.target, ()):
        left, out = (side.strip() for side in text.split("->"))
        ins = tuple(word.strip() for word in left.split(","))[: len(call.ins)]
        if any(len(shape) < 2 if len(word) > 1 else len(shape) != 1 for word, shape in zip((*ins, out), shapes, strict=True)):
            continue
        width = next(shape[word.split().index("i") - 2] for word, shape in zip((*ins, out), shapes, strict=True) if "i" in word)
        if call.target.startswith("colofunc."):
            batch = frozenset(f"b{k}" for k in range(max(map(len, shapes)) - 1))
            yield Form(ins, out, {"b": "b0", "i": "i", "o": "o"}, batch, width)
            continue
        m, n = out.split()
        k = next(f for f in "bio" if f not in (m, n))
        factors = {m: "m", n: "n", k: "k"}
        yield Form(ins, out, factors, frozenset({factors["b"]}), width)


Costs = Callable[[Form, Strategy], tuple[float, int]]  # seconds on the wire, peak bytes of buffers
Local = Callable[[Form, Strategy], Callable[..., torch.Tensor]]


def strategies(
    call: Call, mesh: Mesh, lies: Lies, words: Words, cost: Costs, local: Local,
    *, stripes: int = 1, depth: Words = (), hidden: Sequence[str] = (), sort: bool = False,
) -> Iterator[Strategy]:  # fmt: skip
    """The strategies of one pattern, for every form of the call, with the mesh's other axes on b or nowhere.

    `stripes`: into how many parts o is cut, each of which is split (a fused weight of query, key and value: 3). `depth`: axes
    that lie on b as others may, but always. `hidden`: axes that are left out. `sort`: the axes on b stand in the mesh's
    order (the pattern does not care); otherwise other axes stand before its own.
    """
    words, depth = ([(axis, word) for axis, word in some if mesh.axis_size(axis) > 1] for some in (words, depth))
    for form in forms(call):
        ins, outs = [form.own(text, lies, stripes) for text in form.ins], [form.own(form.out, lies, stripes)]
        for way in ways(call, mesh, ins, outs, open=[a for a in mesh.axis_names if a not in hidden]):
            others = dict(way.axes)
            if not set(others.values()) <= form.batch or any(lay.pending for lay in way.ins):
                continue
            if any(others.pop(axis, None) != form.factors["b"] for axis, _ in depth):
                continue
            rest = "{" + ", ".join(f"{axis}: {factor}" for axis, factor in others.items()) + "}"
            way = attrs.evolve(way, name=rest, axes=tuple(others.items()))
            if sort:
                into, out = tuple(_in_order(lay, mesh) for lay in way.ins), tuple(lay and _in_order(lay, mesh) for lay in way.outs)
                way = attrs.evolve(way, ins=into, outs=out)
            seconds, peak = cost(form, way)
            yield way.with_pattern((*words, *depth), local(form, way), extra_s=seconds, peak_bytes=peak)


def parts(mesh: Mesh, lies: Lies, factor: str) -> int:
    """How many parts a factor must fall into, so that every matrix can lie as a pattern says."""
    axes = [matrix[factor].split() for matrix in lies.values() if factor in matrix]
    return lcm(*(prod(map(mesh.axis_size, some)) for some in axes))


def _in_order(layout: Layout, mesh: Mesh) -> Layout:
    """The layout with the axes that lead a dim in the mesh's order."""
    dims = []
    for dim in layout.dims:
        lead = [(size, axis) for size, axis in takewhile(lambda atom: atom[1] is not None, dim) if axis is not None]
        dims.append((*sorted(lead, key=lambda atom: mesh.axis_names.index(atom[1])), *dim[len(lead) :]))
    return make_layout(tuple(dims), layout.shape, layout.pending)


# ---- of a program ----


def dim(axes: str, factor: str, stripes: int = 1) -> str:
    """One dim of a weight's spec: axes on a factor, in so many stripes: "(tp o)", "(3 tp o)"."""
    return f"({stripes} {axes} {factor})" if stripes > 1 else f"({axes} {factor})"


@attrs.frozen
class Product:
    """A product of an activation with a weight: node index, the leaf, the dims of the leaf that are summed and kept.

    `vectors`: leaves with the kept dim alone: a bias, the scales of a quantized weight's rows.
    """

    index: int
    leaf: int
    summed: int
    kept: int
    vectors: tuple[int, ...]
    weight_factors: tuple[str, str]  # (summed, kept) factors of the rule
    path: str
    dims: int = 2  # of the leaf; the first of three counts experts

    def spec(self, summed: str = "_", kept: str = "_") -> str:
        """The spec of the weight, whichever of its dims is summed."""
        words = ["_"] * self.dims
        words[self.summed], words[self.kept] = summed, kept
        return " ".join(words)


def weighted(program: Program, rules: Rules) -> Iterator[Product]:
    """Forward products of an activation with a weight leaf, as it is, cast or transposed: a matrix, or one for each expert.

    Each row may have a matrix of its own, chosen by index, or rows come in groups.
    """
    made = program.makers
    for index, node in enumerate(program.nodes):
        rule = rules.rule(node) if node.phase == "forward" else None
        if rule is None or rule.flops is None or rule.outs[0] is None:
            continue
        out = {f for dim in rule.outs[0] for f in dim}
        matrices = [_matrix_of(program, made, ref) for ref in node.refs]
        of_experts = [leaf for leaf, _ in matrices if leaf is not None and len(program.values[leaf].shape) == 3]
        if len(of_experts) > 1:
            continue  # both products of a layer of experts, as one operator
        # Where both operands are leaves, as a table of positions and the weight that it is multiplied with, the weight is the second.
        # The data of a quantized weight stands before its scales, which may be matrices too.
        places = (1,) if node.target in WITH_PACKED else reversed(range(len(matrices)))
        for k in places:
            leaf, swapped = matrices[k]
            operand = [_free_factors(dim, rule) for dim in rule.ins[k][-2:]]
            if leaf is None or any(len(dim) != 1 for dim in operand):
                continue
            (a,), (b,) = operand
            if (a in out) == (b in out):
                continue
            kept = 0 if a in out else 1
            factors = (b, a) if kept == 0 else (a, b)
            beside = (leaf_of(program, made, r)[0] for j, r in enumerate(node.refs) if rule.ins[j] == ((factors[1],),))
            vectors = tuple(id for id in beside if id is not None)
            place = 1 - kept if swapped else kept
            dims = len(program.values[leaf].shape)
            yield Product(index, leaf, dims - 1 - place, dims - 2 + place, vectors, factors, node.path, dims)
            break


def _free_factors(dim: Factors, rule: Rule) -> Factors:
    """The factors of a dim, of groups of columns those that count the groups."""
    return dim if len(dim) == 1 else tuple(factor for factor in dim if factor not in rule.whole)


def _carried(node: Node) -> Sequence[int]:
    """The operands whose numbers a node's result may have: of a cast x and not its scale, of a widened weight its data."""
    return node.refs[:1] if node.target in quantized.DEQUANTIZE else fp8.carried(node.target, node.refs)


def _matrix_of(program: Program, made: Mapping[int, Node], id: int) -> tuple[int | None, bool]:
    """(leaf behind a value whose last two dims are those of a matrix, whether these are swapped); None: there is none.

    Through casts, transposes, and choices among the matrices of a leaf of three dims.
    """
    swapped = False
    while id in made:
        node, shape = made[id], program.values[id].shape
        before = program.values[node.refs[0]].shape if node.refs else ()
        if len(shape) < 2 or len(before) != len(shape):
            return None, False
        if node.target in _TRANSPOSES and shape == (*before[:-2], before[-1], before[-2]):
            swapped = not swapped
        elif node.target == "aten.index.Tensor" and len(node.refs) == 2:
            # Of three dims the first is what is chosen from.
            if len(shape) != 3 or shape[1:] != before[1:]:
                return None, False
        elif len(_carried(node)) != 1 or (before != shape and node.target not in quantized.DEQUANTIZE):
            return None, False
        id = node.refs[0]
    is_weight = program.values[id].role in ("param", "frozen") and len(program.values[id].shape) in (2, 3)
    return (id if is_weight else None), swapped


def work(program: Program, rules: Rules) -> dict[int, int]:
    """Node index -> flops, of forward operators that multiply with a weight: products, convolutions, whatever has flops."""
    made = program.makers
    found = {}
    for index, node in enumerate(program.nodes):
        rule = rules.rule(node) if node.phase == "forward" else None
        if rule is not None and rule.flops is not None and any(_is_weight(program, made, ref) for ref in node.refs):
            found[index] = rule.flops
    return found


def _is_weight(program: Program, made: Mapping[int, Node], id: int) -> bool:
    """Whether a value is a weight, or what was chosen from one by index (an expert's matrices)."""
    while id in made and not made[id].target.startswith("aten.embedding"):
        read = _carried(made[id])
        numbers = [ref for ref in read if len(read) == 1 or program.values[ref].dtype.is_floating_point]
        if len(numbers) != 1:
            return False
        id = numbers[0]
    return program.values[id].role in ("param", "frozen")


def share(program: Program, rules: Rules, held: Collection[int]) -> tuple[float, str]:
    """(how much of `work` some nodes do, in words the one with the most of the rest). `held`: their indices."""
    flops = work(program, rules)
    rest = _most_first(flops, held)
    if not rest:
        return 1.0, "nothing"
    return 1 - sum(flops[k] for k in rest) / max(1, sum(flops.values())), _said(program, program.nodes[rest[0]])


def worthwhile(program: Program, rules: Rules, held: Collection[int], name: str, instead: str) -> None:
    """Raises PlanError, in the name of a plan, where it splits less than a fair share of `work`: each rank would do most of it.

    `held`: indices of the nodes that it splits. `instead`: what to try. The error names the operators that stay whole.
    """
    split, _ = share(program, rules, held)
    if split >= FAIR_SHARE:
        return
    whole: dict[str, None] = {}
    for index in _most_first(work(program, rules), held):
        node = program.nodes[index]
        whole.setdefault(_said(program, attrs.evolve(node, path=starred(node.path))), None)
    named = [*whole][:NAMED]
    more = f" and {len(whole) - NAMED} more" if len(whole) > NAMED else ""
    stay = f"these stay whole: {', '.join(named)}{more}"
    raise PlanError(f"{name} splits {100 * split:.0f} % of the work with weights; {stay}; {instead}{why_whole(program, rules)}")


def why_whole(program: Program, rules: Rules) -> str:
    """The end of an error of a plan that splits too little: "; " and a reason for each that rules give (`Rule.why_whole`), or ""."""
    reasons: dict[str, None] = {}
    for node in program.nodes:
        rule = rules.rule(node) if node.phase == "forward" else None
        if rule is not None and rule.why_whole:
            reasons[rule.why_whole] = None
    return "".join(f"; {reason}" for reason in reasons)


def _most_first(flops: Mapping[int, int], held: Collection[int]) -> list[int]:
    """The nodes that are not held, those with most work first."""
    return sorted((index for index in flops if index not in held), key=lambda index: (-flops[index], index))


def _said(program: Program, node: Node) -> str:
    shapes = " and ".join(str(tuple(program.values[r].shape)) for r in node.refs[:2])
    return f"{node.target} in {node.path!r} on {shapes}"


def leaf_of(program: Program, made: Mapping[int, Node], id: int) -> tuple[int | None, bool]:
    """(weight leaf behind a value, whether its dims are swapped), through casts and transposes. `made`: program.makers."""
    swapped = False
    while id in made and len(_carried(made[id])) == 1:
        node = made[id]
        source = program.values[node.refs[0]].shape
        if node.target in _TRANSPOSES and len(source) == 2:
            swapped = not swapped
        elif source != program.values[id].shape and node.target not in quantized.DEQUANTIZE:
            return None, False
        id = node.refs[0]
    return (id if program.values[id].role in ("param", "frozen") else None), swapped


def gradients(program: Program, product: Product, targets: Sequence[str]) -> tuple[int, ...]:
    """What backward makes with one product's operands: of those under its path that read its weight, or give a gradient of its
    weight's shape from what it read."""
    made = program.makers
    forward = program.nodes[product.index]
    reads = {root(made, ref) for ref in forward.refs}
    weight, found = program.values[product.leaf].shape, []
    for node in program.nodes:
        if node.phase == "backward" and node.path == product.path and node.target in targets and node.outs[0] is not None:
            roots = {root(made, ref) for ref in node.refs}
            shape = program.values[node.outs[0]].shape
            if product.leaf in roots or (roots & reads and sorted(shape) == sorted(weight)):
                found.append(node.outs[0])
    return tuple(found)


def wishes(program: Program, mesh: Mesh, patterns: Mapping[Product, Words], source: str) -> Iterator[Wish]:
    """What holds products and their gradients to patterns, with words as in `strategies`, and follows what they give."""
    paths = Counter(product.path for product in patterns)
    for product, every in patterns.items():
        words = [(axis, word) for axis, word in every if mesh.axis_size(axis) > 1]
        node, alone = program.nodes[product.index], paths[product.path] == 1
        backward = _BACKWARD.get(node.target, ("aten.mm.default",))
        forward = node.results
        # An adapter's products stand under the path of the layer that it is for: those are told apart by what they make.
        made = ((), ()) if alone else (forward, gradients(program, product, backward))
        for some in filter(None, (words[:2], words[2:])):  # the planner takes two axes together, then the third
            want = "{" + ", ".join(f"{axis}: {word}" for axis, word in some) + "}"
            wish = Wish(product.path, want, source=source, targets=(node.target,), along=True, values=made[0])
            yield wish
            if alone or made[1]:
                yield attrs.evolve(wish, targets=backward, phases=("backward",), optional=True, values=made[1])


def root(made: Mapping[int, Node], id: int) -> int:
    """The value that an id is, but for how its dims are cut and in which order they stand, and for casts."""
    while id in made and made[id].target.startswith((*_TRANSPOSES, *_VIEWS)):
        id = made[id].refs[0]
    return id
