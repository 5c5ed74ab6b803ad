"""Which kind of kernel an operator is, where a machine has rates of kinds by size: `colofunc.mesh.curves.KINDS`.

    work_kind("aten.gelu.default")        # "transcendental"

Operators that are defined say so themselves (`define(..., work=)`, `cf.operator(..., work=)`); the names here are
torch's. What says nothing counts as elementwise, by the bytes that it reads and writes.
"""

from __future__ import annotations

from functools import cache

from colofunc.ops.define import OPERATORS
from colofunc.program.facts import is_product

_NAMES = {
    "transcendental": """gelu silu mish elu selu softplus sigmoid log_sigmoid tanh sinh cosh exp exp2 expm1 log log2 log10 log1p erf erfc
        erfinv sin cos tan asin acos atan atan2 logaddexp logsumexp""",
    "normalisation": "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _fused_rms_norm",
    "softmax": "_softmax _log_softmax",
    "reduction": "sum mean amax amin max min var var_mean prod any all norm linalg_vector_norm",
    "gather": "embedding index index_select gather embedding_dense index_put index_add scatter scatter_add",
}
ONLY_MULTIPLY = frozenset("tanh_backward sigmoid_backward elu_backward".split())
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}


def work_kind(target: str) -> str:
    """Of an operator by its definition; of torch's by its name."""
    if is_product(target):
        return "product"
    operator = OPERATORS.get(target)
    if operator is None:
        return _kind_of_torch(target)
    if operator.gradient_at is not None:
        return "update"
    return operator.work or "elementwise"


@cache
def _kind_of_torch(target: str) -> str:
    """In-place operators are of the kind of their own, and so are backward ones, but for those that only multiply by
    what forward has left.
    """
    space, _, rest = target.partition(".")
    name = rest.partition(".")[0]
    if space != "aten" or name in ONLY_MULTIPLY:
        return "elementwise"
    for own in (name, name.rstrip("_"), name.removesuffix("_backward"), name.removesuffix("_backward_data")):
        if own in _KINDS:
            return _KINDS[own]
    return "elementwise"
