"""Simplify: the same numbers from fewer nodes.

Problem: a trace holds what Python happened to do: copies that only mattered because tensors were mutated, views undone
by views, the same thing computed in forward and again in backward. Idea: small passes, each Program -> Program.

    tidy           copies, casts and views that change nothing; equal calls computed once; shifts, and backward of
                   activations that was taken apart, are one operator
    fold_masks     dense attention masks that depend on no input become `causal` and `window`
    fold_constants small tables that depend on no input become constants
    drop_dead      what no output needs

`tidy` merges calls with equal arguments, so what `torch.utils.checkpoint` recomputes disappears; random operators carry
their call site among the arguments, so different draws are never merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from colofunc.ops.shift import shift
from colofunc.ops.targets import KEEP_ORDER, overload
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.passes.simplify_known import fold_constants, fold_masks

# ---- shifts ----
# constant_pad_nd(x, (0, 1), c)[:, 1:]                   ->   shift(x, 1, -1, c)       labels of a causal model
# full(c); out[:, 1:] = x[:, :-1]                        ->   shift(x, 1, 1, c)        inputs of a decoder
# shift(x, 1, 1, c); out[:, 0] = e                       ->   shift(x, 1, 1, e)
# cat([full(c), x[:, :-1]], 1)                           ->   shift(x, 1, 1, c)


@attrs.frozen
class Scope:
    """What a rewrite may look at: values, and the node that made each value so far."""

    values: Mapping[int, Value]
    makers: Mapping[int, Node]

    def shape(self, arg: Any) -> tuple[int, ...]:
        return self.values[arg.id].shape

    def maker(self, arg: Any, *targets: str) -> Node | None:
        """The node that made the operand, if it is one of `targets` and has a single result."""
        node = self.makers.get(arg.id) if type(arg) is Ref else None
        if node is None or node.target not in targets or len(node.outs) != 1:
            return None
        return node

    def alike(self, one: int, other: int) -> bool:
        """Whether two values are of one shape and dtype."""
        value, twin = self.values[one], self.values[other]
        return value.shape == twin.shape and value.dtype == twin.dtype


SLICE, FULL = "aten.slice.Tensor", "aten.full.default"
SlicePattern = tuple[Ref, int, int, Any]


def _shifted(node: Node, scope: Scope) -> Node | None:
    """The node as a shift; None where it is none."""
    find = FORMS.get(node.target)
    found = find(node, scope) if find is not None else None
    if found is None or node.outs[0] is None or not scope.alike(found[0].id, node.outs[0]):
        return None
    return attrs.evolve(node, target=shift.name, args=found, kwargs=())


def _slice(node: Node, scope: Scope) -> SlicePattern | None:
    """A pad at one end, cut at the other."""
    pad = scope.maker(node.args[0], "aten.constant_pad_nd.default")
    if pad is None:
        return None
    source, dim, low, high = _cut(node, scope)
    # The widths of a pad are pairs (before, behind), that of the last dim first.
    rank, widths = len(scope.shape(source)), tuple(pad.args[1])
    pairs: dict[int, tuple[int, ...]] = {}
    for first in range(0, len(widths), 2):
        pair = widths[first : first + 2]
        if any(pair):
            pairs[rank - 1 - first // 2] = pair
    if list(pairs) != [dim] or min(pairs[dim]) < 0:
        return None
    before, behind = pairs[dim]
    fill = pad.args[2] if len(pad.args) > 2 else 0
    if (before and behind) or high - low != scope.shape(pad.args[0])[dim]:
        return None
    return pad.args[0], dim, before - low, fill


def _cut(node: Node, scope: Scope) -> tuple[Ref, int, int, int]:
    """(operand, dim, start, end) of a slice; end < start where it has a step."""
    args = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    shape = scope.shape(args[0])
    dim = args[1] % len(shape)
    low, high, step = slice(args[2], args[3], args[4]).indices(shape[dim])
    return args[0], dim, low, high if step == 1 else -1


def _first_rows(arg: Any, dim: int, scope: Scope) -> tuple[Ref, int] | None:
    """(x, how many rows are left out) where the operand is x without its last rows along `dim`."""
    node = scope.maker(arg, SLICE)
    if node is None:
        return None
    source, along, low, high = _cut(node, scope)
    left = scope.shape(source)[along] - high
    if along != dim or low != 0 or high <= 0 or left <= 0:
        return None
    return source, left


def _number(arg: Any, scope: Scope) -> Any:
    """The value of a tensor that is full of it; None where it is not."""
    node = scope.maker(arg, FULL)
    return None if node is None else node.args[1]


def _slice_scatter(node: Node, scope: Scope) -> SlicePattern | None:
    """All but the last rows, put behind the first rows of a tensor of fill."""
    base, part, *rest = node.args
    args = (*rest, *(0, None, None, 1)[len(rest) :])
    shape = scope.shape(base)
    dim = args[0] % len(shape)
    source, fill = _first_rows(part, dim, scope), _number(base, scope)
    low, high, step = slice(*args[1:]).indices(shape[dim])
    if source is None or fill is None or step != 1 or high != shape[dim] or low != source[1]:
        return None
    return source[0], dim, low, fill


def _select_scatter(node: Node, scope: Scope) -> SlicePattern | None:
    """A shift by one row, whose first row is set."""
    base, part, dim, index = node.args
    inner, fill = scope.maker(base, shift.name), _number(part, scope)
    if inner is None or fill is None or index != 0:
        return None
    x, along, by, _ = inner.args
    if by != 1 or along != dim % len(scope.shape(x)):
        return None
    return x, along, by, fill


def _joined_rows(node: Node, scope: Scope) -> SlicePattern | None:
    """Rows of fill, and all but the last rows."""
    parts = node.args[0]
    if len(parts) != 2 or not scope.shape(parts[0]):
        return None
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(scope.shape(parts[0]))
    source, fill = _first_rows(parts[1], dim, scope), _number(parts[0], scope)
    if source is None or fill is None or scope.shape(parts[0])[dim] != source[1]:
        return None
    return source[0], dim, source[1], fill


FORMS: dict[str, Callable[[Node, Scope], SlicePattern | None]] = {
    SLICE: _slice,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.cat.default": _joined_rows,
}


def simplify(program: Program) -> Program:
    """All passes, in the order in which they help one another."""
    program = drop_dead(tidy(program))
    program = drop_dead(fold_masks(program))
    return drop_dead(tidy(fold_constants(program)))


# ---- dead code ----


def drop_dead(program: Program) -> Program:
    """Without nodes and constants that no output needs.

    The user's inputs stay; a node without results is there for its effect.
    """
    alive = set(program.outputs)
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if not node.outs or not alive.isdisjoint(node.outs) or overload(node.target)._schema.is_mutable:
            kept.append(node)
            alive.update(node.refs)
    constants = {vid: table for vid, table in program.constants.items() if vid in alive}
    inputs = tuple(vid for vid in program.inputs if vid in constants or vid not in program.constants)
    return Editor(program).written(reversed(kept), inputs=inputs, constants=constants)


# ---- copies, views, equal calls ----


NLL_SUM = 2  # torch's number of reduction="sum"

# A rewrite returns an operand that the result equals, another node, or None to leave the node.
NodeRewrite = Callable[[Node, Scope], "int | Node | None"]


def tidy(program: Program) -> Program:
    """Drop calls that change nothing and compute equal calls once."""
    edit = Editor(program)
    makers: dict[int, Node] = {}
    scope = Scope(program.values, makers)
    seen: dict[Any, Node] = {}
    for index, original in enumerate(program.nodes):
        node = edit.with_names(original)
        rewrite = REWRITES.get(node.target)
        found = rewrite(node, scope) if rewrite is not None else None
        if found is None:
            found = _shifted(node, scope)
        if isinstance(found, int):
            edit.rename(_only(node), found)
            edit.drop(index)
            continue
        node = found or node
        key = call_key(node)
        twin = seen.get(key)
        if twin is not None and node.outs and not overload(node.target)._schema.is_mutable:
            for out, earlier in zip(node.outs, twin.outs, strict=True):
                if out is not None and earlier is not None:
                    edit.rename(out, earlier)
            edit.drop(index)
            continue
        seen[key] = node
        edit.replace(index, node)
        makers.update(dict.fromkeys(node.results, node))
    return edit.done()


def _only(node: Node) -> int:
    (out,) = node.outs
    assert out is not None
    return out


def call_key(node: Node) -> Any:
    """Equal for calls that compute the same. 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    return (node.target, _typed(node.args), _typed(node.kwargs), tuple(out is None for out in node.outs))


