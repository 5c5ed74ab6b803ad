"""What a card holds beside the tensors of a plan: each part is stated, and what is nearly full is no fit."""

from pathlib import Path

import attrs
import pytest
import torch

import colofunc as cf
from colofunc.mesh.card import KEPT_FRAGMENTS, TIGHT_FRAGMENTS, CardMemory, card_memory
from colofunc.mesh.detection import COLLECTIVES_BYTES, CONTEXT_BYTES, LIBRARIES_BYTES
from colofunc.mesh.presets import PRESETS

GIB = 1 << 30
H100 = PRESETS["8xh100"]


def card(alive_bytes: int, ranks: int = 8, is_tight: bool = False) -> CardMemory:
    found = card_memory(H100, alive_bytes, ranks, is_tight)
    assert found is not None
    return found


@pytest.mark.parametrize(("is_tight", "gaps"), [(False, KEPT_FRAGMENTS), (True, TIGHT_FRAGMENTS)])
def test_the_parts_of_a_card_add_up(is_tight: bool, gaps: int) -> None:
    alone, several = card(64 * GIB, 1, is_tight), card(64 * GIB, 8, is_tight)
    assert alone.needed_bytes == 64 * GIB + 64 * GIB // gaps + CONTEXT_BYTES + LIBRARIES_BYTES
    assert several.needed_bytes == alone.needed_bytes + COLLECTIVES_BYTES


def test_a_card_that_is_nearly_full_is_no_fit() -> None:
    assert card(64 * GIB).fits and not card(int(74.3 * GIB)).fits
    lines = card(int(74.3 * GIB)).lines()
    assert lines[0] == "on a card of 74.51 GiB:"
    assert lines[-1].endswith("3.955 GiB more than it has: this is no fit. Try: a budget of 62.57 GiB")
    assert card(card(int(74.3 * GIB)).budget_bytes, is_tight=True).fits
    assert [line.strip().split("  ")[0] for line in lines[1:-1]] == [
        "tensors alive at the peak", "gaps between the allocator's blocks", "workspaces of libraries, rounding of the allocator",
        "the driver's context", "buffers of communicators",
    ]  # fmt: skip


def test_a_card_without_room_for_tensors_is_given_no_budget() -> None:
    full = CardMemory(2 * GIB, GIB, (("gaps", GIB // 64), ("taken by others already", 3 * GIB)))
    assert full.budget_bytes < 0
    assert full.lines()[-1].endswith("this is no fit. Try: a card with more memory; what stands beside the tensors fills this one")


def test_what_a_found_card_has_taken_is_a_part_and_a_small_card_states_an_8th() -> None:
    taken = attrs.evolve(H100, reserved_bytes=8 * GIB)
    found = card_memory(taken, GIB, 8, False)
    assert found is not None and found.needed_bytes == GIB + GIB // KEPT_FRAGMENTS + 8 * GIB
    small = attrs.evolve(H100, tiers=tuple(attrs.evolve(t, capacity_bytes=8 * GIB) if t.name == "device" else t for t in H100.tiers))
    found = card_memory(small, GIB, 8, False)
    assert found is not None and found.needed_bytes == pytest.approx(GIB + GIB // KEPT_FRAGMENTS + GIB, abs=3)


def test_memory_without_a_limit_has_no_card() -> None:
    assert card_memory(PRESETS["ideal"], GIB, 8, False) is None


def test_plans_for_cards_say_it_and_keep_it(tmp_path: Path) -> None:
    def lowered(topology: str) -> cf.Plan:
        return cf.shard(lambda x: x.relu(), cf.Mesh(dp=2, topology=topology), donate=()).lower(cf.abstract((1 << 20,), torch.float32)).plan

    plan = lowered("8xh100")
    assert plan.card[1].endswith("4 MiB") and plan.card[-1].endswith("to spare") and plan.card[0] in plan.table()
    plan.save(tmp_path / "plan.json")
    assert cf.Plan.load(tmp_path / "plan.json").card == plan.card
    assert lowered("gloo-cpu").card == ()
