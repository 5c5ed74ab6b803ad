"""Three operators that local code of experts is made of: who sends which token where.

    slots        index (n, k)              -> slot (n, k), rows (r, c)
    to_slots     x (n, d), slot (n, k)     -> (owners, c, d)      round t of r: what goes to each owner
    from_slots   y (owners, c, d), slot    -> (n, d)              what came back, added up per token

Problem: how many tokens choose the experts of a rank is data, and buffers have to be of one size. Idea: the tokens that
a rank has for one owner form a queue, in their order, and a round moves `c` of each queue; n = r c, so after r rounds
everything is moved even if all tokens go to one owner. `rows` says how many of the c each round needs: what is empty
does not travel. A token that has several experts of one owner is in that owner's queue once.

Slot o * n + j is place j of the queue for owner o; -1: nobody, or in the queue already. All three work on a part of the
tokens as well as on all (each part has queues of its own), which is what their rules say: n is (c r), and c may be
split.
"""

from __future__ import annotations

from typing import Any

import torch

import colofunc as cf


def _slots_rule(call: Any) -> cf.ext.Rule:
    (n, k), rounds = call.ins[0].shape, call.arg(3, "rounds", 1)
    tokens = (("c", "r"), ("k",))
    return cf.ext.Rule(
        (tokens,), (tokens, (("r",), ("c",))), {"c": n // rounds, "r": rounds, "k": k}, whole=frozenset("rk")
    )


def _to_rule(call: Any) -> cf.ext.Rule:
    (n, d), k, owners, rounds = call.ins[0].shape, call.ins[1].shape[1], call.arg(2, "owners"), call.arg(3, "rounds", 1)
    sizes = {"c": n // rounds, "r": rounds, "k": k, "d": d, "o": owners}
    tokens = ("c", "r")
    return cf.ext.Rule(((tokens, ("d",)), (tokens, ("k",))), ((("o",), ("c",), ("d",)),), sizes, whole=frozenset("rko"))


def _from_rule(call: Any) -> cf.ext.Rule:
    (owners, c, d), (n, k) = call.ins[0].shape, call.ins[1].shape
    sizes = {"c": c, "r": n // c, "k": k, "d": d, "o": owners}
    tokens = ("c", "r")
    pattern = ((("o",), ("c",), ("d",)), (tokens, ("k",)))
    return cf.ext.Rule(pattern, ((tokens, ("d",)),), sizes, whole=frozenset("rko"), linear=(frozenset({0}),))


@cf.operator("moe.slots", rule=_slots_rule)
def slots(index: torch.Tensor, per_owner: int, owners: int, rounds: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot of each choice, and how many rows of each queue the rounds need (the longest queue, cut into rounds)."""
    n, k = index.shape
    owner = torch.where((index >= 0) & (index < per_owner * owners), index // per_owner, owners)
    again = (
        (owner.unsqueeze(2) == owner.unsqueeze(1)) & torch.ones(k, k, dtype=torch.bool, device=index.device).tril(-1)
    ).any(2)
    goes = (owner.unsqueeze(2) == torch.arange(owners, device=index.device)).any(1)  # (n, owners)
    place = (goes.cumsum(0) - 1).gather(1, owner.clamp(max=owners - 1))
    slot = torch.where((owner < owners) & ~again, owner * n + place, -1)
    c = n // rounds
    longest = goes.sum(0).max() if n else goes.sum()
    need = (longest - c * torch.arange(rounds, device=index.device)).clamp(0, c)
    return slot, need.unsqueeze(1).expand(rounds, c).contiguous()


@cf.operator("moe.to_slots", rule=_to_rule)
def to_slots(
    x: torch.Tensor, slot: torch.Tensor, owners: int, rounds: int = 1, number: int = 0, blank: float = 0.0
) -> torch.Tensor:
    """Rows of x in the slots of round `number`, `blank` where a queue has no more tokens."""
    n, c = x.shape[0], x.shape[0] // rounds
    place, live = _in_round(slot, n, c, number)
    token = torch.arange(n, device=x.device).unsqueeze(1).expand_as(slot)
    # One place too many, for all that is not of this round.
    table = torch.full((owners * c + 1,), -1, dtype=torch.int64, device=x.device)
    table = table.scatter(0, torch.where(live, place, owners * c).flatten(), token.flatten())[:-1]
    rows = x.index_select(0, table.clamp(min=0)).masked_fill((table < 0).unsqueeze(1), blank)
    return rows.reshape(owners, c, x.shape[1])


@cf.operator("moe.from_slots", rule=_from_rule)
def from_slots(y: torch.Tensor, slot: torch.Tensor, number: int = 0) -> torch.Tensor:
    """Per token the sum of what its slots of round `number` hold; in a fixed order, at least in float32."""
    (owners, c, d), n = y.shape, slot.shape[0]
    place, live = _in_round(slot, n, c, number)
    rows = y.reshape(owners * c, d)
    total = torch.zeros((n, d), dtype=torch.promote_types(y.dtype, torch.float32), device=y.device)
    for k in range(slot.shape[1]):
        here = rows.index_select(0, torch.where(live[:, k], place[:, k], 0)) if owners * c else total
        total = total + here.masked_fill(~live[:, k].unsqueeze(1), 0)
    return total.to(y.dtype)


def _in_round(slot: torch.Tensor, n: int, c: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(place in the (owners, c) rows of a round, whether it is of this round) for each choice."""
    owner, place = slot // max(n, 1), slot % max(n, 1) - number * c
    return owner * c + place, (slot >= 0) & (place >= 0) & (place < c)
