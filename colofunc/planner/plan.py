"""Plan: what was decided and why, as data that can be printed, saved, compared and given back as constraints.

One `Decision` stands for all operator calls that are decided together (the same call in 48 identical layers), one
`Leaf` for one input. A plan is plain data: it needs no program and no mesh to be read.

    plan.save("plan.json"); Plan.load("plan.json").diff(plan); print(plan)
    dp: ZeRO-3 (found) · tp: Megatron column/row (found) on dp=2 tp=4 8xa100-80g: 1.07 s per step, ...
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from colofunc.errors import PlanError, near
from colofunc.planner.plan_table import plan_table, size_text, time_text

if TYPE_CHECKING:
    from rich.table import Table

FORMAT_VERSION = 1


@attrs.frozen
class Alternative:
    """Another strategy of the same operator, and what the whole step would gain or lose by it, all else as it is."""

    strategy: str
    axes: tuple[tuple[str, str], ...]
    more_s: float  # inf: it cannot be connected to its neighbours


@attrs.frozen
class Decision:
    """One operator call, or one per identical layer; `keys`: the stable key of each, "path|target|phase|occurrence"."""

    path: str  # with digits starred where there are several
    target: str
    phase: str
    rule: str
    strategy: str
    axes: tuple[tuple[str, str], ...]  # (mesh axis, factor)
    ins: tuple[str, ...]
    outs: tuple[str | None, ...]
    compute_s: float  # of one call
    communication_s: float  # converting the operands of one call, and inside it
    collectives: tuple[str, ...]
    why: str
    keys: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()

    @property
    def count(self) -> int:
        return len(self.keys)

    @property
    def cost_s(self) -> float:
        """Seconds of all calls together."""
        return self.count * (self.compute_s + self.communication_s)


@attrs.frozen
class Leaf:
    """One input leaf and the spec it is kept in."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    spec: str


@attrs.frozen
class AxisUse:
    """What one mesh axis does, in the field's words. `by`: "found", or who wished it."""

    axis: str
    words: str
    by: str = "found"

    def __str__(self) -> str:
        return f"{self.axis}: {self.words} ({self.by})"


