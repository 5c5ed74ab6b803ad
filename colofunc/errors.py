"""Every error a user can meet, one class per kind of mistake.

Each derives from `ColofuncError` and from the builtin that a Python user expects, so `except ValueError` keeps
working. A message says what went wrong, on which value, under which rule, and one thing to try; callers further out
add what only they know (shape, spec, the user's line) with `BaseException.add_note`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class ColofuncError(Exception):
    """Base of all errors that colofunc raises on purpose.

    `about`: the subject by which plugins give a hint for users of a library (`colofunc_hints`); "" for most errors.
    """

    def __init__(self, *args: object, about: str = "") -> None:
        super().__init__(*args)
        self.about = about


class MeshError(ColofuncError, ValueError):
    """A mesh, axis or view that does not exist or does not fit.

    Usual causes: a misspelt axis; as many processes as the mesh has ranks were not started. `cf.Mesh(dp=-1, tp=2)`
    takes the size of `dp` from the launcher; without one, the mesh is simulated in this process.
    """


class TopologyError(ColofuncError, ValueError):
    """A topology name, file or figure that cannot be used.

    `topology="ideal"` is free communication and unlimited memory, for tests; names such as "8xa100-80g" are built in.
    """


class SpecError(ColofuncError, ValueError):
    """A sharding spec that cannot be parsed, or does not fit its tensor or mesh.

    One word or group per dim: `(dp b) s (tp d)`; `...` stands for the rest; `b~` pads what does not divide; `+tp` is a
    pending sum. A group with two names that are no axes is taken for a misspelt axis. A plain tensor with dims beside a
    DTensor has no spec at all: place it with `cf.distribute(tensor, "...", mesh)`.
    """


class RuleError(ColofuncError, ValueError):
    """An operator rule that contradicts the operator's own shapes, or an operator that no rule covers and none may
    replicate.

    Rules of plugins are checked against each call. Outside of a step, operators that draw random numbers have no rule.
    """


class TraceError(ColofuncError, RuntimeError):
    """The step function does something that one recorded program cannot repeat.

    Python runs once per signature. Decisions on values become `torch.where`; numbers that change per call become
    arguments; random numbers come from torch; what the step changes is an argument and a result. A tensor that is kept
    from an earlier trace, or two dtypes in one matrix product, are refused here as well.
    """


class InputError(ColofuncError, TypeError):
    """An argument of a staged step that is not what the step was planned for, or a tree of specs that is not its tree.

    The message gives the path of the leaf. `step.lower` takes tensors without data (`cf.abstract`), running does not.
    """


class PlanError(ColofuncError, ValueError):
    """A wish that matches nothing, clashes with another, or cannot be met.

    Globs match the end of a parameter's dotted name from some dot on. Two wishes that place one axis of one tensor in
    two places clash. Where no plan fits in memory the message says what dominates the least peak found.
    """


class ConfigError(ColofuncError, ValueError):
    """A configuration with a key, a value or a file that cannot be used.

    The message begins with the file and line. Misspelt keys get near names; a transform under `parallel` and a policy
    without its transform are told where they stand. YAML needs PyYAML; JSON does not.
    """


class PrecisionError(ColofuncError, ArithmeticError):
    """Gradients that were not finite for so many steps in a row that no loss scale can help.

    Skipped steps leave the state as it was, so it can still be saved. bf16 has the range of float32 and needs no scale.
    """


class PluginError(ColofuncError, ValueError):
    """A plugin that misspells a hook, clashes with another, fails or returns the wrong type. The message names it."""


@contextmanager
def plugin_faults(what: str, remedy: str) -> Iterator[None]:
    """Inside, what code of a plugin raises is a PluginError: "`what` failed: ... Try: `remedy`".

    Errors of this project pass, and so does what is no fault of the code: no memory is left.
    """
    try:
        yield
    except (ColofuncError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which this module does not import
            raise
        raise plugin_error(what, remedy, error) from error


def plugin_error(what: str, remedy: str, error: Exception) -> PluginError:
    """What is said of an error that code of a plugin has raised."""
    return PluginError(f"{what} failed: {type(error).__name__}: {error}. Try: {remedy}")


class ConsumedError(ColofuncError, RuntimeError):
    """A value whose memory was given away to an earlier call, or a view of one that was written since.

    A step consumes its first argument where its first result can take the memory: go on with the result, or pass
    `donate=()`. A view is taken again after its base was written, or cloned before.
    """


class ProgramError(ColofuncError, RuntimeError):
    """A program that breaks its own invariants: a defect in a pass (or a plugin's strategy), never the caller's fault.

    Please report it with the text of the message, which shows the operators around the defect.
    """


class CapacityError(ColofuncError, MemoryError):
    """A memory tier that would hold more than its capacity.

    `low.memory().at_peak` says what is alive at the peak and which line made it.

    A device that is full while a step runs, as others use it too, is `torch.OutOfMemoryError`: torch says how many
    bytes did not fit, and notes which argument or operator asked for them, what the plan holds at its peak, and one
    thing to try. The state is as it was; if its update had begun, it is lost, and to use it is a `ConsumedError`.
    """


class CollectiveError(ColofuncError, RuntimeError):
    """Ranks that disagree, wait for each other for ever, or have lost a peer.

    The first traceback among the ranks is the cause; the others ended because of it. A step of `cf.pipeline` that
    raised behind its first message may have left some under way: no further one runs until the processes are started
    again.
    """


class CheckpointError(ColofuncError, RuntimeError):
    """A saved folder that is incomplete, changed, foreign or in use, or does not fit what it is loaded into.

    A save that fails leaves the folder as it was before. The message names the file and the tensor; `strict=False`
    loads what fits.
    """


class DiskError(ColofuncError, OSError):
    """A directory of the disk tier that is missing, not writable, full or removed, or data that reads back changed.

    The message names the path, and where there is too little room the bytes needed and free. What the last commit wrote
    stays as it was. Every chunk takes its room twice, because a write never touches the version that counts.
    """


class NativeError(ColofuncError, RuntimeError):
    """Kernels in C++ or CUDA that COLOFUNC_NATIVE=require or `python -m colofunc native` asked for and that are not
    there.

    The message says why: no compiler, one that failed (and the file with what it said), a folder that cannot be
    written, a GPU that cannot run them. Otherwise the same is a warning, once, and operators run in Python.
    """


class SwitchError(ColofuncError, ValueError):
    """An environment variable with a value that it cannot have, or a switch that is not documented.

    The message names the variable: one of `COLOFUNC_...` (docs/environment.md), or one that a launcher sets, such as a
    RANK that is no rank of WORLD_SIZE. Every process of a run has to have them.
    """


class FaultError(ColofuncError, RuntimeError):
    """A failure that `cf.testing.fail` asked for, in a test of what a run does when a rank fails."""


class CheckError(ColofuncError, AssertionError):
    """A check of `colofunc.testing` that found a difference: which leaf or strategy, and by how much."""


def near(name: object, names: Iterable[str], what: str = "known") -> str:
    """`"; did you mean 'x'?"` or the list of known names, to end an error message with one thing to try. name: whatever
    was given.
    """
    known = sorted({str(name) for name in names})
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    if not known:
        return f"; there are no {what}" if what != "known" else "; there are no known names"
    shown = ", ".join(repr(k) for k in known[:12]) + (", ..." if len(known) > 12 else "")
    return f"; {what}: {shown}"
