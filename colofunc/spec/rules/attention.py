"""Attention: batch, key heads, query heads of a group and rows are free; keys are whole.

    attention            b (g r) s [e], b g [t] [e], b g [t] [f], bias -> b (g r) s [f], b (g r) s
    attention_backward   dq b (g r) s [e], dk b g [t] [e] and dv summed over r and s, dbias as the bias

An axis on `g` is head parallelism, on `r` it repeats the keys (grouped heads), on `s` it is context parallelism with
gathered keys: a causal or windowed part must know its rows' positions, so the local code passes `q_offset` (one number
for a contiguous part, every position for a striped one). With dropout it also passes the place of the part in the
virtual (b, h, s, t) weights. Codes of columns are whole, bounds of rows are split as rows. Parts of keys (ring
attention) are a strategy with local code of its own.
"""

from __future__ import annotations

import torch

from colofunc.mesh import Mesh
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.attention_call import AttentionCall
from colofunc.spec.rules.build import LocalFn, Texts, at, bind
from colofunc.spec.rules.pattern import RuleFn


def _offsets(a: AttentionCall) -> Texts:
    """The tensors among the options: the seed and single offsets have no dims, offsets per row have `s` or `t`; codes
    and bounds.
    """
    texts = {
        a.operand(name): dim if a.shape(name) else ""
        for name, dim in (("seed", ""), ("q_offset", "s"), ("k_offset", "[t]"))
    }
    return texts | {a.operand(name): f"b [n] {dim}" for name, dim in (("code", "[t]"), ("least", "s"), ("most", "s"))}


def _code(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> LocalFn | None:
    a = AttentionCall(call)
    at = a.operand("q")
    assert at is not None
    q = ins[at]
    # a position per row is its own
    moved = a.positional and any(axis is not None for _, axis in q.dims[2]) and not a.shape("q_offset")
    if not moved and not (a.get("dropout") and q.axes):
        return None

    def local(*shards: torch.Tensor, mesh: Mesh) -> object:
        x = a.parts(shards)
        return a.run(x, a.options(q.dims, mesh, x))

    return local


def _bias_text(call: Call, bias: int | None) -> str:
    if bias is None:
        return ""
    words = ["b", "(g r)", "s", "[t]"]
    shape = call.ins[bias].shape
    return " ".join("1" if n == 1 else word for n, word in zip(shape, words[4 - len(shape) :], strict=True))


def _heads(call: Call, q: int) -> dict[str, int]:
    g = call.ins[q + 1].shape[1]
    return {"g": g, "r": call.ins[q].shape[1] // g}


def _flops(call: Call, q: int, causal: bool, window: int = 0) -> int:
    (b, h, s, e), (t, f) = call.ins[q].shape, call.ins[q + 2].shape[2:]
    pairs = s * t // (2 if causal and s == t else 1)
    return 2 * b * h * (min(pairs, s * window) if causal and window else pairs) * (e + f)


Q, K, V, OUT, LSE = "b (g r) s [e]", "b g [t] [e]", "b g [t] [f]", "b (g r) s [f]", "b (g r) s"


def attention(call: Call) -> Rule | None:
    a = AttentionCall(call)
    if a.placed:
        return None
    bias = a.operand("bias")
    return bind(
        call,
        {0: Q, 1: K, 2: V, bias: _bias_text(call, bias), **_offsets(a)},
        [OUT, LSE],
        local=_code,
        flops=_flops(call, 0, bool(a.get("causal")), int(a.get("window"))),
        sizes=_heads(call, 0),
    )


def attention_backward(call: Call) -> Rule | None:
    a = AttentionCall(call)
    bias, out, lse, grad_lse = (a.operand(name) for name in ("bias", "out", "lse", "grad_lse"))
    if a.placed or out is None or lse is None:
        return None
    needed = a.needs_dbias
    texts: Texts = {0: OUT, 1: Q, 2: K, 3: V, bias: _bias_text(call, bias), **_offsets(a)}
    texts |= {out: OUT, lse: LSE, grad_lse: LSE}
    return bind(
        call,
        texts,
        [Q, K, V, _bias_text(call, bias) if needed else "[z]"],
        reduce=dict.fromkeys(("b", "g", "r", "s") if needed else ("r", "s"), "sum"),
        copied=[] if needed else [(3, f) for f in "bgrs"],
        linear=[{0, grad_lse}],
        local=_code,
        flops=5 * _flops(call, 1, bool(a.get("causal")), int(a.get("window"))) // 2,
        sizes=_heads(call, 1),
    )


# --- torch's own fused operator for CPU, should it reach a program


def cpu_flash(call: Call) -> Rule | None:
    mask, causal = at(call, 5, "attn_mask"), bool(call.arg(4, "is_causal", False))
    return _fused(call, 0, {}, mask, causal, float(call.arg(3, "dropout_p", 0.0)), [OUT, LSE])


def cpu_flash_backward(call: Call) -> Rule | None:
    mask, causal = at(call, 8, "attn_mask"), bool(call.arg(7, "is_causal", False))
    return _fused(call, 1, {0: OUT, 4: OUT, 5: LSE}, mask, causal, float(call.arg(6, "dropout_p", 0.0)), [Q, K, V])


def _fused(
    call: Call, q: int, more: Texts, mask: int | None, causal: bool, dropout: float, outs: list[str]
) -> Rule | None:
    if dropout or len(call.ins[q].shape) != 4:
        return None
    texts = {**more, q: Q, q + 1: K, q + 2: V, mask: _bias_text(call, mask)}
    if causal:  # the operator counts rows from 0
        texts = {k: text.replace(" s", " [s]") for k, text in texts.items()}
        outs = [text.replace(" s", " [s]") for text in outs]
    return bind(
        call,
        texts,
        outs,
        reduce={"r": "sum", "s": "sum"} if q else {},
        linear=[{0}] if q else [],
        flops=_flops(call, q, causal) * (5 if q else 2) // 2,
        sizes=_heads(call, q),
    )


RULES: dict[str, RuleFn] = {
    "colofunc.attention": attention,
    "colofunc.attention_backward": attention_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": cpu_flash,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": cpu_flash_backward,
}
