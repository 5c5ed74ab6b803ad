"""Where a traced operator comes from: its module path, the user's source line, its phase.

Problem: a plan or an error that names `%212 mm` helps nobody. Idea: while a trace is active, forward hooks keep the
module path, the Python stack gives the innermost line outside torch and colofunc, and an operator of the backward pass
takes path and line from the forward operator with the same autograd sequence number.

>>> with phase("update"):
...     ...          # operators recorded here are the optimizer's
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import attrs
import torch

from colofunc import compat
from colofunc.errors import TraceError
from colofunc.program.ir import PHASES
from colofunc.program.tracing.module_tensors import ContainerBefore

_HERE = os.path.dirname(os.path.abspath(compat.__file__)) + os.sep
_TRACE = os.path.join(_HERE, "program", "tracing", "trace.py")
_COMMAND_LINE = os.path.join(_HERE, "cli.py")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DISTRIBUTIONS = os.path.join("torch", "distributions") + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_GENERATED = ("<string>", "<frozen", "<attrs", "<eval_with_key>", "<__array_function__")


@attrs.frozen
class Attribute:
    """Where a module holds a tensor in a plain attribute. `known`: since before the model was taken apart.

    `buffer`: the name of the buffer that the tensor is as well, "" where it is none.
    """

    path: str
    name: str
    tensor: torch.Tensor = attrs.field(eq=False, repr=False)
    known: bool
    buffer: str = ""

    def __str__(self) -> str:
        return f"in attribute {self.name!r} of module {self.path or '(the model itself)'!r}"


class Whereabouts:
    """The stacks of one active trace: phases, module paths, and forward origins by autograd sequence number."""

    def __init__(self) -> None:
        self.phases: list[str] = ["forward"]
        self.paths: list[str] = [""]
        self.gradients = True  # the grad mode that the step has set, whatever torch does inside of autograd Functions
        self.frozen: dict[int, str] = {}  # id of a tensor that is captured as a frozen weight -> its name
        self.marks: dict[str, str] = {}  # name of an input leaf -> its role, as somebody said (see `roles`)
        # id of a tensor in plain attributes of modules -> where it is, of the innermost module that is watched last
        self.attributes: dict[int, tuple[Attribute, ...]] = {}
        self.read: list[Attribute] = []  # of these, what was read
        self.replaced: dict[
            int, str
        ] = {}  # id of a module's own parameter, for which the step passes another -> its name
        self.watched: frozenset[int] = frozenset()  # ids of modules whose attributes are watched
        # (module, id of a tensor in an attribute of it, what is trained): whether it is filled in again has been asked
        self.asked: set[tuple[str, int, frozenset[str]]] = set()
        self.kept: list[ContainerBefore] = []  # what plain attributes of modules held before their first forward
        self.modules: dict[int, ref[torch.nn.Module]] = {}  # by id: what was called (see `used`)
        self.models: dict[int, ref[Any]] = {}  # by id: models that were called, with their frozen weights
        self._origin: dict[int, tuple[str, str]] = {}

    def now(self) -> tuple[str, str, str]:
        """(phase, path, line) of the operator that is being recorded."""
        if compat.in_backward():
            origin = self._origin.get(compat.backward_sequence())
            if origin is not None:
                return "backward", *origin
            return "backward", self.paths[-1], user_line()
        origin = self.paths[-1], user_line()
        self._origin.setdefault(compat.forward_sequence(), origin)
        return self.phases[-1], *origin


_ACTIVE: ContextVar[Whereabouts | None] = ContextVar("colofunc_trace", default=None)


def active_stacks() -> Whereabouts | None:
    """The stacks of the trace that runs in this context, None outside of a trace."""
    return _ACTIVE.get()


@contextmanager
def activate(whereabouts: Whereabouts) -> Iterator[None]:
    token = _ACTIVE.set(whereabouts)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Operators recorded inside belong to phase `name` ("update" for an optimizer). Does nothing outside of a trace."""
    if name not in PHASES:
        raise TraceError(f"phase {name!r} is none of {', '.join(PHASES)}")
    here = active_stacks()
    if here is None:
        yield
        return
    here.phases.append(name)
    try:
        yield
    finally:
        here.phases.pop()


def name_frozen(tensors: Mapping[str, torch.Tensor]) -> None:
    """From now on these are captured as frozen weights, `frozen.<name>`. Does nothing outside of a trace."""
    here = active_stacks()
    if here is None:
        return
    new = {name: t for name, t in tensors.items() if id(t) not in here.frozen}
    taken = set(here.frozen.values())
    # Another model may have the same names: frozen, frozen2, frozen3, ...
    prefix, number = "frozen", 1
    while any(f"{prefix}.{name}" in taken for name in new):
        number += 1
        prefix = f"frozen{number}"
    here.frozen.update({id(t): f"{prefix}.{name}" for name, t in new.items()})


