"""Actions: what each rank of a pipeline does, in which order, as a table.

Problem: a pipeline schedule is usually a loop with many cases, so that it can be run and not much else. Idea: a
schedule is data. A stage of the model does three kinds of work for each microbatch, and a table says, for each rank, in
which order. Who waits for whom follows from the actions themselves:

    F(s, m)   waits for F(s-1, m)                                   forward
    B(s, m)   waits for F(s, m) and for the B or I of (s+1, m)      backward, of inputs and weights
    I(s, m)   as B                                                  backward of inputs
    W(s, m)   waits for I(s, m)                                     backward of weights

>>> table = ActionTable.parse(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
>>> check_table(table)
>>> " ".join(f"{rank}:{action}" for rank, action in linear_order(table))
'0:0F0 0:0F1 1:1F0 1:1B0 0:0B0 1:1F1 1:1B1 0:0B1'

Source: the letters and the CSV are those of torch.distributed.pipelining; the split of backward is Zero Bubble Pipeline
Parallelism (2401.10241, section 2).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain

import attrs

from colofunc.errors import PlanError

KINDS = ("F", "B", "I", "W")
_ACTION = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_SHOWN = 4
"""An error names at most this many actions of one kind of mistake."""


def _kind(action: Action, field: attrs.Attribute[str], kind: str) -> None:
    if kind not in KINDS:
        raise PlanError(
            f"an action has the kind {kind!r}; it is F (forward), B (backward), I (backward of inputs) or W (of "
            "weights)"
        )


@attrs.frozen(order=True, cache_hash=True)  # tables are looked up by actions
class Action:
    """One piece of work: a stage does it for a microbatch. Written "2F0": stage 2, forward, microbatch 0."""

    stage: int
    kind: str = attrs.field(validator=_kind)
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that a text such as "2F0" says. Raises PlanError."""
        found = _ACTION.fullmatch(text.strip())
        if found is None:
            raise PlanError(f"{text!r} is no action; write stage, kind and microbatch, such as 2F0")
        stage, kind, microbatch = found.groups()
        if kind not in KINDS:
            raise PlanError(
                f"{text!r}: {kind!r} is none of the kinds F, B, I, W; leave sends, receives and gathers out, which "
                "follow from these"
            )
        if not microbatch:
            raise PlanError(f"{text!r} names no microbatch; write {text.strip()}0 for the first")
        return cls(int(stage), kind, int(microbatch))


@attrs.frozen
class Numbers:
    """Numbers of the actions of so many stages and microbatches: those of a kind and stage are one after another."""

    stages: int
    microbatches: int

    def of(self, action: Action) -> int:
        """The number of an action."""
        return (KINDS.index(action.kind) * self.stages + action.stage) * self.microbatches + action.microbatch

    def kind_and_stage(self, number: int) -> int:
        """The place of an action's kind and stage among all: kind after kind in the order of `KINDS`."""
        return number // self.microbatches

    def own_need(self, number: int) -> int:
        """What an action needs of its own stage, -1 if nothing."""
        kind, of_kind = divmod(number, self.stages * self.microbatches)
        if KINDS[kind] == "F":
            return -1
        if KINDS[kind] == "W":
            return number - self.stages * self.microbatches  # its I
        return of_kind  # its F

    def other_need(self, number: int, there: Set[int]) -> int:
        """What an action needs of the stage before or behind it, -1 if nothing.

        there: the actions that there are; a gradient comes from an I, or else from a B.
        """
        kind, of_kind = divmod(number, self.stages * self.microbatches)
        if KINDS[kind] == "F":
            return number - self.microbatches if of_kind >= self.microbatches else -1
        gradient = of_kind + self.microbatches
        if KINDS[kind] == "W" or gradient >= self.stages * self.microbatches:
            return -1
        inputs = KINDS.index("I") * self.stages * self.microbatches + gradient
        whole = KINDS.index("B") * self.stages * self.microbatches + gradient
        return inputs if inputs in there else whole


