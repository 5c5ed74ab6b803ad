"""Models as they are: one AdamW training step of each on dp=2, tp=2 against one device, every leaf, in float64.

Per model a line is printed (`pytest -s`, or the summary of `-rP`): operators, seconds of tracing and planning, the share
of flops and of bytes that is split, operators without a rule, and collectives. Default: one of each kind; `-m sweep`: all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import zoo

import colofunc as cf
from colofunc import testing
from colofunc.compiler import named_candidates

pytest.importorskip("transformers")
pytest.importorskip("timm")

# Diverse and small: a decoder with a learned position, one with rotary positions and grouped heads, relative positions
# with a bias gradient, masked encoder, encoder-decoder; patches, windows, convolutions with batch norm, squeezes.
QUICK = ("gpt2", "llama", "t5", "bert", "vit", "resmlp", "resnet", *zoo.KINDS)


@pytest.fixture(autouse=True)
def searched_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What operators can be split is asked of the search; a named plan that ends sooner may split less."""
    monkeypatch.setattr(named_candidates, "MOST_NODES", 0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def one_step(name: str) -> tuple[cf.testing.Checked, object]:
    """Check one step of a model and print its line; returns what was checked and the coverage."""
    with testing.float64():
        fn, state, batch = zoo.step_of(name)
        step = cf.shard(fn, cf.Mesh(dp=2, tp=2, topology="ideal"))
        began = time.perf_counter()
        low = step.lower(state, batch)
        planned_s = time.perf_counter() - began
        cover, cost = low.coverage(), low.cost()
        calls = " ".join(f"{kind}/{axes}:{n}" for (kind, axes), n in sorted(cost.calls.items()))
        print(
            f"\n{name:20} {len(low.global_program.nodes):5} operators  trace and plan {planned_s:5.1f} s  "
            f"flops {cover.flops:.1%}  bytes {cover.bytes:.1%}  fallbacks {list(cover.fallbacks) or 'none'}  {calls}"
        )
        try:
            checked = testing.check(step, state, batch, steps=1)
        except cf.CheckError:
            # Batch norm over a few samples, tens of layers deep, magnifies rounding a million times. Moving the inputs by
            # their last bit shows how much; ten times that, because sums in another order move every layer's results by
            # several last bits, not the inputs' alone.
            moved = testing.last_bit(fn, state, batch)
            print(f"{'':20} the last bit of the inputs moves the reference by {moved:.1e}")
            assert 1e-10 < moved < 1e-6  # otherwise the difference is no rounding
            checked = testing.check(step, state, batch, steps=1, tolerance=10 * moved)
        print(f"{'':20} {checked.leaves:5} leaves equal one device, worst {checked.worst:.1e}")
    return checked, cover


def assert_split(name: str) -> None:
    checked, cover = one_step(name)
    assert checked.leaves > 5
    assert not cover.fallbacks
    assert cover.flops >= 0.95
    assert cover.bytes >= zoo.ALL[name].least_bytes


@pytest.mark.parametrize("name", QUICK)
def test_model(name) -> None:
    assert_split(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [n for n in zoo.LISTED if n not in QUICK])
def test_listed_model(name) -> None:
    assert_split(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", zoo.LAYERS)
def test_layers(name) -> None:
    assert_split(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", zoo.MORE)
def test_more_model(name) -> None:
    assert_split(name)


@pytest.mark.parametrize("name", ["gpt2", "resmlp"])
def test_zoo_is_deterministic(name) -> None:
    with testing.float64():
        a, b = zoo.step_of(name), zoo.step_of(name)
    assert testing.compare(a[1:], b[1:], tolerance=0.0) == 0.0


def test_labels_are_masked_unevenly() -> None:
    counts = (zoo.build("gpt2")[1]["labels"] != -100).sum(1)
    assert len(set(counts.tolist())) > 1
