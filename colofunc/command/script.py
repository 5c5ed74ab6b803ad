"""The step that the command line is given: a script or module is read, and its step and example arguments are taken
from it.

    train.py:step        the step function, or a staged one; `example()` or `inputs()` of the script gives its arguments
    train.py:plan_me     a function without arguments that returns (step, state, batch)

An error of the script is shown as the script's own, without our lines.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import typer
from rich.console import Console

from colofunc import errors
from colofunc.compiler.staged import Staged
from colofunc.errors import ColofuncError, InputError, near

EXAMPLES = ("example", "inputs")
"""Names of functions that give a step's arguments, where the command names none."""
_HERE = str(Path(errors.__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep


def load_step(target: str, example: str = "") -> tuple[Any, tuple[Any, ...]]:
    """The step that `target` names, and what to call it with."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise InputError(f"{target!r} names no step; write script.py:NAME, such as train.py:step")
    module = _module(where)
    if not hasattr(module, name):
        raise InputError(f"{where} has no {name!r}{near(name, _public_functions(module), 'names')}")
    step = getattr(module, name)
    if not callable(step):
        kind = type(step).__name__
        raise InputError(f"{target} is of type {kind}; name a step function, or one that returns (step, state, batch)")
    if isinstance(step, Staged) or _has_required_arguments(step):
        return step, _example_arguments(module, where, target, example)

    with errors_of(f"{target}()"):
        returned = step()
    if not isinstance(returned, tuple) or len(returned) < 2 or not callable(returned[0]):
        kind = type(returned).__name__
        raise InputError(f"{target} takes no arguments, so it has to return (step, state, batch); it returned {kind}")
    return returned[0], returned[1:]


def _example_arguments(module: ModuleType, where: str, target: str, example: str) -> tuple[Any, ...]:
    """What `example`, or the first of EXAMPLES that the module has, returns."""
    name = example
    if not name:
        name = next((candidate for candidate in EXAMPLES if hasattr(module, candidate)), "")
    if not name or not callable(getattr(module, name, None)):
        missing = f"no function {example!r}" if example else f"neither {EXAMPLES[0]}() nor {EXAMPLES[1]}()"
        raise InputError(
            f"{where} has {missing} that returns what {target} is called with; add `def example(): return state, "
            "batch` (cf.abstract and lazy tensors will do), or name one with --example"
        )
    with errors_of(f"{name}() of {where}"):
        arguments = getattr(module, name)()
    if not isinstance(arguments, tuple):
        kind = type(arguments).__name__
        raise InputError(
            f"{name}() of {where} returned {kind}; return the arguments of the step as a tuple: (state, batch)"
        )
    return arguments


def _module(where: str) -> ModuleType:
    """A module by its name, or by the path of its file, whose folder is then searched by its imports."""
    if not where.endswith(".py"):
        try:
            with errors_of(where, ModuleNotFoundError):
                return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise InputError(
                f"there is no module {where!r} ({error}); write the path of a file, such as train.py:step"
            ) from error
    path = Path(where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"there is no file {where!r}; write its path from here, such as examples/train.py:step")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    with errors_of(where):
        spec.loader.exec_module(module)
    return module


def _public_functions(module: ModuleType) -> list[str]:
    return [name for name, thing in vars(module).items() if not name.startswith("_") and callable(thing)]


def _has_required_arguments(function: Callable[..., Any]) -> bool:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is parameter.empty or parameter.kind is parameter.VAR_POSITIONAL:
            return True
    return False


# ---- errors ----


@contextmanager
def errors_of(what: str, *passing: type[Exception], ours: bool = False) -> Iterator[None]:
    """An error of the script is printed as its own: its lines, not ours, and the command ends.

    `passing` pass as they are.

    ours: the script is called by us, so errors that we raise, on purpose or as a defect, pass too.
    """
    try:
        yield
    except passing:
        raise
    except SystemExit as error:
        remedy = "put what it does as a program under if __name__ == '__main__':"
        raise InputError(f"{what} ended the program (exit {error.code}) while it was read; {remedy}") from error
    except Exception as error:
        shown = traceback.TracebackException.from_exception(error)
        innermost = shown.stack[-1].filename if shown.stack else ""
        script_frame_count = _remove_our_frames(shown)
        is_ours = isinstance(error, ColofuncError) or innermost.startswith(_HERE) or not script_frame_count
        if ours and is_ours:
            raise
        complain(f"colofunc: {what} failed, and nothing was planned\n" + "".join(shown.format()).rstrip())
        raise typer.Exit(1) from error


def _remove_our_frames(shown: traceback.TracebackException) -> int:
    """Takes frames of colofunc, torch and the import system out of a traceback and its causes; how many of its own are
    left.
    """
    for cause in (shown.__cause__, shown.__context__):
        if cause is not None:
            _remove_our_frames(cause)
    frames = [frame for frame in shown.stack if not frame.filename.startswith((_HERE, _TORCH, "<frozen "))]
    shown.stack = traceback.StackSummary.from_list(frames)
    return len(shown.stack)


def complain(text: str) -> None:
    """Print an error in red."""
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
