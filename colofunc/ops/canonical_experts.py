"""Layers of experts that are written out, caught whole while they run.

Problem: a model computes its experts in a dozen torch calls: sort choices by expert, gather rows, a grouped product, an
activation, a second product, weights, back into order, a sum over choices. One operator says it (see `experts`), but no
single torch function stands for it. Idea: while a step runs under the canonical modes, tensors remember the few calls
that made them; where a sum over choices is reached, the calls behind it are read backwards:

    sum(view(getitem(mul(grouped_mm(act(grouped_mm(getitem(x, perm // k), gate_up))), down), weight), inverse)), dim 1)

If all of it is there, the sum becomes `colofunc.experts`, and nobody reads what was computed on the way: a trace drops
it. Products are `grouped_mm` over sorted rows, or `bmm` with each choice's own matrices. Whatever looks otherwise runs
as it is written. Nothing here knows a model or a library: transformers' "grouped_mm" and "batched_mm" experts are such
code. A write in place between the calls (but of a bias) makes all that was remembered stale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor

from colofunc import compat
from colofunc.ops.experts import Interleaved, capped, experts, in_float8

_KEY = "_colofunc_made"
_CASTS = ("to", "float", "int", "long", "type", "bfloat16", "half", "double")
_ACTS = {"silu": "silu", "gelu": "gelu", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}
_PLUS = ("add", "__add__", "__radd__")
_TIMES = ("mul", "__mul__", "__rmul__")
_PRODUCTS = ("grouped_mm", "_grouped_mm", "bmm")
_FOLLOWS = frozenset(
    ("sort", "argsort", "__getitem__", "__floordiv__", "floor_divide", "chunk", "mul", "__mul__", "__rmul__", "unsqueeze", "squeeze",
     "view", "reshape", "histc", "bincount", "cumsum", "clamp", *_PLUS, *_CASTS, *_ACTS, *_PRODUCTS)
)  # fmt: skip
_STARTS = frozenset(
    ("reshape", "view", "flatten", "transpose", "swapaxes", "repeat_interleave", "grouped_mm", "_grouped_mm", "arange")
)  # fmt: skip


@attrs.frozen(eq=False)
class MakingCall:
    """The call that made a tensor. `part`: which of several results it is; `epoch`: writes in place before it.

    `versions`: how often its result and its operands had been written to then, by torch's own count. It also sees what
    names do not tell (`F.dropout(x, inplace=True)`); it has no numbers in inference mode.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    part: int
    epoch: int
    versions: tuple[int, ...]

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)


class _No(Exception):
    """What is read is no layer of experts."""


