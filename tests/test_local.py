"""cf.ext.local: collectives along a dim, each as the local code of a strategy of an operator that does nothing."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import colofunc as cf
from colofunc.testing import check_strategies, sample

Local = Callable[[torch.Tensor, cf.Mesh], torch.Tensor]


@cf.operator("test_local.same")
def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def in_turn(x: torch.Tensor, mesh: cf.Mesh) -> torch.Tensor:
    """Blocks as they come by, put in their order: what came at hop k is that of rank me - k."""
    blocks = torch.stack(list(cf.ext.local.passing(x, 3, "a", mesh)))
    order = torch.remainder(cf.collectives.axis_index("a", mesh) - torch.arange(3), 3)
    return blocks.index_select(0, order).flatten(0, 1)


MOVES: dict[str, tuple[str, str, Local]] = {
    "gathered": ("m (a d) e", "m d e", lambda x, mesh: cf.ext.local.gathered(x, 1, "a", mesh)),
    "gathered, first dim": ("(a m) d e", "m d e", lambda x, mesh: cf.ext.local.gathered(x, 0, "a", mesh)),
    "gathered, striped": ("(m a) d e", "m d e", lambda x, mesh: cf.ext.local.gathered(x, 0, "a", mesh, striped=True)),
    "scattered": ("m d e", "m (a d) e", lambda x, mesh: cf.ext.local.scattered(x, 1, "a", mesh) / 3),
    "scattered, first dim": ("m d e", "(a m) d e", lambda x, mesh: cf.ext.local.scattered(x, 0, "a", mesh) / 3),
    "scattered, striped": ("m d e", "m d (e a)", lambda x, mesh: cf.ext.local.scattered(x, 2, "a", mesh, striped=True) / 3),
    "exchanged": ("m (a d) e", "m d (a e)", lambda x, mesh: cf.ext.local.exchanged(x, 2, 1, "a", mesh)),
    "part": ("m d e", "m (a d) e", lambda x, mesh: cf.ext.local.part(x, 1, "a", mesh)),
    "among zeros": ("m (a d) e", "m d e +a", lambda x, mesh: cf.ext.local.among_zeros(x, 1, "a", mesh)),
    "passing": ("(a m) d e", "m d e", in_turn),
    "streamed": ("(a m) d e", "m d e", lambda x, mesh: torch.stack([*cf.ext.local.streamed(x, 2, "a", mesh)], 1).flatten(0, 1)),
    "streamed, two blocks each": ("(a m) d e", "m d e", lambda x, mesh: torch.cat([*cf.ext.local.streamed(x, 1, "a", mesh, blocks=6)])),
    "collected": ("m d e", "(a m) d e", lambda x, mesh: cf.ext.local.collected(x.unflatten(0, (3, 2)).unbind(1), "a", mesh) / 3),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_a_move_makes_of_a_layout(name: str) -> None:
    before, after, code = MOVES[name]

    def strategies(call: Any, mesh: cf.Mesh) -> Any:
        ins, outs = (cf.Spec(text).bind(mesh, call.ins[0].shape) for text in (before, after))
        cost = cf.Cost(flops=1e3, nbytes=1e3, extra_s=1e-6)
        yield cf.Strategy("{a: moved}", (ins,), (outs,), cost, lambda x, *, mesh: code(x, mesh), (("a", "moved"),))

    plugin = ModuleType("moves")
    plugin.colofunc_strategies = cf.hookimpl(lambda: {"test_local.same": strategies})  # type: ignore[attr-defined]
    proved = check_strategies(plugin, same, sample(torch.randn(6, 9, 3)), meshes=[cf.Mesh(a=3)])
    assert [p.worst for p in proved if p.strategy == "{a: moved}"] == [0.0]


def test_sums_are_kept_in_float32_at_least() -> None:
    assert [cf.ext.local.wide(d) for d in (torch.bfloat16, torch.float32, torch.float64)] == [torch.float32, torch.float32, torch.float64]
