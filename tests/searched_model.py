"""The cost model that a plan is searched in."""

from collections.abc import Callable
from typing import Any

import pytest

from colofunc.planner.sharding import assign
from colofunc.planner.sharding.model import PairwiseModel


def searched_model(plan: Callable[[], object]) -> PairwiseModel:
    """Of the first search while `plan()` plans anew."""
    found: list[PairwiseModel] = []
    real = assign.search_ends

    def noted(model: PairwiseModel, *args: Any) -> list[list[int]]:
        found.append(model)
        return real(model, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assign, "search_ends", noted)
        patch.setenv("COLOFUNC_CACHE", "off")
        plan()
    return found[0]
