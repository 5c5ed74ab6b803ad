"""What HiGHS prints by itself does not reach stdout; all else that is printed meanwhile does, once and in order."""

import ctypes
import os

import pytest

from colofunc.planner.solver_lines import without_solver_lines

LINE = b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\n"


def print_in_c(text: bytes) -> None:
    """As the solver does: through the buffer of the C library."""
    ctypes.CDLL(None).puts(text)


def test_only_the_solvers_own_line_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    print_in_c(b"before")
    with without_solver_lines():
        print_in_c(b"meanwhile")
        print_in_c(LINE)
        os.write(1, b"and at once\n")
        print_in_c(LINE)
    print_in_c(b"behind")
    ctypes.CDLL(None).fflush(None)
    said = capfd.readouterr().out.split("\n")
    assert sorted(said) == sorted(["before", "meanwhile", "and at once", "behind", ""])
    assert said[0] == "before" and said[-2] == "behind"


def test_stdout_is_what_it_was_where_the_solver_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no solution"), without_solver_lines():
        print_in_c(LINE)
        raise ValueError("no solution")
    os.write(1, b"there\n")
    assert capfd.readouterr().out == "there\n"


def test_a_process_without_stdout_solves_too() -> None:
    kept = os.dup(1)
    os.close(1)
    try:
        with without_solver_lines():
            solved = True
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert solved
