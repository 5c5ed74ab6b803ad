"""Excerpts on the pages: `py` blocks that are no programs of their own run behind what they leave out, or a reason stands here.

`python` blocks of README and docs run as they are printed (test_readme).
"""

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colofunc as cf

PAGES = {page.stem: page for page in sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md"))}

GENERATED = "docstrings of hooks and functions, whose plugins the tests of plugins and of writing_a_mode run"
ELSEWHERE = {  # page -> why its blocks do not run here
    "plugins": GENERATED,
    "reference": GENERATED,
    "configuration": "test_config runs it with the page's file",
    "integrations": "test_lightning and test_trainer run them",
    "environment": "the figures that it writes are left out: test_owned and test_plan_cache use the cache",
    "testing": "a test of two processes, which test_distributed and others are",
}


def excerpts(page: str) -> list[str]:
    return re.findall(r"^```py\n(.*?)^```$", PAGES[page].read_text(), re.S | re.M)


def training() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = cf.functional(nn.Sequential(OrderedDict({"q_proj": nn.Linear(8, 16), "out": nn.Linear(16, 8)})))
    return cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), loss=lambda out: out.square().mean())


def test_every_excerpt_runs_or_says_why_not() -> None:
    assert {page for page in PAGES if excerpts(page)} == {*ELSEWHERE, "saving", "compiled"}


def test_the_excerpts_of_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save, load, pretrained = excerpts("saving")
    mesh = cf.Mesh(dp=2, tp=2, topology="ideal")
    step_fn, state = training()
    step = cf.shard(step_fn, mesh)
    data = cf.batches([torch.ones(4, 8)] * 3, mesh)
    state = step.init(state, data.peek())
    names: dict[str, Any] = {"cf": cf, "state": state, "data": data}
    begins, goes_on = save.split("...\n")
    exec(begins, names)
    names["saving"].wait()  # what is left out takes longer
    exec(goes_on, names)
    bits = {name: x.full() for name, x in state["params"].items()}
    for name, x in names["state"]["params"].items():
        assert torch.equal(x.full(), bits[name])
    names = {"cf": cf, "state": state, "path": "run/step-200", "mesh": mesh}
    for line in load.splitlines():
        got = eval(line, names)["params"]
        for name, x in got.items():
            assert torch.equal(x.full() if isinstance(x, cf.DTensor) else x, bits[name]), line
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained("llama")
    ids = torch.randint(32, (4, 6))
    names |= {"LlamaForCausalLM": transformers.LlamaForCausalLM, "config": config, "opt": cf.adapt(torch.optim.SGD, lr=0.1)}
    exec(pretrained, names | {"batch": {"input_ids": ids, "labels": ids}})
    want = transformers.LlamaForCausalLM.from_pretrained("llama").state_dict()
    for name, x in transformers.AutoModelForCausalLM.from_pretrained("trained").state_dict().items():
        assert torch.equal(x, want[name]), name


def test_the_excerpt_of_compiled() -> None:
    (text,) = excerpts("compiled")
    step_fn, state = training()
    batch = torch.ones(8, 8)
    fast = cf.shard(step_fn, cf.Mesh())
    names = {"cf": cf, "fast": fast, "state": fast.init(state, batch), "batch": batch, "step_fn": step_fn}
    exec(text, names)
    assert names["step"].executor == "compiled" and names["metrics"]["loss"].isfinite()
