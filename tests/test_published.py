"""What the table of published runs counts by: the order of runs."""

from __future__ import annotations

import attrs

from bench._published_rows import RUNS
from bench.published import Result, kendall


def test_the_order_counts_pairs_of_one_model_without_what_was_published_as_equal() -> None:
    like = RUNS[0]
    runs = [attrs.evolve(like, measured_s=measured_s) for measured_s in (1.0, 2.0, 2.0, 3.0)]
    other = attrs.evolve(like, model=attrs.evolve(like.model, layers=1))
    results = [Result(run, seconds, 0.0, {}) for run, seconds in zip((*runs, other), (1.0, 2.0, 3.0, 2.5, 9.0), strict=True)]
    assert kendall(results) == (4, 5)  # the third is predicted slower than the last; the second and third are alike
