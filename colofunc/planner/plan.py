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
from typing import Any

import attrs

from colofunc import owned, untrusted
from colofunc.errors import PlanError, near
from colofunc.planner.plan_cuts import why_cut, why_not_cut
from colofunc.planner.plan_table import plan_table, size_text, time_text
from colofunc.planner.plan_terms import TermSeconds, about, collectives_text, names_row, summed, terms_text
from colofunc.planner.plan_terms import matches as matches
from colofunc.planner.plan_why import LEGEND, more_text, where_text, why_decision, why_leaf
from colofunc.planner.stages.report import Pipelined
from colofunc.spec.layout import At, at_text

FORMAT_VERSION = 1
"""Of the file of a plan."""
MARK = "colofunc_plan"
INFINITY = "impossible"  # JSON has none


@attrs.frozen
class Alternative:
    """Another strategy of the same operator, and what the whole step would gain or lose by it, all else as it is."""

    strategy: str
    axes: tuple[tuple[str, str], ...]
    more_s: float  # inf: it cannot be connected to its neighbours
    more_compute_s: float | None = None  # of `more_s`, what the operator itself takes longer


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
    why: str = ""
    read_by: tuple[str, ...] = ()  # the first few operators
    alternatives: tuple[Alternative, ...] = ()  # the best few specs
    at: At | None = None  # where it exists, if not everywhere: ("pp", (1,))

    @property
    def placed(self) -> str:
        """The spec, and where it exists."""
        return self.spec if self.at is None else f"{self.spec} {at_text(self.at)}".lstrip()


@attrs.frozen
class PlanOfAxis:
    """The named plan that speaks for an axis. `splits_products`: as `NamedPlan` has it."""

    name: str
    splits_products: bool = False


@attrs.frozen
class AxisUse:
    """What one mesh axis does, in the field's words. `by`: "found", or who wished it."""

    axis: str
    words: str
    by: str = "found"

    def __str__(self) -> str:
        return f"{self.axis}: {self.words} ({self.by})"


ESTIMATE = "by an estimate"
"""Why a way was not planned."""