class Catcher:
    """Remembers calls and finds layers of experts. `before`: casts what goes into `bmm`, as autocast does."""

    def __init__(self, before: Callable[..., tuple[Tensor | None, ...]]) -> None:
        self.before = before
        self.epoch = 0

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
        """Called behind every torch function with its result; returns the result, or what stands in its place."""
        name = getattr(func, "__name__", "")
        if name == "sum":
            return self._sum(args, kwargs, out)
        if name in _FOLLOWS or name in _STARTS:
            if name in _STARTS or any(_has(arg) for arg in args):
                self._remember(name, args, kwargs, out)
        elif name.endswith("_") or name == "__setitem__" or "out" in kwargs:
            self._write(name, args, kwargs)
        return out

    def _remember(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        if isinstance(out, Tensor):
            if not any(out is arg for arg in args) and _worth(name, out, args):
                self._put(out, name, args, kwargs)
        elif isinstance(out, (tuple, list)):
            for place, part in enumerate(out):
                if isinstance(part, Tensor):
                    self._put(part, name, args, kwargs, place)

    def _put(self, out: Tensor, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], part: int = 0) -> None:
        out.__dict__[_KEY] = MakingCall(name, args, kwargs, part, self.epoch, _versions(out, args, kwargs))

    def _write(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not args or not isinstance(args[0], Tensor):
            # `_foreach_mul_`, which torch does not count
            self.epoch += bool(args) and isinstance(args[0], (tuple, list))
            return
        target = args[0]
        # A view of the target remembers the target: each would keep the other alive, where no collector sees it.
        apart = (
            len(args) == 2
            and not kwargs
            and self._maybe(args[1]) is not None
            and _memory(target) is not _memory(args[1])
        )
        if name == "add_" and apart and (before := self._before_write(target)) is not None:
            self._put(target, "add_", (before, args[1]), {})
        elif name == "__setitem__" and not _has(target) and self._inverts(target, *args[1:]):
            self._put(target, name, args[1:], {})
        elif not name.startswith("__") or name.startswith("__i") or name == "__setitem__":
            self.epoch += name not in ("requires_grad_", "retain_grad")

    def _before_write(self, target: Tensor) -> MakingCall | None:
        """The call that made a tensor which has just been written to, as it is to be read now.

        None if it had been written to before, too.

        What the target is a view of has been written to as well.
        """
        for x in {id(t): t for t in (_memory(target), target)}.values():
            made = x.__dict__.get(_KEY)
            if not isinstance(made, MakingCall) or made.epoch != self.epoch:
                if x is target:
                    return None
                continue
            now = _versions(x, made.args, made.kwargs)
            memories = [_memory(t) is _memory(target) for t in _operands(x, made.args, made.kwargs)]
            for count, old, is_target in zip(now, made.versions, memories, strict=True):
                # The write itself counts once.
                if count != old and not (is_target and count == old + 1):
                    return None
            x.__dict__[_KEY] = attrs.evolve(made, versions=now)
        found: MakingCall = target.__dict__[_KEY]
        return found

    def _inverts(self, target: Tensor, perm: Any, value: Any) -> bool:
        """Whether `target[perm] = value` makes the inverse of an order: `value` counts up from 0."""
        order, counted = self._maybe(perm), self._maybe(value)
        if order is None or counted is None or order.name not in ("sort", "argsort") or counted.name != "arange":
            return False
        return tuple(target.shape) == tuple(perm.shape) == tuple(value.shape)

    # ---- reading backwards ----

    def _sum(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if (
            dim not in (1, (1,), [1])
            or len(args) > 2
            or set(kwargs) - {"dim"}
            or not isinstance(args[0], Tensor)
            or args[0].dim() != 3
        ):
            return out
        try:
            return self._layer(args[0], out)
        except _No:
            return out

    def _maybe(self, x: Any) -> MakingCall | None:
        made = x
        if isinstance(x, Tensor) and not isinstance(x, MakingCall):
            made = x.__dict__.get(_KEY)
        if not isinstance(made, MakingCall) or made.epoch != self.epoch:
            return None
        now = _versions(x, made.args, made.kwargs)
        return made if now[1:] == made.versions[1:] and (x is made or now == made.versions) else None

    def _made(self, x: Any, *names: str) -> MakingCall:
        made = self._maybe(x)
        if made is None or made.name not in names:
            raise _No
        return made

    def _layer(self, stacked: Tensor, out: Tensor) -> Tensor:
        n, k, d = stacked.shape
        weighted = self._made(stacked, "view", "reshape").args[0]
        back = self._maybe(weighted)
        perm = None
        if back is not None and back.name == "__getitem__":
            perm = self._inverse(back.args[1])
            weighted = back.args[0]
        y, scale = self._scaled(weighted)
        if perm is not None:
            gathered = self._made(scale, "__getitem__")
            _same(gathered.args[1], perm)
            scale = gathered.args[0]
        weight = self._made(scale, "reshape", "view", "flatten").args[0]
        rows = _Sorted(self, perm) if perm is not None else _Each(self)
        down, down_bias, swapped, ids, h = rows.product(y)
        act, gated, inner = self._activation(h)
        up, up_bias, swapped_up, ids_up, xs = rows.product(inner)
        _same(ids, ids_up)
        index = self._made(ids, "reshape", "view", "flatten").args[0]
        x = rows.tokens(xs, k)
        shapes = (tuple(x.shape), tuple(index.shape), tuple(weight.shape), swapped, up.shape[0])
        if shapes != ((n, d), (n, k), (n, k), swapped_up, down.shape[0]):
            raise _No
        float8 = in_float8(up, down)
        if perm is None:
            x, up, down, up_bias, down_bias = self.before(x, up, down, up_bias, down_bias)  # type: ignore[assignment]
        index = capped(index, up.shape[0])
        found: Tensor = experts.apply(x, index, weight, up, down, up_bias, down_bias, act, gated, swapped, 1.0, float8)
        return found.to(out.dtype)

    def _inverse(self, inverse: Any) -> Any:
        """The permutation that `inverse[perm] = arange` or `argsort(perm)` undoes."""
        made = self._made(inverse, "__setitem__", "argsort")
        if made.name == "argsort" and _descends(made):
            raise _No
        return made.args[0]

    def _scaled(self, x: Any) -> tuple[Any, Any]:
        """(rows, one weight per row) of their product."""
        a, b = self._made(x, "mul", "__mul__", "__rmul__").args[:2]
        for rows, scale in ((a, b), (b, a)):
            made = self._maybe(scale)
            if made is not None and made.name == "unsqueeze" and made.arg(1, "dim") in (-1, 1):
                return rows, made.args[0]
            if made is not None and made.name == "__getitem__" and made.args[1] == (slice(None), None):
                return rows, made.args[0]
        raise _No

    def _activation(self, h: Any) -> tuple[str, bool, Any]:
        """(name of the activation, whether it is gated, what goes into it)."""
        made = self._maybe(self.uncast(h))
        if made is None:
            raise _No
        if made.name in _ACTS:
            return _act_name(made), False, made.args[0]
        if made.name not in _TIMES:
            raise _No
        for pair in (made.args[:2], made.args[1::-1]):
            found = self._interleaved(*pair)
            if found is not None:
                return found
        for one, other in (made.args[:2], reversed(made.args[:2])):
            act, up = self._maybe(one), self._maybe(other)
            if act is None or act.name not in _ACTS or up is None or up.name != "chunk" or up.part != 1:
                continue
            gate = self._made(act.args[0], "chunk")
            if (
                gate.part == 0
                and gate.args[0] is up.args[0]
                and gate.arg(1, "chunks") == 2
                and gate.arg(2, "dim") in (-1, 1)
            ):
                return _act_name(act), True, gate.args[0]
        raise _No

    def _interleaved(self, scaled: Any, glu: Any) -> tuple[str, bool, Any] | None:
        """What `_activation` gives for (up + 1) * (gate * sigmoid(alpha * gate)), both clamped and taken in turn; None:
        it is another.
        """
        more, product = self._maybe(scaled), self._maybe(glu)
        if more is None or more.name not in _PLUS or more.args[1:] != (1,) or more.kwargs:
            return None
        if product is None or product.name not in _TIMES:
            return None
        for gate, slope in (product.args[:2], product.args[1::-1]):
            sigmoid = self._maybe(slope)
            inner = None if sigmoid is None or sigmoid.name != "sigmoid" else self._maybe(sigmoid.args[0])
            if (
                inner is None
                or inner.name not in _TIMES
                or inner.args[0] is not gate
                or not isinstance(inner.args[1], (int, float))
            ):
                continue
            low, limit, h = self._clamped(gate, 0)
            least, most, other = self._clamped(more.args[0], 1)
            if low is None and isinstance(limit, (int, float)) and most == limit and least == -limit and h is other:
                return Interleaved(float(inner.args[1]), float(limit)).name, True, h
        return None

    def _clamped(self, x: Any, first: int) -> tuple[Any, Any, Any]:
        """(min, max, h) of every second column of h, from `first` on, that is clamped."""
        clamp = self._made(x, "clamp")
        taken = self._made(clamp.args[0], "__getitem__")
        at = taken.args[1]
        if not isinstance(at, tuple) or len(at) != 2 or at[0] is not Ellipsis or at[1] != slice(first or None, None, 2):
            raise _No
        return clamp.arg(1, "min"), clamp.arg(2, "max"), taken.args[0]

    def uncast(self, x: Any) -> Any:
        """What one cast was made of: the operator casts what goes into its products itself."""
        made = self._maybe(x)
        return made.args[0] if made is not None and made.name in _CASTS else x

    def biased(self, y: Any, ids: Callable[[Any], Any]) -> tuple[MakingCall, Tensor | None, Any]:
        """(the product, its bias or None, the experts by which the bias is chosen)."""
        made = self._maybe(y)
        if made is None or made.name != "add_":
            if made is None:
                raise _No
            return made, None, None
        chosen = self._made(made.args[1], "__getitem__")
        return made.args[0], chosen.args[0], ids(chosen.args[1])


@attrs.frozen
class _Sorted:
    """Rows in the order of experts, products by `grouped_mm`."""

    of: Catcher
    perm: Any

    def product(self, y: Any) -> tuple[Tensor, Tensor | None, bool, Any, Any]:
        """(weight, bias, whether it is stored (e, in, out), flat index, rows that go in)."""
        made, bias, chosen = self.of.biased(y, self._sorted)
        if made.name not in ("grouped_mm", "_grouped_mm"):
            raise _No
        ids = self._sorted(self.perm, 1)
        _same(ids, self._counted(made.arg(2, "offs")))
        if chosen is not None:
            _same(ids, chosen)
        weight = made.arg(1, "mat_b")
        turned = self.of._maybe(weight)
        stored = turned is None or turned.name not in ("transpose", "swapaxes")
        if not stored and turned is not None:
            if {dim % 3 for dim in turned.args[1:]} != {1, 2}:
                raise _No
            weight = turned.args[0]
        return weight, bias, stored, ids, self.of.uncast(made.args[0])

    def _sorted(self, x: Any, part: int = 0) -> Any:
        """What was sorted to give x: its values (0) or its order (1)."""
        made = self.of._made(x, "sort", "argsort")
        if (made.name == "argsort" and part != 1) or (made.name == "sort" and made.part != part) or _descends(made):
            raise _No
        return made.args[0]

    def _counted(self, offs: Any) -> Any:
        """The flat index whose experts are counted up to each offset."""
        counts = self.of._made(
            self.of.uncast(self.of._made(self.of.uncast(offs), "cumsum").args[0]), "histc", "bincount"
        )
        counted = self.of.uncast(counts.args[0])
        made = self.of._maybe(counted)
        if counts.name == "histc":
            low, high, bins = counts.arg(2, "min", 0), counts.arg(3, "max", 0), counts.arg(1, "bins", 100)
            if low != 0 or high != bins - 1:
                raise _No
        return made.args[0] if made is not None and made.name == "sort" and made.part == 0 else counted

    def tokens(self, rows: Any, k: int) -> Tensor:
        made = self.of._made(self.of.uncast(rows), "__getitem__")
        token = self.of._made(made.args[1], "__floordiv__", "floor_divide")
        _same(token.args[0], self.perm)
        if token.args[1] != k:
            raise _No
        found: Tensor = made.args[0]
        return found


@attrs.frozen
class _Each:
    """Each choice with matrices of its own, products by `bmm`."""

    of: Catcher

    def product(self, y: Any) -> tuple[Tensor, Tensor | None, bool, Any, Any]:
        made, bias, chosen = self.of.biased(y, lambda ids: ids)
        if made.name != "squeeze":
            raise _No
        a, b = self.of._made(made.args[0], "bmm").args[:2]
        picked, vector, stored = (
            (b, a, True) if (m := self.of._maybe(a)) is not None and m.name == "unsqueeze" else (a, b, False)
        )
        rows = self.of._made(vector, "unsqueeze")
        weights = self.of._made(self.of.uncast(picked), "__getitem__")
        if (made.arg(1, "dim"), rows.arg(1, "dim")) not in (
            ((1, 1),) if stored else ((-1, -1), (2, 2), (-1, 2), (2, -1))
        ):
            raise _No
        if chosen is not None:
            _same(chosen, weights.args[1])
        return weights.args[0], bias, stored, weights.args[1], self.of.uncast(rows.args[0])

    def tokens(self, rows: Any, k: int) -> Tensor:
        made = self.of._made(rows, "repeat_interleave")
        if made.arg(1, "repeats") != k or made.arg(2, "dim") != 0:
            raise _No
        found: Tensor = made.args[0]
        return found


def _versions(out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """How often a result and the operands of its call have been written to, the result first."""
    return tuple(compat.version(x) if isinstance(x, Tensor) else 0 for x in _operands(out, args, kwargs))


def _operands(out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """A result and the operands of its call."""
    operands: list[Any] = [out]
    for arg in (*args, *kwargs.values()):
        operands += arg if isinstance(arg, (tuple, list)) else (arg,)
    return operands


def _descends(made: MakingCall) -> bool:
    """Whether a `sort` or `argsort` puts the largest first."""
    return bool(made.arg(2, "descending", False))


def _memory(x: Any) -> Any:
    """The tensor that `x` is a view of, or `x`."""
    base = compat.view_base(x) if isinstance(x, Tensor) else None
    return x if base is None else base


def _act_name(made: MakingCall) -> str:
    if made.name == "gelu" and made.kwargs.get("approximate", "none") == "tanh":
        return "gelu_tanh"
    return _ACTS[made.name]


def _same(one: Any, other: Any) -> None:
    if one is not other:
        raise _No


def _has(x: Any) -> bool:
    return (isinstance(x, Tensor) and _KEY in x.__dict__) or (isinstance(x, tuple) and any(_has(i) for i in x))


def _worth(name: str, out: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a call that nothing led to may be the start of a layer."""
    if name in _PLUS and (len(args) < 2 or isinstance(args[1], Tensor)):
        return False  # a residual sum; what is looked for adds a number
    if any(_has(arg) for arg in args):
        return True
    source = args[0] if args and isinstance(args[0], Tensor) else out
    if name == "arange":  # that counts up from 0
        return out.dim() == 1 and len(args) == 1
    if name in ("reshape", "view", "flatten"):
        return out.dim() == 1 and source.dim() == 2
    return source.dim() == (3 if name in ("transpose", "swapaxes") else 2)