@attrs.frozen
class ActionTable:
    """Per index of the pipeline's axis (rank), its actions in the order in which it runs them."""

    rows: tuple[tuple[Action, ...], ...]

    @classmethod
    def parse(cls, rows: Iterable[str]) -> ActionTable:
        """From a text per rank with blanks between actions: `["0F0 0B0", "1F0 1B0"]`. Raises PlanError."""
        parsed = []
        for row in rows:
            parsed.append(tuple(Action.parse(word) for word in row.split()))
        return cls(tuple(parsed))

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """Those of all ranks, rank after rank."""
        return tuple(action for row in self.rows for action in row)

    @cached_property
    def stages(self) -> int:
        """How many stages there are."""
        return 1 + max((action.stage for action in self.actions), default=-1)

    @cached_property
    def microbatches(self) -> int:
        """How many microbatches there are."""
        return 1 + max((action.microbatch for action in self.actions), default=-1)

    @property
    def ranks(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """Stage -> the rank that runs it. Raises PlanError where two do."""
        found: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                first = found.setdefault(action.stage, rank)
                if first != rank:
                    raise PlanError(
                        f"stage {action.stage} is on rank {first} and, by {action}, on rank {rank}; give a stage to "
                        "one rank"
                    )
        return found

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the most microbatches at once that are between forward and backward.

        The forward of these has begun, and the backward (B or I) has not ended.
        """
        most = [0] * self.stages
        now = [0] * self.stages
        for action in self.actions:
            if action.kind == "F":
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind != "W":
                now[action.stage] -= 1
        return tuple(most)

    @cached_property
    def place_of(self) -> Mapping[Action, tuple[int, int]]:
        """Action -> (rank, position in its row); the first one of an action that is repeated."""
        found: dict[Action, tuple[int, int]] = {}
        for rank, row in enumerate(self.rows):
            for position, action in enumerate(row):
                found.setdefault(action, (rank, position))
        return found

    @cached_property
    def _by_parts(self) -> dict[tuple[int, str, int], Action]:
        """(stage, kind, microbatch) -> the action of the table."""
        return {(action.stage, action.kind, action.microbatch): action for action in self.actions}

    def _action(self, stage: int, kind: str, microbatch: int) -> Action:
        """The table's own, which is known by its hash already, or one that it does not have."""
        return self._by_parts.get((stage, kind, microbatch)) or Action(stage, kind, microbatch)

    def backward_of(self, stage: int, microbatch: int) -> Action:
        """The action that makes the gradient of a stage's inputs: its I where the table has one, else its B."""
        return self._by_parts.get((stage, "I", microbatch)) or self._action(stage, "B", microbatch)

    @cached_property
    def _needs_of(self) -> dict[Action, tuple[Action, ...]]:
        """Of each action that somebody has asked for, what it needs."""
        return {}

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Actions, of this stage or another one, whose results an action reads."""
        found = self._needs_of.get(action)
        if found is None:
            found = self._needs_of[action] = self._needed(action)
        return found

    @cached_property
    def numbers(self) -> Numbers:
        """Its actions as numbers: what is asked of every action of a large table is asked of these."""
        return Numbers(self.stages, self.microbatches)

    @cached_property
    def numbered_rows(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the numbers of its actions in order."""
        number_of = self.numbers.of
        return tuple(tuple(number_of(action) for action in row) for row in self.rows)

    @cached_property
    def other_needs(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the number of what each of its actions needs of another stage, in order; -1: nothing."""
        there = set(chain.from_iterable(self.numbered_rows))
        other_need = self.numbers.other_need
        return tuple(tuple(other_need(number, there) for number in row) for row in self.numbered_rows)

    @cached_property
    def in_order(self) -> tuple[tuple[int, Action], ...]:
        """What `linear_order` gives."""
        return tuple((rank, self.rows[rank][position]) for rank, position in self.places_in_order)

    @cached_property
    def places_in_order(self) -> tuple[tuple[int, int], ...]:
        """The same as (rank, position in its row)."""
        return tuple(_in_order(self))

    def _needed(self, action: Action) -> tuple[Action, ...]:
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            return (self._action(stage - 1, "F", microbatch),) if stage else ()
        if action.kind == "W":
            return (self._action(stage, "I", microbatch),)
        forward = self._action(stage, "F", microbatch)
        if stage == self.stages - 1:
            return (forward,)
        return forward, self.backward_of(stage + 1, microbatch)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    def to_csv(self) -> str:
        """A line per rank, an action per cell: what `_load_csv` of torch's schedules reads."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([map(str, row) for row in self.rows])
        return text.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> ActionTable:
        """From a line per rank; blank cells are moments at which a rank waits, and are left out.

        Raises PlanError with the line.
        """
        rows = []
        for number, line in enumerate(csv.reader(io.StringIO(text)), start=1):
            try:
                rows.append(tuple(Action.parse(cell) for cell in line if cell.strip()))
            except PlanError as error:
                raise PlanError(f"line {number} of a table of actions: {error}") from None
        return cls(tuple(rows))


def check_table(
    table: ActionTable, stages: int | None = None, microbatches: int | None = None, backward: bool = True
) -> None:
    """Raise PlanError, with the actions, where a table cannot be run or leaves something out.

    stages, microbatches: how many there have to be; None: as many as the table says. backward: whether each forward has
    its backward.
    """
    stages = table.stages if stages is None else stages
    microbatches = table.microbatches if microbatches is None else microbatches
    table.rank_of  # noqa: B018  a stage on two ranks is an error of its own
    _check_range(table, stages, microbatches)
    _check_repeated(table)
    _check_backward(table, backward)
    _check_missing(table, stages, microbatches, backward)
    _check_order_in_rows(table)
    for _ in linear_order(table):
        pass


def _check_range(table: ActionTable, stages: int, microbatches: int) -> None:
    beyond = [action for action in table.actions if action.stage >= stages or action.microbatch >= microbatches]
    if beyond:
        raise PlanError(
            f"a table for {stages} stages and {microbatches} microbatches has {_shown(beyond)}; numbers begin at 0"
        )


def _check_repeated(table: ActionTable) -> None:
    if len(table._by_parts) == len(table.actions):
        return
    seen: set[Action] = set()
    repeated = []
    for action in table.actions:
        if action in seen:
            repeated.append(action)
        seen.add(action)
    if repeated:
        raise PlanError(f"a table has {_shown(repeated)} more than once; a stage does an action once for a microbatch")


def _check_backward(table: ActionTable, backward: bool) -> None:
    """Of one stage and microbatch the backward is whole or in two parts, and there is none in a table of forwards."""
    if not backward:
        wrong = [action for action in table.actions if action.kind != "F"]
        if wrong:
            raise PlanError(f"a table of forwards alone has {_shown(wrong)}; leave backwards out")
    both = []
    for action in table.actions:
        parts = [Action(action.stage, kind, action.microbatch) for kind in ("I", "W")]
        if action.kind == "B":
            both += [(action, part) for part in parts if part in table.place_of]
    if both:
        whole, part = both[0]
        raise PlanError(f"a table has {whole} and {part}: B is I and W in one; write B alone, or I and W")


def _check_missing(table: ActionTable, stages: int, microbatches: int, backward: bool) -> None:
    there = table._by_parts
    missing: list[str] = []
    for stage in range(stages):
        for microbatch in range(microbatches):
            split = (stage, "I", microbatch) in there and (stage, "W", microbatch) in there
            whole = split or (stage, "B", microbatch) in there or not backward
            if not whole or (stage, "F", microbatch) not in there:
                missing += _missing_of(table, stage, microbatch, backward)
    if missing:
        raise PlanError(
            f"a table for {stages} stages and {microbatches} microbatches lacks "
            f"{', '.join(missing[:_SHOWN])}{_rest(missing)}"
        )


def _missing_of(table: ActionTable, stage: int, microbatch: int, backward: bool) -> Iterator[str]:
    forward, whole, inputs, weights = (Action(stage, kind, microbatch) for kind in KINDS)
    if forward not in table.place_of:
        yield str(forward)
    if not backward or whole in table.place_of:
        return
    lacking = [str(part) for part in (inputs, weights) if part not in table.place_of]
    if len(lacking) == 2:
        yield f"{whole} (or {inputs} and {weights})"
    else:
        yield from lacking


def _check_order_in_rows(table: ActionTable) -> None:
    """A stage is on one rank, so that its own order can be read from one row."""
    for rank, row in enumerate(table.numbered_rows):
        done = {-1}
        for position, number in enumerate(row):
            if table.numbers.own_need(number) not in done:
                action = table.rows[rank][position]
                need = next(need for need in table.needs(action) if need.stage == action.stage)
                raise PlanError(f"rank {rank} has {action} before {need}, which it needs; put {need} first")
            done.add(number)


def linear_order(table: ActionTable) -> Iterator[tuple[int, Action]]:
    """One order of the actions of all ranks that keeps each rank's order and has each action behind those that it
    needs.

    Ranks take turns, and each runs an action where it can. Raises PlanError with the actions that wait for one another
    where there is no such order, and where an action needs one that is not there.
    """
    return iter(table.in_order)


def _in_order(table: ActionTable) -> Iterator[tuple[int, int]]:
    """(rank, position in its row) of each action."""
    needs_of = []
    for row, others in zip(table.numbered_rows, table.other_needs, strict=True):
        needs_of.append([(table.numbers.own_need(number), other) for number, other in zip(row, others, strict=True)])
    at = [0] * table.ranks
    done = {-1}  # of which an action needs nothing
    left = len(table.actions)
    while left:
        ready = []
        for rank, needs in enumerate(needs_of):
            if at[rank] < len(needs):
                own, other = needs[at[rank]]
                if own in done and other in done:
                    ready.append(rank)
        if not ready:
            raise PlanError(_deadlock(table, at, {table.rows[r][k] for r in range(table.ranks) for k in range(at[r])}))
        for rank in ready:
            yield rank, at[rank]
            done.add(table.numbered_rows[rank][at[rank]])
            at[rank] += 1
            left -= 1


def _deadlock(table: ActionTable, at: Sequence[int], done: set[Action]) -> str:
    """Follow who waits for whom from a rank that is not done, until a rank comes again."""
    rank = next(rank for rank, row in enumerate(table.rows) if at[rank] < len(row))
    path: list[int] = []
    words: list[str] = []
    while rank not in path:
        path.append(rank)
        action = table.rows[rank][at[rank]]
        need = next(need for need in table.needs(action) if need not in done)
        if need not in table.place_of:
            return f"{action} on rank {rank} waits for {need}, which no rank runs; add it"
        rank, position = table.place_of[need]
        behind = table.rows[rank][at[rank]]
        if table.place_of[behind][1] == position:
            words.append(f"{action} waits for {need} (rank {rank})")
        else:
            words.append(f"{action} waits for {need}, which stands behind {behind} on rank {rank}")
    cycle = words[path.index(rank) :]
    return f"a table of actions ends in a deadlock: {'; '.join(cycle)}; change the order on one of these ranks"


def _shown(actions: Sequence[Action]) -> str:
    return ", ".join(map(str, actions[:_SHOWN])) + _rest(actions)


def _rest(items: Sequence[object]) -> str:
    return f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