@attrs.frozen
class OtherWay:
    """A way to write an open transform that was not taken: what it says, seconds a step, peak, and what there is to say
    of it.

    cost_s: None where no plan was found. peak_bytes: 0 where it was not planned, because it takes at least `cost_s`, or
    where `why` is ESTIMATE about as long.
    """

    words: str
    cost_s: float | None
    peak_bytes: int
    why: str = ""

    def line(self, plan: Plan) -> str:
        """Beside the plan that was taken."""
        if self.cost_s is None:
            return f"{self.words}: {self.why}"
        if self.why == ESTIMATE:
            return f"{self.words}: its schedule takes about {time_text(self.cost_s)} by an estimate, so not planned"
        if not self.peak_bytes:
            least, taken = time_text(self.cost_s), time_text(plan.cost_s)
            return f"{self.words}: at least {least} per step in place of {taken}, so not planned"
        figures = (
            f"{self.words}: {time_text(self.cost_s)} per step in place of {time_text(plan.cost_s)}, "
            f"peak {size_text(self.peak_bytes)} in place of {size_text(plan.peak_bytes)}"
        )
        return f"{figures} ({self.why})" if self.why else figures


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
    notes: tuple[str, ...] = ()  # what a reader should know of the program itself, as a dense mask of many bytes
    card: tuple[str, ...] = ()  # what a CUDA card holds of it, a line a part, and whether that fits
    pipeline: Pipelined | None = None  # its schedule, and what each stage holds, computes and waits for
    way: str = ""  # of a transform that left something open, the way that was taken, and the others
    others: tuple[OtherWay, ...] = ()
    taken: tuple[tuple[str, str], ...] = ()  # where a transform left open what the state depends on: (weight, scheme)
    spent: tuple[TermSeconds, ...] = ()  # what the seconds of a step are made of, by the clock

    def __str__(self) -> str:
        """One sentence."""
        sizes = [f"{name}={size}" for name, size in self.mesh]
        mesh = " ".join([*sizes, f"({self.topology})"])
        what = " · ".join(map(str, self.axes)) or "one rank"
        share = self.communication_s / self.cost_s if self.cost_s else 0.0
        return (
            f"{what} on {mesh}: {time_text(self.cost_s)} per step, {share:.0%} of it communication, "
            f"peak {size_text(self.peak_bytes)} per rank"
        )

    @property
    def calls(self) -> int:
        """Operator calls decided."""
        return sum(decision.count for decision in self.decisions)

    def leaf(self, name: str) -> Leaf:
        """The input leaf of that name."""
        for leaf in self.inputs:
            if leaf.name == name:
                return leaf
        names = [leaf.name for leaf in self.inputs]
        raise PlanError(f"the plan has no input {name!r}{near(name, names, 'inputs')}")

    def with_pipeline(self, pipeline: Pipelined | None) -> Plan:
        """This plan, saying what its pipeline does."""
        if pipeline is None:
            return self
        axes = [use for use in self.axes if use.axis != pipeline.axis]
        said = AxisUse(pipeline.axis, pipeline.words, "cf.pipeline")
        return attrs.evolve(self, pipeline=pipeline, axes=(said, *axes))

    def find(self, glob: str) -> tuple[Decision, ...]:
        """Decisions whose module path or target matches; raises PlanError with near names where none does."""
        found = tuple(decision for decision in self.decisions if _matches_any(_names(decision), glob))
        if not found:
            known = {decision.path or decision.target for decision in self.decisions}
            raise PlanError(f"{glob!r} matches no operator of the plan{near(glob, known)}")
        return found

    def table(self, glob: str = "*", costly: int | None = 24) -> str:
        """The plan as text, one line per kind of call (×48 for identical layers). `costly`: the dearest; None: all."""
        return plan_table(self, self.decisions if glob == "*" else self.find(glob), costly)

    def why(self, glob: str, most: int = 4) -> str:
        """What was chosen for matching operators, modules, parameters or parts of the batch, what else would cost, and
        which term decides.

        A collective is asked for by its kind, or with its axes ("all_gather tp"); then its seconds are said, by modules
        and parameters, and how much of them the device's work hides. So are those of copies ("copies to device"). Of a
        pipeline, "stage 2" says why that stage begins where it does, "schedule" and "placement" what else there is.
        Raises PlanError where nothing matches.
        """
        of_cuts = why_cut(self, glob, most)
        if of_cuts:
            return "\n".join(of_cuts)
        sent = [row for row in self.spent if names_row(row, glob)]
        leaves = [leaf for leaf in self.inputs if leaf.name and matches(leaf.name, glob)]  # constants have no name
        decisions = [decision for decision in self.decisions if _matches_any(_names(decision), glob)]
        if not leaves and not decisions:  # a module that only holds others
            decisions = [decision for decision in self.decisions if _matches_any(_parents(decision), glob)]
        if not leaves and not decisions and not sent:
            known = {decision.path or decision.target for decision in self.decisions}
            known.update(leaf.name for leaf in self.inputs)
            known.update(row.what for row in self.spent)
            raise PlanError(f"{glob!r} matches no operator, module, leaf or collective of the plan{near(glob, known)}")

        lines = list[str]()
        for leaf in leaves:
            lines += why_leaf(self, leaf, most)
        for decision in decisions:
            lines += why_decision(self, decision, most)
        if decisions:
            lines.append(LEGEND)
        if leaves or decisions:
            spent = summed(row for row in self.spent if about(row, glob))
            lines.append(terms_text(spent, self.cost_s))
        if sent and glob != "*":
            lines += collectives_text(sent, most)
        return "\n".join(line for line in lines if line)

    def why_not(self, what: str, glob: str = "*") -> str:
        """What another choice would cost: a strategy "{tp: i}", any with an axis on a factor "tp: i", or a name.

        Of a pipeline whose microbatches or cuts were chosen, whole words such as "16 microbatches" or "cut by memory";
        the last one of several may be a beginning, as in "16 micro". Where else a stage could begin is asked for by
        "stage 2 at layers.7", or "stage 2" and the name of a module or a parameter, another schedule for the same
        stages by its name.
        """
        ways = [other.line(self) for other in self.others if _says(what, other.words)]
        if _says(what, self.way):
            ways.insert(0, f"{self.way} is what was chosen")
        if ways:
            return "\n".join(ways)
        of_cuts = why_not_cut(self, what, glob)
        if of_cuts:
            return "\n".join(of_cuts)
        if self.pipeline is not None and what.startswith("cut by"):
            return (
                f"{what}: not compared. Other cuts are where stages= are open and a budget is met with help only "
                "(values made again, copies)"
            )
        lines = []
        for decision in self.find(glob):
            line = self._why_not_line(decision, what)
            if not line and glob != "*":
                hint = near(what, _choices([decision], what), "choices")
                rule = decision.rule or "replicated"
                line = f"{_called(decision)}: no strategy {what!r}; its rule is {rule}{hint}"
            if line:
                lines.append(line)
        if not lines:
            hint = near(what, _choices(self.decisions, what), "choices")
            return f"no operator matching {glob!r} has a strategy {what!r}{hint}"
        return "\n".join(lines)

    def _why_not_line(self, decision: Decision, what: str) -> str:
        """What an alternative would cost; "" where the operator has none such."""
        if _is(what, decision):
            return f"{_called(decision)}: {decision.strategy} is what was chosen"
        for alternative in decision.alternatives:
            if _is(what, alternative):
                more = more_text(self, alternative)
                return f"{_called(decision)}: {alternative.strategy} instead of {decision.strategy}, {more}"
        return ""

    def diff(self, other: Plan) -> str:
        """What changes from this plan to `other`, a line each; "" where they decide alike."""
        lines = [f"mesh {self.mesh} -> {other.mesh}"] if self.mesh != other.mesh else []
        lines += _changes(self._specs(), other._specs())
        lines += _changes(self._strategies(), other._strategies())
        lines += _changes(dict(self.taken), dict(other.taken))
        if lines and self.cost_s:
            lines.append(
                f"{time_text(self.cost_s)} -> {time_text(other.cost_s)} ({other.cost_s / self.cost_s - 1:+.1%})"
            )
        return "\n".join(lines)

    def _specs(self) -> dict[str, str]:
        return {leaf.name: leaf.placed for leaf in self.inputs}

    def _strategies(self) -> dict[str, str]:
        """Key of each operator call -> its strategy."""
        strategies = {}
        for decision in self.decisions:
            for key in decision.keys:
                strategies[key] = decision.strategy
        return strategies

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a versioned JSON file. Raises PlanError where the path is a file that is no plan."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        owned.write_text(path, text, MARK, "Plan.save", PlanError)

    def to_dict(self) -> dict[str, Any]:
        """What `save` writes, as plain data."""
        data: dict[str, Any] = _finite({"colofunc_plan": FORMAT_VERSION, **attrs.asdict(self)})
        return data

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read what `save` wrote; raises PlanError where the file is no plan of this version."""
        where = owned.given(path, "Plan.load", PlanError, owned.A_FILE)
        try:
            data = untrusted.read_json(where)
        except OSError as error:
            raise PlanError(
                f"cannot read plan {str(path)!r}: {error.strerror or error}; give the path of Plan.save"
            ) from error
        except ValueError as error:
            raise PlanError(
                f"plan file {str(path)!r} cannot be used: {error}; write it again with Plan.save"
            ) from error
        return Plan.from_dict(data, str(path))

    @staticmethod
    def from_dict(data: Any, path: str = "plan") -> Plan:
        """A plan from what `to_dict` gave; `path`: where it came from, for errors."""
        data = dict(data) if isinstance(data, dict) else data
        version = data.pop("colofunc_plan", None) if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise PlanError(
                f"{str(path)!r} is no plan of version {FORMAT_VERSION} but {version!r:.80}; write it again with "
                "Plan.save"
            )
        try:
            return untrusted.build(Plan, data, "plan", infinity=INFINITY)
        except untrusted.Wrong as error:
            raise PlanError(f"plan file {str(path)!r} is damaged: {error}; write it again with Plan.save") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return INFINITY if value == float("inf") else value


def parse_axes(text: str) -> tuple[tuple[str, str], ...]:
    """`"{dp: b, tp: o}"` or `"tp: o"` -> (("dp", "b"), ("tp", "o")); () for other words."""
    pairs = []
    for part in text.strip().removeprefix("{").removesuffix("}").split(","):
        axis, colon, factor = part.partition(":")
        if not colon:
            return ()
        pairs.append((axis.strip(), factor.strip()))
    return tuple(pairs)


def _called(decision: Decision) -> str:
    return f"{where_text(decision)} [{decision.phase}]"


def _is(what: str, choice: Decision | Alternative) -> bool:
    pairs = parse_axes(what)
    if what.startswith("{") and pairs:
        return set(pairs) == set(choice.axes) or what == choice.strategy
    return set(pairs) <= set(choice.axes) if pairs else what in choice.strategy


def _says(what: str, way: str) -> bool:
    """Whether a way has these words one after another; the last of several may be its beginning only.

    "2 micro" is among "2 microbatches", "6 microbatches" are not among "16 microbatches", and "b", a strategy, is not
    among "cut by time".
    """
    asked = [word.rstrip(",") for word in what.split()]
    words = [word.rstrip(",") for word in way.split()]
    for first in range(len(words) - len(asked) + 1):
        there = words[first : first + len(asked)]
        if there == asked:
            return bool(asked)
        if len(asked) > 1 and there[:-1] == asked[:-1] and there[-1].startswith(asked[-1]):
            return True
    return False


def _choices(decisions: Iterable[Decision], what: str) -> set[str]:
    """What `why_not` knows, in the words of the question: names of strategies, or single pairs "tp: i"."""
    choices: list[Decision | Alternative] = []
    for decision in decisions:
        choices += [decision, *decision.alternatives]
    if ":" not in what or what.startswith("{"):
        return {choice.strategy for choice in choices}
    pairs = set()
    for choice in choices:
        for axis, factor in choice.axes:
            pairs.add(f"{axis}: {factor}")
    return pairs


def _matches_any(names: Iterable[str], glob: str) -> bool:
    return any(matches(name, glob) for name in names)


def _names(decision: Decision) -> Iterable[str]:
    yield decision.path
    yield decision.target
    if "*" in decision.path:
        yield from dict.fromkeys(key.split("|", 1)[0] for key in decision.keys)


def _parents(decision: Decision) -> Iterable[str]:
    """Paths of the modules around a call."""
    parts = decision.path.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A line for each name that changed, went or came, in this order."""
    changed, gone = list[str](), list[str]()
    for name, value in before.items():
        if name not in after:
            gone.append(f"- {name}: {value}")
        elif after[name] != value:
            changed.append(f"{name}: {value} -> {after[name]}")
    new = [f"+ {name}: {value}" for name, value in after.items() if name not in before]
    return changed + gone + new
