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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import count
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from colofunc import compat
from colofunc.errors import TraceError
from colofunc.ops.attention import attention
from colofunc.ops.bags import bags_of
from colofunc.ops.canonical_experts import Catcher
from colofunc.ops.canonical_random import RANDOM_HANDLERS, RandomHandler
from colofunc.ops.ctc import reduced_ctc_loss
from colofunc.ops.grouped import grouped_mm
from colofunc.ops.linear import linear
from colofunc.ops.lstm import layer as lstm_layer
from colofunc.ops.norms import rms_norm
from colofunc.ops.seeds import draw_seed, stream
from colofunc.ops.selected import Selected, masked_selection

# Functions written in Python that call what is replaced: their bodies run under the mode again.
OPENED = ("torch.nn.functional", "torch.nn.init", "torch.functional", "torch._jit_internal")


def modes(seed: Tensor | Callable[[], Tensor], sites: Iterator[int] | None = None) -> list[TorchFunctionMode]:
    """The modes to enter, outermost first, while a step is traced or run as the single-device reference."""
    provide = (lambda: seed) if isinstance(seed, Tensor) else seed
    return [Canonical(provide, count() if sites is None else sites)]


_SINGLE_DEVICE: ContextVar[bool] = ContextVar("colofunc_single_device", default=False)


@contextmanager
def single_device(seed: Tensor | None = None) -> Iterator[None]:
    """Run a step eagerly under the canonical operators.

    Without a seed, one is drawn from torch's generator if needed; random operators find it where their operands lie.
    """
    drawn: list[Tensor] = [] if seed is None else [seed]

    def provide() -> Tensor:
        if not drawn:
            drawn.append(draw_seed())
        return drawn[0]

    token = _SINGLE_DEVICE.set(True)
    try:
        with compat.uncompiled(), ExitStack() as stack:
            stack.enter_context(Canonical(provide, count(), beside=True))
            yield
    finally:
        _SINGLE_DEVICE.reset(token)


def on_single_device() -> bool:
    """Whether the code runs inside `single_device`."""
    return _SINGLE_DEVICE.get()


