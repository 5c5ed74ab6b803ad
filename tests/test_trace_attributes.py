"""Tensors in plain attributes of modules: tables stay constants, what was computed of a parameter is refused."""

import collections
import contextlib
import dataclasses
import functools
from typing import ClassVar

import attrs
import pytest
import torch
from torch import nn

import colofunc as cf


class Biased(nn.Module):
    """Attention layers of several vision models keep their looked-up biases like this."""

    def __init__(self, holder: str) -> None:
        super().__init__()
        self.holder = holder
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.biases = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.table = torch.tensor([[0, 1, 2], [1, 2, 3], [2, 3, 0]])  # a constant, of no parameter
        self.scales = {"cpu": torch.linspace(1, 2, 3, dtype=torch.float64)}
        self.in_dict: dict[str, torch.Tensor] = {}
        self.in_list: list[torch.Tensor] = []
        self.plain: torch.Tensor | None = None

    def kept(self) -> torch.Tensor:
        if self.training:
            return self.biases[self.table]
        if self.holder == "in_dict":
            if not self.in_dict:
                self.in_dict["cpu"] = self.biases[self.table]
            return self.in_dict["cpu"]
        if self.holder == "in_list":
            self.in_list = self.in_list or [self.biases[self.table]]
            return self.in_list[0]
        self.plain = self.biases[self.table] if self.plain is None else self.plain
        return self.plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight * self.scales["cpu"] + self.kept()).square().mean()


X = torch.ones(3, 3, dtype=torch.float64)


def gradients(model: cf.Model) -> object:
    def step(params, x):
        return cf.value_and_grad(lambda p: model.apply(p, model.buffers, x)[0])(params)

    return cf.shard(step, cf.Mesh(dp=1))(model.params, X)


@pytest.mark.parametrize("holder", ["in_dict", "in_list", "plain"])
@pytest.mark.parametrize("called", ["before", "since", "with a gradient"])
def test_what_was_computed_of_a_parameter_is_refused(holder, called):
    module = Biased(holder).eval()
    model = cf.functional(module)
    with torch.set_grad_enabled(called == "with a gradient"):
        module(X)
    if called == "before":
        model = cf.functional(module)
    with pytest.raises(cf.TraceError, match=rf"attribute .*'{holder}'.*clear that attribute"):
        gradients(model)


def by_hand(module: nn.Module) -> object:
    """The gradients of a step that calls a module by torch's own function."""

    def step(params, x):
        return cf.value_and_grad(lambda p: torch.func.functional_call(module, p, (x,)))(params)

    return cf.shard(step, cf.Mesh(dp=1))({name: p.detach() for name, p in module.named_parameters()}, X)


@pytest.mark.parametrize("holder", ["in_dict", "in_list", "plain"])
@pytest.mark.parametrize("called", ["without", "with"])
def test_what_was_computed_is_refused_in_a_functional_call_by_hand(holder, called):
    module = Biased(holder).eval()
    with torch.set_grad_enabled(called == "with"):
        module(X)
    with pytest.raises(cf.TraceError, match=rf"attribute .*'{holder}'.*clear that attribute"):
        by_hand(module)


def test_an_attribute_that_is_passed_to_a_module_by_hand_is_refused():
    module = nn.Linear(3, 3).double()
    with torch.no_grad():
        module.kept = module.bias.exp()

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.helpers = module, [nn.Identity()]

        def forward(self, x):
            return (x @ self.inner.weight + self.helpers[0](self.inner.kept * 1)).square().mean()

    with pytest.raises(cf.TraceError, match=r"keeps in attribute 'kept', and does not read the parameter 'inner\.bias'"):
        by_hand(Adds())


