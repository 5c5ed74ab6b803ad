"""The list of files in `docs/architecture.md` by which one value can be followed: short, and what is entered on the way."""

import re
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

import colofunc as cf

FEWER_THAN = 40
ROOT = Path(cf.__file__).parent
ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \| .+ \|$", re.M)


def listed() -> list[tuple[str, str]]:
    """(file, function) of each row."""
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    return ROW.findall(text.partition("## Following one value")[2].partition("\n## ")[0])


def run() -> None:
    """README's first example, smaller; in sizes of its own, so that nothing is known of it from other tests."""
    model = cf.functional(nn.Sequential(nn.Linear(44, 76), nn.GELU(), nn.Linear(76, 44)))
    optimizer = cf.adapt(torch.optim.AdamW, lr=1e-3)

    def step_fn(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> torch.Tensor:
            out, _ = model.apply(params, model.buffers, batch["x"])
            return (out - batch["y"]).square().mean()

        loss, grads = cf.value_and_grad(loss_fn)(state["params"])
        params, opt_state = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt_state}, {"loss": loss}

    step = cf.shard(step_fn, cf.Mesh(dp=2, tp=2), {"0.weight": "(tp o) i"}, in_specs=(None, "(dp b) ..."))
    batch = {"x": torch.randn(36, 44), "y": torch.randn(36, 44)}
    state = {"params": model.params, "opt": optimizer.init(model.params)}
    step.lower(state, batch)
    step(step.init(state, batch), batch)


def entered() -> set[tuple[str, str]]:
    """(file, function) of all of ours that `run` enters."""
    codes: set[CodeType] = set()

    def look(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(before)
    ours = (code for code in codes if code.co_filename.startswith(str(ROOT)))
    return {(str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname) for code in ours}


def test_every_step_on_the_way_is_taken() -> None:
    steps = listed()
    assert len({file for file, _ in steps}) == len(steps) < FEWER_THAN
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    assert f"These are {len(steps)} files" in text
    found = entered()
    assert [step for step in steps if step not in found] == []