class Canonical(TorchFunctionMode):
    """Replaces the functions of `HANDLERS`; everything else runs as it is.

    Activation checkpointing is a hint: what to recompute is the planner's choice, so nothing is thrown away. (A
    recomputation would count call sites anew and draw other random numbers than the forward pass.)
    """

    def __init__(self, seed: Callable[[], Tensor], sites: Iterator[int], beside: bool = False) -> None:
        """beside: operators run now, on whichever devices, so that each gets the seed on its own.

        A traced one has one symbolic device.
        """
        super().__init__()
        self.seed = seed
        self.beside = beside
        self.place: torch.device | None = None  # of the call that is replaced
        self.copies: dict[torch.device, Tensor] = {}  # of the seed
        self.sites = sites
        self.stream = stream()
        self.experts = Catcher(autocast)

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if compat.under_checkpoint():
            with compat.identity_saved_hooks():
                return self._run(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.experts.see(func, args, kwargs, self._result(func, args, kwargs))

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            self.place = _place(args, kwargs) if self.beside else None
            result = handler(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        elif _can_open(func):
            with self:
                return _open(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def key(self) -> tuple[Tensor, int]:
        """(seed, a new call site)."""
        if stream() is not self.stream:
            raise TraceError(
                "cf.random(key) stands inside a step, whose numbers follow from one seed per call. Try: `with "
                "cf.random(key):` around the calls of the step"
            )
        return self._seed_here(), next(self.sites)

    def _seed_here(self) -> Tensor:
        """The seed where the call is that is replaced."""
        seed, place = self.seed(), self.place
        if place is None or seed.device == place:
            return seed
        if place not in self.copies:
            self.copies[place] = seed.to(place)
        return self.copies[place]


def _place(args: Any, kwargs: Any) -> torch.device:
    """Where a call computes: as it says, where its first tensor lies, or where factories make theirs."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    return torch.get_default_device() if first is None else first.device


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


def opened(func: Any) -> Any:
    """The body of a torch function that is written in Python, to be called under a mode; None for every other one."""
    return _open(func) if func not in HANDLERS and _can_open(func) else None


def _can_open(func: Any) -> bool:
    return isinstance(func, types.FunctionType) and func.__globals__.get("__name__") in OPENED


@cache
def _open(func: Any) -> Any:
    """`func` without its check for overrides, so that the calls in its body are seen by the active modes."""
    scope = {**func.__globals__, **NEVER}
    # A private helper may check in place of its public function: left as it is, it would ask for that one for ever.
    helpers: dict[str, Any] = {}
    for name in func.__code__.co_names:
        helper = scope.get(name)
        if name.startswith("_") and helper is not func and _can_open(helper):
            helpers[name] = _open(helper)
    scope.update(helpers)
    if scope.get("torch") is torch:
        scope["torch"] = _Torch()
    # The two functions between which a dispatcher chooses are in its closure.
    cells: list[Any] = []
    for cell in func.__closure__ or ():
        cells.append(types.CellType(_open(cell.cell_contents)) if _can_open(cell.cell_contents) else cell)
    body = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, tuple(cells) or None)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


# ---- linear, bags of embeddings and attention ----


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as autocast would hand them to a matmul. Fake tensors sit on CPU, whatever device autocast names."""
    kinds = [tensor.device.type for tensor in tensors if tensor is not None] + ["cuda", "cpu"]
    for kind in kinds:
        # Weights without data lie on "meta", of which autocast knows nothing.
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            return tuple(_autocast_to(dtype, tensor) for tensor in tensors)
    return tensors


def _autocast_to(dtype: torch.dtype, t: Tensor | None) -> Tensor | None:
    if t is None or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(dtype)


def _in_autocast() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _linear(mode: Canonical, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if compat.in_forward_mode():
        return NotImplemented  # torch's own operators have forward-mode derivatives
    if weight.dim() != 2 or input.dim() == 0 or input.is_sparse or weight.is_sparse or weight.is_quantized:
        return NotImplemented
    return linear.apply(*autocast(input, weight, bias))


def _embedding_bag(
    canonical: Canonical, input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    """A matrix of indices, summed or averaged.

    All else is torch's: bags cut at offsets, a maximum, what writes to the table.
    """
    if input.dim() != 2 or input.is_floating_point() or mode not in ("sum", "mean") or weight.dim() != 2:
        return NotImplemented
    if offsets is not None or include_last_offset or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    factors = per_sample_weights
    if factors is not None and (mode == "mean" or factors.shape != input.shape or factors.dtype != weight.dtype):
        return NotImplemented  # torch says what is wrong
    if padding_idx is not None and not -weight.shape[0] <= padding_idx < weight.shape[0]:
        return NotImplemented
    return bags_of(input, weight, mode, factors, padding_idx)


def _dense_gradient(function: Any, position: int) -> RandomHandler:
    """`sparse`, the argument at `position`, asks for a gradient in another format.

    It has the same numbers dense, as all of a step is.
    """

    def handle(mode: Canonical, *args: Any, **kwargs: Any) -> Any:
        is_sparse = args[position] if len(args) > position else kwargs.get("sparse", False)
        if not is_sparse:
            return NotImplemented
        if len(args) > position:
            return function(*args[:position], False, *args[position + 1 :], **kwargs)
        return function(*args, **{**kwargs, "sparse": False})

    return handle


def _attention(
    mode: Canonical, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if min(query.dim(), key.dim(), value.dim()) < 2 or query.shape[-1] == 0:
        return NotImplemented
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)  # type: ignore[assignment]
    scale = 1.0 / sqrt(query.shape[-1]) if scale is None else scale
    lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    q, k, v = (_four(t, lead) for t in (query, key, value))
    heads = k.shape[1] if enable_gqa or k.shape[1] == v.shape[1] else max(k.shape[1], v.shape[1])
    if not enable_gqa and heads not in (1, q.shape[1]):
        if q.shape[1] != 1:
            return NotImplemented  # torch says what is wrong
        q = q.expand(-1, heads, -1, -1)
    k, v = (t if t.shape[1] == heads else t.expand(-1, heads, -1, -1) for t in (k, v))
    bias = None if attn_mask is None else _mask(attn_mask, lead)
    seed, site = mode.key() if dropout_p > 0.0 else (None, 0)
    out, _ = attention.apply(
        q, k, v, bias, float(scale), is_causal, 0, float(dropout_p), seed, site,
        None, None, [], [], None, None, None, None,  # no explicit positions, no part of a whole, no bounds of rows
    )  # fmt: skip
    if query.dim() != 4:
        heads_shape = (q.shape[1],) if query.dim() > 2 else ()
        leading = (*lead, *heads_shape) if query.dim() > 4 or len(lead) else heads_shape
        out = out.reshape((*leading, *out.shape[-2:]))
    # torch's result lies as the query does, and code behind it may call `.view`. In a program this is no operator.
    return out.contiguous() if query.is_contiguous() else out


def _four(x: Tensor, lead: torch.Size) -> Tensor:
    """(..., h, s, e) -> (b, h, s, e) with the leading dims broadcast to `lead` and folded."""
    while x.dim() < 4 and x.dim() < len(lead) + 3:
        x = x.unsqueeze(0)
    if x.dim() == 4 and len(lead) == 1:
        return x if x.shape[0] == lead[0] else x.expand(lead[0], -1, -1, -1)
    while x.dim() < 3:
        x = x.unsqueeze(0)
    return x.expand((*lead, *x.shape[-3:])).reshape((prod(lead), *x.shape[-3:]))


def _mask(mask: Tensor, lead: torch.Size) -> Tensor:
    """The mask with four dims, each of size one or full."""
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if len(lead) > 1 and any(size != 1 for size in mask.shape[:-3]):
        return mask.expand((*lead, *mask.shape[-3:])).reshape((prod(lead), *mask.shape[-3:]))
    return mask if mask.dim() == 4 else mask.reshape(mask.shape[-4:])


def _rms_norm(
    mode: Canonical, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if compat.in_forward_mode() or _in_autocast():
        return NotImplemented  # torch's own operators have forward-mode derivatives
    shape = tuple(normalized_shape)
    if not input.is_floating_point() or input.is_sparse or not input.numel():
        return NotImplemented
    if not shape or input.shape[-len(shape) :] != shape:
        return NotImplemented  # torch says what is wrong
    if weight is not None and (weight.dtype != input.dtype or weight.shape != shape):
        return NotImplemented
    if eps is None:
        eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
    return rms_norm.apply(input, shape, weight, eps)[0]


def _grouped_mm(mode: Canonical, mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, **more: Any) -> Any:
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or any(v is not None for v in more.values()):
        return NotImplemented
    return grouped_mm.apply(mat_a, mat_b, offs)


def _ctc_loss(
    mode: Canonical, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:  # fmt: skip
    as_tensors = [isinstance(given, Tensor) for given in (input_lengths, target_lengths)]
    joined = isinstance(targets, Selected)
    if log_probs.dim() not in (2, 3) or (any(as_tensors) and not all(as_tensors)):
        return NotImplemented  # torch says what is wrong
    if not joined and targets.dim() not in (1, 2):
        return NotImplemented
    if _in_autocast():
        log_probs = log_probs.float() if log_probs.dtype in (torch.float16, torch.bfloat16) else log_probs
    return reduced_ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)


def _masked_select(mode: Canonical, input: Tensor, mask: Tensor) -> Any:
    """Its size is a value.

    Where a step is traced, and the mask depends on its inputs, what is selected is kept in two parts.
    """
    try:
        return torch.masked_select(input, mask)
    except TraceError as refusal:
        return masked_selection(input, mask, refusal)


def _lstm(
    mode: Canonical, input: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool = False,
) -> Any:  # fmt: skip
    each = 4 if has_biases else 2
    ways = 2 if bidirectional else 1
    if isinstance(hx, Tensor) or compat.in_forward_mode() or input.dim() != 3 or input.shape[int(batch_first)] == 0:
        return NotImplemented  # a packed sequence, for one
    if len(hx) != 2 or len(params) != each * num_layers * ways:
        return NotImplemented  # hidden units are projected
    x, h0, c0, *weights = autocast(input, *hx, *params)
    assert x is not None and h0 is not None and c0 is not None
    x = x.transpose(0, 1) if batch_first else x
    last: list[tuple[Tensor, Tensor]] = []
    for number in range(num_layers):
        if number and dropout and train:
            x = RANDOM_HANDLERS[torch.dropout](mode, x, dropout, True)
        outs = []
        for way in range(ways):
            at = number * ways + way
            out, h, c = lstm_layer(x, h0[at], c0[at], weights[at * each : (at + 1) * each], way == 1)  # type: ignore[arg-type]
            outs.append(out)
            last.append((h, c))
        x = torch.cat(outs, -1) if ways > 1 else outs[0]
    h_n, c_n = (torch.stack(states) for states in zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, h_n, c_n


HANDLERS: dict[Any, RandomHandler] = {
    torch.ctc_loss: _ctc_loss,
    torch.lstm: _lstm,
    torch.masked_select: _masked_select,
    Tensor.masked_select: _masked_select,
    torch.embedding: _dense_gradient(torch.embedding, 4),
    torch.embedding_bag: _dense_gradient(torch.embedding_bag, 5),
    F.grouped_mm: _grouped_mm,
    compat.grouped_mm: _grouped_mm,
    F.linear: _linear,
    F.embedding_bag: _embedding_bag,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: _attention,
    **RANDOM_HANDLERS,
}
