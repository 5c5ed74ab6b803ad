"""Looking at values from inside a step: `print` and `tap`, eagerly and in staged steps.

Problem: Python's `print` runs once, while the step is traced, when there is no value yet. Idea: an operator that has no
result, only an effect. It is recorded where it stands, stays there, and each time the step runs the main rank shows the
global value; bringing the value together is part of the program, as for any operator that wants it whole.

    def step(state, batch):
        loss, grads = cf.value_and_grad(loss_fn)(state["params"], batch)
        cf.debug.print("loss {:.3f}, first bias {}", loss, state["params"]["b"])
        cf.debug.print("{x}", x=batch, ranks=True)            # every rank its own part
        cf.debug.tap(grads["w"], "dw")                        # kept by `with cf.debug.collect() as seen`

No effect on numbers: what is shown is detached, and nothing reads it. It is part of what is planned, though: a large
value has to be gathered to be shown whole, and `low.cost()` says so.
"""

from __future__ import annotations

import builtins
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops.define import define

# Programs are plain data that ranks compare, so a node says the name of its function; this is where the name leads.
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
_COLLECTED: ContextVar[dict[str, list[Any]] | None] = ContextVar("colofunc_collected", default=None)
_QUIET: ContextVar[bool] = ContextVar("colofunc_quiet", default=False)
_FORMATTER = string.Formatter()


def print(text: str, *values: Any, ranks: bool = False, **named: Any) -> None:
    """Print `text.format(*values, **named)` each time the step comes here: the main rank, global values.

    `ranks`: every rank prints its own part, behind `[rank r]`. What is no tensor is formatted while tracing.
    """
    if not isinstance(text, str):
        raise InputError(
            f'cf.debug.print wants a text first, then values: cf.debug.print("x {{}}", x), not {type(text).__name__}'
        )
    template, tensors = _template(text, values, named)
    _debug(tensors, template, "", ranks)


def tap(x: Tensor, to: Callable[..., Any] | str, ranks: bool = False) -> Tensor:
    """Hand a copy of `x` to a function each time the step comes here, or keep it under a name; returns `x`.

    A function is called as `to(value)` on the main rank, with `ranks` as `to(part, rank)` on every rank. What a name
    keeps is in the lists that `collect` gives; outside of `collect` it is dropped.
    """
    if not isinstance(x, Tensor):
        raise InputError(f"cf.debug.tap wants a tensor, not {type(x).__name__}")
    if not (callable(to) or isinstance(to, str)):
        raise InputError(f"cf.debug.tap wants a function or a name as its second argument, not {type(to).__name__}")
    _debug([x.detach()], "", f"name:{to}" if isinstance(to, str) else _known_as(to), ranks)
    return x


@contextmanager
def collect() -> Iterator[dict[str, list[Any]]]:
    """Inside, what `tap(x, "name")` is handed is appended to `seen["name"]` (with `ranks`: pairs (rank, part))."""
    seen: dict[str, list[Any]] = {}
    token = _COLLECTED.set(seen)
    try:
        yield seen
    finally:
        _COLLECTED.reset(token)


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing is shown: for runs that only look into a step."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def show(values: Sequence[Tensor], text: str, key: str, ranks: bool, rank: int) -> None:
    """What happens when a step comes to a debug operator on `rank`; executors call it on the ranks that show."""
    if _QUIET.get():
        return
    if not key:
        shown = [v.item() if v.dim() == 0 else v for v in values]
        builtins.print(f"{f'[rank {rank}] ' if ranks else ''}{text.format(*shown)}", flush=True)
        return
    kind, name = key.split(":", 1)
    copy = values[0].detach().clone()  # the memory may be written to as soon as nobody reads it
    if kind == "function":
        if name not in _FUNCTIONS:
            raise InputError(
                f"this program hands values to {name}, a function of the process that traced it; trace the step again "
                "here"
            )
        _FUNCTIONS[name](*((copy, rank) if ranks else (copy,)))
        return
    seen = _COLLECTED.get()
    if seen is not None:
        seen.setdefault(name, []).append((rank, copy) if ranks else copy)


def _known_as(fn: Callable[..., Any]) -> str:
    """The name of a function in programs: the same on all ranks that trace the same steps."""
    name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
    for k in count():
        if _FUNCTIONS.setdefault(f"{name}#{k}", fn) is fn:
            return f"function:{name}#{k}"
    raise AssertionError("count() does not end")


def _template(text: str, values: Sequence[Any], named: dict[str, Any]) -> tuple[str, list[Tensor]]:
    """The text with what is known filled in, and the tensors that its fields, numbered anew, stand for."""
    out: list[str] = []
    tensors: list[Tensor] = []
    numbers = count()
    for literal, field, spec, conversion in _FORMATTER.parse(text):
        out.append(_escaped(literal))
        if field is None:
            continue
        name = str(next(numbers)) + field if not field or field[0] in ".[" else field
        try:
            value, _ = _FORMATTER.get_field(name, values, named)
            spec = (spec or "").format(*values, **named)
        except (LookupError, AttributeError) as error:
            raise InputError(
                f"cf.debug.print: {text!r} asks for {field or 'a value'!r}, which was not given ({error})"
            ) from error
        if not isinstance(value, Tensor):
            out.append(_escaped(format(_FORMATTER.convert_field(value, conversion) if conversion else value, spec)))
            continue
        if spec and value.dim() > 0:
            raise InputError(
                f"cf.debug.print: {text!r} formats a tensor of shape {tuple(value.shape)} as {spec!r}, which is for "
                "numbers; print it as {} or reduce it first, x.mean()"
            )
        out.append(f"{{{len(tensors)}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}}}")
        tensors.append(value.detach())
    return "".join(out), tensors


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


# ---- the operator ----


def _kernel(values: Sequence[Tensor], text: str, key: str, ranks: bool) -> None:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if ranks or rank == 0:
        show(values, text, key, ranks, rank)


def _nothing(values: Sequence[Tensor], text: str, key: str, ranks: bool) -> None:
    return None


_debug = define("debug(Tensor[] values, str text, str key, bool ranks) -> ()", _kernel, _nothing, kind="effect")
