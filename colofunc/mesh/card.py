"""What a card holds in a step, part by part: the tensors of the plan, and what no plan sees.

Problem: a plan counts tensors to the byte, and a card holds more than tensors. 74.3 of 74.5 GiB is not a fit: the
allocator cannot use every gap, libraries have workspaces, each communicator has buffers, and the driver has its
context. Idea: every part is stated with the figure that `mesh.found` has for it, their sum is compared with the card,
and the plan says both.

    card = card_memory(topology, peak_bytes, ranks=8, is_tight=True)
    card.needed_bytes <= card.total_bytes            # whether it fits
    print(*card.lines(), sep="\\n")
"""

from __future__ import annotations

import attrs

from colofunc.mesh.detection import COLLECTIVES_BYTES, CONTEXT_BYTES, FRAGMENTS, LIBRARIES_BYTES, MOST_RESERVED
from colofunc.mesh.sizes import size_text
from colofunc.mesh.topology import Topology

KEPT_FRAGMENTS = 64
"""Where all is kept, torch's caching allocator wants a 64th more than is alive (1.2 and 1.5 %,
`python -m bench fragmentation`)."""
TIGHT_FRAGMENTS = FRAGMENTS - 1
"""Where a plan recomputes or copies to keep to a budget, a 7th more than is alive: the 8th of a card that
`budget="auto"` leaves."""


@attrs.frozen
class CardMemory:
    """`parts`: (words, bytes) of what a card holds beside what is alive at the peak."""

    total_bytes: int
    alive_bytes: int
    parts: tuple[tuple[str, int], ...]

    @property
    def needed_bytes(self) -> int:
        return self.alive_bytes + sum(nbytes for _, nbytes in self.parts)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.total_bytes

    @property
    def budget_bytes(self) -> int:
        """What a plan may hold that keeps to a budget, so that it fits with all that is beside it; nothing or less
        where that alone is more than the card has."""
        _, *stated = self.parts
        return (self.total_bytes - sum(nbytes for _, nbytes in stated)) * TIGHT_FRAGMENTS // FRAGMENTS

    @property
    def kept_bytes(self) -> int:
        """The same of a plan that keeps all, whose blocks leave fewer gaps."""
        _, *stated = self.parts
        return (self.total_bytes - sum(nbytes for _, nbytes in stated)) * KEPT_FRAGMENTS // (KEPT_FRAGMENTS + 1)

    def lines(self) -> tuple[str, ...]:
        """A line a part, then the sum beside what the card has."""
        rows = [("tensors alive at the peak", self.alive_bytes), *self.parts]
        spare_bytes = self.total_bytes - self.needed_bytes
        verdict = f"{size_text(spare_bytes)} to spare"
        if not self.fits:
            helps = f"a budget of {size_text(self.budget_bytes)}"
            if self.budget_bytes <= 0:
                helps = "a card with more memory; what stands beside the tensors fills this one"
            verdict = f"{size_text(-spare_bytes)} more than it has: this is no fit. Try: {helps}"
        return (
            f"on a card of {size_text(self.total_bytes)}:",
            *(f"  {words:<52} {size_text(nbytes):>10}" for words, nbytes in rows),
            f"  {'together':<52} {size_text(self.needed_bytes):>10}, {verdict}",
        )


def card_memory(topology: Topology, alive_bytes: int, ranks: int, is_tight: bool) -> CardMemory | None:
    """What a card of a machine holds; None where its memory has no limit.

    is_tight: the plan recomputes or copies to keep to a budget, so that blocks of many sizes come and go. What is
    stated is an 8th of a small card at most, as for machines that are found; what is taken there already counts as
    found.
    """
    total_bytes = topology.tier("device").capacity_bytes
    if total_bytes is None:
        return None
    fragments_bytes = alive_bytes // (TIGHT_FRAGMENTS if is_tight else KEPT_FRAGMENTS)
    stated = [
        ("workspaces of libraries, rounding of the allocator", LIBRARIES_BYTES),
        ("the driver's context", CONTEXT_BYTES),
    ]
    if ranks > 1:
        stated.append(("buffers of communicators", COLLECTIVES_BYTES))
    stated_bytes = sum(nbytes for _, nbytes in stated)
    most_bytes = total_bytes // MOST_RESERVED
    if stated_bytes > most_bytes:
        stated = [(words, nbytes * most_bytes // stated_bytes) for words, nbytes in stated]
    taken_bytes = topology.reserved_bytes - min(stated_bytes, most_bytes)
    if topology.reserved_bytes and taken_bytes > 0:
        stated.append(("taken by others already", taken_bytes))
    return CardMemory(total_bytes, alive_bytes, (("gaps between the allocator's blocks", fragments_bytes), *stated))
