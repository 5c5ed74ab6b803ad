"""What torch's random functions become under the canonical modes.

Problem: torch has some thirty functions that draw numbers, most of them from one sequential generator. Idea: each is a
function of (mode, the user's arguments) made of `random_uniform`, `random_normal`, `random_bits`, `random_bernoulli`
and `dropout`; `mode.key()` gives the seed and a new call site.

    torch.randperm(n)  ->  argsort of random_bits((n,))
    x.exponential_()   ->  x.copy_(-log1p(-random_uniform(x.shape)))
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any, Protocol

import torch
from torch import Tensor

from colofunc.errors import InputError, TraceError
from colofunc.ops import random

RandomHandler = Callable[..., Any]
# Scaled exponential units: minus the value that dropped activations take, from Klambauer et al. (2017), section 2.
ALPHA = 1.7580993408473766


class Mode(Protocol):
    def key(self) -> tuple[Tensor, int]: ...


# ---- dropout ----


def _check_p(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _dropout(mode: Mode, input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    _check_p(p)
    if not train or p == 0.0 or input.numel() == 0:
        return input
    seed, site = mode.key()
    return random.dropout.apply(input, seed, site, float(p), [], [], None)


def _noise(mode: Mode, input: Tensor, p: float, feature: bool) -> Tensor:
    """Ones with probability 1 - p, else zeros: per element, or per (sample, channel)."""
    if feature and input.dim() < 2:
        raise InputError(f"feature dropout needs at least two dims, not {tuple(input.shape)}")
    shape = (*input.shape[:2], *(1,) * (input.dim() - 2)) if feature else tuple(input.shape)
    return random.random_bernoulli(*mode.key(), shape, input.dtype, 1.0 - p)


def _feature_dropout(mode: Mode, input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    _check_p(p)
    if not train or p == 0.0 or input.numel() == 0:
        return input
    return input * (_noise(mode, input, p, True) * (0.0 if p == 1.0 else 1.0 / (1.0 - p)))


def _alpha(feature: bool) -> RandomHandler:
    def alpha_dropout(mode: Mode, input: Tensor, p: float = 0.5, train: bool = False) -> Tensor:
        _check_p(p)
        if not train or p == 0.0 or input.numel() == 0:
            return input
        if p == 1.0:
            return input * 0.0
        noise = _noise(mode, input, p, feature)
        a = 1.0 / sqrt((ALPHA * ALPHA * p + 1.0) * (1.0 - p))
        return input * (noise * a) + ((noise - 1.0) * (ALPHA * a) + ALPHA * a * p)

    return alpha_dropout


def _in_place(handler: RandomHandler) -> RandomHandler:
    def replaced(mode: Mode, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = handler(mode, input, *args, **kwargs)
        return input if result is input else input.copy_(result)

    return replaced


def _native_dropout(mode: Mode, input: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False or p == 0.0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    keep = random.random_bernoulli(*mode.key(), tuple(input.shape), torch.bool, 1.0 - p)
    return input * keep * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), keep


def _rrelu(mode: Mode, input: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False) -> Any:
    if not training:
        return NotImplemented
    slope = _uniform(mode, input.shape, input.dtype) * (upper - lower) + lower
    return torch.where(input <= 0, input * slope, input)


# ---- factories ----


def _own(generator: Any) -> None:
    if generator is not None:
        raise TraceError(
            "a random call has its own torch.Generator, which one recorded program cannot repeat. Try: "
            "without generator="
        )


def _uniform(mode: Mode, shape: Any, dtype: torch.dtype) -> Tensor:
    return random.random_uniform(*mode.key(), tuple(shape), dtype)


def _normal(mode: Mode, shape: Any, dtype: torch.dtype) -> Tensor:
    return random.random_normal(*mode.key(), tuple(shape), dtype)


def _size(sizes: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    size = kwargs.pop("size", sizes)
    if len(size) == 1 and isinstance(size[0], tuple | list | torch.Size):
        size = size[0]
    return tuple(int(s) for s in size)


def _finish(x: Tensor, out: Tensor | None = None, requires_grad: bool = False, **ignored: Any) -> Tensor:
    # device, layout, pin_memory: a traced tensor lives on the one symbolic device. generator: None, see `_own`.
    if out is not None:
        return out.copy_(x)
    return x.requires_grad_() if requires_grad else x


def _factory(make: RandomHandler) -> RandomHandler:
    def rand(mode: Mode, *sizes: Any, **kwargs: Any) -> Tensor:
        _own(kwargs.get("generator"))
        size, dtype = _size(sizes, kwargs), kwargs.pop("dtype", None) or torch.get_default_dtype()
        return _finish(make(mode, size, dtype), **kwargs)

    return rand


def _like(make: RandomHandler) -> RandomHandler:
    def rand_like(mode: Mode, input: Tensor, **kwargs: Any) -> Tensor:
        _own(kwargs.get("generator"))
        return _finish(make(mode, input.shape, kwargs.pop("dtype", None) or input.dtype), **kwargs)

    return rand_like


def _integers(mode: Mode, low: int, high: int, shape: Any, dtype: torch.dtype) -> Tensor:
    if high <= low:
        raise InputError(f"randint: low {low} is not below high {high}")
    return ((_uniform(mode, shape, torch.float64) * (high - low)).floor() + low).to(dtype)


def _randint(mode: Mode, *args: Any, **kwargs: Any) -> Tensor:
    _own(kwargs.get("generator"))
    names = ("low", "high", "size") if len(args) == 3 or "low" in kwargs else ("high", "size")
    given = {**dict(zip([name for name in names if name not in kwargs], args)), **kwargs}
    low, high, size = int(given.pop("low", 0)), int(given.pop("high")), given.pop("size")
    return _finish(_integers(mode, low, high, size, given.pop("dtype", None) or torch.int64), **given)


def _randint_like(mode: Mode, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    _own(kwargs.get("generator"))
    if args:
        low, high = args if len(args) == 2 else (0, *args)
    else:
        low, high = kwargs.pop("low", 0), kwargs.pop("high")
    return _finish(
        _integers(mode, int(low), int(high), input.shape, kwargs.pop("dtype", None) or input.dtype), **kwargs
    )


def _randperm(mode: Mode, n: int, **kwargs: Any) -> Tensor:
    _own(kwargs.get("generator"))
    dtype = kwargs.pop("dtype", None) or torch.int64
    return _finish(random.random_bits(*mode.key(), (n,)).argsort(stable=True).to(dtype), **kwargs)


def _bernoulli(mode: Mode, input: Tensor, p: float | Tensor | None = None, **kwargs: Any) -> Tensor:
    _own(kwargs.get("generator"))
    p = input if p is None else p
    if isinstance(p, Tensor):
        # Float32 is compared, so that half precision does not round the draws.
        wide = torch.promote_types(p.dtype, torch.float32)
        return _finish((_uniform(mode, input.shape, wide) < p.detach().to(wide)).to(input.dtype), **kwargs)
    return _finish(random.random_bernoulli(*mode.key(), tuple(input.shape), input.dtype, float(p)), **kwargs)


def _multinomial(mode: Mode, input: Tensor, num_samples: int, replacement: bool = False, **kwargs: Any) -> Tensor:
    _own(kwargs.get("generator"))
    weights = input.detach().to(torch.float64)
    if replacement:
        cumulative = weights.cumsum(-1)
        u = _uniform(mode, (*input.shape[:-1], num_samples), torch.float64) * cumulative[..., -1:]
        return _finish(torch.searchsorted(cumulative, u, right=True).clamp(max=input.shape[-1] - 1), **kwargs)
    # An exponential race: the first arrivals at rates `weights` are a draw without replacement.
    arrival = -_uniform(mode, input.shape, torch.float64).log()
    return _finish((weights / arrival).topk(num_samples, -1).indices, **kwargs)


def _torch_normal(mode: Mode, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    _own(kwargs.get("generator"))
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors)) if size is None else tuple(size)
    dtype = kwargs.pop("dtype", None) or (tensors[0].dtype if tensors else torch.get_default_dtype())
    return _finish(_normal(mode, shape, dtype) * std + mean, **kwargs)


# ---- in-place draws ----


def _fill(make: Callable[..., Tensor]) -> RandomHandler:
    def filled(mode: Mode, input: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        _own(generator)
        return input.copy_(make(mode, input, *args, **kwargs))

    return filled


def _draw_uniform(mode: Mode, x: Tensor, a: float = 0.0, b: float = 1.0, **names: float) -> Tensor:
    a, b = names.get("from", a), names.get("to", b)
    u = _uniform(mode, x.shape, x.dtype)
    return u if (a, b) == (0.0, 1.0) else u * (b - a) + a


def _draw_exponential(mode: Mode, x: Tensor, lambd: float = 1.0) -> Tensor:
    return -(-_uniform(mode, x.shape, torch.float64)).log1p() / lambd


def _draw_cauchy(mode: Mode, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return ((_uniform(mode, x.shape, torch.float64) - 0.5) * pi).tan() * sigma + median


def _draw_geometric(mode: Mode, x: Tensor, p: float | Tensor) -> Tensor:
    """How many trials up to the first success: 1, 2, ..."""
    failures = torch.as_tensor(p, dtype=torch.float64)
    return ((-_uniform(mode, x.shape, torch.float64)).log1p() / (-failures).log1p()).ceil().clamp_min(1)


def _draw_log_normal(mode: Mode, x: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return (_normal(mode, x.shape, x.dtype) * std + mean).exp()


def _draw_random(mode: Mode, x: Tensor, *bounds: int) -> Tensor:
    if len(bounds) == 2:
        low, high = bounds
    else:
        low, high = 0, bounds[0] if bounds else 1 << (24 if x.is_floating_point() else 31)
    return _integers(mode, low, high, x.shape, x.dtype)


RANDOM_HANDLERS: dict[Any, RandomHandler] = {
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
    Tensor.cauchy_: _fill(_draw_cauchy),
    Tensor.geometric_: _fill(_draw_geometric),
    Tensor.log_normal_: _fill(_draw_log_normal),
    Tensor.random_: _fill(_draw_random),
}
