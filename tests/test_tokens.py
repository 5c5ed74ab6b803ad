"""cf.ext.tokens: what a step has of attention, and wishes that split its tokens from where they come in."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import colofunc as cf

MESH = cf.Mesh(dp=1, cp=2)


def program_of(step: Any, batch: Any) -> Any:
    """The traced step, with one parameter."""
    return cf.shard(step, MESH).lower({"w": torch.ones(())}, batch).traced.program


def mixed(x: torch.Tensor) -> torch.Tensor:
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


def leaves(state: Any, batch: Any) -> Any:
    return state, mixed(batch["x"] * state["w"]).sum() + batch["other"].sum() + batch["row"].sum()


def patches(state: Any, batch: Any) -> Any:
    return state, mixed((batch * state["w"]).reshape(2, 3, 4, 8).flatten(1, 2)).sum()


def written(state: Any, batch: Any) -> Any:
    x = batch * state["w"]
    return state, ((x @ x.transpose(1, 2)).softmax(-1) @ x).sum()


def test_leaves_as_long_as_attention_are_split() -> None:
    program = program_of(leaves, {"x": torch.randn(2, 6, 8), "other": torch.randn(2, 8), "row": torch.randn(2)})
    (wish,) = cf.ext.tokens.wishes(program, MESH, "(cp s)", ("cp",), "mine")
    assert (wish.match, wish.want, wish.axes, wish.source) == ("batch.x", "_ (cp s) ...", ("cp",), "mine")
    assert wish.along and wish.across == cf.ext.AttentionCall.TARGETS and not wish.gathers
    (call,) = cf.ext.tokens.attention(program, "mine")
    assert call.sizes == {"b": 2, "g": 2, "r": 1, "s": 6, "t": 6}


def test_tokens_that_arise_inside_are_split_there() -> None:
    program = program_of(patches, torch.randn(2, 12, 8))
    assert [wish.match for wish in cf.ext.tokens.wishes(program, MESH, "(s cp)", ("cp",), "mine")] == ["batch"]
    program = program_of(patches, torch.randn(2, 3, 4, 8))
    wish, *_ = cf.ext.tokens.wishes(program, MESH, "(s cp)", ("cp",), "mine")
    assert wish.match == "*" and wish.values and "cp" in str(wish.want)


def test_scores_that_are_written_out() -> None:
    program = program_of(written, torch.randn(2, 6, 8))
    says = r"^mine finds no attention in this step \(it is written out at .*; where a model has none, take another"
    with pytest.raises(cf.PlanError, match=says):
        cf.ext.tokens.attention(program, "mine", instead="take another")
    assert cf.ext.tokens.attention(program, "mine", written=True) == []
    assert cf.ext.tokens.wishes(program, MESH, "(cp s)", ("cp",), "mine") == []
    (wish,) = cf.ext.tokens.wishes(program, MESH, "(cp s)", ("cp",), "mine", written=True)
    assert wish.match == "batch" and wish.gathers == ("aten.bmm.default", "aten.baddbmm.default")
    found = cf.ext.tokens.wishes(program, MESH, "(cp s)", ("cp",), "mine", written=True, heads="cp")
    by_heads = [wish for wish in found if wish.values]
    assert not any(wish.gathers for wish in found) and by_heads
    assert {wish.want.text() for wish in by_heads} == {"cp a b", "a (cp b) c"}


@pytest.mark.parametrize(("instead", "end"), [("", "use fewer ranks"), ("take another", "use fewer ranks, or take another")])
def test_heads_that_do_not_divide(instead: str, end: str) -> None:
    """What else to write is the plan's to say: the core knows no other."""
    program = program_of(written, torch.randn(2, 6, 8))
    with pytest.raises(cf.PlanError, match=rf"^mine: .* do not divide over the 3 ranks of 'cp'; {end}$"):
        cf.ext.tokens.wishes(program, cf.Mesh(cp=3), "(cp s)", ("cp",), "mine", written=True, heads="cp", instead=instead)


def test_no_attention_at_all() -> None:
    program = program_of(lambda state, batch: (state, (batch * state["w"]).sum()), torch.randn(2, 6))
    for written in (False, True):
        with pytest.raises(cf.PlanError, match=r"^mine finds no attention in this step; it knows .*scaled_dot_product_attention$"):
            cf.ext.tokens.attention(program, "mine", written, instead="take another")


def test_tokens_that_do_not_divide() -> None:
    program = program_of(leaves, {"x": torch.randn(2, 7, 8), "other": torch.randn(2, 8), "row": torch.randn(2)})
    with pytest.raises(cf.PlanError, match=r"^mine: 7 tokens do not divide over 2 ranks; take a multiple"):
        cf.ext.tokens.wishes(program, MESH, "(cp s)", ("cp",), "mine")
    program = program_of(patches, torch.randn(2, 3, 4, 8))
    with pytest.raises(cf.PlanError, match=r"^mine: 12 tokens do not divide over 8 ranks; they arise inside the model"):
        cf.ext.tokens.wishes(program, cf.Mesh(cp=8), "(cp s)", ("cp",), "mine")
