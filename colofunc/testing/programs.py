"""Small training steps with names: `step, state, batch = programs.mlp()`.

Each is a whole step (forward, loss, backward, AdamW) of a model of `colofunc.testing.models`, with sizes that 2 and 4
divide; state is {"params", "buffers", "opt"}. `NAMED` lists them, to parametrise tests:

    @pytest.mark.parametrize("name", programs.NAMED)
    def test_my_plugin(name):
        step, state, batch = programs.NAMED[name]()
        cf.testing.check(cf.shard(step, mesh, plugins=[my_plugin]), state, batch)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colofunc.functional.gradients import value_and_grad
from colofunc.functional.modules import functional
from colofunc.functional.optimizers import adapt
from colofunc.testing import models

Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]


class Step(NamedTuple):
    """A step function and what to call it with: `step.fn(step.state, step.batch) -> (state, loss)`."""

    fn: Callable[..., Any]
    state: dict[str, Any]
    batch: dict[str, Tensor]


def training(
    module: nn.Module, batch: Mapping[str, Tensor], loss: Loss, optimizer: Any = torch.optim.AdamW, lr: float = 1e-2
) -> Step:
    """One training step of any module that takes `batch["x"]`."""
    model, opt = functional(module), adapt(optimizer, lr=lr)

    def step(state: dict[str, Any], batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        def loss_of(params: Any) -> tuple[Tensor, Any]:
            out, buffers = model.apply(params, state["buffers"], batch["x"])
            return loss(out, batch), buffers

        (value, buffers), grads = value_and_grad(loss_of, has_aux=True)(state["params"])
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": buffers, "opt": opt_state}, value

    return Step(step, {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}, dict(batch))


def class_loss(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy over the last dim; labels of -100 do not count."""
    return F.cross_entropy(out.flatten(0, -2), batch["y"].flatten())


def mlp(batch: int = 8, width: int = 16, dtype: torch.dtype = torch.float64) -> Step:
    """Classification by two linear layers."""
    torch.manual_seed(0)
    rows = {"x": torch.randn(batch, width, dtype=dtype), "y": torch.randint(0, 8, (batch,))}
    return training(models.Mlp(width).to(dtype), rows, class_loss)


def attention_block(
    batch: int = 4, seq: int = 8, width: int = 16, dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> Step:
    """One transformer block that learns to copy its input."""
    torch.manual_seed(0)
    rows = {"x": torch.randn(batch, seq, width, dtype=dtype)}
    return training(models.Attention(width, dropout=dropout).to(dtype), rows, lambda out, b: F.mse_loss(out, b["x"]))


def conv_net(batch: int = 4, size: int = 16, dtype: torch.dtype = torch.float64) -> Step:
    """Classification of images, with batch norm in train mode."""
    torch.manual_seed(0)
    rows = {"x": torch.randn(batch, 4, size, size, dtype=dtype), "y": torch.randint(0, 8, (batch,))}
    return training(models.ConvNet().to(dtype), rows, class_loss)


def embedding_loss(batch: int = 4, seq: int = 8, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Step:
    """A language model with a tied embedding and labels that are unevenly masked over the batch."""
    torch.manual_seed(0)
    labels = torch.randint(0, 32, (batch, seq))
    labels[0, : seq // 2 + 1] = -100
    rows = {"x": torch.randint(0, 32, (batch, seq)), "y": labels}
    return training(models.Language(dropout=dropout).to(dtype), rows, class_loss)


NAMED: Mapping[str, Callable[..., Step]] = {
    "mlp": mlp,
    "attention_block": attention_block,
    "conv_net": conv_net,
    "embedding_loss": embedding_loss,
}
