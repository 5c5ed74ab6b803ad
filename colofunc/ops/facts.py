"""Facts of an operator: what is true of it in whatever program it stands.

Plans, passes and costs ask the same few things of every operator: is it a product, which operands are weights, may its
result be written over. The answer stands once: for operators of ours where they are defined (`ops.define`), for those
of plugins in `cf.operator`, for torch's in `ops.torch_facts`.

    Facts(own_memory=True, product=True, as_products=("b i, o i, o -> b o",), weights=(1, 2), row_order="any")   # linear
"""

from __future__ import annotations

import attrs

from colofunc.mesh import curves

ROWS = ("read", "indexed", "summed", "written")
"""What `Facts.rows` may say."""
ROW_ORDER = ("any", "dealt")
"""What `Facts.row_order` may say."""
WORK = tuple(kind for kind in curves.KINDS if kind not in ("product", "update"))
"""What `Facts.work` may say; products and updates are told apart otherwise."""


def _one_of(words: tuple[str, ...]) -> str:
    """A field that is empty or one of the words; anything else is a ValueError."""

    def check(facts: object, field: attrs.Attribute[str], word: str) -> None:
        if word and word not in words:
            raise ValueError(f"{field.name} is {word!r}. Try: one of {', '.join(words)}")

    made: str = attrs.field(default="", validator=check)
    return made


@attrs.frozen
class Facts:
    """What is true of an operator. The defaults hold of one of which nothing is known.

    `own_memory`: each result is a tensor of its own, whose elements lie apart, so that a later operator may write over
    it.

    `view`: it only describes memory anew, so that it costs nothing to run; a reshape where no view is possible, which
    copies, is among them.

    `keeps_order`: its result has all elements of its operand, in their order, in another shape.

    `touches_part`: of an operator in place, that it touches as much of what it writes to as it is given; others go
    through all.

    `elementwise_first`: of a loss, that it writes every element's into the memory of its result before it reduces them:
    the result keeps memory of that size.

    `product`: most of its work is multiplying matrices, so that its results are dear to make again.

    `factors`: of a product of matrices, or of as many as a batch has, the positions of both among its tensors.

    `backward_products`: of a product, the names of those that its gradients are made by, where these are not torch's.

    `as_products`: how it reads as the product of a linear layer of rows b, inputs i and outputs o: "b i, o i, o -> b o".

    `weights`: positions, among the tensors that it is given, of those that are weights.

    `rows`: "read", few rows of its first operand, a table, at the indices of its second; "indexed", few rows of its first
    operand, which may be an activation as well; "summed", as "read", and each row of its result is a sum of them;
    "written", few rows of its result, which are given to it.

    `row_order`: "any", it does not matter in which order rows lie, neither to it nor to local code of plugins that split
    it; "dealt", as "any", and it does not matter which ranks have which rows, on axes that the local code splits by a
    pattern of its own; "" where the order may matter.

    `work`: which kind of kernel it is, one of `WORK`, where a machine has rates of kinds; what says nothing counts as
    elementwise, by the bytes that it reads and writes.

    `draws_by_place`: the random numbers that it draws depend on where its part lies in the global tensor, which `sizes`,
    `strides` and `offset` say.

    Raises ValueError for words that are none of these.
    """

    own_memory: bool = False
    view: bool = False
    keeps_order: bool = False
    touches_part: bool = False
    elementwise_first: bool = False
    product: bool = False
    factors: tuple[int, int] | None = None
    backward_products: tuple[str, ...] = ()
    as_products: tuple[str, ...] = ()
    weights: tuple[int, ...] = ()
    rows: str = _one_of(ROWS)
    row_order: str = _one_of(ROW_ORDER)
    work: str = _one_of(WORK)
    draws_by_place: bool = False


NOTHING = Facts()
"""Of an operator of which nothing is known."""