def _typed(arg: Any) -> Any:
    kind = type(arg)
    if kind is tuple:
        return tuple([_typed(item) for item in arg])
    if kind is float:
        return (float, arg.hex())
    if kind is Ref or kind is str or arg is None:
        return arg
    return (kind, arg)


def _clone(node: Node, scope: Scope) -> int | None:
    return int(node.args[0].id)


def _to_copy(node: Node, scope: Scope) -> int | None:
    dtype = dict(node.kwargs).get("dtype")
    source: int = node.args[0].id
    if dtype is None or dtype == scope.values[source].dtype:
        return source
    return None


def _view(node: Node, scope: Scope) -> int | Node | None:
    source, shape = node.args
    if scope.shape(source) == shape:
        return int(source.id)
    inner = scope.maker(source, *KEEP_ORDER)
    if inner is not None:
        if scope.shape(inner.args[0]) == shape:
            return int(inner.args[0].id)
        return attrs.evolve(node, target="aten.view.default", args=(inner.args[0], shape))
    if node.target != "aten.view.default":
        return attrs.evolve(node, target="aten.view.default")
    return None


def _same_shape(node: Node, scope: Scope) -> int | None:
    """Operators that only ever change the shape: expand, slice, squeeze."""
    source = node.args[0]
    if scope.values[_only(node)].shape != scope.shape(source):
        return None
    step = node.args[4] if node.target == "aten.slice.Tensor" and len(node.args) > 4 else 1
    return int(source.id) if step == 1 else None


