"""Function modes that put canonical operators in place of torch functions.

Problem: by the time a call reaches aten, a linear is three nodes, attention is a kernel of one device with a dense
mask, and random numbers come from a sequential generator. Idea: a `TorchFunctionMode` sees the call as the user wrote
it and issues `colofunc::linear`, `colofunc::attention`, `colofunc::dropout`, ... instead.

    with ExitStack() as stack:
        for mode in modes(seed=lambda: torch.tensor(0)):
            stack.enter_context(mode)
        F.dropout(x, 0.1)        # colofunc::dropout(x, seed, site=0, p=0.1)

`seed()` is called at the first random operator; call sites are numbered in the order in which they run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from colofunc import compat
from colofunc.errors import InputError, TraceError
from colofunc.ops import random
from colofunc.ops.attention import attention
from colofunc.ops.linear import linear

Handler = Callable[..., Any]
# Functions written in Python that call what is replaced: their bodies run under the mode again.
OPENED = ("torch.nn.functional", "torch.nn.init", "torch.functional", "torch._jit_internal")
# Scaled exponential units: minus the value that dropped activations take, from Klambauer et al. (2017), section 2.
ALPHA = 1.7580993408473766


def modes(seed: Tensor | Callable[[], Tensor], sites: Iterator[int] | None = None) -> list[TorchFunctionMode]:
    """The modes to enter, outermost first, while a step is traced or run as the single-device reference."""
    provide = (lambda: seed) if isinstance(seed, Tensor) else seed
    return [Canonical(provide, count() if sites is None else sites)]


@contextmanager
def single_device(seed: Tensor | None = None) -> Iterator[None]:
    """Run a step eagerly under the canonical operators. Without a seed, one is drawn from torch's generator if needed."""
    drawn: list[Tensor] = [] if seed is None else [seed]

    def provide() -> Tensor:
        if not drawn:
            drawn.append(draw_seed())
        return drawn[0]

    with ExitStack() as stack:
        for mode in modes(provide):
            stack.enter_context(mode)
        yield


def draw_seed() -> Tensor:
    """A fresh 0-dim int64 seed from torch's default generator, as one call of a staged step draws it."""
    with compat.no_function_modes():
        return torch.randint(0, 1 << 62, (), dtype=torch.int64)


class Canonical(TorchFunctionMode):
    """Replaces the functions of `HANDLERS`; everything else runs as it is."""

    def __init__(self, seed: Callable[[], Tensor], sites: Iterator[int]) -> None:
        super().__init__()
        self.seed = seed
        self.sites = sites

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            result = handler(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        elif _can_open(func):
            with self:
                return _open(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def key(self) -> tuple[Tensor, int]:
        """(seed, a new call site)."""
        return self.seed(), next(self.sites)


class _Overrides:
    """`torch.overrides` for opened bodies: nothing is overridden."""

    def __getattr__(self, name: str) -> Any:
        return _never if name in NEVER else getattr(torch.overrides, name)


class _Torch:
    """`torch` for opened bodies."""

    overrides = _Overrides()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _never(*args: Any) -> bool:
    return False


NEVER = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never)


def _can_open(func: Any) -> bool:
    return isinstance(func, types.FunctionType) and func.__globals__.get("__name__") in OPENED


@cache
def _open(func: Any) -> Any:
    """`func` without its check for overrides, so that the calls in its body are seen by the active modes."""
    scope = {**func.__globals__, **NEVER}
    if scope.get("torch") is torch:
        scope["torch"] = _Torch()
    # The two functions between which a dispatcher chooses are in its closure.
    cells = tuple(types.CellType(_open(c.cell_contents)) if _can_open(c.cell_contents) else c for c in func.__closure__ or ())
    body = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, cells or None)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


# ---- linear and attention ----


