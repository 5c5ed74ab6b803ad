"""Small data that tests of batches share, and comparisons of trees."""

import torch

import colofunc as cf

MESH = cf.Mesh(dp=2, tp=2)


def samples(n=10, length=5):
    return [{"input_ids": torch.arange(length) + 7 * i, "labels": torch.arange(length) + i} for i in range(n)]


def full(tree):
    if isinstance(tree, cf.DTensor):
        return tree.full()
    return {k: full(v) for k, v in tree.items()} if isinstance(tree, dict) else [full(v) for v in tree]


def equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)