@attrs.frozen
class Plan:
    """All decisions of one step on one mesh. Build with `make_plan`, or `Plan.load`."""

    mesh: tuple[tuple[str, int], ...]
    topology: str
    decisions: tuple[Decision, ...]
    inputs: tuple[Leaf, ...]
    outputs: tuple[str, ...]
    axes: tuple[AxisUse, ...]
    cost_s: float
    communication_s: float
    peak_bytes: int
    budget_bytes: int | None = None
    regather: tuple[str, ...] = ()  # parameters that are gathered anew in every phase
    memory: tuple[str, ...] = ()  # what was done to keep to a budget, in words

    def __str__(self) -> str:
        """One sentence."""
        mesh = " ".join(f"{name}={n}" for name, n in self.mesh)
        what = " · ".join(map(str, self.axes)) or "one rank"
        share = self.communication_s / self.cost_s if self.cost_s else 0.0
        return (
            f"{what} on {mesh} ({self.topology}): {time_text(self.cost_s)} per step, {share:.0%} of it communication, "
            f"peak {size_text(self.peak_bytes)} per rank"
        )

    @property
    def calls(self) -> int:
        """Operator calls decided."""
        return sum(d.count for d in self.decisions)

    def leaf(self, name: str) -> Leaf:
        """The input leaf of that name."""
        for leaf in self.inputs:
            if leaf.name == name:
                return leaf
        raise PlanError(f"the plan has no input {name!r}{near(name, (x.name for x in self.inputs), 'inputs')}")

    def find(self, glob: str) -> tuple[Decision, ...]:
        """Decisions whose module path or target matches; raises PlanError with near names where none does."""
        found = tuple(d for d in self.decisions if any(matches(n, glob) for n in _names(d)))
        if not found:
            raise PlanError(
                f"{glob!r} matches no operator of the plan{near(glob, {d.path or d.target for d in self.decisions})}"
            )
        return found

    def table(self, glob: str = "*", costly: int | None = None) -> Table:
        """A rich table, one line per decision (×48 for identical layers). `costly`: only so many, the dearest."""
        return plan_table(self, self.decisions if glob == "*" else self.find(glob), costly)

    def why(self, glob: str, most: int = 4) -> str:
        """What was chosen for matching operators, and what the best alternatives would cost."""
        lines = []
        for d in self.find(glob):
            times = f" ×{d.count}" if d.count > 1 else ""
            lines.append(f"{_where(d)}{times} [{d.phase}]  {d.rule}")
            lines.append(
                f"  {d.strategy}: {time_text(d.compute_s)} compute + {time_text(d.communication_s)} communication"
                + (f" ({'; '.join(d.collectives)})" if d.collectives else "")
            )
            lines.append(f"  {d.why}")
            for other in d.alternatives[:most]:
                lines.append(f"  instead {other.strategy}: {_more(other)}")
        return "\n".join(lines)

    def why_not(self, what: str, glob: str = "*") -> str:
        """What another choice would cost: a strategy "{tp: i}", any with an axis on a factor "tp: i", or a name."""
        lines = []
        for d in self.find(glob):
            found = [a for a in d.alternatives if _is(what, a)]
            if _is(what, d):
                lines.append(f"{_where(d)} [{d.phase}]: {d.strategy} is what was chosen")
            elif found:
                lines.append(f"{_where(d)} [{d.phase}]: {found[0].strategy} instead of {d.strategy}, {_more(found[0])}")
            elif glob != "*":
                hint = near(what, _choices([d], what), "choices")
                lines.append(f"{_where(d)} [{d.phase}]: no strategy {what!r}; its rule is {d.rule or 'replicated'}{hint}")
        if not lines:
            return f"no operator matching {glob!r} has a strategy {what!r}{near(what, _choices(self.decisions, what), 'choices')}"
        return "\n".join(lines)

    def diff(self, other: Plan) -> str:
        """What changes from this plan to `other`, a line each; "" where they decide alike."""
        lines = [f"mesh {self.mesh} -> {other.mesh}"] if self.mesh != other.mesh else []
        mine, theirs = ({x.name: x.spec for x in p.inputs} for p in (self, other))
        lines += _changes(mine, theirs)
        before, after = ({k: d.strategy for d in p.decisions for k in d.keys} for p in (self, other))
        lines += _changes(before, after)
        if lines and self.cost_s:
            lines.append(
                f"{time_text(self.cost_s)} -> {time_text(other.cost_s)} ({other.cost_s / self.cost_s - 1:+.1%})"
            )
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a versioned JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """What `save` writes, as plain data."""
        data: dict[str, Any] = _finite({"colofunc_plan": FORMAT_VERSION, **attrs.asdict(self)})
        return data

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read what `save` wrote; raises PlanError where the file is no plan of this version."""
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise PlanError(
                f"cannot read plan {str(path)!r}: {error.strerror or error}; give the path of Plan.save"
            ) from error
        except ValueError as error:
            raise PlanError(f"plan file {str(path)!r} is not JSON ({error}); write it again with Plan.save") from error
        return Plan.from_dict(data, str(path))

    @staticmethod
    def from_dict(data: Any, path: str = "plan") -> Plan:
        """A plan from what `to_dict` gave; `path`: where it came from, for errors."""
        data = dict(data) if isinstance(data, dict) else data
        version = data.pop("colofunc_plan", None) if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise PlanError(
                f"{str(path)!r} is no plan of version {FORMAT_VERSION} but {version!r}; write it again with Plan.save"
            )
        try:
            return _build(Plan, data)
        except (TypeError, KeyError, ValueError) as error:
            raise PlanError(f"plan file {str(path)!r} is damaged: {error}; write it again with Plan.save") from error


_NESTED: Mapping[tuple[type, str], type] = {
    (Plan, "decisions"): Decision,
    (Plan, "inputs"): Leaf,
    (Plan, "axes"): AxisUse,
    (Decision, "alternatives"): Alternative,
}


def _build(cls: Any, data: Mapping[str, Any]) -> Any:
    fields = {}
    for name, value in data.items():
        nested = _NESTED.get((cls, name))
        fields[name] = tuple(_build(nested, item) for item in value) if nested else _tuples(value)
    if cls is Alternative and fields.get("more_s") == "impossible":
        fields["more_s"] = float("inf")
    return cls(**fields)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return "impossible" if value == float("inf") else value


def matches(name: str, glob: str) -> bool:
    """Whether a dotted name, or its end from some dot on, matches the glob."""
    return fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")


def parse_axes(text: str) -> tuple[tuple[str, str], ...]:
    """`"{dp: b, tp: o}"` or `"tp: o"` -> (("dp", "b"), ("tp", "o")); () for other words."""
    pairs = []
    for part in text.strip().removeprefix("{").removesuffix("}").split(","):
        axis, colon, factor = part.partition(":")
        if not colon:
            return ()
        pairs.append((axis.strip(), factor.strip()))
    return tuple(pairs)


def _is(what: str, choice: Decision | Alternative) -> bool:
    pairs = parse_axes(what)
    if what.startswith("{") and pairs:
        return set(pairs) == set(choice.axes) or what == choice.strategy
    return set(pairs) <= set(choice.axes) if pairs else what in choice.strategy


def _choices(decisions: Iterable[Decision], what: str) -> set[str]:
    """What `why_not` knows, in the words of the question: names of strategies, or single pairs "tp: i"."""
    all_of: list[Decision | Alternative] = []
    for d in decisions:
        all_of += [d, *d.alternatives]
    if ":" in what and not what.startswith("{"):
        return {f"{axis}: {factor}" for c in all_of for axis, factor in c.axes}
    return {c.strategy for c in all_of}


def _names(d: Decision) -> Iterable[str]:
    yield d.path
    yield d.target
    if "*" in d.path:
        yield from dict.fromkeys(key.split("|", 1)[0] for key in d.keys)


def _where(d: Decision) -> str:
    return f"{d.path} {d.target}" if d.path else d.target


def _more(other: Alternative) -> str:
    if other.more_s == float("inf"):
        return "cannot be connected to its neighbours"
    return f"{'+' if other.more_s >= 0 else '-'}{time_text(abs(other.more_s))} with everything else as it is"


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    lines = [f"{k}: {v} -> {after[k]}" for k, v in before.items() if k in after and after[k] != v]
    lines += [f"- {k}: {v}" for k, v in before.items() if k not in after]
    return lines + [f"+ {k}: {v}" for k, v in after.items() if k not in before]
