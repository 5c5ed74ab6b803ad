"""Masks as bands: equal to the masks themselves, made from vectors alone, of any size."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import ring

import colofunc as cf
from colofunc.program.passes import mask_bands
from colofunc.program.passes.bands import BandedTensor
from colofunc.program.passes.simplify_known import Known
from colofunc.program.tracing.trace import trace

Make = Callable[[], torch.Tensor]


def dense(band: BandedTensor) -> torch.Tensor:
    columns = torch.arange(band.shape[-1])
    inside = (columns >= band.lo.unsqueeze(-1)) & (columns < band.hi.unsqueeze(-1))
    return torch.where(inside, band.inside, band.outside).expand(band.shape)


def band_and_value(make: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[BandedTensor | None, torch.Tensor]:
    """What a step makes, as a band where it can be one, with only vectors made on the way, and as it is."""
    program = trace(lambda x: (make(), x + 1), (torch.zeros(1),)).program
    value = Known(program).value(program.outputs[0])
    monkeypatch.setattr(mask_bands, "MAX_REAL", 4 * max(value.shape))
    return Known(program).band(program.outputs[0], value.shape[-1]), value


def positions(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows)[:, None], torch.arange(columns)[None]


def far(s: int) -> torch.Tensor:
    return torch.full((s, s), torch.finfo(torch.float32).min)


def sequences(batch: int, s: int) -> torch.Tensor:
    """As transformers makes it: causal, and within runs of positions, read by index; all sequences alike."""
    i = torch.arange(s).unsqueeze(0).expand(batch, s)
    sequence = (i.diff(prepend=i[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    at, rows, columns = torch.arange(batch)[:, None, None, None], torch.arange(s)[None, None, :, None], torch.arange(s)[None, None, None]
    return (i[at, columns] <= i[at, rows]) & (sequence[at, rows] == sequence[at, columns])


I, J = 40, 50
BANDS: dict[str, Make] = {
    "causal": lambda: torch.arange(J)[None] <= torch.arange(I)[:, None],
    "batch": lambda: (torch.arange(J) <= torch.arange(I)[:, None]).expand(3, 1, I, J),
    "window": lambda: (torch.arange(J) <= torch.arange(I)[:, None]) & (torch.arange(J) > torch.arange(I)[:, None] - 7),
    "distances": lambda: ((torch.arange(I)[:, None] - torch.arange(J)) >= 0) & ((torch.arange(I)[:, None] - torch.arange(J)) < 7),
    "documents": lambda: torch.tensor([0] * 20 + [3] * 30)[None] == torch.tensor([0] * 30 + [3] * 10)[:, None],
    "triangle": lambda: torch.ones(I, I, dtype=torch.bool).tril(2),
    "triangle of the lowest": lambda: far(I).triu(1)[None, None].expand(2, 1, I, I),
    "product": lambda: far(I).triu(1) * (torch.arange(I) > torch.arange(I).reshape(-1, 1)),
    "filled": lambda: torch.zeros(I, J).masked_fill(torch.arange(J) > torch.arange(I)[:, None], -torch.inf),
    "chosen": lambda: torch.where(torch.arange(J) > torch.arange(I)[:, None], -1e9, 0.0).to(torch.bfloat16),
    "cut": lambda: torch.ones(2 * I, 2 * I, dtype=torch.bool).tril()[None, None, 5:I, :I],
    "falling": lambda: torch.arange(J).flip(0) * -2 > 3 - torch.arange(I)[:, None],
    "halves": lambda: torch.arange(J) / 2 < torch.arange(I)[:, None],
    "sequences": lambda: sequences(11, I),
    "padded rows": lambda: (torch.arange(I)[:, None] < 9) & (torch.arange(J) < 30),
}


@pytest.mark.parametrize("make", BANDS.values(), ids=BANDS)
def test_masks_that_models_make_are_bands(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    band, value = band_and_value(make, monkeypatch)
    assert band is not None
    assert torch.equal(dense(band), value)


def test_other_values_are_no_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    def slopes() -> torch.Tensor:
        return -1.0 * (torch.arange(I)[:, None] - torch.arange(J)).abs()

    def two_runs() -> torch.Tensor:
        i, j = positions(I, J)
        return (j < 3) | ((j > i) & (j < i + 5))

    for make in (slopes, two_runs, lambda: torch.tensor([1, 3, 2] * 20) < torch.arange(I)[:, None]):
        assert band_and_value(make, monkeypatch)[0] is None


def generated(rng: random.Random, depth: int) -> torch.Tensor:
    """A bool mask (I, J) of comparisons, joins and views."""
    kind = rng.choice(["row", "distance", "triangle"] if depth == 0 else ["and", "or", "not", "where", "cut", "fill"])
    if kind == "row":
        compare = rng.choice([torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne])
        ends = sorted(rng.sample(range(J), 4))
        row = torch.arange(I)[:, None] * rng.choice([1, 2, -1]) + rng.randint(-9, 30)
        column = rng.choice([torch.arange(J), torch.arange(J) // 7, torch.tensor([end for end in ends for _ in range(J)][:J])])
        return compare(column, row) if rng.random() < 0.5 else compare(row, column)
    if kind == "distance":
        i, j = positions(I, J)
        return (i - j >= rng.randint(-9, 9)) if rng.random() < 0.5 else (j - i + 3 < rng.randint(-9, 9))
    if kind == "triangle":
        whole = torch.full((I, J), rng.random() < 0.8)
        return whole.tril(rng.randint(-5, 9)) if rng.random() < 0.5 else whole.triu(rng.randint(-5, 9))
    first = generated(rng, depth - 1)
    if kind == "not":
        return ~first
    if kind == "fill":
        return torch.zeros(I, J).masked_fill(first, -torch.inf) == 0
    if kind == "cut":
        start = rng.randint(0, 9)
        return F.pad(first[start:, :], (0, 0, 0, 0)).expand(2, I - start, J)[1, :1].expand(I, J)
    second = generated(rng, depth - 1)
    if kind == "where":
        return torch.where(first, second, torch.full((), rng.random() < 0.5))
    return first & second if kind == "and" else first | second


def found_among(seeds: range, monkeypatch: pytest.MonkeyPatch) -> int:
    """Generated masks that are bands; each is equal to its mask."""
    found = 0
    for seed in seeds:
        band, value = band_and_value(lambda seed=seed: generated(random.Random(seed), seed % 4), monkeypatch)
        found += band is not None
        assert band is None or torch.equal(dense(band), value), f"seed {seed}"
    return found


def test_generated_masks_are_what_their_bands_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_among(range(60), monkeypatch) > 30


@pytest.mark.sweep
def test_many_generated_masks_are_what_their_bands_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_among(range(60, 5060), monkeypatch) > 2500


def attend(x: torch.Tensor) -> torch.Tensor:
    """x (b, s, e) through attention of two heads under a mask as models of transformers make it, with its batch and positions."""
    batch, s, _ = x.shape
    i = torch.arange(s).unsqueeze(0).expand(batch, s)
    sequence = (i.diff(prepend=i[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    same = sequence[:, None, :, None] == sequence[:, None, None, :]
    mask = (i[:, None, None, :] <= i[:, None, :, None]) & same
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask.expand(batch, 1, s, s))


@pytest.mark.parametrize(("batch", "s"), [(1, 131072), (8, 8192), (1024, 8192)])
def test_no_length_leaves_a_square(batch: int, s: int) -> None:
    low = cf.shard(attend, cf.Mesh(cp=8), ring("cp"), auto=False).lower(cf.abstract((batch, s, 16), torch.float32))
    assert not any(s * s <= torch.Size(value.shape).numel() for value in low.program.values.values())
    assert low.memory().peak_bytes["device"] < 64 * batch * s * 16
    assert all("striped" in d.strategy for d in low.plan.find("*attention*"))


@pytest.mark.parametrize("batch", [8, 4096])
def test_blocks_of_a_ring_have_a_fused_kernel_however_many_sequences_a_step_has(batch: int) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=sequences(*x.shape[:2]))

    mesh = cf.Mesh(dp=4, cp=2, topology="8xh100")
    low = cf.shard(step, mesh, ring("cp"), auto=False).lower(cf.abstract((batch, 4096, 256), torch.bfloat16))
    planned = [node.kernel.name for node in low.program.nodes if node.target == "colofunc.attention" and node.kernel is not None]
    assert planned == ["cudnn", "flash"]  # of which the first stands on the diagonal


def test_a_dense_mask_is_named_in_the_plan() -> None:
    def step(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=keep[:, None, None, :] | keep[:, None, :, None])

    def notes(s: int) -> tuple[str, ...]:
        abstract = cf.abstract((1, s, 16), torch.float32), cf.abstract((1, s), torch.bool)
        return cf.shard(step, cf.Mesh(dp=1)).lower(*abstract).plan.notes

    (note,) = notes(32768)
    assert "dense mask (1, 1, 32768, 32768) of 1" in note
    assert notes(512) == ()
