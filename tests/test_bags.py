"""`nn.EmbeddingBag` over a matrix of indices: torch's numbers, its derivatives, its strategies, and a recommender on meshes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero
from torch import nn

import colofunc as cf
from colofunc.ops.bags import bags_of, embedding_bag
from colofunc.testing import check, check_strategies, sample

ROWS, WIDTH, BAGS, EACH = 12, 6, 8, 4


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


INDEX = torch.randint(0, ROWS, (BAGS, EACH), generator=torch.Generator().manual_seed(3))
KINDS: dict[str, tuple[str, bool, int | None]] = {  # mode, with factors, padding
    "sum": ("sum", False, None),
    "mean": ("mean", False, None),
    "weighted": ("sum", True, None),
    "padded": ("sum", False, 3),
    "mean of the rest": ("mean", False, -2),
    "weighted and padded": ("sum", True, -9),
}


def operands(kind: str) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    weight = seeded(ROWS, WIDTH).requires_grad_()
    factors = seeded(BAGS, EACH).requires_grad_() if KINDS[kind][1] else None
    return weight, factors, [weight] if factors is None else [weight, factors]


@pytest.mark.parametrize("kind", KINDS)
def test_bags_are_those_of_torch(kind: str) -> None:
    mode, _, padding = KINDS[kind]
    weight, factors, leaves = operands(kind)
    ours = bags_of(INDEX, weight, mode, factors, padding)
    theirs = F.embedding_bag(INDEX, weight, mode=mode, per_sample_weights=factors, padding_idx=padding)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    for mine, other in zip(torch.autograd.grad(ours.sin().sum(), leaves), torch.autograd.grad(theirs.sin().sum(), leaves), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("padding", [-1, 3])
def test_derivatives_of_both_orders(padding: int) -> None:
    leaves = seeded(ROWS, WIDTH).requires_grad_(), seeded(BAGS, EACH).requires_grad_()
    assert torch.autograd.gradcheck(lambda w, f: embedding_bag(w, INDEX, f, padding), leaves)
    assert torch.autograd.gradgradcheck(lambda w, f: embedding_bag(w, INDEX, f, padding), leaves)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_no_bags_and_empty_bags(shape: tuple[int, int]) -> None:
    weight = seeded(ROWS, WIDTH).requires_grad_()
    out = bags_of(torch.empty(shape, dtype=torch.int64), weight, "mean", None, None)
    assert out.shape == (shape[0], WIDTH) and not out.any()
    assert not torch.autograd.grad(out.sum(), weight)[0].any()


@pytest.mark.parametrize("target", ["embedding_bag", "embedding_bag_backward", "embedding_bag_factors_backward"])
@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("weighted", [True, False])
def test_parts_on_ranks(target: str, padding: int, weighted: bool) -> None:
    """Bags, what is in them, columns, and rows of the table, as pending sums where each rank has some."""
    weight, grad, factors = seeded(ROWS, WIDTH), seeded(BAGS, WIDTH), seeded(BAGS, EACH) if weighted else None
    calls: dict[str, tuple[Any, ...]] = {
        "embedding_bag": (weight, INDEX, factors, padding),
        "embedding_bag_backward": (grad, INDEX, factors, ROWS, padding),
        "embedding_bag_factors_backward": (grad, weight, INDEX, padding),
    }
    tried = check_strategies(None, f"colofunc.{target}", sample(*calls[target]), meshes=[cf.Mesh(a=2, b=2)])
    names = {each.strategy for each in tried}
    factors_of = {"embedding_bag": "bnev", "embedding_bag_backward": "bnev", "embedding_bag_factors_backward": "bnev"}
    assert {f"{{a: {factor}}}" for factor in factors_of[target]} <= names, names


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padding", [None, 1])
def test_numbers_that_are_not_finite_are_those_of_one_device(weighted: bool, padding: int | None) -> None:
    """Infinity in rows of both ranks' parts, in bags with rows of other ranks, in padding, and in what comes back."""
    weight, grad = seeded(ROWS, WIDTH), seeded(BAGS, WIDTH)
    weight[0], weight[6], weight[8], weight[1, 2] = torch.inf, -torch.inf, torch.nan, torch.inf
    grad[4, 1], grad[5, 3] = torch.inf, torch.nan
    factors = seeded(BAGS, EACH).abs() + 1 if weighted else None

    def both(w: torch.Tensor, i: torch.Tensor, f: torch.Tensor | None, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [w.requires_grad_()] if f is None else [w.requires_grad_(), f.requires_grad_()]
        out = F.embedding_bag(i, w, mode="sum", per_sample_weights=f, padding_idx=padding)
        return out.detach(), *torch.autograd.grad(out, leaves, g)

    step = cf.shard(both, cf.Mesh(tp=2), in_specs=("(tp v) e", "b n", None if factors is None else "b n", "b e"), donate=())
    want = step.eager(weight, INDEX, factors, grad)
    assert any(x.isinf().any() for x in want) and any(x.isnan().any() for x in want)
    for mine, theirs in zip(step(weight, INDEX, factors, grad), want, strict=True):
        torch.testing.assert_close(mine.full(), theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_an_index_that_no_rank_has_fails() -> None:
    step = cf.shard(lambda w, i: F.embedding_bag(i, w, mode="sum"), cf.Mesh(tp=2), in_specs=("(tp v) e", "b n"), out_specs="b e", donate=())
    with pytest.raises(RuntimeError, match="embedding_bag"):
        step(seeded(ROWS, WIDTH), INDEX + 5)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode=mode, padding_idx=2) for mode in ("sum", "mean"))
        self.top = nn.Linear(2 * WIDTH, 1)

    def forward(self, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        bags = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat(bags, 1)).squeeze(1), clicked)


