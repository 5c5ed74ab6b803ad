"""Every error a user can meet, one class per kind of mistake.

Each derives from `ColofuncError` and from the builtin that a Python user expects, so `except ValueError` keeps
working. A message says what went wrong, on which value, under which rule, and one thing to try; callers further out
add what only they know (shape, spec, the user's line) with `BaseException.add_note`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ColofuncError(Exception):
    """Base of all errors that colofunc raises on purpose."""


class MeshError(ColofuncError, ValueError):
    """A mesh, axis or view that does not exist or does not fit."""


class TopologyError(ColofuncError, ValueError):
    """A topology name, file or figure that cannot be used."""


class SpecError(ColofuncError, ValueError):
    """A sharding spec that cannot be parsed, or does not fit its tensor or mesh."""


class RuleError(ColofuncError, ValueError):
    """An operator rule that contradicts the operator's own shapes."""


class TraceError(ColofuncError, RuntimeError):
    """The step function does something that one recorded program cannot repeat."""


class InputError(ColofuncError, TypeError):
    """An argument of a staged step that is not what the step was planned for."""


class PlanError(ColofuncError, ValueError):
    """A wish that matches nothing, clashes with another, or cannot be met."""


class PluginError(ColofuncError, ValueError):
    """A plugin that misspells a hook, clashes with another or returns the wrong type."""


class ConsumedError(ColofuncError, RuntimeError):
    """A value whose memory was given away to an earlier call."""


class ProgramError(ColofuncError, RuntimeError):
    """A program that breaks its own invariants: a defect in a pass, never the user's fault."""


class CapacityError(ColofuncError, MemoryError):
    """A memory tier that would hold more than its capacity."""


class CollectiveError(ColofuncError, RuntimeError):
    """Ranks that disagree, wait for each other for ever, or have lost a peer."""


class CheckError(ColofuncError, AssertionError):
    """A check of `colofunc.testing` that found a difference."""


def near(name: str, names: Iterable[str], what: str = "known") -> str:
    """`"; did you mean 'x'?"` or the list of known names, to end an error message with one thing to try."""
    known = sorted({str(n) for n in names})
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    if not known:
        return f"; there are no {what} names"
    shown = ", ".join(repr(k) for k in known[:12]) + (", ..." if len(known) > 12 else "")
    return f"; {what}: {shown}"
