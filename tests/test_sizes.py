"""Budgets: bytes, units, parts of a memory and "auto", in one reading for every transform and the command line."""

from fractions import Fraction
from typing import Any

import attrs
import pytest
import torch

import colofunc as cf
from colofunc.command.machine import machine
from colofunc.errors import InputError
from colofunc.mesh.sizes import parse_bytes, parse_room

BAD: list[Any] = [
    "6 gigs", "lots", "", "-3", "-0.5", "0", "0.0", "0GiB", "0.3B", "0.0000001KB", "1.5", "nan", "inf", "1e9",
    0, -3, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, False, ["6GiB"], Fraction(1, 2), b"6GiB",
]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("6GiB", (6 * 2**30, None)), (" 512 mib ", (2**29, None)), ("0.5GB", (500_000_000, None)), ("1.5B", (1, None)),
        (7, (7, None)), ("7", (7, None)), (1, (1, None)), ("1", (1, None)),
        (0.5, (None, 0.5)), ("0.5", (None, 0.5)), (".25", (None, 0.25)), (1.0, (None, 1.0)), ("1.0", (None, 1.0)),
        ("auto", (None, None)),
    ],
)  # fmt: skip
def test_what_a_budget_means(said: Any, means: Any) -> None:
    assert parse_room(said, "budget") == means


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize(
    ("takes", "what"),
    [
        (lambda bad: cf.checkpoint(lambda x: x, budget=bad), "cf.checkpoint(budget=)"),
        (lambda bad: cf.offload(lambda x: x, budget=bad), "cf.offload(budget=)"),
        (lambda bad: cf.offload(lambda x: x, host=bad), "cf.offload(host=)"),
    ],
    ids=["checkpoint", "offload", "host"],
)
def test_a_budget_that_is_none_is_named_with_one_thing_to_try(takes: Any, what: str, bad: Any) -> None:
    with pytest.raises(InputError) as caught:
        takes(bad)
    assert str(caught.value).startswith(f"{what}: {bad!r} is no ") and "; write " in str(caught.value)


@pytest.mark.parametrize("bad", ["0.5", "0.3B", "0", "2T"])
def test_a_size_is_at_least_a_byte_and_no_part(bad: str) -> None:
    with pytest.raises(InputError, match=f"--disk: {bad!r} is no size.*; write"):
        parse_bytes(bad, "--disk")


def small(capacity_bytes: int) -> cf.Mesh:
    topology = cf.Mesh(topology="a100-40g").topology
    tiers = tuple(attrs.evolve(t, capacity_bytes=capacity_bytes) if t.name == "device" else t for t in topology.tiers)
    return cf.Mesh(topology=attrs.evolve(topology, tiers=tiers))


def net() -> Any:
    layers = torch.nn.Sequential(*(m for _ in range(4) for m in (torch.nn.Linear(16, 16), torch.nn.GELU())))
    opt, loss = cf.adapt(torch.optim.SGD, lr=0.1), lambda out, _: (out**2).mean()
    return *cf.train_step(cf.functional(layers), opt, loss=loss, inputs=lambda b: ((b,), {})), torch.ones(512, 16)


@pytest.mark.parametrize("move", [cf.checkpoint, cf.offload])
def test_half_of_the_device_is_kept_to_in_every_word(move: Any) -> None:
    step, *args = net()
    whole = cf.shard(step, cf.Mesh()).lower(*args).memory().peak_bytes["device"]
    sharded = cf.shard(step, small(int(1.5 * whole)))
    words = ("auto", 0.5, "0.5", int(0.75 * whole))
    peaks = [move(sharded, budget=b).lower(*args).memory().peak_bytes["device"] for b in words]
    assert peaks[0] == whole and peaks[1] == peaks[2] == peaks[3] <= 0.75 * whole


def test_a_part_of_no_limit_is_refused_and_auto_is_none() -> None:
    step, *args = net()
    with pytest.raises(cf.PlanError, match=r"cf\.checkpoint\(budget=0\.5\) is a part of the device's memory, which topology 'ideal'"):
        cf.checkpoint(cf.shard(step, cf.Mesh(topology="ideal")), budget=0.5).lower(*args)
    assert cf.checkpoint(cf.shard(step, cf.Mesh(topology="ideal")), budget="auto").lower(*args).memory().peak_bytes["device"]


def test_the_command_line_reads_the_same_words() -> None:
    has = {tier: cf.Mesh(topology="a100-40g").capacity_bytes(tier) or 0 for tier in ("device", "host")}
    left_bytes = has["device"] - 2**30  # beside the driver's context and libraries
    for budget, bytes_there in (("0.5", has["device"] // 2), ("auto", left_bytes), ("1GiB", 2**30), ("80GiB", left_bytes)):
        assert machine("a100-40g", "", "", budget)(cf.Mesh()).capacity_bytes("device") == bytes_there
    assert machine("a100-40g", "", "0.25", "")(cf.Mesh()).capacity_bytes("host") == has["host"] // 4
    assert machine("", "ideal", "", "auto")(cf.Mesh()).capacity_bytes("device") is None
    with pytest.raises(InputError, match=r"--budget 0.5 is a part of the device's memory, which topology 'ideal' does not limit; write"):
        machine("", "ideal", "", "0.5")(cf.Mesh())
    with pytest.raises(InputError, match=r"--budget: '0\.3B' is no size, it comes to less than one byte"):
        machine("a100-40g", "", "", "0.3B")(cf.Mesh())
