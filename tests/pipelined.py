"""Small steps for tests of pipelines."""

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from colofunc.program.ir import Loop, Program


def mlp(layers: int = 4) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Linear(8, 16)]
    for _ in range(layers - 2):
        blocks += [nn.Tanh(), nn.Linear(16, 16)]
    net = nn.Sequential(*blocks, nn.Tanh(), nn.Linear(16, 4)).double()
    step, state = cf.train_step(
        cf.functional(net),
        cf.adapt(torch.optim.AdamW, lr=1e-2),
        lambda out, b: (out - b[1]).pow(2).mean(),
        inputs=lambda b: ((b[0],), {}),
    )
    return step, state, (torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64))


def gpt2(layers: int = 2, width: int = 16) -> tuple[Any, Any, Any]:
    """With a tied weight: the embedding of the first stage is the head of the last."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=2, vocab_size=32, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    step, state = cf.train_step(cf.functional(GPT2LMHeadModel(config).double()), cf.adapt(torch.optim.AdamW, lr=1e-3), clip=0.5)
    ids = torch.randint(32, (8, 8))
    return step, state, {"input_ids": ids, "labels": ids}


def cut_as(low: Any) -> dict[str, int]:
    """Stages to give to `cf.pipeline`, so that it cuts as a lowered step is cut. A tied weight is left to be where it is read."""
    leaves = [leaf for leaf in low.plan.inputs if leaf.role == "param" and leaf.at is not None]
    return {leaf.name: leaf.at[1][0] for leaf in leaves if len(leaf.at[1]) == 1}


def loop_of(program: Program) -> Loop:
    """The loop that a schedule runs."""
    (loop,) = (node.loop for node in program.nodes if node.loop is not None and node.loop.timetable is not None)
    return loop
