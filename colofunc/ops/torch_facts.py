"""Facts of torch's operators, which have no definition of ours to stand at.

By name, with the overload where a fact is of this one only; what is said of both adds up. In-place and backward
operators are named by themselves, but for their kind of work, which is that of their own (`program.work_kinds`).

    facts_of_torch("aten.mm.default").product    # True
"""

from __future__ import annotations

from functools import cache
from typing import Any

from colofunc.ops.facts import NOTHING, Facts

BATCHED_PRODUCTS = ("aten.bmm.default", "aten.baddbmm.default")
CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
# "mm" or "sum.dim_IntList" -> the fields of its `Facts`.
_SAID: dict[str, dict[str, Any]] = {}


def _say(names: str, **facts: Any) -> None:
    """Adds facts of the operators that `names` lists."""
    for name in names.split():
        _SAID.setdefault(name, {}).update(facts)


@cache
def facts_of_torch(target: str) -> Facts:
    """The facts of "aten.mm.default"; `NOTHING` of what is not torch's."""
    space, _, named = target.partition(".")
    if space != "aten":
        return NOTHING
    name = named.partition(".")[0]
    return Facts(**_SAID.get(name, {}) | _SAID.get(named, {}))


def torch_targets(fact: str) -> tuple[str, ...]:
    """The operators of which a fact of one overload is said: "as_products"."""
    return tuple(f"aten.{named}" for named, facts in _SAID.items() if fact in facts)


# ---- products ----
_say("addmm.default", factors=(1, 2), as_products=("o, b i, i o -> b o",))
_say(
    "mm.default",
    factors=(0, 1),
    as_products=("b i, i o -> b o", "b o, o i -> b i", "i b, b o -> i o", "o b, b i -> o i"),
)
_say("bmm.default", factors=(0, 1))
_say("baddbmm.default", factors=(1, 2))
_say("mm addmm", row_order="any")
_say(
    """mm addmm bmm baddbmm addbmm mv addmv dot _trilinear _scaled_mm _grouped_mm _int_mm convolution convolution_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward""",
    product=True,
)
_say("convolution.default", weights=(1, 2))

# ---- tables and rows ----
_say("embedding.default", weights=(0,), rows="read")
_say("index_select.default index.Tensor", rows="indexed")
_say("embedding_dense_backward.default index_put.default index_add.default", rows="written")
_say("embedding embedding_dense_backward", row_order="any")
_say("embedding index index_select gather embedding_dense index_put index_add scatter scatter_add", work="gather")
_say("index_copy_ index_put_ index_add_ index_fill_ scatter_ scatter_add_", touches_part=True)

# ---- norms, softmax, losses ----
_say("native_layer_norm.default native_group_norm.default", weights=(1, 2))
_say("_fused_rms_norm.default", weights=(1,))
_say("native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward", row_order="any")
_say(
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _fused_rms_norm",
    work="normalisation",
)
_say("_softmax _log_softmax", work="softmax")
_say("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data", row_order="any")
_say("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward", row_order="any")
_say(
    "mse_loss.default smooth_l1_loss.default soft_margin_loss.default binary_cross_entropy.default",
    elementwise_first=True,
)

# ---- elementwise and reductions ----
_say(
    """gelu silu mish elu selu softplus sigmoid log_sigmoid tanh sinh cosh exp exp2 expm1 log log2 log10 log1p erf erfc erfinv
    sin cos tan asin acos atan atan2 logaddexp logsumexp""",
    work="transcendental",
)
# These only multiply by what forward has left.
_say("tanh_backward sigmoid_backward elu_backward", work="elementwise")
_say("sum mean amax amin max min var var_mean prod any all norm linalg_vector_norm", work="reduction")

# ---- views ----
_say(
    """view reshape _unsafe_view permute transpose t expand squeeze unsqueeze select slice split split_with_sizes unsafe_split
    unsafe_split_with_sizes unsafe_chunk _reshape_alias unbind detach alias view_as_real view_as_complex as_strided diagonal
    narrow chunk""",
    view=True,
)
_say(
    """view.default _unsafe_view.default reshape.default _reshape_alias.default unsqueeze.default squeeze.default squeeze.dim
    squeeze.dims""",
    keeps_order=True,
)

# ---- results in memory of their own, beside those of elementwise operators ----
_say(
    """mm.default addmm.default bmm.default baddbmm.default rsub.Tensor
    _softmax.default _log_softmax.default _softmax_backward_data.default _log_softmax_backward_data.default
    nll_loss_backward.default embedding.default embedding_dense_backward.default
    native_layer_norm.default native_layer_norm_backward.default native_group_norm.default
    _native_batch_norm_legit_no_training.default _native_batch_norm_legit.no_stats
    upsample_nearest2d.default upsample_nearest2d.vec upsample_bilinear2d.default upsample_bilinear2d.vec
    avg_pool2d.default _adaptive_avg_pool2d.default max_pool2d_with_indices.default constant_pad_nd.default
    convolution.default convolution_backward.default sum.dim_IntList mean.dim var.correction var_mean.correction
    cat.default stack.default index.Tensor zeros_like.default ones_like.default full.default zeros.default ones.default""",
    own_memory=True,
)
