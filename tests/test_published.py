"""What the prediction of published runs counts by: chunks beside products, and the order of runs."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from test_executors import R, program

from bench._published_rows import RUNS
from bench._published_steps import Apart, Chunked
from bench.published import Result, kendall


def seconds_of(**taken_s: float) -> Any:
    return lambda node, values: taken_s[node.target.split(".")[1]]


GATHER = [
    ("colofunc.all_gather", (R(0), ("tp",), 4, 0), (1,)), ("aten.view.default", (R(1), [4]), (2,)), ("aten.mm.default", (R(2), R(2)), (3,)),
    ("colofunc.reduce_scatter", (R(3), ("tp",), 4, 0), (4,)), ("colofunc.all_gather", (R(4), ("dp",), 4, 0), (5,)),
]  # fmt: skip


@pytest.mark.parametrize(("wire_s", "product_s", "left_s"), [(4.0, 10.0, 1.0), (4.0, 1.0, 3.0), (4.0, 3.5, 1.0)])
def test_what_runs_in_chunks_leaves_one_piece_or_what_is_longer_than_the_product(wire_s: float, product_s: float, left_s: float) -> None:
    made = program([0], GATHER, [], [(4,)] * 6)
    whole = seconds_of(all_gather=wire_s, reduce_scatter=wire_s, view=0.0, mm=product_s)
    chunked = Chunked(made, whole)
    found = [chunked.seconds(node, made.values) for node in made.nodes]
    assert found == [left_s, 0.0, product_s, left_s, wire_s]  # what other axes move is not cut


def test_a_gather_that_no_product_reads_stays_whole() -> None:
    made = program([0], [*GATHER[:2], ("aten.neg.default", (R(2),), (3,))], [], [(4,)] * 4)
    chunked = Chunked(made, seconds_of(all_gather=4.0, view=0.0, neg=9.0))
    assert chunked.seconds(made.nodes[0], made.values) == 4.0


def test_gradients_of_one_input_are_reduced_one_by_one_where_a_run_had_it_so() -> None:
    """Two products, one of them behind a view, whose results are summed; and one product whose result is reduced at once."""
    product = ("aten.mm.default", (R(0), R(0)))
    nodes = [
        (*product, (1,)), (*product, (2,)), ("aten.view.default", (R(2), [4]), (3,)), ("aten.add.Tensor", (R(1), R(3)), (4,)),
        ("colofunc.reduce_scatter", (R(4), ("tp",), 4, 0), (5,)), ("colofunc.reduce_scatter", (R(1), ("tp",), 4, 0), (6,)),
        ("colofunc.reduce_scatter", (R(4), ("dp",), 4, 0), (7,)),
    ]  # fmt: skip
    made = program([0], nodes, [], [(4,)] * 8)
    apart = Apart(made, seconds_of(reduce_scatter=4.0, mm=1.0, view=0.0, add=0.5))
    assert [apart.seconds(node, made.values) for node in made.nodes] == [1.0, 1.0, 0.0, 0.5, 8.0, 4.0, 4.0]


def test_the_order_counts_pairs_of_one_model_without_what_was_published_as_equal() -> None:
    like = RUNS[0]
    runs = [attrs.evolve(like, measured_s=measured_s) for measured_s in (1.0, 2.0, 2.0, 3.0)]
    other = attrs.evolve(like, model=attrs.evolve(like.model, layers=1))
    results = [Result(run, seconds, 0.0, {}) for run, seconds in zip((*runs, other), (1.0, 2.0, 3.0, 2.5, 9.0), strict=True)]
    assert kendall(results) == (4, 5)  # the third is predicted slower than the last; the second and third are alike
