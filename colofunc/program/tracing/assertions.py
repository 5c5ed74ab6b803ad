"""Conditions that Python asks for only to raise an error: `assert x.isfinite().all()`,
`if labels.max() >= n: raise ...`.

Problem: they look at values, which a trace does not have, and stand in many models, to say early what is wrong with a
batch. Idea: a program holds what is computed where nothing is wrong. The syntax tree of the running line says whether a
condition does nothing else than raise; then the trace goes on as if all was well, and says once that the check is not
made.

    if labels is not None and labels.max() >= n:       the condition that is asked for is False
        raise ValueError(...)
    assert not torch.isnan(x).any()                    False
    assert (x > 0).all().item(), "positive"            True
"""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Sequence
from functools import cache
from types import FrameType

SourceSpan = dis.Positions
"""Of an expression: its first and last line, first and last column."""


def passes(frame: FrameType) -> bool | None:
    """The value of the condition that `frame` asks for with which its line raises nothing.

    None where it does more than to raise.
    """
    return _answer(frame.f_code.co_filename, _asked(frame))


def _asked(frame: FrameType) -> SourceSpan | None:
    """Where the expression stands whose value is asked for: by a call, or by an instruction that looks at what the one
    before has left.
    """
    before = None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            looks = "JUMP" in instruction.opname or instruction.opname == "TO_BOOL"
            return before if looks else instruction.positions
        before = instruction.positions
    return None


@cache
def _answer(file: str, asked: SourceSpan | None) -> bool | None:
    if asked is None:
        return None
    for test, passing in _checks(file):
        operand, negated = _operand(test, asked)
        if _place(operand) == asked:
            return passing is not negated
    return None


@cache
def _checks(file: str) -> Sequence[tuple[ast.expr, bool]]:
    """Conditions of a file that only raise, and the values with which they do not."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()  # a cell of a notebook, for one
    checks = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            checks.append((node.test, True))
        elif isinstance(node, ast.If) and _only_raises(node.body):
            checks.append((node.test, False))
    return checks


def _only_raises(body: Sequence[ast.stmt]) -> bool:
    """The message may be put together first."""
    return isinstance(body[-1], ast.Raise) and all(isinstance(s, (ast.Assign, ast.Raise)) for s in body)


def _operand(test: ast.expr, asked: SourceSpan) -> tuple[ast.expr, bool]:
    """The operand of `and`, `or` and `not` that holds what is asked for, and whether it is negated."""
    negated = False
    while True:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, negated = test.operand, not negated
        elif isinstance(test, ast.BoolOp):
            test = next((value for value in test.values if _holds(value, asked)), test.values[0])
        else:
            return test, negated


def _holds(node: ast.expr, asked: SourceSpan) -> bool:
    if asked.lineno is None or asked.end_lineno is None or asked.col_offset is None or asked.end_col_offset is None:
        return False
    begin, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return begin <= (asked.lineno, asked.col_offset) and (asked.end_lineno, asked.end_col_offset) <= end


def _place(node: ast.expr) -> SourceSpan:
    return SourceSpan(node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