@contextmanager
def watch_modules(module: torch.nn.Module) -> Iterator[None]:
    """While a trace is active, operators inside `module` carry the dotted name of the submodule that called them."""
    here = active_stacks()
    if here is None:
        yield
        return
    handles: list[Any] = []
    paths = here.paths
    depth = len(paths)

    def enter(path: str) -> Any:
        return lambda mod, args: paths.append(path)

    def leave(mod: torch.nn.Module, args: Any, out: Any) -> None:
        paths.pop()

    for name, sub in module.named_modules():
        if isinstance(sub, torch.jit.ScriptModule):
            continue  # takes no hooks, or never calls those of its submodules
        # The enter hook runs after the module's own pre-hooks have been registered but must see every call: prepend.
        handles.append(sub.register_forward_pre_hook(enter(name), prepend=True))
        handles.append(sub.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        del paths[depth:]
        for handle in handles:
            handle.remove()


_IS_USER: dict[str, bool] = {}


def _is_user(code: CodeType) -> bool:
    return _is_user_file(code.co_filename)  # to hash a code object takes longer


def _is_user_file(name: str) -> bool:
    known = _IS_USER.get(name)
    if known is None:
        inside = name.startswith((_HERE, _TORCH)) or (name.startswith(_STDLIB) and "site-packages" not in name)
        known = _IS_USER[name] = not inside and not name.startswith(_GENERATED)
    return known


def user_frame() -> FrameType | None:
    """The innermost frame outside torch, colofunc and the standard library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user(frame.f_code):
        if frame.f_code.co_filename == _COMMAND_LINE:
            return None  # further out is what started the command
        frame = frame.f_back
    return frame


def user_line() -> str:
    """`file.py:12 in f` of that frame; "" if there is none."""
    frame = user_frame()
    return "" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def variable_of(tensor: torch.Tensor) -> str:
    """What the step calls a tensor, `W` or `weights['a']`, in its outermost frame that knows it; "" in none."""
    found = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _TRACE:
        if _is_user(frame.f_code):
            read = set(frame.f_code.co_names)
            names = {**{k: v for k, v in frame.f_globals.items() if k in read}, **frame.f_locals}
            found = _named_among(tensor, names) or found
        frame = frame.f_back
    return found


def _named_among(tensor: torch.Tensor, names: Mapping[str, Any]) -> str:
    for name, value in names.items():
        if value is tensor:
            return name
    for name, value in names.items():
        items: Any = ()
        if type(value) is dict:
            items = value.items()
        elif type(value) in (list, tuple):
            items = enumerate(value)
        for key, item in items:
            if item is tensor:
                return f"{name}[{key!r}]"
    return ""


_STACK_ENTRY = re.compile(r'File "(.+)", line (\d+), in (.+)')


def maker_line(tensor: torch.Tensor) -> str:
    """The line that computed a tensor, where torch has kept it (`torch.autograd.set_detect_anomaly`); else ""."""
    # A dict, which torch's stubs call a method.
    kept: Any = {} if tensor.grad_fn is None else tensor.grad_fn.metadata
    stack: list[str] = kept.get("traceback_", [])
    for entry in reversed(stack):
        at = _STACK_ENTRY.search(entry)
        if at is not None and _is_user_file(at[1]):
            return _line(at[1], int(at[2]), at[3])
    return ""


def raised_line(error: BaseException) -> str:
    """The innermost such line in the traceback of an error."""
    line, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        line = _line(code.co_filename, trace.tb_lineno, code.co_name) if _is_user(code) else line
        trace = trace.tb_next
    return line


@lru_cache(maxsize=1 << 12)
def _line(file: str, number: int, function: str) -> str:
    return f"{os.path.basename(file)}:{number} in {function}"


def inside_file(suffix: str, function: str = "") -> bool:
    """Whether a frame of the current stack runs code of a file that ends with `suffix`, of that function where one is
    named.
    """
    return any(code.co_filename.endswith(suffix) and function in ("", code.co_name) for code in _running())


def inside_distributions() -> bool:
    """Whether a frame of the current stack runs code of torch.distributions."""
    return any(_DISTRIBUTIONS in code.co_filename for code in _running())


def _running() -> Iterator[CodeType]:
    """The code of the current stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back  # type: ignore[assignment]
