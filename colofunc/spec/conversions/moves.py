"""The moves of a conversion puzzle: what one collective can do with where the parts of mesh axes are.

A state says where each part of a mesh axis is: in a slot, in copies, or in a pending reduction. A move takes a set of
parts at once:

    all_gather  slots -> copies        reduce_scatter  pending -> slots     take_shard  copies -> slots (free)
    all_to_all  slots -> free slots    all_reduce      pending -> copies    keep_first  copies -> pending (free)
    permute     parts of equal size exchange their roles

Large puzzles have fewer moves to try, see Note [Trading places] in `search`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, permutations, product, repeat

import attrs

from colofunc.spec.conversions.refine import COPY, Locations

MOST_SEARCHED_WHOLE = 4
"""Puzzles of at most this many pieces are searched as they are.

`(dp tp o) -> (tp dp o)` of 16 and 8 ranks is a puzzle of seven pieces, each of two ranks; a search over their subsets
takes seconds: Note [Trading places].
"""

MOST_EXCHANGED = 4
"""A permutation that the search tries exchanges at most this many pieces; where nothing else is to be done it may be of
more."""

MOST_INTO_ANY_SLOT = 3
"""Where a piece has no scratch slot, pieces of puzzles up to this size may go to any slot of their size."""

PuzzleMove = tuple[str, tuple[int, ...], Locations]  # kind, parts that it acts on, locations after it

FREE = ("take_shard", "keep_first")  # moves that cost nothing


@attrs.frozen
class PuzzlePiece:
    """One part in a normalised puzzle; slots are numbered by first use, so that equal problems are equal keys."""

    size: int
    start: int
    goal: int
    scratch: int  # a slot, or -1


def moves_from(pieces: tuple[PuzzlePiece, ...], state: Locations) -> Iterator[PuzzleMove]:
    """Moves worth trying from a state: towards goals, out of the way of others, and into scratch slots."""
    board = _Board(pieces, state)
    for move in _slices_to_goals(board):
        yield move
        if board.is_roomy:  # free, and less data makes every later move cheaper
            return
    yield from _moves_of_copies(board)
    yield from _reductions(board)
    yield from _gathers_and_exchanges_of_slots(board)
    yield from _permutations(board)


class _Board:
    """A state, and what moves from it ask for."""

    __slots__ = ("_known_targets", "is_large", "is_roomy", "pieces", "state", "taken")

    def __init__(self, pieces: tuple[PuzzlePiece, ...], state: Locations) -> None:
        self.pieces = pieces
        self.state = state
        self.taken = {where for where in state if where >= 0}  # slots
        self.is_roomy = all(piece.scratch >= 0 for piece in pieces)
        self.is_large = len(pieces) > MOST_SEARCHED_WHOLE  # Note [Trading places]
        self._known_targets: dict[int, list[int]] = {}

    def step(self, kind: str, who: tuple[int, ...], locations: Iterable[int]) -> PuzzleMove:
        """The move that brings the pieces `who` to `locations`."""
        after = list(self.state)
        for number, where in zip(who, locations):
            after[number] = where
        return kind, who, tuple(after)

    def can_go_home(self, number: int) -> bool:
        """Whether the goal of a piece is a slot, and free."""
        goal = self.pieces[number].goal
        return goal >= 0 and goal not in self.taken

    def targets(self, number: int) -> list[int]:
        """Free slots for a piece. Many subsets ask for them."""
        known = self._known_targets.get(number)
        if known is None:
            known = self._known_targets[number] = self._free_slots_for(number)
        return known

    def _free_slots_for(self, number: int) -> list[int]:
        """The goal of a piece, else its scratch slot, or the goal of one with which it can exchange roles later."""
        piece = self.pieces[number]
        if self.can_go_home(number):
            return [piece.goal]
        # In a large puzzle not a slot that another piece will have to leave: those that trade places do so in one
        # permutation.
        if self.is_large and piece.scratch >= 0:
            return [piece.scratch]
        alike = [other for other in self.pieces if other.size == piece.size]
        slots = {piece.scratch, *(other.goal for other in alike)}
        if not self.is_roomy and len(self.pieces) <= MOST_INTO_ANY_SLOT:
            for other in alike:
                slots.update((other.start, other.scratch))
        return sorted(slot for slot in slots if slot >= 0 and slot not in self.taken)

    def has_to_reduce(self) -> bool:
        """Whether a reduction has to be done: it is not where its piece ends, or another kind is pending around it."""
        outermost = min(self.state, default=COPY)
        for piece, where in zip(self.pieces, self.state, strict=True):
            if where < COPY and (where != piece.goal or where > outermost):
                return True
        return False


def _subsets(numbers: list[int]) -> Iterator[tuple[int, ...]]:
    """All but the empty one, small ones first."""
    for count in range(1, len(numbers) + 1):
        yield from combinations(numbers, count)


def _slices_to_goals(board: _Board) -> Iterator[PuzzleMove]:
    """Slices that bring a copy to its goal."""
    for number, where in enumerate(board.state):
        if where == COPY and board.can_go_home(number):
            yield board.step("take_shard", (number,), (board.pieces[number].goal,))


def _moves_of_copies(board: _Board) -> Iterator[PuzzleMove]:
    """Copies become a pending reduction, where they have to be one in the end, or take a shard."""
    reduces = board.has_to_reduce()
    for number, where in enumerate(board.state):
        if where != COPY:
            continue
        goal = board.pieces[number].goal
        if goal < COPY:
            yield board.step("keep_first", (number,), (goal,))
        # Less data for what follows, and a role that another piece may take over.
        if reduces or goal >= 0:
            for slot in board.targets(number):
                yield board.step("take_shard", (number,), (slot,))


def _reductions(board: _Board) -> Iterator[PuzzleMove]:
    """All-reduces and reduce-scatters of the innermost kind of reduction that is pending."""
    innermost = max((where for where in board.state if where < COPY), default=COPY)
    if innermost == COPY:
        return
    pending = [number for number, where in enumerate(board.state) if where == innermost]
    for who in _subsets(pending):
        yield board.step("all_reduce", who, repeat(COPY))
        yield from _into_slots(board, "reduce_scatter", who)


def _gathers_and_exchanges_of_slots(board: _Board) -> Iterator[PuzzleMove]:
    """All-gathers and all-to-alls of pieces that are in a slot which is not their goal."""
    away = [number for number, where in enumerate(board.state) if where >= 0 and where != board.pieces[number].goal]
    for who in _subsets(away):
        yield board.step("all_gather", who, repeat(COPY))
    # To another slot go pieces that get home by it, or are in the way; where scratch is scarce, any.
    goals = {piece.goal for piece in board.pieces}
    movers = [
        number for number in away if board.can_go_home(number) or board.state[number] in goals or not board.is_roomy
    ]
    for who in _subsets(movers):
        yield from _into_slots(board, "all_to_all", who)


def _into_slots(board: _Board, kind: str, who: tuple[int, ...]) -> Iterator[PuzzleMove]:
    """The moves of one kind that bring each of the pieces to a free slot of its own."""
    for slots in product(*[board.targets(number) for number in who]):
        if len(set(slots)) == len(slots):
            yield board.step(kind, who, slots)


def _permutations(board: _Board) -> Iterator[PuzzleMove]:
    """Permutations of ranks: pieces of equal size that are not at home exchange roles, one of them gets home."""
    pieces = board.pieces
    away = [number for number, where in enumerate(board.state) if where != pieces[number].goal]
    for count, orders in _DERANGEMENTS.items():
        if count > 2 and board.is_large:  # a known way has the permutation of more
            continue
        for who in combinations(away, count):
            roles = [board.state[number] for number in who]
            nobody_in_slot = max(roles) < 0
            all_alike = roles.count(roles[0]) == count
            if nobody_in_slot or all_alike or any(pieces[number].size != pieces[who[0]].size for number in who):
                continue
            for order in orders:
                new_roles = [roles[giver] for giver in order]
                if any(role == pieces[number].goal for number, role in zip(who, new_roles, strict=True)):
                    yield board.step("permute", who, new_roles)


def _derangements(count: int) -> list[tuple[int, ...]]:
    """Orders of so many things in which none stays where it is."""
    orders = []
    for order in permutations(range(count)):
        if all(place != thing for place, thing in enumerate(order)):
            orders.append(order)
    return orders


_DERANGEMENTS = {count: _derangements(count) for count in range(2, MOST_EXCHANGED + 1)}