def _autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as autocast would hand them to a matmul. Fake tensors sit on CPU, whatever device autocast names."""
    kinds = [t.device.type for t in tensors if t is not None] + ["cuda", "cpu"]
    kind = next((k for k in kinds if torch.is_autocast_enabled(k)), None)
    if kind is None:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _linear(mode: Canonical, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.dim() != 2 or input.dim() == 0 or input.is_sparse or weight.is_sparse or weight.is_quantized:
        return NotImplemented
    return linear.apply(*_autocast(input, weight, bias))


def _attention(
    mode: Canonical, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if min(query.dim(), key.dim(), value.dim()) < 2 or query.shape[-1] == 0:
        return NotImplemented
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)  # type: ignore[assignment]
    scale = 1.0 / sqrt(query.shape[-1]) if scale is None else scale
    lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    q, k, v = (_four(t, lead) for t in (query, key, value))
    heads = k.shape[1] if enable_gqa or k.shape[1] == v.shape[1] else max(k.shape[1], v.shape[1])
    if not enable_gqa and heads not in (1, q.shape[1]):
        if q.shape[1] != 1:
            return NotImplemented  # torch says what is wrong
        q = q.expand(-1, heads, -1, -1)
    k, v = (t if t.shape[1] == heads else t.expand(-1, heads, -1, -1) for t in (k, v))
    bias = None if attn_mask is None else _mask(attn_mask, lead, query.dim())
    seed, site = mode.key() if dropout_p > 0.0 else (None, 0)
    out, _ = attention.apply(q, k, v, bias, float(scale), is_causal, 0, float(dropout_p), seed, site, None, None, [], [], None)
    if query.dim() == 4:
        return out
    heads_shape = (q.shape[1],) if query.dim() > 2 else ()
    return out.reshape((*lead, *heads_shape, *out.shape[-2:])) if query.dim() > 4 or len(lead) else out.reshape((*heads_shape, *out.shape[-2:]))


def _four(x: Tensor, lead: torch.Size) -> Tensor:
    """(..., h, s, e) -> (b, h, s, e) with the leading dims broadcast to `lead` and folded."""
    while x.dim() < 4 and x.dim() < len(lead) + 3:
        x = x.unsqueeze(0)
    if x.dim() == 4 and len(lead) == 1:
        return x if x.shape[0] == lead[0] else x.expand(lead[0], -1, -1, -1)
    while x.dim() < 3:
        x = x.unsqueeze(0)
    return x.expand((*lead, *x.shape[-3:])).reshape((prod(lead), *x.shape[-3:]))


def _mask(mask: Tensor, lead: torch.Size, dims: int) -> Tensor:
    """The mask with four dims, each of size one or full."""
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if len(lead) > 1 and any(n != 1 for n in mask.shape[:-3]):
        return mask.expand((*lead, *mask.shape[-3:])).reshape((prod(lead), *mask.shape[-3:]))
    return mask if mask.dim() == 4 else mask.reshape(mask.shape[-4:])


# ---- dropout ----


def _check_p(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _dropout(mode: Canonical, input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    _check_p(p)
    if not train or p == 0.0 or input.numel() == 0:
        return input
    seed, site = mode.key()
    return random.dropout.apply(input, seed, site, float(p), [], [], None)


def _noise(mode: Canonical, input: Tensor, p: float, feature: bool) -> Tensor:
    """Ones with probability 1 - p, else zeros: per element, or per (sample, channel)."""
    if feature and input.dim() < 2:
        raise InputError(f"feature dropout needs at least two dims, not {tuple(input.shape)}")
    shape = (*input.shape[:2], *(1,) * (input.dim() - 2)) if feature else tuple(input.shape)
    return random.random_bernoulli(*mode.key(), shape, input.dtype, 1.0 - p)


def _feature_dropout(mode: Canonical, input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    _check_p(p)
    if not train or p == 0.0 or input.numel() == 0:
        return input
    return input * (_noise(mode, input, p, True) * (0.0 if p == 1.0 else 1.0 / (1.0 - p)))


def _alpha(feature: bool) -> Handler:
    def alpha_dropout(mode: Canonical, input: Tensor, p: float = 0.5, train: bool = False) -> Tensor:
        _check_p(p)
        if not train or p == 0.0 or input.numel() == 0:
            return input
        if p == 1.0:
            return input * 0.0
        noise = _noise(mode, input, p, feature)
        a = 1.0 / sqrt((ALPHA * ALPHA * p + 1.0) * (1.0 - p))
        return input * (noise * a) + ((noise - 1.0) * (ALPHA * a) + ALPHA * a * p)

    return alpha_dropout


def _in_place(handler: Handler) -> Handler:
    def replaced(mode: Canonical, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = handler(mode, input, *args, **kwargs)
        return input if result is input else input.copy_(result)

    return replaced


def _native_dropout(mode: Canonical, input: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False or p == 0.0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    keep = random.random_bernoulli(*mode.key(), tuple(input.shape), torch.bool, 1.0 - p)
    return input * keep * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), keep


def _rrelu(mode: Canonical, input: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False) -> Any:
    if not training:
        return NotImplemented
    slope = _uniform(mode, input.shape, input.dtype) * (upper - lower) + lower
    return torch.where(input <= 0, input * slope, input)


# ---- factories ----


def _own(generator: Any) -> None:
    if generator is not None:
        raise TraceError("a random call has its own torch.Generator, which one recorded program cannot repeat. Try: without generator=")


def _uniform(mode: Canonical, shape: Any, dtype: torch.dtype) -> Tensor:
    return random.random_uniform(*mode.key(), tuple(shape), dtype)


def _normal(mode: Canonical, shape: Any, dtype: torch.dtype) -> Tensor:
    return random.random_normal(*mode.key(), tuple(shape), dtype)


def _size(sizes: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    size = kwargs.pop("size", sizes)
    if len(size) == 1 and isinstance(size[0], tuple | list | torch.Size):
        size = size[0]
    return tuple(int(s) for s in size)


def _finish(x: Tensor, out: Tensor | None = None, requires_grad: bool = False, generator: Any = None, **ignored: Any) -> Tensor:
    # device, layout, pin_memory: a traced tensor lives on the one symbolic device.
    if out is not None:
        return out.copy_(x)
    return x.requires_grad_() if requires_grad else x


def _factory(make: Handler) -> Handler:
    def rand(mode: Canonical, *sizes: Any, **kwargs: Any) -> Tensor:
        _own(kwargs.get("generator"))
        size, dtype = _size(sizes, kwargs), kwargs.pop("dtype", None) or torch.get_default_dtype()
        return _finish(make(mode, size, dtype), **kwargs)

    return rand


def _like(make: Handler) -> Handler:
    def rand_like(mode: Canonical, input: Tensor, **kwargs: Any) -> Tensor:
        _own(kwargs.get("generator"))
        return _finish(make(mode, input.shape, kwargs.pop("dtype", None) or input.dtype), **kwargs)

    return rand_like


def _integers(mode: Canonical, low: int, high: int, shape: Any, dtype: torch.dtype) -> Tensor:
    if high <= low:
        raise InputError(f"randint: low {low} is not below high {high}")
    return ((_uniform(mode, shape, torch.float64) * (high - low)).floor() + low).to(dtype)


def _randint(mode: Canonical, *args: Any, **kwargs: Any) -> Tensor:
    _own(kwargs.get("generator"))
    names = ("low", "high", "size") if len(args) == 3 or "low" in kwargs else ("high", "size")
    given = {**dict(zip([n for n in names if n not in kwargs], args)), **kwargs}
    low, high, size = int(given.pop("low", 0)), int(given.pop("high")), given.pop("size")
    return _finish(_integers(mode, low, high, size, given.pop("dtype", None) or torch.int64), **given)


def _randint_like(mode: Canonical, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    low, high = (args if len(args) == 2 else (0, *args)) if args else (kwargs.pop("low", 0), kwargs.pop("high"))
    return _finish(_integers(mode, int(low), int(high), input.shape, kwargs.pop("dtype", None) or input.dtype), **kwargs)


def _randperm(mode: Canonical, n: int, **kwargs: Any) -> Tensor:
    _own(kwargs.get("generator"))
    dtype = kwargs.pop("dtype", None) or torch.int64
    return _finish(random.random_bits(*mode.key(), (n,)).argsort(stable=True).to(dtype), **kwargs)


def _bernoulli(mode: Canonical, input: Tensor, p: float | Tensor | None = None, **kwargs: Any) -> Tensor:
    _own(kwargs.get("generator"))
    p = input if p is None else p
    if isinstance(p, Tensor):
        # Float32 is compared, so that half precision does not round the draws.
        wide = torch.promote_types(p.dtype, torch.float32)
        return _finish((_uniform(mode, input.shape, wide) < p.detach().to(wide)).to(input.dtype), **kwargs)
    return _finish(random.random_bernoulli(*mode.key(), tuple(input.shape), input.dtype, float(p)), **kwargs)


def _multinomial(mode: Canonical, input: Tensor, num_samples: int, replacement: bool = False, **kwargs: Any) -> Tensor:
    _own(kwargs.get("generator"))
    weights = input.detach().to(torch.float64)
    if replacement:
        cumulative = weights.cumsum(-1)
        u = _uniform(mode, (*input.shape[:-1], num_samples), torch.float64) * cumulative[..., -1:]
        return _finish(torch.searchsorted(cumulative, u, right=True).clamp(max=input.shape[-1] - 1), **kwargs)
    # An exponential race: the first arrivals at rates `weights` are a draw without replacement.
    arrival = -_uniform(mode, input.shape, torch.float64).log()
    return _finish((weights / arrival).topk(num_samples, -1).indices, **kwargs)


def _torch_normal(mode: Canonical, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    _own(kwargs.get("generator"))
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors)) if size is None else tuple(size)
    dtype = kwargs.pop("dtype", None) or (tensors[0].dtype if tensors else torch.get_default_dtype())
    return _finish(_normal(mode, shape, dtype) * std + mean, **kwargs)


# ---- in-place draws ----


def _fill(make: Callable[..., Tensor]) -> Handler:
    def filled(mode: Canonical, input: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        _own(generator)
        return input.copy_(make(mode, input, *args, **kwargs))

    return filled


def _draw_uniform(mode: Canonical, x: Tensor, a: float = 0.0, b: float = 1.0, **names: float) -> Tensor:
    a, b = names.get("from", a), names.get("to", b)
    u = _uniform(mode, x.shape, x.dtype)
    return u if (a, b) == (0.0, 1.0) else u * (b - a) + a


def _draw_exponential(mode: Canonical, x: Tensor, lambd: float = 1.0) -> Tensor:
    return -(-_uniform(mode, x.shape, torch.float64)).log1p() / lambd


def _draw_random(mode: Canonical, x: Tensor, *bounds: int) -> Tensor:
    low, high = bounds if len(bounds) == 2 else (0, bounds[0]) if bounds else (0, 1 << (24 if x.is_floating_point() else 31))
    return _integers(mode, low, high, x.shape, x.dtype)


HANDLERS: dict[Any, Handler] = {
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    torch.dropout: _dropout,
    torch.dropout_: _in_place(_dropout),
    torch.feature_dropout: _feature_dropout,
    torch.feature_dropout_: _in_place(_feature_dropout),
    torch.alpha_dropout: _alpha(False),
    torch.alpha_dropout_: _in_place(_alpha(False)),
    torch.feature_alpha_dropout: _alpha(True),
    torch.feature_alpha_dropout_: _in_place(_alpha(True)),
    torch.native_dropout: _native_dropout,
    torch.rrelu: _rrelu,
    torch.rrelu_: _in_place(_rrelu),
    torch.rand: _factory(_uniform),
    torch.randn: _factory(_normal),
    torch.rand_like: _like(_uniform),
    torch.randn_like: _like(_normal),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    torch.normal: _torch_normal,
    Tensor.bernoulli: _bernoulli,
    Tensor.multinomial: _multinomial,
    Tensor.uniform_: _fill(_draw_uniform),
    Tensor.normal_: _fill(lambda mode, x, mean=0.0, std=1.0: _normal(mode, x.shape, x.dtype) * std + mean),
    Tensor.bernoulli_: _fill(lambda mode, x, p=0.5: _bernoulli(mode, x, p)),
    Tensor.exponential_: _fill(_draw_exponential),
    Tensor.random_: _fill(_draw_random),
}
