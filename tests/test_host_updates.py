"""Updates on the host: whatever the optimizer, its state lies there and the device's peak falls."""

import itertools
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import colofunc as cf
from colofunc.functional.lion_lamb import OWN
from colofunc.functional.optimizers import OPERATORS
from colofunc.functional.torch_optim import TRACEABLE
from colofunc.planner.offload.policies import HOST
from colofunc.testing import check

CLASSES = {cls.__name__: cls for cls in (*OPERATORS, *OWN, *(getattr(torch.optim, name) for name in TRACEABLE))}
BY_DEFAULT = {"Adam", "AdamW", "LAMB", "Lion", "Muon", "RMSprop", "SGD"}
EVERY = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.sweep) for name in sorted(CLASSES)]
OPTIONS = {"Adam": {"amsgrad": True}, "RMSprop": {"momentum": 0.9, "centered": True}, "SGD": {"momentum": 0.9}}
ALL_THERE = attrs.evolve(HOST, name="all there", update="host")


def network() -> Any:
    torch.manual_seed(0)
    layers = (layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.Tanh()))
    return cf.functional(nn.Sequential(*layers).double())


def batch() -> Any:
    return torch.randn(4, 48, dtype=torch.float64)


def training(name: str) -> tuple[Any, Any, Any]:
    groups = {"*.bias": cf.adapt(torch.optim.SGD, lr=1e-2)} if name == "Muon" else {}
    optimizer = cf.adapt(CLASSES[name], lr=1e-2, groups=groups, **OPTIONS.get(name, {}))
    step, state = cf.train_step(network(), optimizer, loss=lambda out: out.square().mean())
    return step, state, batch()


def by_hand(adam: bool, clip: bool, averaged: bool) -> tuple[Any, Any, Any]:
    """A step whose update is written with torch's operators."""
    model = network()

    def step(state: Any, x: Any) -> Any:
        params = state["params"]
        loss, grads = cf.value_and_grad(lambda p: model.apply(p, {}, x)[0].square().mean())(params)
        if clip:
            grads, _ = cf.clip_by_global_norm(grads, 0.1)
        new: dict[str, Any] = {key: {} for key in state}
        for n, p in params.items():
            move = grads[n]
            if adam:
                new["m"][n] = 0.9 * state["m"][n] + 0.1 * grads[n]
                new["v"][n] = 0.99 * state["v"][n] + 0.01 * grads[n] * grads[n]
                move = new["m"][n] / (new["v"][n].sqrt() + 1e-8)
            new["params"][n] = p - 0.01 * move
            if averaged:
                new["ema"][n] = state["ema"][n].lerp(new["params"][n], 0.1)
        return new, loss

    kept = ["params", *(["m", "v"] if adam else []), *(["ema"] if averaged else [])]
    state = {key: {n: p.clone() if key in ("params", "ema") else torch.zeros_like(p) for n, p in model.params.items()} for key in kept}
    return step, state, batch()


def peak(staged: Any, *args: Any) -> int:
    return int(staged.lower(*args).memory().peak_bytes["device"])


def nbytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_is_updated_on_the_host_with_equal_numbers(name: str) -> None:
    step, *args = training(name)
    whole = cf.shard(step, cf.Mesh(dp=1))
    assert peak(cf.offload(whole, policy="host"), *args) < peak(whole, *args) / 1.2
    # Parameters are fetched for the forward pass; gradients leave one by one and no other state ever comes.
    away = cf.offload(whole, policy=ALL_THERE)
    assert peak(away, *args) < 1.1 * nbytes(args[0]["params"])
    with cf.testing.float64():
        check(away, *args, steps=2)


@pytest.mark.parametrize("adam, clip, averaged", list(itertools.product((False, True), repeat=3)))
def test_updates_written_by_hand_are_found_and_run_on_the_host(adam: bool, clip: bool, averaged: bool) -> None:
    step, *args = by_hand(adam, clip, averaged)
    whole = cf.shard(step, cf.Mesh(dp=1))
    away = cf.offload(whole, policy=ALL_THERE)
    low = away.lower(*args)
    assert "8 of 8 updates run there" in str(low.plan.memory)
    # Clipping wants the norm of all gradients before the first of them is used.
    assert peak(away, *args) < (2.1 if clip else 1.1) * nbytes(args[0]["params"])
    check(away, *args, steps=2)


def test_within_a_budget_an_update_of_many_operators_needs_no_more_than_one_operator_does() -> None:
    step, *args = training("Muon")
    whole = cf.shard(step, cf.Mesh(dp=1))
    budget = int(1.2 * nbytes(args[0]["params"]))
    staged = cf.offload(whole, budget=budget)
    assert peak(staged, *args) <= budget < peak(whole, *args) / 2
    check(staged, *args, steps=2)
