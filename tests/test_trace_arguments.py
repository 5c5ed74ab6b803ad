"""Arguments of a traced step: trees and their names, static parts of a signature, floats, states of every kind."""

import dataclasses
from collections import UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from interpreter import run_reference
from torch import nn
from traced import close, f64, same

import colofunc as cf
from colofunc.errors import InputError
from colofunc.program.tracing.trace import trace
from colofunc.program.tracing.tree import flatten
from colofunc.testing.trees import compare

# ---- trees, names, statics ----


class Pair(NamedTuple):
    a: torch.Tensor
    b: Any


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    mode: str


@attrs.frozen
class Box:
    items: list[torch.Tensor]


def test_trees_and_names() -> None:
    args = (
        {"w": torch.ones(2), "deep.name": Pair(torch.ones(1), None)},
        Record(torch.ones(2), "sum"),
        UserDict({"ids": torch.arange(2)}),
        Box([torch.ones(1), torch.ones(2)]),
        np.float64(0.5),
        np.arange(3.0),
    )

    def step(state: Any, record: Record, batch: Any, box: Box, lr: torch.Tensor, table: torch.Tensor) -> Any:
        assert record.mode == "sum"
        new = {
            k: (v * lr if isinstance(v, torch.Tensor) else v._replace(a=v.a + batch["ids"])) for k, v in state.items()
        }
        return new, Record(record.x * table.sum(), record.mode), Box(box.items[::-1]), batch

    traced = trace(step, args)
    assert traced.names == (
        "state.w", "state.deep.name.a", "record.x", "batch.ids", "box.items.0", "box.items.1", "lr", "table",
    )  # fmt: skip
    out = traced.unpack(run_reference(traced.program, traced.pack(args)))
    assert isinstance(out[0]["deep.name"], Pair) and out[0]["deep.name"].b is None
    assert isinstance(out[1], Record) and isinstance(out[2], Box) and isinstance(out[3], UserDict)
    assert torch.equal(out[0]["w"], torch.full((2,), 0.5)) and torch.equal(out[1].x, torch.full((2,), 3.0))


def test_a_float_argument_is_exact_and_does_not_promote() -> None:
    traced = same(lambda x, lr: x * lr, torch.randn(3), 0.1)
    assert traced.program.value(traced.program.outputs[0]).dtype == torch.float32


def test_pack_refuses_another_structure() -> None:
    traced = trace(lambda a, n: a["x"] * n, ({"x": torch.ones(2)}, 3))
    with pytest.raises(InputError, match="another structure"):
        traced.pack(({"y": torch.ones(2)}, 3))
    with pytest.raises(InputError, match="static"):
        traced.pack(({"x": torch.ones(2)}, 4))


def test_outputs_may_repeat_and_be_inputs() -> None:
    same(lambda x: (x, x, x.detach(), {"n": None, "k": 3}), torch.randn(2))


# ---- float arguments ----

OPERANDS = {
    "int": torch.tensor([1, 2, 3]),
    "int32_0dim": torch.tensor(3, dtype=torch.int32),
    "bool": torch.tensor([True, False]),
    "float32_0dim": torch.tensor(1.7),
    "bfloat16_0dim": torch.tensor(1.7, dtype=torch.bfloat16),
    "float32": torch.tensor([0.3, 1.7]),
    "bfloat16": torch.tensor([0.3, 1.7], dtype=torch.bfloat16),
    "float64": torch.tensor([0.3, 1.7], dtype=f64),
    "complex64_0dim": torch.tensor(1 + 2j),
}
WITH_A_FLOAT: dict[str, Callable[..., Any]] = {
    "add": lambda x, a: x + a,
    "radd": lambda x, a: a + x,
    "mul": lambda x, a: x * a,
    "sub": lambda x, a: a - x,
    "div": lambda x, a: x / a,
    "pow": lambda x, a: x**a,
    "rpow": lambda x, a: a**x,
    "less": lambda x, a: x < a,
    "equal": lambda x, a: x == a,
    "where": lambda x, a: torch.where(x != 0, x, a),
    "where_number": lambda x, a: torch.where(x != 0, a, 0.0),
    "arithmetic": lambda x, a: x * (2 * a + a * a),
    "negative": lambda x, a: x * -a,
    "two": lambda x, a: (x * a) * a,
}


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", WITH_A_FLOAT)
def test_a_float_promotes_as_python_does(name, operand):
    fn, x = WITH_A_FLOAT[name], OPERANDS[operand]
    if (name, operand) in (("sub", "bool"), ("less", "complex64_0dim")):
        return  # torch refuses these
    want = fn(x, 0.3)
    traced = trace(fn, (x, 0.3))
    (got,) = run_reference(traced.program, traced.pack((x, 0.3)))
    assert got.dtype == want.dtype == traced.program.values[traced.program.outputs[0]].dtype
    assert torch.equal(got, want)


def test_a_float_in_place_and_in_a_gradient():
    def step(x, n, a):
        y = x.clone()
        y.mul_(a)
        y += n * a
        return y.sum() * a, torch.autograd.grad(y.sum() * a, x)[0]

    args = (torch.tensor([0.1, 0.7], requires_grad=True), torch.tensor([1, 2]), 0.3)
    traced = trace(step, args)
    for a, b in zip(run_reference(traced.program, traced.pack(args)), step(*args), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_module_under_two_names_gets_its_own_tensors_back():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Sequential(self.a, nn.Linear(2, 2))
            self.b[1].weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    module = Twice()
    before = dict(module.named_parameters())
    model = cf.functional(module)
    x = torch.ones(1, 2)
    params = {k: v + 1 for k, v in model.params.items()}
    traced = trace(lambda p, x: model.apply(p, {}, x)[0], (params, x))
    assert all(a is before[name] for name, a in module.named_parameters()) and set(params) == {"a.weight", "a.bias", "b.1.bias"}
    (got,) = run_reference(traced.program, traced.pack((params, x)))
    inner = F.linear(F.linear(x, params["a.weight"], params["a.bias"]), params["a.weight"], params["a.bias"])
    close(got, F.linear(inner, params["a.weight"], params["b.1.bias"]))


class Mine(NamedTuple):
    w: torch.Tensor


@dataclasses.dataclass
class Held:
    w: torch.Tensor


@attrs.frozen
class Kept:
    w: torch.Tensor


KINDS_OF_STATES = [Mine, Held, Kept, lambda w: (w,), lambda w: [w], lambda w: defaultdict(dict, w=w), lambda w: UserDict(w=w)]


@pytest.mark.parametrize("kind", KINDS_OF_STATES)
def test_states_of_every_kind_are_trained_and_checked(kind):
    def step(state, x):
        (w,) = flatten(state)[0]
        return kind(w * 2 + x), x.sum()

    staged = cf.shard(step, cf.Mesh(dp=2))
    assert cf.testing.check(staged, kind(torch.ones(4)), torch.ones(4)).steps == 2
    state, _ = staged(staged.init(kind(torch.ones(4)), torch.ones(4)), torch.ones(4))
    assert type(state) is type(kind(torch.ones(4)))


def test_a_wrong_record_is_named_by_its_field():
    with pytest.raises(cf.CheckError, match=r"out\.0\.w: differs"):
        compare([Kept(torch.ones(2))], [Kept(torch.zeros(2))], "out")
    with pytest.raises(cf.CheckError, match=r"unexpected \['out\.w'\], missing \['out\.0'\]"):
        compare(Kept(torch.ones(2)), [torch.ones(2)], "out")