def _permute(node: Node, scope: Scope) -> int | None:
    rank = len(node.args[1])
    same = tuple(range(rank))
    order = tuple(dim % rank for dim in node.args[1])
    if order == same:
        return int(node.args[0].id)
    inner = scope.maker(node.args[0], "aten.permute.default")
    if inner is not None and tuple(inner.args[1][dim] % rank for dim in order) == same:
        return int(inner.args[0].id)
    return None


def _transpose(node: Node, scope: Scope) -> int | None:
    rank = len(scope.shape(node.args[0]))
    dims = {dim % rank for dim in node.args[1:]} if rank else set()
    if len(dims) < 2:
        return int(node.args[0].id)
    inner = scope.maker(node.args[0], "aten.transpose.int")
    if inner is not None and {dim % rank for dim in inner.args[1:]} == dims:
        return int(inner.args[0].id)
    return None


def _t(node: Node, scope: Scope) -> int | None:
    if len(scope.shape(node.args[0])) < 2:
        return int(node.args[0].id)
    inner = scope.maker(node.args[0], "aten.t.default")
    return int(inner.args[0].id) if inner is not None else None


def _cat(node: Node, scope: Scope) -> int | Node | None:
    """Without empty operands (the start of a cache); one operand is itself."""
    operands = node.args[0]
    full = tuple(operand for operand in operands if scope.shape(operand) != (0,))
    dtypes = {scope.values[operand.id].dtype for operand in operands}
    if not full or len(dtypes | {scope.values[_only(node)].dtype}) > 1:
        return None
    if len(full) == 1:
        return int(full[0].id)
    if len(full) < len(operands):
        return attrs.evolve(node, args=(full, *node.args[1:]))
    return None


def _scatter(node: Node, scope: Scope) -> int | None:
    """A part that covers the whole."""
    whole, part = node.args[:2]
    step = node.args[5] if len(node.args) > 5 else 1
    return int(part.id) if step == 1 and scope.alike(whole.id, part.id) else None


def _nll_sum(node: Node, scope: Scope) -> Node | None:
    """The gradient of a summed loss does not read the total weight: it need not wait until that is known."""
    grad, *middle, reduction, ignored, total = node.args
    if reduction != NLL_SUM or total == grad or scope.shape(grad) != ():
        return None
    if scope.values[grad.id].dtype != scope.values[total.id].dtype:
        return None
    return attrs.evolve(node, args=(grad, *middle, reduction, ignored, grad))


