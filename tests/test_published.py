"""What the table of published runs counts by: the order of runs."""

from __future__ import annotations

import attrs
import pytest

from bench import _published_steps
from bench._published_rows import RUNS
from bench.published import Result, kendall


def test_the_order_counts_pairs_of_one_model_without_what_was_published_as_equal() -> None:
    like = RUNS[0]
    runs = [attrs.evolve(like, measured_s=measured_s) for measured_s in (1.0, 2.0, 2.0, 3.0)]
    other = attrs.evolve(like, model=attrs.evolve(like.model, layers=1))
    results = [Result(run, seconds, 0.0, {}) for run, seconds in zip((*runs, other), (1.0, 2.0, 3.0, 2.5, 9.0), strict=True)]
    assert kendall(results) == (4, 5)  # the third is predicted slower than the last; the second and third are alike


def test_microbatches_run_once_where_nothing_is_kept_and_gradients_are_reduced_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that backward reads behind the loop are no values to make again: that would be the whole step once more."""
    monkeypatch.setattr(_published_steps, "_policy", lambda run: "nothing")
    run = next(run for run in RUNS if run.id == "K3")
    assert run.reduces == "last"
    low = _published_steps.lowered(run, 1)
    loops = [node.loop for node in low.program.nodes if node.loop is not None]
    assert sum(any(node.target == "colofunc.linear_dw" for node in loop.body.nodes) for loop in loops) == 1
