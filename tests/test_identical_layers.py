"""Identical layers are asked once: what planning and lowering do for each kind of layer does not grow with their number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from colofunc_plugins.sequence import ring
from transformers import LlamaConfig, LlamaForCausalLM

import colofunc as cf
from colofunc.compiler import completion
from colofunc.spec.conversions import conversion, search


def lowered(layers: int) -> None:
    size = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, vocab_size=32, use_cache=False)
    with torch.device("meta"):
        model = cf.functional(LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=layers)))
    optimizer = cf.adapt(torch.optim.SGD, lr=0.1)
    step, _ = cf.train_step(model, optimizer)
    state = {"params": model.params, "buffers": model.buffers, "opt": optimizer.init(model.params)}
    ids = cf.abstract((2, 16), torch.int64)
    cf.shard(step, cf.Mesh(cp=2), ring("cp")).lower(state, {"input_ids": ids, "labels": ids})


def counted(of: Any, name: str, monkeypatch: pytest.MonkeyPatch, layers: int) -> int:
    """How often a function is called while a step of so many layers is planned and lowered."""
    calls = list[None]()
    real: Callable[..., Any] = getattr(of, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(of, name, counting)
        lowered(layers)
    return len(calls)


def test_local_code_of_identical_layers_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    two, eight = (counted(completion, "record_local", monkeypatch, layers) for layers in (2, 8))
    assert two == eight > 0


def test_conversions_between_identical_layers_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sums of gradients are no new puzzles: a second step asks for nothing that the first has not asked for."""
    for known in (search.answer, conversion._route, conversion.conversion, conversion.conversion_curve):
        known.cache_clear()
    assert counted(search, "_search", monkeypatch, 2) > 0
    assert counted(search, "_search", monkeypatch, 8) == 0
