"""States that tests of saving share, and the bits of a tensor."""

from typing import Any

import torch

import colofunc as cf

MESH = cf.Mesh(dp=2, tp=2)


def bits(x: torch.Tensor) -> list[int]:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(8, 6, generator=made), "b": torch.randn(6, generator=made), "n": torch.tensor(3)}


def state(mesh: cf.Mesh = MESH, seed: int = 0) -> dict[str, Any]:
    found = tensors(seed)
    specs = {"w": "(dp o) (tp i)", "b": "(dp o)", "n": ""}
    return {name: cf.distribute(x, specs[name], mesh) for name, x in found.items()}
