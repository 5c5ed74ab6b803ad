"""Which kind of kernel an operator is, where a machine has rates of kinds by size: `colofunc.mesh.curves.KINDS`.

    work_kind("aten.gelu.default")        # "transcendental"

The facts of an operator say it (`ops.facts`). What says nothing counts as elementwise, by the bytes that it reads and writes.
"""

from __future__ import annotations

from functools import cache

from colofunc.ops.define import OPERATORS
from colofunc.ops.torch_facts import facts_of_torch
from colofunc.program.facts import is_product


def work_kind(target: str) -> str:
    """The kind of a product or an update, or what is known of the operator."""
    if is_product(target):
        return "product"
    operator = OPERATORS.get(target)
    if operator is None:
        return _kind_of_torch(target)
    if operator.gradient_at is not None:
        return "update"
    return operator.facts.work or "elementwise"


@cache
def _kind_of_torch(target: str) -> str:
    """In-place operators are of the kind of their own, and so are backward ones of which nothing else is known."""
    space, _, rest = target.partition(".")
    name = rest.partition(".")[0]
    for own in (name, name.rstrip("_"), name.removesuffix("_backward"), name.removesuffix("_backward_data")):
        work = facts_of_torch(f"{space}.{own}").work
        if work:
            return work
    return "elementwise"
