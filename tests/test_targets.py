"""What is told of operators by their names and definitions: views, reshapes, which of them may copy, arguments, partners."""

from collections.abc import Callable

import pytest
import torch

from colofunc.errors import ProgramError
from colofunc.ops.attention import attention, attention_backward
from colofunc.ops.define import OPERATORS
from colofunc.ops.facts import Facts
from colofunc.ops.targets import KEEP_ORDER, RESHAPES, argument_at, is_view, keeps_order, may_copy, overload, resolve
from colofunc.program.facts import (
    backward_of,
    facts_of,
    is_lookup,
    is_product,
    reads_rows,
    sums_rows,
    writes_rows,
)

X = torch.arange(24.0).view(2, 1, 12)
CALLS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(RESHAPES, ((4, 6),)),
    "aten._reshape_alias.default": ((4, 6), (6, 1)),
    "aten.unsqueeze.default": (1,),
    "aten.squeeze.default": (),
    "aten.squeeze.dim": (1,),
    "aten.squeeze.dims": ((1,),),
}


def test_reshapes_keep_all_elements_in_their_order() -> None:
    assert set(CALLS) == KEEP_ORDER
    for target, args in CALLS.items():
        found = overload(target)(X, *args)
        assert found.shape != X.shape and torch.equal(found.flatten(), X.flatten())
        assert is_view(target) and keeps_order(target)


@pytest.mark.parametrize("target", ["aten.permute.default", "aten.expand.default", "aten.slice.Tensor", "aten.view.dtype"])
def test_other_views_are_no_reshapes(target: str) -> None:
    assert is_view(target) and not keeps_order(target)


@pytest.mark.parametrize("target", ["aten.clone.default", "aten.view_copy.default", "colofunc.rearrange", "mylib.view"])
def test_what_makes_memory_is_no_view(target: str) -> None:
    assert not is_view(target)


GAPS: dict[str, Callable[[], torch.Tensor]] = {
    "aten.view.default": lambda: resolve("aten.view.default")(X.expand(2, 3, 12), (72,)),
    "aten.view.dtype": lambda: resolve("aten.view.dtype")(X[..., ::2], torch.int16),
    "aten.as_strided.default": lambda: resolve("aten.as_strided.default")(X.transpose(0, 2), (3,), (1,)),
    "aten.unsqueeze.default": lambda: resolve("aten.unsqueeze.default")(X.transpose(0, 2), 1),
    "aten.squeeze.dim": lambda: resolve("aten.squeeze.dim")(X.transpose(0, 2), 1),
    "aten.select.int": lambda: resolve("aten.select.int")(X[..., ::2], 2, 1),
}


@pytest.mark.parametrize("target", GAPS)
def test_a_view_may_copy_where_it_wants_its_operand_in_one_piece(target: str) -> None:
    copied = GAPS[target]().untyped_storage().data_ptr() != X.untyped_storage().data_ptr()
    assert is_view(target) and may_copy(target) == copied


def test_arguments_are_found_by_name() -> None:
    assert [argument_at(attention.name, name) for name in ("q", "bias", "causal", "window", "sizes")] == [0, 3, 5, 6, 12]
    assert argument_at(attention_backward.name, "q") == 1
    with pytest.raises(ProgramError, match=r"'aten.mm.default' has no argument 'q'. Try: one of \['mat2', 'self'\]"):
        argument_at("aten.mm.default", "q")


def test_products_name_those_of_their_gradients() -> None:
    assert backward_of("colofunc.linear") == ("colofunc.linear_dx", "colofunc.linear_dw")
    assert backward_of("colofunc.int8_linear") == ("colofunc.int8_linear_dx",)
    assert backward_of("aten.mm.default") == ("aten.mm.default",)
    for target, made in OPERATORS.items():
        products = made.facts.backward_products
        assert all(map(is_product, (target, *products))) or not products


def test_lookups_read_rows_and_their_gradients_write_some() -> None:
    for lookup, gradient in (("aten.embedding.default", "aten.embedding_dense_backward.default"),
                             ("colofunc.embedding_bag", "colofunc.embedding_bag_backward")):  # fmt: skip
        assert reads_rows(lookup) and writes_rows(gradient) and not reads_rows(gradient) and not writes_rows(lookup)
        assert is_lookup(lookup) and not is_lookup(gradient)
    assert sums_rows("colofunc.embedding_bag") and not sums_rows("aten.embedding.default")
    # Activations are indexed as well: no table stands there.
    assert reads_rows("aten.index.Tensor") and not is_lookup("aten.index.Tensor")
    with pytest.raises(ValueError, match=r"rows is 'reads'\. Try: one of read, indexed, summed, written"):
        Facts(rows="reads")


def test_operators_that_draw_by_place_are_the_random_ones() -> None:
    drawn = {f"colofunc.random_{name}" for name in ("bits", "uniform", "normal", "bernoulli")}
    found = {name for name, operator in OPERATORS.items() if operator.facts.draws_by_place}
    assert found == {*drawn, "colofunc.dropout", attention.name, attention_backward.name}
    assert not facts_of("aten.as_strided.default").draws_by_place
    # Updates that round at random draw by the place of a row, in memory of their own: no part of them is drawn by itself.
    assert not facts_of("colofunc.adamw_rounded").draws_by_place
