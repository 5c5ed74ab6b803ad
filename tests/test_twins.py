"""Twins as schemas have them: each writes what its functional operator computes, over the argument that it names."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from colofunc.ops.scatter import VIEWS
from colofunc.ops.targets import overload, resolve, target_of
from colofunc.ops.twins import Twin, functional_of, out_twin, twin_of
from colofunc.program.facts import is_pointwise

WRITTEN = 180
"""Elementwise operators that at least are tried; some want other arguments than `arguments` makes, or give another dtype than they take."""
X, PART, AT = torch.arange(12.0).reshape(3, 4), torch.full((3, 2), -1.0), torch.tensor([0, 2])
CASES: dict[str, tuple[Any, ...]] = {
    "aten.index_copy.default": (X, 1, AT, PART),
    "aten.index_add.default": (X, 1, AT, PART),
    "aten.index_put.default": (X, (None, AT), PART),
    "aten.index_fill.int_Scalar": (X, 1, AT, 5.0),
    "aten.scatter.src": (X, 1, AT.expand(3, 2), PART),
    "aten.scatter_add.default": (X, 1, AT.expand(3, 2), PART),
    "aten.masked_scatter.default": (X, X > 5, -X),
    "aten.copy.default": (X, PART[:, :1]),
    "aten.addmm.default": (X, PART, torch.ones(2, 4)),
    "aten.tril.default": (X,),
    "aten.cumsum.default": (X, 1),
    "aten.slice_scatter.default": (X, PART, 1, 1, 3),
    "aten.select_scatter.default": (X, PART[:, 0], 1, -1),
    "aten.diagonal_scatter.default": (X, torch.zeros(3), 1),
}


@cache
def elementwise() -> tuple[str, ...]:
    """Functional operators of torch that a schema gives an `out`, or a form in place, and that are tagged as elementwise."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for each in packet.overloads() if hasattr(packet, "overloads") else ():
            target = target_of(getattr(packet, each))
            if any(argument.name == "filename" for argument in getattr(packet, each)._schema.arguments):
                continue  # no step may have it, and it is listed where another test has asked for it
            if is_pointwise(target) and (out_twin(target) is not None or twin_of(target) is not None):
                found.append(target)
    return tuple(found)


def arguments(target: str) -> Iterator[list[Any]]:
    """Some for which an operator may compute: tensors of floats, integers, or a condition first."""
    wanted = [a for a in overload(target)._schema.arguments if not a.has_default_value() or "Tensor" in str(a.type)]
    for kind in ("float", "integer", "condition"):
        torch.manual_seed(0)
        made = [argument_of(str(argument.type), kind == "integer") for argument in wanted]
        if kind == "condition":
            made[0] = made[0] > 0.5
        yield made


def argument_of(kind: str, integer: bool) -> Any:
    if kind in ("Tensor", "Optional[Tensor]"):
        return torch.randint(1, 9, (4, 5)) if integer else torch.rand(4, 5) * 0.8 + 0.1
    if kind == "str":
        return "none"
    if "float" in kind:
        return 0.5
    return 2 if integer else 1


@pytest.mark.parametrize("part", range(2))
def test_elementwise_operators_may_write_over_any_operand(part: int) -> None:
    written = set()
    for target in elementwise()[part::2]:
        for given in arguments(target):
            try:
                want = overload(target)(*given)
            except (RuntimeError, TypeError, NotImplementedError):
                continue
            for k, x in enumerate(given):
                if isinstance(x, torch.Tensor) and (x.dtype, x.shape) == (want.dtype, want.shape):
                    assert_written(target, given, k, want)
                    written.add(target)
    assert len(written) >= WRITTEN // 2


def assert_written(target: str, given: list[Any], over: int, want: torch.Tensor) -> None:
    mine = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
    out, twin = out_twin(target), twin_of(target)
    if out is not None:
        assert functional_of(out[0]) == (target, out[1])
        got = overload(out[0])(*mine, **{out[1]: mine[over]})
    else:
        assert twin is not None
        if over != twin.places[0][1]:
            return
        got = overload(twin.target)(*mine)
    assert got.data_ptr() == mine[over].data_ptr()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=f"{target} over argument {over}")


@pytest.mark.parametrize("target", CASES)
def test_others_write_over_the_argument_that_is_written_in_their_schema(target: str) -> None:
    twin, args = twin_of(target), CASES[target]
    assert isinstance(twin, Twin) and (twin.places, twin.own) == (((0, 0),), 0) and functional_of(twin.target) == (target, "")
    mine = args[0].clone()
    got = resolve(twin.target)(mine, *args[1:])
    assert got.data_ptr() == mine.data_ptr()
    torch.testing.assert_close(got, resolve(target)(*args), rtol=0, atol=0)


def test_a_norms_twin_has_results_of_its_own_before_what_it_writes() -> None:
    functional = "aten._native_batch_norm_legit_functional.default"
    twin = twin_of(functional)
    assert twin == Twin("aten._native_batch_norm_legit.default", ((3, 3), (4, 4)), 3, 0)
    x, mean, var = torch.randn(6, 3), torch.zeros(3), torch.ones(3)
    want = resolve(functional)(x, None, None, mean, var, True, 0.1, 1e-5)
    got = resolve(twin.target)(x, None, None, mean, var, True, 0.1, 1e-5)
    for mine, theirs in zip((*got, mean, var), want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("target", [
    "aten.view.default",  # its result is a view
    "aten.bernoulli.p",  # the order of draws is its own
    "aten.mm.default",
    "aten._fused_adam.default",  # writes lists
    "colofunc.linear", "colofunc.all_gather_start", "segment.0.", "nobody.has_this",
])  # fmt: skip
def test_no_twin(target: str) -> None:
    assert twin_of(target) is None and functional_of(target) is None


def test_parts_are_written_through_the_view_that_a_name_says() -> None:
    """The view takes the same arguments but for the part."""
    for scatter, view in VIEWS.items():
        one, other = ([(a.name, str(a.type)) for a in overload(name)._schema.arguments] for name in (scatter, view))
        assert [a for a in one if a[0] != "src"] == other