# ---- backward of silu and mish ----
#
# Problem: on tensors without data torch takes the backward of some activations apart into six or ten elementwise
# operators, each with a buffer of its own: in a UNet or a LLaMA they are the peak of a layer's backward. Idea: the
# product that ends such a group is recognised by what made its operands, and becomes the operator again; what nobody
# else reads goes as dead code.
#
#     s = sigmoid(x);  g * (s * (1 + x * (1 - s)))          ->          silu_backward(g, x)
#
# Source: `math_silu_backward` and `math_mish_backward` of ATen (native/Activation.cpp). The kernels compute the same
# formula.


def _whole_backward(node: Node, scope: Scope) -> Node | None:
    """The activation's backward that a product `g * factor` is the end of, if it is one."""
    if node.phase != "backward" or len(node.args) != 2 or not all(isinstance(arg, Ref) for arg in node.args):
        return None
    grad, factor = node.args
    for name, argument in (("silu", _silu), ("mish", _mish)):
        x = argument(factor, scope)
        if x is not None and scope.alike(x, grad.id):
            return attrs.evolve(node, target=f"aten.{name}_backward.default", args=(grad, Ref(x)))
    return None


def _silu(factor: Ref, scope: Scope) -> int | None:
    """x of s * (1 + x * (1 - s)), s = sigmoid(x)."""
    s, more = _operands(factor, "aten.mul.Tensor", scope)
    x = _argument(s, "aten.sigmoid.default", scope)
    product, one = _operands(more, "aten.add.Scalar", scope)
    value, rest = _operands(product, "aten.mul.Tensor", scope)
    if x is None or one != 1 or value != x or _one_minus(rest, scope) != s:
        return None
    return x.id


def _mish(factor: Ref, scope: Scope) -> int | None:
    """x of t + x * sigmoid(x) * (1 - t * t), t = tanh(softplus(x))."""
    t, more = _operands(factor, "aten.add.Tensor", scope)
    x = _argument(_argument(t, "aten.tanh.default", scope), "aten.softplus.default", scope)
    product, rest = _operands(more, "aten.mul.Tensor", scope)
    value, sigmoid = _operands(product, "aten.mul.Tensor", scope)
    square = _operands(_one_minus(rest, scope), "aten.mul.Tensor", scope)
    if x is None or value != x or square != (t, t) or _argument(sigmoid, "aten.sigmoid.default", scope) != x:
        return None
    return x.id


def _operands(arg: Any, target: str, scope: Scope) -> tuple[Any, Any]:
    """The two arguments of the node that made a value, if it is `target` with no other arguments."""
    node = scope.maker(arg, target)
    if node is None or len(node.args) != 2 or node.kwargs:
        return None, None
    return node.args[0], node.args[1]


def _argument(arg: Any, target: str, scope: Scope) -> Ref | None:
    """The only argument of the node that made a value, if it is `target` with none that differ from their defaults."""
    node = scope.maker(arg, target)
    if node is None or len(node.args) != 1 or node.kwargs:
        return None
    operand: Ref = node.args[0]
    return operand


def _one_minus(arg: Any, scope: Scope) -> Any:
    """y of 1 - y."""
    ones, y = _operands(arg, "aten.sub.Tensor", scope)
    return y if _number(ones, scope) == 1 else None


REWRITES: dict[str, NodeRewrite] = {
    "aten.nll_loss_backward.default": _nll_sum,
    "aten.nll_loss2d_backward.default": _nll_sum,
    "aten.clone.default": _clone,
    "aten.contiguous.default": _clone,
    "aten._to_copy.default": _to_copy,
    "aten.view.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.expand.default": _same_shape,
    "aten.slice.Tensor": _same_shape,
    "aten.squeeze.dim": _same_shape,
    "aten.squeeze.dims": _same_shape,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _t,
    "aten.cat.default": _cat,
    "aten.mul.Tensor": _whole_backward,
    "aten.slice_scatter.default": _scatter,
}