class Widens(nn.Module):
    """Calls itself, and a module that is registered nowhere, which reads its table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.table = torch.arange(3, dtype=torch.float64)
        self.fails = False

    def forward(self, x: torch.Tensor, rounds: int = 2) -> torch.Tensor:
        if self.fails and not rounds:
            raise ValueError
        x = nn.Tanh()(self.linear(x) * self.table)
        return self(x, rounds - 1) if rounds else x.square().mean()


def test_tables_are_constants_in_a_functional_call_by_hand():
    torch.manual_seed(0)
    module = Widens()
    _, grads = by_hand(module)
    module(X).backward()
    cf.testing.compare(grads, {name: p.grad for name, p in module.named_parameters()})


def test_a_module_that_fails_is_watched_no_more():
    module, other = Widens(), Biased("plain").eval()
    module.fails = True
    with torch.no_grad():
        other(X)

    def step(params, x):
        with contextlib.suppress(ValueError):
            torch.func.functional_call(module, params["failing"], (x,))
        return cf.value_and_grad(lambda p: torch.func.functional_call(other, p, (x,)))(params["other"])

    params = {"failing": dict(module.named_parameters()), "other": dict(other.named_parameters())}
    with pytest.raises(cf.TraceError, match=r"attribute 'plain' of module '\(the model itself\)'"):
        cf.shard(step, cf.Mesh(dp=1))(params, X)


class Holder:
    """What is no container and no module."""


@attrs.define
class Slotted:
    kept: object


@dataclasses.dataclass(slots=True)
class SlottedData:
    kept: object
    other: object = dataclasses.field(init=False)


def cached(x):
    look = functools.lru_cache(lambda: x * 1)
    look()
    return look


NESTED = {
    "slots": Slotted,
    "slots of a dataclass": SlottedData,
    "deque": lambda x: collections.deque([x], maxlen=2),
    "partial": lambda x: functools.partial(torch.mul, x),
    "keyword of a partial": lambda x: functools.partial(torch.mul, other=x),
    "closure": lambda x: lambda: x,
    "default": lambda x: lambda x=x: x,
    "method": lambda x: Slotted(x).__repr__,
    "cache of a function": cached,
    "list": lambda x: [x],
    "dict of lists": lambda x: {"a": [{"b": (x,)}]},
    "object": lambda x: held_by(Holder(), x),
    "dict of objects": lambda x: {"a": held_by(Holder(), (None, x))},
    "itself": lambda x: in_itself([x]),
}


def held_by(holder: Holder, x: object) -> Holder:
    holder.kept, holder.owner = x, holder
    return holder


def in_itself(items: list[object]) -> list[object]:
    items.append(items)
    return items


@pytest.mark.parametrize("nesting", NESTED)
def test_what_was_computed_of_a_parameter_is_refused_however_deep_it_lies(nesting):
    module = Biased("plain").eval()
    model = cf.functional(module)
    with torch.no_grad():
        module(X)
    module.nested = NESTED[nesting](module.plain)
    with pytest.raises(cf.TraceError, match=r"attribute .*'nested'.*parameter 'biases'.*clear that attribute"):
        gradients(model)


class Shared(Biased):
    """Its objects share what they looked up."""

    memo: ClassVar[dict[str, torch.Tensor]] = {}

    def kept(self) -> torch.Tensor:
        if self.holder == "memo":
            if "biases" not in self.memo:
                self.memo["biases"] = self.biases[self.table]
            return self.memo["biases"]
        return self.looked()

    @functools.cache  # noqa: B019
    def looked(self) -> torch.Tensor:
        return self.biases[self.table]


@pytest.mark.parametrize("without_gradient", [False, True])
@pytest.mark.parametrize("holder", ["memo", "looked"])
def test_what_the_class_of_a_module_keeps_is_refused_if_it_was_computed(holder, without_gradient):
    module = Shared(holder).eval()
    model = cf.functional(module)
    Shared.memo.clear()
    with torch.set_grad_enabled(not without_gradient):
        module(X)
    with pytest.raises(cf.TraceError, match=rf"attribute '{holder}'"):
        gradients(model)
    Shared.memo.clear()
    Shared.looked.cache_clear()
    _, grads = gradients(cf.functional(module))
    assert not Shared.memo and grads["biases"].full().abs().max() > 0


class Registered(Biased):
    """Keeps what it computed in a buffer that it registers at the first call."""

    def kept(self) -> torch.Tensor:
        if self.holder not in self._buffers:
            self.register_buffer(self.holder, self.biases[self.table], persistent=False)
        return getattr(self, self.holder)


def test_a_buffer_that_was_registered_since_is_refused():
    module = Registered("late").eval()
    model = cf.functional(module)
    with torch.no_grad():
        module(X)
    with pytest.raises(cf.TraceError, match=r"attribute 'late'.*computed of parameter 'biases' at test_trace_attributes.py"):
        gradients(model)
    assert isinstance(module.late, torch.Tensor) and not module.late.requires_grad


def test_a_buffer_that_was_computed_with_a_gradient_is_refused():
    module = Registered("early").eval()
    module(X)
    with pytest.raises(cf.TraceError, match="the buffer 'early' of a module, which was computed, by IndexBackward"):
        gradients(cf.functional(module))


class Angles(nn.Module):
    """A table that is made at the first call, of no parameter; `around`: what it is kept in."""

    def __init__(self, around: str) -> None:
        super().__init__()
        self.around, self.cache, self.kept = NESTED[around], None, {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            table = torch.arange(3, dtype=torch.float64).cos()
            self.cache, self.kept["table"] = self.around(table), table
        return x * self.kept["table"]


class Rotated(nn.Module):
    def __init__(self, around: str) -> None:
        super().__init__()
        self.angles, self.linear = Angles(around), nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.angles(x)).square().mean()


# In the trace however it is nested, and at each other time once or more; the others in the sweep.
FILLED = [
    pytest.param(filled, around, marks=() if f == 2 or n % 2 == f else pytest.mark.sweep)
    for f, filled in enumerate(("before", "since", "in the trace"))
    for n, around in enumerate(NESTED)
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("filled", "around"), FILLED)
def test_a_table_is_filled_at_any_time(around, filled):
    module = Rotated(around)
    if filled == "before":
        module(X)
    model = cf.functional(module)
    if filled == "since":
        module(X)
    _, grads = gradients(model)
    assert (module.angles.cache is None) == (not module.angles.kept) == (filled == "in the trace")
    module(X).backward()
    cf.testing.compare(grads, {name: p.grad for name, p in module.named_parameters()})


class Offsets(nn.Module):
    """Keeps in itself what its submodule makes of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.made_by, self.kept = nn.Parameter(torch.ones(3).double()), nn.Linear(3, 3).double(), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.made_by(X) if self.kept is None else self.kept
        return (x * self.scale + self.kept).square().mean()


