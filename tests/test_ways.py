"""cf.ext.ways: strategies that hold an axis on different factors, beside what the rule says of the other axes."""

from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

import colofunc as cf
from colofunc.testing import check, check_strategies
from colofunc.testing.prove import sample


def doubled(call: Any, mesh: cf.Mesh) -> Any:
    """x (m k) @ w (k n) with `tp` on the rows of x and on the columns of w: w is gathered, one term at a time."""
    if "tp" not in mesh.axis_names:
        return
    for way in cf.ext.ways(call, mesh, ins=[{"m": "tp m"}, {"n": "tp n"}], outs=[{"m": "tp m"}]):

        def local(x: torch.Tensor, w: torch.Tensor, mesh: cf.Mesh) -> torch.Tensor:
            every = cf.collectives.all_gather(w, "tp", mesh)
            return torch.cat([x @ part for part in every.unbind()], 1)

        wire_s = mesh.collective_s("all_gather", call.ins[1].nbytes, ("tp",))
        cost = attrs.evolve(way.cost, extra_s=wire_s)
        yield attrs.evolve(way, name="{tp: gathered}", local=local, cost=cost, axes=(("tp", "gathered"), *way.axes))


def plugin(strategies: Any) -> ModuleType:
    made = ModuleType(strategies.__name__)
    made.colofunc_strategies = cf.hookimpl(lambda: {"aten.mm.default": strategies})  # type: ignore[attr-defined]
    return made


PLUGIN = plugin(doubled)


@attrs.frozen
class Gathered:
    axes: tuple[str, ...] = ("tp",)
    name: str = "gathered"
    word: str = "gathered"

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        both = ("forward", "backward")
        return [cf.ext.Wish("*", f"{{tp: {self.word}}}", self.axes, source=self.name, targets=("aten.mm.default",), phases=both)]


@pytest.mark.parametrize("axes", [dict(tp=2), dict(tp=3), dict(dp=2, tp=2), dict(tp=2, dp=3)])
def test_every_way_computes_what_the_operator_does(axes: dict[str, int]) -> None:
    call = sample(torch.randn(12, 6).double(), torch.randn(6, 12).double())
    proved = check_strategies(PLUGIN, "aten.mm.default", call, meshes=[cf.Mesh(**axes)])
    assert len(proved) >= (3 if "dp" in axes else 1)
    assert all(p.share <= 1 / axes["tp"] for p in proved)


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(torch.mm(x, w.requires_grad_()).square().sum(), w)[0]


def test_a_wish_names_a_pattern_of_a_plugin_in_the_phases_it_says() -> None:
    args = torch.randn(8, 6).double(), torch.randn(6, 4).double()
    staged = cf.shard(step, cf.Mesh(dp=2, tp=2), Gathered(), plugins=(PLUGIN,), donate=())
    low = staged.lower(*args)
    assert {"gathered"} == {dict(c.axes)["tp"] for c in low.plan.decisions if c.target == "aten.mm.default"}
    assert low.cost().calls["all_gather", "tp"] >= 2
    assert check(staged, *args).worst < 1e-10


def test_a_pattern_that_nobody_has_is_an_error_with_the_rule() -> None:
    with pytest.raises(cf.PlanError, match=r"no operator there.*has these factors.*m k, k n"):
        cf.shard(step, cf.Mesh(tp=2), Gathered(word="gatherd"), plugins=(PLUGIN,)).lower(torch.randn(8, 6), torch.randn(6, 4))


def test_words_that_make_no_sense_are_errors() -> None:
    seen = []

    def spy(call: Any, mesh: cf.Mesh) -> Any:
        for own in ({"q": "tp q"}, {"m": "tpp m"}, {"m": "tp"}):
            with pytest.raises(cf.ColofuncError) as error:
                list(cf.ext.ways(call, mesh, ins=[own, {}], outs=[{}]))
            seen.append(str(error.value))
        return ()

    cf.shard(lambda x: x @ x, cf.Mesh(tp=2), plugins=(plugin(spy),)).lower(torch.randn(4, 4))
    assert "no factor 'q'" in seen[0] and "tpp" in seen[1] and "must have 'm' itself" in seen[2]
