"""A pattern of attention and an exchange as a third party writes them, against dense attention in float64."""

from typing import Any

import attrs
import pytest
import torch
from test_sequence import SHAPES, calls, mesh

import colofunc as cf
from colofunc import collectives
from colofunc.testing import check_strategies
from colofunc.testing.prove import run_whole


class Broadcast(cf.ext.AttentionPattern):
    """Every rank's keys in turn, for all ranks at once."""

    words = "broadcast", "broadcast striped"

    def price(self, flops: float) -> tuple[float, float, float]:
        nbytes = self.block_bytes(cf.ext.local.wide(self.attention.dtype))
        return flops * self.busiest, self.n * self.mesh.collective_s("all_reduce", nbytes, (self.axis,)), 2 * nbytes

    def attend(self, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        me = collectives.axis_index(self.axis, self.mesh)
        own = cf.ext.local.among_zeros(self.keys(x)[None], 0, self.axis, self.mesh)
        blocks = [collectives.all_reduce(own[j], self.axis, self.mesh) for j in range(self.n)]
        found = [self.over_block(x, keys, me, torch.full((), j)) for j, keys in enumerate(blocks)]
        if not self.attention.backward:
            return self.merged(found)
        dq, dk, dv, dbias = zip(*found, strict=True)
        sums = collectives.reduce_scatter(torch.stack(list(map(self.key_grads, dk, dv))), self.axis, self.mesh)
        dk, dv = self.apart(sums, x)
        return torch.stack(dq).sum(0), dk, dv, self.bias_grad(dbias, lambda me, c: c)


@attrs.frozen
class Dealt:
    """Heads for rows by all-to-all, where the axis divides the key heads of calls without a bias."""

    attention: cf.ext.AttentionCall
    mesh: cf.Mesh
    axis: str
    way: cf.Strategy
    word, work, keys = "dealt", 1.0, 1.0

    @property
    def fits(self) -> bool:
        return self.attention.layout("k", self.way).local_shape[1] % self.mesh.axis_size(self.axis) == 0

    def price(self) -> tuple[float, float]:
        return 1e-3, 1024.0

    def there(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: cf.ext.local.exchanged(part, 1, 2, self.axis, self.mesh) for name, part in x.items()}

    def back(self, found: tuple[torch.Tensor, ...], x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return *(cf.ext.local.exchanged(part, 2, 1, self.axis, self.mesh) for part in found[:3]), *found[3:]

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options


@attrs.frozen
class Plugin:
    """A pattern over `a`, alone and inside an exchange over `o`."""

    kind: type[cf.ext.AttentionPattern] = Broadcast

    @cf.hookimpl
    def colofunc_strategies(self) -> Any:
        return dict.fromkeys(cf.ext.AttentionCall.TARGETS, self.strategies)

    def strategies(self, call: Any, mesh: cf.Mesh) -> Any:
        return self.kind.strategies(call, mesh, "a", Dealt, ["o"] if "o" in mesh else [])


def proved(made: dict[str, Any], on: cf.Mesh) -> set[str]:
    tried = [each for target, call in made.items() for each in check_strategies(Plugin(), target, call, meshes=[on])]
    assert max(each.worst for each in tried) < 1e-10
    return {each.strategy for each in tried}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pattern_of_a_third_party(shape: str) -> None:
    """Masks, windows, biases, dropout and positions of the rows: all of it is the base's work."""
    assert proved(calls(**SHAPES[shape]), mesh(a=3)) == {"{a: broadcast}", "{a: broadcast striped}"}


@pytest.mark.parametrize("shape", ["full", "causal", "wide window", "cross"])
def test_inside_an_exchange_of_a_third_party(shape: str) -> None:
    found = proved(calls(**SHAPES[shape]), mesh(a=2, o=2))
    assert {name for name in found if "dealt" in name} == {"{a: broadcast, o: dealt}", "{a: broadcast striped, o: dealt}"}
    assert {"{a: broadcast, o: b}", "{a: broadcast, o: r}"} <= found


def ways(on: cf.Mesh, **shape: Any) -> dict[str, cf.Cost]:
    """What the forward call can do, and what that costs."""
    call, _, _ = run_whole(cf.ext.AttentionCall.FORWARD, calls(**shape)[cf.ext.AttentionCall.FORWARD])
    return {way.name: way.cost for way in Plugin().strategies(call, on)}


def test_what_an_exchange_costs_is_added() -> None:
    found = ways(mesh(a=2, o=2))
    alone, inside = found["{a: broadcast, o: b}"], found["{a: broadcast, o: dealt}"]
    assert inside.extra_s == pytest.approx(alone.extra_s + 1e-3)
    assert inside.peak_bytes == alone.peak_bytes + 1024 and inside.flops == alone.flops


def test_where_nothing_is_split_there_is_no_pattern() -> None:
    """One rank on the axis; a mesh without it; an exchange that does not fit; rows that do not divide."""
    assert not ways(mesh(a=1)) and not ways(mesh(o=2))
    assert not [name for name in ways(mesh(a=2, o=3), h=4, g=4) if "dealt" in name]
    assert not ways(mesh(a=5))


def test_the_last_contiguous_block_works_most_under_a_causal_mask() -> None:
    found = ways(mesh(a=4), causal=True)
    assert found["{a: broadcast}"].flops == 1.75 * found["{a: broadcast striped}"].flops
    found = ways(mesh(a=4))
    assert found["{a: broadcast}"].flops == found["{a: broadcast striped}"].flops


def test_blocks_of_columns_merge_to_all_of_them() -> None:
    """Sums over exp of scores; a row that sees nothing of some blocks, and one that sees nothing at all."""
    gen = torch.Generator().manual_seed(0)
    scores, v = torch.randn(3, 12, generator=gen, dtype=torch.float64), torch.randn(12, 4, generator=gen, dtype=torch.float64)
    scores[1, :8], scores[2] = -torch.inf, -torch.inf
    blocks = [(scores[:, k : k + 4].softmax(-1).nan_to_num(nan=0.0) @ v[k : k + 4], scores[:, k : k + 4].logsumexp(-1)) for k in (0, 4, 8)]
    out, lse = cf.ext.AttentionPattern.merged(blocks)
    weights = scores.exp()
    assert torch.allclose(out[:2], (weights @ v / weights.sum(-1, keepdim=True))[:2], rtol=0, atol=1e-12)
    assert torch.allclose(lse[:2], weights.sum(-1).log()[:2], rtol=0, atol=1e-12)
    assert out[2].eq(0).all() and lse[2] == -torch.inf


def test_a_pattern_that_forgets_a_block_is_found_out() -> None:
    class Own(Broadcast):
        def attend(self, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            me = collectives.axis_index(self.axis, self.mesh)
            return self.over_block(x, self.keys(x), me, me, own=True)

    with pytest.raises(cf.CheckError, match="differs from the operator on whole tensors"):
        check_strategies(Plugin(Own), cf.ext.AttentionCall.FORWARD, calls()[cf.ext.AttentionCall.FORWARD], meshes=[mesh(a=2)])
