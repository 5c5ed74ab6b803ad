"""What the seconds of a step are made of, as a plan keeps it: which term of the clock each operator, parameter or
collective is.

    all_gather tp            3.1 ms, 1.2 ms of it hidden  (48 calls)

A row stands for all calls of one operator of a module, in one phase; layers that are alike share one.
`colofunc.compiler.terms` makes them from what the clock has played.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import attrs

from colofunc.planner.plan_table import time_text

COMPUTE, MEMORY, LAUNCHES, ON_HOST = "compute", "memory", "launches", "on the host"
OF_DEVICE = frozenset({COMPUTE, MEMORY, LAUNCHES, ON_HOST})
"""Sorts that are no collective and no copy."""

ROUNDING = 1e-6
"""Less of a term that nothing hides is what sums of seconds leave."""


@attrs.frozen
class Term:
    """Seconds of a step of one sort; `hidden_s`: of them, while the device works.

    `calls`: operators, every trip of a loop counted.
    """

    what: str
    seconds: float
    hidden_s: float
    calls: int

    @property
    def exposed_s(self) -> float:
        return self.seconds - self.hidden_s

    def __str__(self) -> str:
        hidden = f", {time_text(self.hidden_s)} of it hidden" if self.hidden_s else ""
        return f"{self.what:<24} {time_text(self.seconds)}{hidden}  ({self.calls} calls)"


@attrs.frozen
class TermSeconds:
    """A row of what a step takes. path: of the module, digits starred where layers are alike. what: the sort, as
    `Term.what`.

    leaves: of a collective or a copy, the parameters whose gradients or values it moves, where that is known.
    """

    path: str
    target: str
    phase: str
    what: str
    seconds: float
    hidden_s: float
    calls: int
    leaves: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The module, else the parameters, else the operator."""
        if self.path:
            return self.path
        if not self.leaves:
            return self.target
        return self.leaves[0] if len(self.leaves) == 1 else f"{self.leaves[0]} and {len(self.leaves) - 1} more"


def matches(name: str, glob: str) -> bool:
    """Whether a dotted name, or its end from some dot on, matches the glob."""
    return fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")


def names_row(row: TermSeconds, glob: str) -> bool:
    """Whether a row is a collective, or a copy, of that name: "all_gather", "all_gather tp", "copies to device"."""
    return row.what not in OF_DEVICE and (matches(row.what, glob) or matches(row.what.split()[0], glob))


def about(row: TermSeconds, glob: str) -> bool:
    """Whether a row is of a module that matches, or one in it, of an operator, or of a parameter."""
    parts = row.path.split(".")
    names = [row.target, *(".".join(parts[:k]) for k in range(1, len(parts) + 1))]
    return any(matches(name, glob) or _is_one_of(glob, name) for name in (*names, *row.leaves) if name)


def _is_one_of(asked: str, starred: str) -> bool:
    """Whether a name is one of those that a starred name stands for: "h.3.attn" of "h.*.attn", where each star is a
    number.
    """
    if "*" not in starred:
        return False
    # As of globs, the end of a name from some dot on is enough.
    parts = [re.escape(part).replace(re.escape("*"), r"\d+") for part in starred.split(".")]
    return any(re.fullmatch(r"\.".join(parts[k:]), asked) for k in range(len(parts)))


def summed(rows: Iterable[TermSeconds]) -> tuple[Term, ...]:
    """One term of each sort, those first that hold the step up longest."""
    found: dict[str, Term] = {}
    for row in rows:
        so_far = found.get(row.what, Term(row.what, 0.0, 0.0, 0))
        calls = so_far.calls + row.calls
        found[row.what] = Term(row.what, so_far.seconds + row.seconds, so_far.hidden_s + row.hidden_s, calls)
    return tuple(sorted((term for term in found.values() if term.seconds), key=lambda term: -term.exposed_s))


def terms_text(found: Sequence[Term], step_s: float) -> str:
    """The terms in lines, under which one decides; "" for none."""
    if not found:
        return ""
    first = found[0]
    if first.exposed_s <= ROUNDING * first.seconds:
        head = f"in a step of {time_text(step_s)}, the device's work hides all of it"
        return "\n".join([head, *(f"  {term}" for term in found)])
    share = first.exposed_s / step_s if step_s else 0.0
    exposed = f"{time_text(first.exposed_s)} that nothing hides, {share:.0%} of the step"
    head = f"in a step of {time_text(step_s)}, {first.what} decides: {exposed}"
    return "\n".join([head, *(f"  {term}" for term in found)])


def collectives_text(rows: Sequence[TermSeconds], most: int) -> list[str]:
    """Of each collective that was asked for, its seconds in all and of the modules or parameters that take most of
    them.
    """
    lines = []
    for term in summed(rows):
        lines.append(str(term))
        mine = sorted((row for row in rows if row.what == term.what), key=lambda row: -row.seconds)
        for row in mine[:most]:
            hidden = f", {time_text(row.hidden_s)} of it hidden" if row.hidden_s else ""
            lines.append(f"  {row.where} [{row.phase}]: {time_text(row.seconds)}{hidden}  ({row.calls} calls)")
        if len(mine) > most:
            rest = sum(row.seconds for row in mine[most:])
            lines.append(f"  and {len(mine) - most} more: {time_text(rest)}")
    return lines