def test_what_a_submodule_computed_is_refused_and_runs_once_it_is_cleared():
    module = Offsets()
    model = cf.functional(module)
    with torch.no_grad():
        module(X)
    with pytest.raises(cf.TraceError, match=r"attribute 'kept'.*of parameter 'made_by\.bias', 'made_by\.weight' at test_trace"):
        gradients(model)
    module.kept = None
    with pytest.warns(UserWarning, match="in attribute 'kept' of a module Offsets, which is put back"):
        _, grads = gradients(model)
    module(X).backward()
    cf.testing.compare(grads, {name: p.grad for name, p in module.named_parameters()})


class ReadElsewhere(nn.Module):
    """Keeps what it computed of a parameter that the same forward reads again, and a table from its constructor."""

    def __init__(self, around: str, dropout: float) -> None:
        super().__init__()
        self.weight, self.biases = nn.Parameter(torch.randn(3, 3).double()), nn.Parameter(torch.randn(3).double())
        self.around, self.kept, self.calls = around, None if around == "attribute" else {}, 0
        self.start = self.weight.detach().clone()  # as penalties of the distance from it want it
        self.dropout = dropout

    def looked_up(self):
        if self.around == "dict":
            if "cpu" not in self.kept:
                self.kept["cpu"] = self.biases.exp()
            return self.kept["cpu"]
        if self.around == "attribute":
            if self.kept is None:
                self.kept = self.biases.exp()
            return self.kept
        if self.around == "hasattr":
            if not hasattr(self, "made"):
                self.made = self.biases.exp()
            return self.made
        if not self.kept:
            self.kept = [{"deep": (self.biases.exp(),)}]
        return self.kept[0]["deep"][0]

    def forward(self, x):
        self.calls += 1
        x = nn.functional.dropout(x @ self.weight + self.looked_up(), self.dropout)
        return x.square().mean() + self.biases.sum() + (self.weight - self.start).square().sum()


class Calling(nn.Module):
    """Calls a method of a submodule that is not its forward."""

    def __init__(self, inside: ReadElsewhere) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return (x + self.inside.looked_up()).square().mean() + self.inside.biases.sum() + self.inside.weight.sum()


@pytest.mark.parametrize("without_gradient", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("when", ["before", "since"])
@pytest.mark.parametrize("around", ["dict", "attribute", "hasattr", "nested"])
def test_what_was_computed_of_a_parameter_that_is_read_elsewhere_is_refused(around, when, without_gradient):
    plain, dropping, inner, called = (ReadElsewhere(around, dropout) for dropout in (0.0, 0.5, 0.0, 0.0))
    for module in (plain, dropping, nn.Sequential(inner), Calling(called)):
        model = cf.functional(module)
        with without_gradient():
            module(X)
        if when == "before":
            model = cf.functional(module)
        part = next(part for part in module.modules() if isinstance(part, ReadElsewhere))
        before = dict(vars(part))
        name = "made" if around == "hasattr" else "kept"
        with pytest.raises(cf.TraceError, match=rf"attribute '{name}' .*of parameter '.*biases' at test_trace_\w+.py:\d+ in looked_up"):
            gradients(model)
        assert {**vars(part), "calls": 0} == {**before, "calls": 0}


def test_what_is_not_filled_in_again_stays_a_constant():
    torch.manual_seed(0)
    module = ReadElsewhere("dict", 0.0)
    with pytest.warns(UserWarning, match="in attribute 'kept' of a module ReadElsewhere, which is put back"):
        _, grads = gradients(cf.functional(module))
    module(X).backward()
    cf.testing.compare(grads, {name: p.grad for name, p in module.named_parameters()})


def test_attributes_are_put_back_after_a_trace_that_fails():
    module = Rotated("list")
    model = cf.functional(module)

    def fails(params, x):
        model.apply(params, model.buffers, x)
        raise ValueError

    with pytest.raises(ValueError):
        cf.shard(fails, cf.Mesh(dp=1))(model.params, X)
    assert module.angles.cache is None and not module.angles.kept


def test_tables_in_attributes_are_constants():
    module = Biased("in_dict")
    module(X)
    model = cf.functional(module)
    _, grads = gradients(model)
    module.zero_grad()
    module(X).backward()
    cf.testing.compare(grads, {name: p.grad for name, p in module.named_parameters()})


def test_a_captured_tensor_with_a_history_is_refused():
    weight = torch.ones(3, requires_grad=True)
    outside = weight * 2
    with pytest.raises(cf.TraceError, match=r"test_trace_attributes.py:\d+ in .*by MulBackward, of something that requires a gradient"):
        cf.shard(lambda x: x + outside, cf.Mesh(dp=1))(torch.ones(3))
    constant = outside.detach()
    cf.testing.compare(cf.shard(lambda x: x + constant, cf.Mesh(dp=1))(torch.ones(3)), torch.ones(3) * 3)
