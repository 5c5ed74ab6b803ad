"""examples/vit_25d.py: it learns, equals one device, and lies as it says."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

import colofunc as cf
from colofunc.testing import check

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def vit(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    pytest.importorskip("timm")
    found = importlib.util.spec_from_file_location("vit_25d", EXAMPLES / "vit_25d.py")
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "vit_25d", module)
    found.loader.exec_module(module)
    return module


def test_a_vision_transformer_on_a_grid_of_depth_two_learns(vit: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    losses = vit.main(["--steps", "15"])
    assert losses[0] > 1.0 and losses[-1] < 0.5
    said = capsys.readouterr().out
    assert "summa rows" in said and "blocks.0.mlp.fc1.weight: (y a) (x b)" in said


def test_it_equals_one_device_and_every_product_of_its_blocks_is_summa(vit: types.ModuleType) -> None:
    step_fn, state = vit.make_step(depth=1, width=16)
    wide = {"params": {k: v.double() for k, v in state["params"].items()}}
    state = {**state, **wide, "opt": cf.adapt(torch.optim.AdamW, lr=5e-3).init(wide["params"])}
    batch = {k: v.double() if v.is_floating_point() else v for k, v in vit.colours(4, 16, seed=0).items()}
    step = cf.shard(step_fn, cf.Mesh(x=2, y=2, z=2, topology="8xa100-80g"), vit.tensor("2.5d", ("x", "y", "z"), depth=2))
    assert check(step, state, batch).worst < 1e-10
    products = [d for d in step.lower(state, batch).plan.find("colofunc.linear*") if d.path.startswith("blocks")]
    assert len(products) == 12 and all(("x", "summa rows") in d.axes and ("z", "summa depth") in d.axes for d in products)
