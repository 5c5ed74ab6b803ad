"""Products for plugins: which of a program's products have a weight, and strategies that lay axes on their three
matrices.

    colofunc.linear      b i, o i, o -> b o          Y = X W          X: b i    (activations)
    colofunc.linear_dx   b o, o i -> b i             dX = dY W^T      W: i o    (weights)
    colofunc.linear_dw   b o, b i -> o i             dW = X^T dY      Y: b o    (results)
    aten.addmm           o, b i, i o -> b o
    aten.mm              b i, i o -> b o, and the gradients: b o, o i -> b i; i b, b o -> i o; o b, b i -> o i

Problem: forward and both gradients are the same three matrices X, W and Y, of which two are given and one is wanted,
but every operator writes them in another order, with other names. Idea: name the three factors b, i and o; say once per
pattern where an axis lies in X, in W and in Y; and let every operator find its own operands in that. So a pattern fits
together by itself: what forward gives is what the next product, and its own backward, take.

    lies = {"x": {"b": "dp"}, "w": {"o": "dp"}, "y": {"b": "dp"}, "bias": {}}     # blocks of W pass, rows stay
    yield from cf.ext.products.strategies(call, mesh, lies, (("dp", "streamed"),), cost, local)

with `cost(form, way)` the seconds and bytes of the communication and `local(form, way)` its code, for a `Form`. A plan
asks for the pattern where it wants it, in forward and in both gradients:

    yield from cf.ext.products.wishes(program, mesh, {p: (("dp", "streamed"),) for p in
    cf.ext.products.weighted(program, rules)}, name)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.ops import fp8, fp8_products, int8_products, quantized, saved_activations
from colofunc.ops.targets import keeps_order
from colofunc.planner.sharding.classes import starred
from colofunc.planner.wishes.product_forms import AxisWords, Form, dim, forms, parts, split_words, strategies
from colofunc.planner.wishes.propagation import Rules
from colofunc.planner.wishes.wish import Wish
from colofunc.program.facts import backward_of, is_lookup, matrix_products
from colofunc.program.ir import Node, Program
from colofunc.spec.rule import Factors, Rule

__all__ = [
    "Form", "Product", "dim", "forms", "gradients", "leaf_of", "matrix_products", "parts", "share", "strategies", "tables",
    "weighted", "why_whole", "wishes", "work", "worthwhile",
]  # fmt: skip

WITH_PACKED = quantized.PRODUCTS | {int8_products.PRODUCT, fp8_products.PRODUCT}
"""Products whose second operand is the data of a packed weight."""
_TRANSPOSES = ("aten.t.default", "aten.transpose.int", "aten.permute.default")
_COPIES = ("aten.view.dtype", "aten.clone.default", "aten._to_copy.default", fp8.CAST)
_ROUNDED = (saved_activations.PACK, saved_activations.WIDEN)
"""What stands for a value in 8 bits, and the value again: about the same numbers."""

FAIR_SHARE = 0.5
"""Least share of the work with weights that a plan which splits products must split."""
NAMED = 3
"""At most this many operators are named in an error."""


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
    """Forward products of an activation with a weight leaf, as it is, cast or transposed: a matrix, or one for each
    expert.

    Each row may have a matrix of its own, chosen by index, or rows come in groups.
    """
    for index, node in enumerate(program.nodes):
        rule = rules.rule(node) if node.phase == "forward" else None
        if rule is None or rule.flops is None or not rule.outs or rule.outs[0] is None:
            continue
        matrices = [_matrix_of(program, ref) for ref in node.refs]
        of_experts = [leaf for leaf, _ in matrices if leaf is not None and len(program.values[leaf].shape) == 3]
        if len(of_experts) > 1:
            continue  # both products of a layer of experts, as one operator
        # Where both operands are leaves, as a table of positions and the weight that it is multiplied with, the weight
        # is the second. The data of a quantized weight stands before its scales, which may be matrices too.
        places = (1,) if node.target in WITH_PACKED else reversed(range(len(matrices)))
        for place in places:
            leaf, swapped = matrices[place]
            product = None
            if leaf is not None:
                product = _product_with(program, index, rule, place, leaf, swapped)
            if product is not None:
                yield product
                break


def _product_with(program: Program, index: int, rule: Rule, place: int, leaf: int, swapped: bool) -> Product | None:
    """A node as a product with one of its operands; None where not one dim of the matrix is summed and the other kept.

    place: of the operand. leaf: the weight behind it, whose dims are `swapped` in the operand.
    """
    assert rule.outs[0] is not None, "weighted has looked"
    node = program.nodes[index]
    dims_of_matrix = [_free_factors(factors, rule) for factors in rule.ins[place][-2:]]
    if any(len(factors) != 1 for factors in dims_of_matrix):
        return None
    (first,), (second,) = dims_of_matrix
    in_result = {factor for factors in rule.outs[0] for factor in factors}
    if (first in in_result) == (second in in_result):
        return None
    if first in in_result:
        summed_factor, kept_factor, kept = second, first, 0
    else:
        summed_factor, kept_factor, kept = first, second, 1
    vectors = []
    for position, ref in enumerate(node.refs):
        if rule.ins[position] == ((kept_factor,),):
            vector, _ = leaf_of(program, program.makers, ref)
            if vector is not None:
                vectors.append(vector)
    if swapped:
        kept = 1 - kept
    dims = len(program.values[leaf].shape)
    return Product(
        index, leaf, dims - 1 - kept, dims - 2 + kept, tuple(vectors), (summed_factor, kept_factor), node.path, dims
    )


def _free_factors(dim: Factors, rule: Rule) -> Factors:
    """The factors of a dim, of groups of columns those that count the groups."""
    return dim if len(dim) == 1 else tuple(factor for factor in dim if factor not in rule.whole)


def _carried(node: Node) -> Sequence[int]:
    """The operands whose numbers a node's result may have: of a cast x and not its scale, of a widened weight its data.

    A parameter that is read in 8 bits is packed and widened, and is still itself.
    """
    if node.target in quantized.DEQUANTIZE or node.target == saved_activations.WIDEN:
        return node.refs[:1]
    return fp8.carried(node.target, node.refs)


def _matrix_of(program: Program, id: int) -> tuple[int | None, bool]:
    """(leaf behind a value whose last two dims are those of a matrix, whether these are swapped); None: there is none.

    Through casts, transposes, and choices among the matrices of a leaf of three dims.
    """
    dims = len(program.values[id].shape)
    leaf, swapped = _leaf_behind(program, program.makers, id, choices=True)
    # The data of a packed weight may have other dims than the weight.
    is_matrix = leaf is not None and dims in (2, 3) and len(program.values[leaf].shape) == dims
    return (leaf if is_matrix else None), swapped


def _leaf_behind(program: Program, makers: Mapping[int, Node], id: int, choices: bool) -> tuple[int | None, bool]:
    """(weight leaf behind a value, whether its last two dims are swapped); None: there is none.

    Through casts and transposes; with `choices` also from some of the matrices of a leaf of three dims to the leaf.
    """
    swapped = False
    while id in makers:
        node, shape = makers[id], program.values[id].shape
        before = program.values[node.refs[0]].shape if node.refs else ()
        # Of three dims the first is what is chosen from.
        chosen = (
            choices
            and node.target == "aten.index.Tensor"
            and len(node.refs) == 2
            and len(shape) == 3
            and shape[1:] == before[1:]
        )
        if node.target in _TRANSPOSES and len(shape) >= 2 and shape == (*before[:-2], before[-1], before[-2]):
            swapped = not swapped
        elif not chosen and (len(_carried(node)) != 1 or (before != shape and node.target not in quantized.DEQUANTIZE)):
            return None, False
        id = node.refs[0]
    return (id if program.values[id].role in ("param", "frozen") else None), swapped


def work(program: Program, rules: Rules) -> dict[int, int]:
    """Node index -> flops, of forward operators that multiply with a weight: products, convolutions, whatever has
    flops.
    """
    flops = {}
    for index, node in enumerate(program.nodes):
        rule = rules.rule(node) if node.phase == "forward" else None
        if rule is None or rule.flops is None:
            continue
        if any(_is_weight(program, program.makers, ref) for ref in node.refs):
            flops[index] = rule.flops
    return flops


def _is_weight(program: Program, makers: Mapping[int, Node], id: int) -> bool:
    """Whether a value is a weight, or what was chosen from one by index (an expert's matrices)."""
    while id in makers and not is_lookup(makers[id].target):
        read = _carried(makers[id])
        numbers = [ref for ref in read if len(read) == 1 or program.values[ref].dtype.is_floating_point]
        if len(numbers) != 1:
            return False
        id = numbers[0]
    return program.values[id].role in ("param", "frozen")


def tables(program: Program) -> list[int]:
    """Values whose rows are looked up by index, by themselves or as bags that are summed, in the order of their
    lookups.
    """
    read = [node.refs[0] for node in program.nodes if node.phase == "forward" and is_lookup(node.target)]
    return list(dict.fromkeys(read))


def share(program: Program, rules: Rules, split: Collection[int]) -> tuple[float, str]:
    """(how much of `work` some nodes do, in words the one with the most of the rest). `split`: their indices."""
    flops = work(program, rules)
    rest = _most_first(flops, split)
    if not rest:
        return 1.0, "nothing"
    flops_of_rest = sum(flops[index] for index in rest)
    return 1 - flops_of_rest / max(1, sum(flops.values())), _said(program, program.nodes[rest[0]])


def worthwhile(program: Program, rules: Rules, split: Collection[int], name: str, instead: str) -> None:
    """Raises PlanError, in the name of a plan, where it splits less than a fair share of `work`: each rank would do
    most of it.

    `split`: indices of the nodes that it splits. `instead`: what to try. The error names the operators that stay whole.
    """
    share_of_split, _ = share(program, rules, split)
    if share_of_split >= FAIR_SHARE:
        return
    whole: dict[str, None] = {}
    for index in _most_first(work(program, rules), split):
        node = program.nodes[index]
        whole.setdefault(_said(program, attrs.evolve(node, path=starred(node.path))), None)
    named = [*whole][:NAMED]
    more = f" and {len(whole) - NAMED} more" if len(whole) > NAMED else ""
    stay = f"these stay whole: {', '.join(named)}{more}"
    raise PlanError(
        f"{name} splits {100 * share_of_split:.0f} % of the work with weights; {stay}; "
        f"{instead}{why_whole(program, rules)}"
    )


def why_whole(program: Program, rules: Rules) -> str:
    """The end of an error of a plan that splits too little: "; " and a reason for each that rules give
    (`Rule.why_whole`), or "".
    """
    reasons: dict[str, None] = {}
    for node in program.nodes:
        rule = rules.rule(node) if node.phase == "forward" else None
        if rule is not None and rule.why_whole:
            reasons[rule.why_whole] = None
    return "".join(f"; {reason}" for reason in reasons)


def _most_first(flops: Mapping[int, int], split: Collection[int]) -> list[int]:
    """The nodes that are not split, those with most work first."""
    rest = [index for index in flops if index not in split]
    return sorted(rest, key=lambda index: (-flops[index], index))


def _said(program: Program, node: Node) -> str:
    """An operator in words, for errors."""
    shapes = " and ".join(str(tuple(program.values[ref].shape)) for ref in node.refs[:2])
    return f"{node.target} in {node.path!r} on {shapes}"


def leaf_of(program: Program, makers: Mapping[int, Node], id: int) -> tuple[int | None, bool]:
    """(weight leaf behind a value, whether its last two dims are swapped), through casts and transposes.

    `makers`: program.makers.
    """
    return _leaf_behind(program, makers, id, choices=False)


def gradients(program: Program, product: Product, targets: Sequence[str]) -> tuple[int, ...]:
    """What backward makes with one product's operands.

    Of the nodes under its path: what reads its weight, or gives a gradient of its weight's shape from what the product
    read.
    """
    makers = program.makers
    read_by_product = {root(makers, ref) for ref in program.nodes[product.index].refs}
    weight_shape = program.values[product.leaf].shape
    values = []
    for node in program.nodes:
        out = node.outs[0] if node.outs else None
        if node.phase != "backward" or node.path != product.path or node.target not in targets or out is None:
            continue
        roots = {root(makers, ref) for ref in node.refs}
        has_shape_of_weight = sorted(program.values[out].shape) == sorted(weight_shape)
        if product.leaf in roots or (roots & read_by_product and has_shape_of_weight):
            values.append(out)
    return tuple(values)


def wishes(program: Program, mesh: Mesh, patterns: Mapping[Product, AxisWords], source: str) -> Iterator[Wish]:
    """What holds products and their gradients to patterns, with words as in `strategies`, and follows what they give.
    """
    products_at = Counter(product.path for product in patterns)
    for product, words in patterns.items():
        node = program.nodes[product.index]
        alone = products_at[product.path] == 1
        backward = backward_of(node.target)
        # An adapter's products stand under the path of the layer that it is for: those are told apart by what they
        # make.
        forward_values: tuple[int, ...] = ()
        backward_values: tuple[int, ...] = ()
        if not alone:
            forward_values, backward_values = node.results, gradients(program, product, backward)
        words = split_words(words, mesh)
        for axes_at_once in (words[:2], words[2:]):  # the planner takes two axes together, then the third
            if not axes_at_once:
                continue
            want = "{" + ", ".join(f"{axis}: {word}" for axis, word in axes_at_once) + "}"
            wish = Wish(product.path, want, source=source, targets=(node.target,), along=True, values=forward_values)
            yield wish
            if alone or backward_values:
                yield attrs.evolve(wish, targets=backward, phases=("backward",), optional=True, values=backward_values)


def root(makers: Mapping[int, Node], id: int) -> int:
    """The value that an id is, but for how its dims are cut and in which order they stand, and for casts and rounding.
    """
    while id in makers and (keeps_order(makers[id].target) or makers[id].target in (*_TRANSPOSES, *_COPIES, *_ROUNDED)):
        id = makers[id].refs[0]
    return id
