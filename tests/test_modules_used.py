"""Modes and frozen weights of the models that a step calls are part of its program, however the step comes to them."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import colofunc as cf

X = torch.linspace(-1, 1, 12).view(4, 3)
MESH = cf.Mesh(dp=2)
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Trainer:
    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model.apply(params, self.model.buffers, x)[0]
        return out

    def training(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        self.model.train()
        return self.forward(params, x)

    def evaluation(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        return self.forward(params, x)


def with_model(model: Any, params: Any, x: torch.Tensor) -> torch.Tensor:
    return Trainer(model).forward(params, x)


def in_list(model: Any) -> Forward:
    models = [model]
    return lambda params, x: Trainer(models[0]).forward(params, x)


def in_dict(model: Any) -> Forward:
    models = {"net": model}
    return lambda params, x: Trainer(models["net"]).forward(params, x)


def of_another_file(model: Any) -> Forward:
    helper = ModuleType("helper")
    helper.__dict__["MODEL"] = model
    exec("def forward(params, x): return MODEL.apply(params, MODEL.buffers, x)[0]", helper.__dict__)
    return lambda params, x: helper.forward(params, x)


def called_as_a_module(model: Any) -> Forward:
    trainer = Trainer(model.module)
    return lambda params, x: torch.func.functional_call(trainer.model, params, (x,))


WAYS: dict[str, Callable[[Any], Forward]] = {
    "a bound method": lambda model: Trainer(model).forward,
    "a partial": lambda model: partial(with_model, model),
    "a list": in_list,
    "a dict": in_dict,
    "a helper of another file": of_another_file,
    "a plain module": called_as_a_module,
}


def net(trainable: str = "*") -> Any:
    torch.manual_seed(0)
    return cf.functional(nn.Sequential(nn.Linear(3, 4), nn.Dropout(1.0), nn.Linear(4, 2)), trainable)


def prepared(step: Any) -> int:
    return sum(len(known) for known in step.compiler._ready.values())


@pytest.mark.parametrize("way", WAYS)
def test_a_switch_of_the_mode_is_seen_and_the_old_program_found_again(way: str) -> None:
    model = net()
    step = cf.shard(WAYS[way](model), MESH)
    for training in (True, False, False, True, False):
        model.train(training)
        torch.testing.assert_close(step(model.params, X).full(), model.module(X))
    assert prepared(step) == 2


@pytest.mark.parametrize("way", ["a bound method", "a list", "a helper of another file"])
def test_another_tensor_as_a_frozen_weight_is_seen(way: str) -> None:
    model = net("0.*").eval()
    step = cf.shard(WAYS[way](model), MESH)
    before = step(model.params, X).full()
    step(model.params, X)
    model.frozen["2.bias"] = model.frozen["2.bias"] + 1
    torch.testing.assert_close(step(model.params, X).full(), before + 1)


def test_the_mode_of_one_submodule_and_another_submodule_are_seen() -> None:
    model = net()
    step = cf.shard(Trainer(model).forward, MESH)
    step(model.params, X)
    model.module[1].eval()
    torch.testing.assert_close(step(model.params, X).full(), model.module(X))
    model.module[1] = nn.Tanh()
    torch.testing.assert_close(step(model.params, X).full(), model.module(X))


def test_steps_that_switch_the_mode_themselves_are_not_traced_for_ever() -> None:
    trainer = Trainer(net())
    train, evaluate = (cf.shard(fn, MESH) for fn in (trainer.training, trainer.evaluation))
    for _ in range(5):
        dropped, whole = (step(trainer.model.params, X).full() for step in (train, evaluate))
        assert dropped.equal(dropped[:1].expand_as(dropped)) and not whole.equal(dropped)
    assert prepared(train) <= 2 and prepared(evaluate) <= 2


def test_a_module_that_the_step_makes_for_itself_ends_with_its_trace() -> None:
    model = net().eval()
    parts = list(model.module)
    step = cf.shard(lambda x: nn.Sequential(nn.ReLU(), *parts)(x), MESH)
    low = step.lower(X)
    assert {type(module) for module in low.traced.modules} == {nn.Linear, nn.Dropout}
    kept = step(X).full()
    parts[1].train()
    assert not step(X).full().equal(kept)
