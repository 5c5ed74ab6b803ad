"""A choice in a cost model from which moves are tried: what was asked of it is known until a move touches it.

Problem: of thousands of moves that are tried under the true cost few are made, and each asks again what the flows cost that it would
change, and what every option of their consumers would. Idea: keep both by flow and by class, and forget after a move what it touched.
A move that costs more by itself than it could save in conversions is not looked at further, and a flow of which no move was a gain is
settled until a move touches what its moves were judged by.

    here = Position(model, choice)
    if here.change_s({3: 1, 5: 2}) < 0:
        here.move({3: 1, 5: 2})
    here.go_to(another_choice)          # what both have in common is still known
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from colofunc.planner.sharding.eliminate import Array
from colofunc.planner.sharding.model import Model


class Position:
    """`choice`: the option of each class; a new list after each move. `settled`: flows of which no move is a gain."""

    def __init__(self, model: Model, choice: Sequence[int]) -> None:
        self.model, self.choice = model, list(choice)
        self.settled: set[int] = set()
        self._flows: dict[int, float] = {}
        self._rows: dict[int, Array] = {}

    def row(self, c: int) -> Array:
        """`Model.row` of this choice."""
        if c not in self._rows:
            self._rows[c] = self.model.row(c, self.choice)
        return self._rows[c]

    def change_s(self, moves: Mapping[int, int]) -> float:
        """Change of the true cost when the classes of `moves` change option; where that is no gain, a lower bound that is none."""
        model, after = self.model, list(self.choice)
        delta = 0.0
        for c, o in moves.items():
            now = self.choice[c]
            after[c] = o
            delta += model.weight[c] * (model.seconds[c].item(o) - model.seconds[c].item(now))
            if model.extra:
                delta += model.extra[c].item(o) - model.extra[c].item(now)
        touched = {f: self._flow_s(f) for c in moves for f in model.flows_of[c]}
        can_save = sum(touched.values())
        for f, seconds in touched.items():
            if delta > can_save:
                break
            delta += model.flow_s(f, after) - seconds
            can_save -= seconds
        else:
            return delta
        return delta - can_save

    def move(self, moves: Mapping[int, int]) -> None:
        """Change the option of some classes."""
        self.choice = list(self.choice)
        for c, o in moves.items():
            self.choice[c] = o
        touched: set[int] = set()
        for f in {f for c in moves for f in self.model.flows_of[c]}:
            coded = self.model.coded[f]
            self._flows.pop(f, None)
            touched.update((coded.flow.producer, *coded.classes))
        for c in touched:
            self._rows.pop(c, None)
            self.settled.difference_update(self.model.flows_of[c])

    def go_to(self, choice: Sequence[int]) -> None:
        """Move to another choice."""
        moves = {c: o for c, (o, now) in enumerate(zip(choice, self.choice, strict=True)) if o != now}
        if moves:
            self.move(moves)

    def _flow_s(self, f: int) -> float:
        if f not in self._flows:
            self._flows[f] = self.model.flow_s(f, self.choice)
        return self._flows[f]
