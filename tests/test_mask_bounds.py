"""Masks as bounds: packed documents and padding need vectors alone, whether their values are known or come with the batch."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import gather_kv, ring, tensor, ulysses, zero
from torch import Tensor

import colofunc as cf
from colofunc.ops.attention import attention, attention_backward
from colofunc.ops.canonical import single_device
from colofunc.program.passes import simplify_known
from colofunc.spec.rules.attention_call import AttentionCall

D = torch.float64
B, S, T = 4, 8, 8


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplify_known, "MIN_BOUNDED", 0)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


# ---- the operator ----


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 5)])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_operator_with_bounds_is_the_operator_with_their_mask(batch: int, causal: bool, window: int, dropout: float) -> None:
    q, k, v, grad = draw(3, 4, 9, 5), draw(3, 2, 11, 5, seed=1), draw(3, 2, 11, 5, seed=2), draw(3, 4, 9, 5, seed=3)
    dice = torch.Generator().manual_seed(4)
    code = torch.randint(0, 6, (batch, 2, 11), generator=dice)
    least = torch.randint(0, 3, (batch, 2, 9), generator=dice)
    most = least + torch.randint(-1, 6, (batch, 2, 9), generator=dice)  # some rows see nothing
    mask = ((code[:, :, None] >= least[..., None]) & (code[:, :, None] <= most[..., None])).all(1, keepdim=True)
    options: Any = dict(causal=causal, window=window, dropout=dropout, seed=torch.tensor(7))
    box = dict(code=code, least=least, most=most)
    dense, bounded = attention(q, k, v, mask, 0.3, **options), attention(q, k, v, None, 0.3, **options, **box)
    torch.testing.assert_close(bounded, dense, rtol=0, atol=1e-12)
    ways = [(mask, {}), (None, box)]
    found = [attention_backward(grad, q, k, v, bias, *dense, 0.3, **options, **more)[:3] for bias, more in ways]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


# ---- masks of a step ----


def packed(document: Tensor, position: Tensor) -> Tensor:
    """As transformers writes it for documents in one row of a batch."""
    rows = (torch.arange(document.shape[0])[:, None, None, None], torch.arange(S)[None, None, :, None])
    columns = (rows[0], torch.arange(S)[None, None, None, :])
    same = torch.ones((), dtype=torch.bool) & (document[rows] == document[columns])
    return (same & (position[columns] <= position[rows])).expand(document.shape[0], -1, S, S)


def window(document: Tensor, position: Tensor) -> Tensor:
    near = position[:, None, :] > (position - 3)[:, :, None]
    return (near & (torch.arange(S) <= torch.arange(S)[:, None]) & (document[:, :, None] == document[:, None, :])).unsqueeze(1)


def padded(document: Tensor, position: Tensor) -> Tensor:
    """Causal, without some columns; the first is there."""
    return torch.ones(S, S, dtype=torch.bool).tril() & (document < 2)[:, None, None, :]


def known(document: Tensor, position: Tensor) -> Tensor:
    """Documents that are known while tracing."""
    ends = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    return ((ends[:, None] == ends) & torch.ones(S, S, dtype=torch.bool).tril())[None, None]


def of_rows(document: Tensor, position: Tensor) -> Tensor:
    """Rows of another kind see all of their document."""
    return (document[:, None, :, None].int() == document[:, None, None, :].int()) & (position[:, None, :, None] >= 0)


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "packed": packed, "window": window, "padded": padded, "known": known, "of rows": of_rows,
}  # fmt: skip


def step_of(mask: Callable[[Tensor, Tensor], Tensor], groups: int = 2) -> Any:
    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> Tensor:
            parts = ((batch["x"] @ p[name]).unflatten(-1, (-1, 4)).transpose(1, 2) for name in "qkv")
            keep = mask(batch["document"], batch["position"])
            out = F.scaled_dot_product_attention(*parts, attn_mask=keep, enable_gqa=True)
            return ((out.transpose(1, 2).flatten(2) @ p["o"]) ** 2).mean()

        return cf.value_and_grad(loss)(params)

    params = {"q": draw(6, 16, seed=1), "k": draw(6, 4 * groups, seed=2), "v": draw(6, 4 * groups, seed=3), "o": draw(16, 6, seed=4)}
    starts = torch.tensor([[0, 3, 5], [0, 1, 2], [0, 0, 0], [0, 7, 7]])
    document = (torch.arange(S)[None, :, None] >= starts[:, None]).sum(-1) - 1
    first = torch.stack([(row[:, None] == row).int().argmax(1) for row in document])
    return step, params, {"x": draw(B, S, 6), "document": document, "position": torch.arange(S) - first}


def squares(program: Any) -> list[Any]:
    """Values (.., rows, columns) of tokens that are no activations of heads."""
    return [v for v in program.values.values() if v.dtype == torch.bool and v.shape[-2:] == (S, S)]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_vectors_is_never_made(name: str) -> None:
    step, params, batch = step_of(MASKS[name])
    low = cf.shard(step, cf.Mesh()).lower(params, batch)
    calls = [node for node in low.program.nodes if node.target in AttentionCall.TARGETS]
    assert len(calls) == 2 and all(simplify_known.mask_of(node) is None for node in calls)
    assert not squares(low.program)
    torch.testing.assert_close(cf.shard(step, cf.Mesh())(params, batch)[0].full(), step(params, batch)[0], rtol=0, atol=1e-10)


PLANS: dict[str, tuple[cf.Mesh, list[Any], int]] = {
    "ring": (cf.Mesh(cp=2), [ring("cp", balance=None)], 2),
    "striped": (cf.Mesh(cp=4), [ring("cp", balance="stripes")], 2),
    "ulysses": (cf.Mesh(cp=2), [ulysses("cp")], 2),
    "ulysses, one key head": (cf.Mesh(cp=2), [ulysses("cp")], 1),
    "gathered": (cf.Mesh(cp=2), [gather_kv("cp")], 2),
    "gathered, striped": (cf.Mesh(cp=2), [gather_kv("cp", balance="stripes")], 1),
    "rows": (cf.Mesh(dp=4), [zero(3, "dp")], 2),
    "heads": (cf.Mesh(tp=2), [tensor("1d", "tp")], 2),
    "heads around a ring": (cf.Mesh(r=2, u=2), [ring("r", heads="u")], 1),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["packed", "known"])
def test_bounds_on_a_mesh_equal_the_dense_mask(name: str, plan: str) -> None:
    mesh, plans, groups = PLANS[plan]
    equals_dense(step_of(MASKS[name], groups), mesh, plans)


@pytest.mark.sweep
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["window", "padded", "of rows"])
def test_other_bounds_on_a_mesh_equal_the_dense_mask(name: str, plan: str) -> None:
    mesh, plans, groups = PLANS[plan]
    equals_dense(step_of(MASKS[name], groups), mesh, plans)


def equals_dense(case: Any, mesh: cf.Mesh, plans: list[Any]) -> None:
    step, params, batch = case
    want, grads = step(params, batch)
    staged = cf.shard(step, mesh, *plans)
    assert not squares(staged.lower(params, batch).program)
    loss, found = staged(params, batch)
    torch.testing.assert_close(loss.full(), want, rtol=0, atol=1e-10)
    for key, grad in grads.items():
        torch.testing.assert_close(found[key].full(), grad, rtol=0, atol=1e-10)


# ---- generated masks ----


def generated(dice: random.Random, document: Tensor, keep: Tensor) -> Tensor:
    """A conjunction (B, 1, S, T) of comparisons of vectors, in some order, with what is known."""
    rows, columns = document[:, None, :, None], (document + dice.randint(-2, 2))[:, None, None, :]
    compare = [torch.eq, torch.le, torch.lt, torch.ge, torch.gt]
    parts: list[Tensor] = [torch.ones(S, T, dtype=torch.bool).tril(dice.randint(-1, 3)), torch.ones((), dtype=torch.bool)]
    for _ in range(dice.randint(1, 3)):
        pair = (rows, columns) if dice.random() < 0.5 else (columns, rows.to(torch.int32))
        parts.append(dice.choice(compare)(*pair))
    parts += dice.sample([keep[:, None, None, :], keep[:, None, :, None], keep.any(), (document[:, None, :] > 0).unsqueeze(2)], 2)
    dice.shuffle(parts)
    mask = parts[0]
    for part in parts[1:]:
        mask = mask * part if dice.random() < 0.2 else mask & part
    return mask.expand(B, 1, S, T)


@pytest.mark.parametrize("seed", range(12))
def test_a_generated_conjunction_shows_what_its_bounds_show(seed: int) -> None:
    def step(q: Tensor, document: Tensor, keep: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=generated(random.Random(seed), document, keep))

    dice = torch.Generator().manual_seed(seed)
    args = draw(B, 2, S, 4), torch.randint(0, 4, (B, S), generator=dice), torch.rand(B, S, generator=dice) < 0.8
    assert not squares(cf.shard(step, cf.Mesh()).lower(*args).program)
    with single_device():
        want = step(*args)
    torch.testing.assert_close(cf.shard(step, cf.Mesh())(*args).full(), want, rtol=0, atol=1e-12)


def test_masks_of_another_form_stay_as_they_are() -> None:
    def step(q: Tensor, document: Tensor, kind: int) -> Tensor:
        row, column = document[:, None, :, None], document[:, None, None, :]
        masks = [(row == column) | (column == 0), row - column == 1, (row * 0.5) == (column * 0.5), row != column]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=masks[kind])

    q, document = draw(B, 2, S, 4), torch.arange(S).div(3, rounding_mode="floor").expand(B, S)
    for kind in range(4):
        low = cf.shard(lambda q, d, kind=kind: step(q, d, kind), cf.Mesh())
        assert squares(low.lower(q, document).program)
        with single_device():
            want = step(q, document, kind)
        torch.testing.assert_close(low(q, document).full(), want, rtol=0, atol=1e-12)


# ---- a model, and a length that leaves no square ----


def test_packed_documents_of_a_model_take_no_square() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=1 << 15))
    model, s = cf.functional(module), 1 << 15

    def predict(params: Any, batch: Any) -> Tensor:
        out: Tensor = model.apply(params, model.buffers, **batch, use_cache=False)[0]["logits"]
        return out

    batch = {"input_ids": cf.abstract((1, s), torch.int64), "position_ids": cf.abstract((1, s), torch.int64)}
    low = cf.shard(predict, cf.Mesh(cp=8), ring("cp"), auto=False).lower(model.params, batch)
    assert not any(s * s <= torch.Size(value.shape).numel() for value in low.program.values.values())
    assert low.plan.notes == ()
