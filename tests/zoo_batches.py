"""Batches and losses of the zoo, and the libraries that its models come from."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQ, VOCAB, CLASSES = 4, 8, 64, 8
Batch = dict[str, Any]
Loss = Callable[[Any, Batch], Tensor]
Built = tuple[nn.Module, Batch, Loss]

# ---- batches and losses ----


def ids(seq: int = SEQ, n: int = BATCH) -> Tensor:
    return torch.randint(4, VOCAB, (n, seq))


def labels(seq: int = SEQ) -> Tensor:
    """Token labels of which an uneven part is masked: a mean of per-rank means would be wrong."""
    labels = ids(seq)
    labels[0, : seq // 2] = -100
    labels[1, :2] = -100
    return labels


def image(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def classes() -> Tensor:
    return torch.randint(0, CLASSES, (BATCH,))


def own_loss(out: Any, batch: Batch) -> Tensor:
    return out.loss  # type: ignore[no-any-return]


def class_loss(out: Any, batch: Batch) -> Tensor:
    out = out[0] if isinstance(out, (tuple, list)) else out
    return F.cross_entropy(out, target(batch))


def target(batch: Batch) -> Tensor:
    return batch["_target"]  # type: ignore[no-any-return]


def lm() -> Batch:
    return {"input_ids": ids(), "labels": labels()}


def masked_lm() -> Batch:
    mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
    mask[2, 5:] = 0
    return {"input_ids": ids(), "attention_mask": mask, "labels": labels()}


def pixels(size: int = 32) -> Batch:
    return {"pixel_values": image(size), "labels": classes()}


def seq2seq() -> Batch:
    return {"input_ids": ids(), "labels": ids()}


def pretraining_pairs() -> Batch:
    return {"input_ids": ids(), "pixel_values": image(), "return_loss": True}


@functools.cache
def library(name: str) -> Any:
    """transformers or timm, imported at first use (seconds); quiet about weights that were never loaded."""
    library = importlib.import_module(name)
    if name == "transformers":
        library.logging.set_verbosity_error()
    return library
