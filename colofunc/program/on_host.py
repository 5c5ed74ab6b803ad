"""Known values on the host: what a step captured, and what was computed of it before the step has run.

Problem: a module on a GPU has its tables there, and traced factories make theirs on the host, so that folding the two
meets two devices. Idea: whoever computes known values reads them from here, where each is on the host. What comes of it
is a constant of the program, which lies where the program runs.

    known = OnHost({3: table_on_a_gpu})
    known[3] + torch.arange(4)
"""

from __future__ import annotations

import torch


class OnHost(dict[int, torch.Tensor]):
    """Tensors by value id, brought to the host when they are first read."""

    def __getitem__(self, vid: int) -> torch.Tensor:
        value = super().__getitem__(vid)
        if value.is_cuda:
            value = self[vid] = value.cpu()
        return value
