"""Lines that HiGHS prints although it was told to print nothing.

    with without_solver_lines():
        result = scipy.optimize.milp(...)

Problem: `HighsMipSolverData::transformNewIntegerFeasibleSolution` of the HiGHS that scipy brings announces that it
solves a program again, with a `printf` that no option reaches, so that a user who plans sees a line of C++ on stdout.
Idea: what the process writes there meanwhile goes to a file, and from there to stdout, but for these lines. Nothing
else is lost, also of other threads.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LINE = re.compile(rb"HighsMipSolverData::[^\n]*\n+")
_STDOUT = 1
_ALONE = threading.Lock()
"""There is one stdout for all threads."""


@contextmanager
def without_solver_lines() -> Iterator[None]:
    """While a solver runs.

    Where the process has no stdout, or no C library to ask for what it has buffered, nothing is done.
    """
    if os.name != "posix":
        yield
        return
    with _ALONE:
        try:
            stdout = os.dup(_STDOUT)
        except OSError:  # it is closed, so nothing is printed
            yield
            return
        c_library = ctypes.CDLL(None)
        with os.fdopen(stdout, "wb") as real, tempfile.TemporaryFile() as caught:
            c_library.fflush(None)  # what others have printed before belongs to them
            os.dup2(caught.fileno(), _STDOUT)
            try:
                yield
            finally:
                c_library.fflush(None)
                os.dup2(stdout, _STDOUT)
                caught.seek(0)
                real.write(_LINE.sub(b"", caught.read()))