@pytest.mark.parametrize("how", ["zero 3", "microbatches", "rows of tables"])
def test_a_recommender_is_split_and_equal(how: str) -> None:
    torch.manual_seed(0)
    step_fn, state = cf.train_step(cf.functional(Recommender().double()), cf.adapt(torch.optim.Adagrad, lr=0.1), loss=lambda out: out)
    batch = {"ids": torch.randint(0, ROWS, (BAGS, 2, EACH)), "clicked": torch.rand(BAGS, dtype=torch.float64)}
    if how == "rows of tables":
        params = {name: "(tp v) e" if name.startswith("tables") else None for name in state["params"]}
        step = cf.shard(step_fn, cf.Mesh(dp=2, tp=2), zero(1, "dp"), in_specs=({**dict.fromkeys(state), "params": params}, None))
    else:
        step = cf.shard(step_fn, cf.Mesh(dp=4), zero(3, "dp"))
    step = cf.accumulate(step, microbatches=2) if how == "microbatches" else step
    check(step, state, batch, steps=2)
    coverage = step.lower(state, batch).coverage()
    assert not coverage.fallbacks and coverage.flops > (0.4 if how == "rows of tables" else 0.9)


def test_a_table_is_known_as_a_weight_wherever_it_stands() -> None:
    step = cf.shard(lambda ids, tables: F.embedding_bag(ids, tables["a"], mode="sum"), cf.Mesh(dp=2))
    roles = {leaf.name: leaf.role for leaf in step.lower(INDEX, {"a": seeded(ROWS, WIDTH)}).plan.inputs}
    assert list(roles.values()) == ["batch", "param"], roles


FLAT = [("sum", False), ("sum", True), ("mean", False), ("max", False)]


@pytest.mark.parametrize(("mode", "weighted"), FLAT)
def test_bags_cut_at_offsets_are_split_by_columns(mode: str, weighted: bool) -> None:
    def gradients(w: torch.Tensor, flat: torch.Tensor, offsets: torch.Tensor, f: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        leaves = [w.requires_grad_()] if f is None else [w.requires_grad_(), f.requires_grad_()]
        out = F.embedding_bag(flat, w, offsets, mode=mode, per_sample_weights=f)
        return out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)

    specs = ("v (tp e)", "i", "o", "i" if weighted else None)
    args = seeded(ROWS, WIDTH), INDEX.reshape(-1), torch.tensor([0, 3, 3, 10]), seeded(BAGS * EACH) if weighted else None
    split = ("b (tp e)", "v (tp e)", "i") if weighted else ("b (tp e)", "v (tp e)")
    step = cf.shard(gradients, cf.Mesh(tp=2), in_specs=specs, out_specs=split, donate=())
    check(step, *args)
    assert not step.lower(*args).coverage().fallbacks


def test_parts_of_the_factors_gradient_of_bags_cut_at_offsets() -> None:
    flat, offsets = INDEX.reshape(-1), torch.tensor([0, 3, 3, 10, 11, 20, 20, 30])
    _, bag_of, _, _ = torch.ops.aten._embedding_bag(seeded(ROWS, WIDTH), flat, offsets)
    call = sample(seeded(BAGS, WIDTH), seeded(ROWS, WIDTH), flat, offsets, bag_of, 0, 3)
    tried = check_strategies(None, "aten._embedding_bag_per_sample_weights_backward", call, meshes=[cf.Mesh(a=2)])
    assert "{a: e}" in {each.strategy for each in tried}


MODES: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "1d": ({"tp": 2}, ("tp",)),
    "auto": ({"tp": 2}, ("tp",)),
    "2d": ({"x": 2, "y": 2}, ("x", "y")),
    "2.5d": ({"x": 2, "y": 2, "z": 2}, ("x", "y", "z")),
    "3d": ({"z": 2, "x": 2, "y": 2}, ("z", "x", "y")),
}


class Tagger(nn.Module):
    """Bags of words, weighted by word, through two products to scores of all words."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(16, 8, mode=mode)
        self.weight = nn.Parameter(torch.randn(16)) if mode == "sum" else None
        self.inner, self.outer, self.scores = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16, bias=False)

    def forward(self, ids: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) if self.weight is None else self.words(ids, per_sample_weights=self.weight[ids])
        return F.cross_entropy(self.scores(x + self.outer(F.gelu(self.inner(x)))), word)


# Every way with one kind of bags at least, and the last way with all; the others in the sweep.
BAGS_OF = [
    pytest.param(way, mode, marks=() if way == "3d" or (w + m) % 3 == 0 else pytest.mark.sweep)
    for w, way in enumerate(MODES)
    for m, mode in enumerate(("sum", "mean", "max"))
]


@pytest.mark.parametrize(("way", "mode"), BAGS_OF)
def test_tensor_parallelism_of_a_model_with_bags(way: str, mode: str) -> None:
    torch.manual_seed(0)
    step_fn, state = cf.train_step(cf.functional(Tagger(mode).double()), cf.adapt(torch.optim.AdamW, lr=0.1), loss=lambda out: out)
    batch = {"ids": torch.randint(0, 16, (BAGS, EACH)), "word": torch.randint(0, 16, (BAGS,))}
    axes, names = MODES[way]
    step = cf.shard(step_fn, cf.Mesh(**axes), tensor(way, names))
    check(step, state, batch, steps=2)
    specs = {leaf.name: leaf.spec for leaf in step.lower(state, batch).plan.inputs}
    if way == "1d" and mode != "max":  # where the scores are split along the words, so is the table that is as long
        assert specs["state.params.words.weight"] == specs["state.params.scores.weight"] == "(tp a) b"
