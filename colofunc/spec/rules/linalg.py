"""Linear algebra on stacks of matrices: the batch is free, matrices are whole.

    linalg_inv_ex      b0 [x] [y] -> b0 [x] [y], b0
    _linalg_solve_ex   b0 [x] [y], b0 [x] [k] -> b0 [x] [k], ...
    _cdist_forward     b0 p [m], b0 q [m] -> b0 p q

Splitting one factorisation over ranks is an algorithm of its own (SUMMA-like); it enters as a strategy.
"""

from __future__ import annotations

from collections.abc import Collection

from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.build import Texts, along, batched, bind, names, numbered
from colofunc.spec.rules.pattern import RuleFn


def solve_ex(call: Call) -> Rule | None:
    a, b = call.ins[0].shape, call.ins[1].shape
    vector = len(b) == 1 or (len(a) - 1 == len(b) and b == a[:-1])
    n = 1 if vector else 2
    return batched(2, n, outs=(n, 2, 1, 0))(call)


def pinv(call: Call) -> Rule | None:
    """The tolerances that may follow the matrix are per matrix or without dims."""
    if any(t.shape not in ((), call.ins[0].shape[:-2]) for t in call.ins[1:]):
        return None
    return batched(2, *(0 for _ in call.ins[1:]), outs=(2,))(call)


def lstsq(call: Call) -> Rule | None:
    """Residuals and singular values are left out for some drivers and ranks."""
    if len(call.ins[1].shape) != len(call.ins[0].shape):
        return None
    if len(call.ins[0].shape) > 2 and any(t is not None and t.shape == (0,) for t in call.outs):
        return None  # an empty rank has no batch dims
    return batched(2, 2, outs=(2, 1, 0, 1))(call)


def cross(call: Call) -> Rule | None:
    if any(t.shape != call.ins[0].shape for t in call.ins):
        return None
    return along(call, [call.arg(2, "dim", -1)], linear=[{0}, {1}])


def cdist(call: Call) -> Rule:
    batch = names("b", len(call.outs[0].shape) - 2 if call.outs[0] is not None else 0)
    own = [" ".join(batch[len(batch) - len(t.shape) + 2 :]) for t in call.ins]
    return bind(call, {0: f"{own[0]} p [m]", 1: f"{own[1]} q [m]"}, [" ".join([*batch, "p q"])])


def cdist_backward(call: Call) -> Rule | None:
    """g, x1, x2, distances -> gradient of x1 with all batch dims: a sum over all rows of x2."""
    rank, out = len(call.ins[0].shape), call.outs[0]
    if out is None or len(out.shape) != rank:
        return None
    if any(1 in operand.shape[:-2] or len(operand.shape) > rank for operand in call.ins):
        return None
    batch = names("b", rank - 2)
    # Operands broadcast against one another: each has the last of the batch dims.
    own = [" ".join(batch[rank - len(operand.shape) :]) for operand in call.ins]
    texts: Texts = {0: f"{own[0]} p q", 1: f"{own[1]} p [m]", 2: f"{own[2]} q [m]", 3: f"{own[3]} p q"}
    return bind(call, texts, [" ".join([*batch, "p [m]"])], reduce={"q": "sum"}, linear=[{0}])


def trilinear(call: Call) -> Rule:
    """sum over `sumdim` of i1 * i2 * i3, each of which has all dims but those in its `expand` argument."""
    out_rank = len(call.outs[0].shape) if call.outs[0] is not None else 0
    summed = set(call.arg(6, "sumdim"))
    dims = range(out_rank + len(summed))

    def words(absent: Collection[int]) -> str:
        return " ".join(f"d{dim}" for dim in dims if dim not in absent)

    texts = [words(call.arg(3 + number, f"expand{number + 1}")) for number in range(3)]
    return bind(
        call,
        numbered(texts),
        [words(summed)],
        reduce={f"d{dim}": "sum" for dim in summed},
        linear=[{0}, {1}, {2}],
    )


RULES: dict[str, RuleFn] = {
    "aten.linalg_inv_ex": batched(2, outs=(2, 0)),
    "aten.linalg_cholesky_ex": batched(2, outs=(2, 0)),
    "aten.cholesky": batched(2, outs=(2,)),
    "aten.cholesky_inverse": batched(2, outs=(2,)),
    "aten.cholesky_solve": batched(2, 2, outs=(2,), linear=[{0}]),
    "aten._cholesky_solve_helper": batched(2, 2, outs=(2,), linear=[{0}]),
    "aten._linalg_det": batched(2, outs=(0, 2, 1)),
    "aten._linalg_slogdet": batched(2, outs=(0, 0, 2, 1)),
    "aten._linalg_solve_ex": solve_ex,
    "aten._linalg_eigh": batched(2, outs=(1, 2)),
    "aten._linalg_eigvals": batched(2, outs=(1,)),
    "aten.linalg_eigvals": batched(2, outs=(1,)),
    "aten.linalg_eig": batched(2, outs=(1, 2)),
    "aten._linalg_svd": batched(2, outs=(2, 1, 2)),
    "aten.linalg_qr": batched(2, outs=(2, 2)),
    "aten.geqrf": batched(2, outs=(2, 1)),
    "aten.linalg_householder_product": batched(2, 1, outs=(2,)),
    "aten.ormqr": batched(2, 1, 2, outs=(2,), linear=[{2}]),
    "aten.linalg_lu": batched(2, outs=(2, 2, 2)),
    "aten.linalg_lu_factor_ex": batched(2, outs=(2, 1, 0)),
    "aten.linalg_lu_solve": batched(2, 1, 2, outs=(2,), linear=[{2}]),
    "aten.lu_unpack": batched(2, 1, outs=(2, 2, 2)),
    "aten.linalg_solve_triangular": batched(2, 2, outs=(2,), linear=[{1}]),
    "aten.triangular_solve": batched(2, 2, outs=(2, 2)),
    "aten.linalg_ldl_factor_ex": batched(2, outs=(2, 1, 0)),
    "aten.linalg_ldl_solve": batched(2, 1, 2, outs=(2,), linear=[{2}]),
    "aten.linalg_matrix_exp": batched(2, outs=(2,)),
    "aten.linalg_pinv": pinv,
    "aten.linalg_lstsq": lstsq,
    "aten.linalg_cross": cross,
    "aten.linalg_polar": batched(2, outs=(2, 2)),
    "aten.linalg_matrix_sqrth": batched(2, outs=(2,)),
    "aten._trilinear": trilinear,
    "aten._cdist_forward": cdist,
    "aten._euclidean_dist": cdist,
    "aten._cdist_backward": cdist_backward,
}
