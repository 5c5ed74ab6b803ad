"""Hints: what users of a library can write where a step cannot go on, below the error.

    experts(ep) finds no experts in this step. Try: cf.moe.experts in the model
    transformers: experts_implementation="grouped_mm" (or "batched_mm"), where the model is loaded or configured

Problem: the way out of an error is often an option of the library that a model comes from, and nothing here knows a
library. Idea: an error says what it is about (`ColofuncError.about`), and plugins say by the hook `colofunc_hints` what
their users can do about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from colofunc.errors import ColofuncError
from colofunc.plugins.registry import hints_registry


@contextmanager
def hinted(plugins: tuple[Any, ...] = ()) -> Iterator[None]:
    """Errors that leave this block have the hints of all libraries as notes. `plugins`: those of the step."""
    try:
        yield
    except ColofuncError as error:
        if error.about:
            _add_hints(error, plugins)
        raise


def _add_hints(error: ColofuncError, plugins: tuple[Any, ...]) -> None:
    for library, hints in hints_registry(plugins).hints.items():
        for hint in hints:
            if hint.about == error.about and _has_run(hint.file, error.__traceback__):
                error.add_note(f"{library}: {hint.text}")


def _has_run(file: str, trace: TracebackType | None) -> bool:
    """Whether a frame of a traceback is of a file whose path ends so; of any, where none is named."""
    while file and trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(file):
            return True
        trace = trace.tb_next
    return not file
