"""Conversions: as cheap as the oracle says, and right on every rank.

The whole table (all pairs of major-only layouts on 2x2x2) is `-m sweep`; the default run takes a smaller tensor and a
sample of executions.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moves import run_moves
from oracle_convert import Oracle, State, mask_of

from colofunc.errors import SpecError
from colofunc.mesh import Mesh, wire_bytes
from colofunc.spec.conversions import search
from colofunc.spec.conversions.conversion import conversion, conversion_bytes, conversion_s
from colofunc.spec.conversions.normal import normal
from colofunc.spec.conversions.refine import Puzzle, refine
from colofunc.spec.layout import Layout, make_layout, replicated
from colofunc.spec.parts import join
from colofunc.spec.spec import Spec
from colofunc.testing.parts import parts
from colofunc.testing.strategies import problems

CUBE = Mesh(x=2, y=2, z=2, topology="ideal")


def major_only(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    """Every axis in front of one dim (in any order), in copies, or pending; those that fit the shape."""
    found = []
    for places in itertools.product([*range(len(shape)), "copy", "sum"], repeat=len(mesh.axis_names)):
        fronts = [[a for a, p in zip(mesh.axis_names, places) if p == d] for d in range(len(shape))]
        pending = tuple((a, "sum") for a, p in zip(mesh.axis_names, places) if p == "sum")
        for orders in itertools.product(*map(itertools.permutations, fronts)):
            dims = []
            for order, size in zip(orders, shape):
                split = 2 ** len(order)
                dims.append((*((2, a) for a in order), (size // split, None)) if size >= split else None)
            if None not in dims:
                found.append(make_layout(tuple(dims), shape, pending))
    return found


def anywhere(rng: random.Random, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    """Striped, block-cyclic, composite: axes of 2 on random binary digits of random dims."""
    digits = [(d, k) for d, size in enumerate(shape) for k in range(size.bit_length() - 1)]
    rng.shuffle(digits)
    dims = [[(2, None)] * (size.bit_length() - 1) for size in shape]
    pending = []
    for axis in mesh.axis_names:
        chance = rng.random()
        if chance < 0.15:
            pending.append((axis, "sum"))
        elif chance > 0.3:
            d, k = digits.pop()
            dims[d][k] = (2, axis)
    return make_layout(tuple(map(tuple, dims)), shape, tuple(pending))


def state_of(layout: Layout, mesh: Mesh) -> State:
    index = torch.arange(torch.Size(layout.shape).numel()).reshape(layout.shape)
    masks = tuple(mask_of(p) for p in parts(index, layout.with_pending(()), mesh))
    return masks, frozenset(mesh.axis_names.index(axis) for axis, _ in layout.pending)


def check_costs(oracle: Oracle, pairs: list[tuple[Layout, Layout]], mesh: Mesh) -> None:
    """Bytes equal the oracle's for all pairs."""
    wrong = []
    states = {layout: state_of(layout, mesh) for layout in {x for pair in pairs for x in pair}}
    for src, group in itertools.groupby(sorted(pairs, key=lambda pair: id(pair[0])), key=lambda pair: pair[0]):
        least = oracle.distances(states[src])
        for _, dst in group:
            ours = conversion_bytes(src, dst, mesh, 1)
            if ours != least[states[dst]]:
                wrong.append((src, dst, ours, least[states[dst]]))
    assert not wrong, f"{len(wrong)} of {len(pairs)} differ from the oracle, first {wrong[0]}"


def check_run(src: Layout, dst: Layout, mesh: Mesh) -> None:
    """The moves give every rank its part of the same tensor, and are what the conversion says they cost."""
    x = torch.randint(1, 9, src.shape).to(torch.float64)
    found = conversion(src, dst, mesh, 8)
    got = run_moves(terms(x, src, mesh), found.moves, mesh)
    assert torch.equal(join(got, dst, mesh), x), (src, dst, *map(str, found.moves))
    if not dst.pending:
        assert all(map(torch.equal, got, parts(x, dst, mesh))), (src, dst, *map(str, found.moves))
    moved, before = 0, src.local_shape
    for move in found.moves:
        if move.target in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"):
            elements = max(torch.Size(before).numel(), torch.Size(move.local_shape).numel())
            moved += wire_bytes(move.target, 8 * elements, move.args[1])
        before = move.local_shape
    assert moved == found.wire_bytes


def terms(x: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """Parts of x; where one sum is pending, every rank of it has a term of its own (not just the first)."""
    shards = parts(x, layout, mesh)
    if len(layout.pending) == 1 and layout.pending[0][1] == "sum":
        group_axis = layout.pending[0][0]
        for group in mesh.groups((group_axis,)):
            noise = [torch.randint(-5, 5, shards[r].shape).to(x.dtype) for r in group[1:]]
            for rank, term in zip(group[1:], noise):
                shards[rank] = shards[rank] + term
                shards[group[0]] = shards[group[0]] - term
    return same_on_copies(shards, layout, mesh)


def same_on_copies(shards: list[torch.Tensor], layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    used = {*layout.axes, *(axis for axis, _ in layout.pending)}
    first = [mesh.rank_at({a: i if a in used else 0 for a, i in mesh.coordinates(r).items()}) for r in range(mesh.size)]
    return [shards[r] for r in first]


# ---- cost ----


def test_costs_from_forty_layouts_to_all_that_fit_a_small_tensor() -> None:
    layouts = major_only(CUBE, (4, 4, 4))
    assert len(layouts) == 158  # all but three axes on one dim
    pairs = list(itertools.product(random.Random(0).sample(layouts, 40), layouts))
    check_costs(Oracle((4, 4, 4), 3), pairs, CUBE)


def test_costs_where_there_is_no_room_to_be_in_between() -> None:
    rng = random.Random(0)
    pool = [anywhere(rng, CUBE, (4, 2, 2)) for _ in range(60)]
    check_costs(Oracle((4, 2, 2), 3), [(rng.choice(pool), rng.choice(pool)) for _ in range(1000)], CUBE)


def test_costs_against_any_permutation_of_ranks() -> None:
    square, rng = Mesh(x=2, y=2, topology="ideal"), random.Random(0)
    pool = [anywhere(rng, square, (4, 4)) for _ in range(40)]
    oracle = Oracle((4, 4), 2, any_permutation=True)
    check_costs(oracle, [(rng.choice(pool), rng.choice(pool)) for _ in range(500)], square)


@pytest.mark.sweep
def test_costs_of_all_major_only_pairs_and_2000_others() -> None:
    oracle = Oracle((8, 8, 8), 3)
    layouts = major_only(CUBE, (8, 8, 8))
    pairs = list(itertools.product(layouts, layouts))
    assert len(pairs) == 30_976
    check_costs(oracle, pairs, CUBE)
    rng = random.Random(0)
    pool = [anywhere(rng, CUBE, (8, 8, 8)) for _ in range(200)]
    others = [(rng.choice(pool), rng.choice(pool)) for _ in range(2000)]
    check_costs(oracle, others, CUBE)
    print(f"{len(pairs)} major-only pairs and {len(others)} striped or block-cyclic ones cost what the oracle says")


def test_parts_of_an_axis_cost_what_two_axes_would() -> None:
    whole, split = Mesh(x=4, y=2, topology="ideal"), Mesh(x1=2, x0=2, y=2, topology="ideal")
    for src, dst, src2, dst2 in [
        ("(x b) c d", "(y b) (x c) d", "(x1 x0 b) c d", "(y b) (x1 x0 c) d"),
        ("(x b) c d", "b (y c) (x d)", "(x1 x0 b) c d", "b (y c) (x1 x0 d)"),
        ("(y b) c d +x", "(x b) c d", "(y b) c d +x1 +x0", "(x1 x0 b) c d"),
    ]:
        a = conversion(Spec(src).bind(whole, (8, 8, 8)), Spec(dst).bind(whole, (8, 8, 8)), whole, 1)
        b = conversion(Spec(src2).bind(split, (8, 8, 8)), Spec(dst2).bind(split, (8, 8, 8)), split, 1)
        assert a.wire_bytes == b.wire_bytes


# ---- named cases ----

NAMED = [
    ("(x b) d", "(x b) d", []),
    ("b d", "(x b) d", ["take_shard"]),
    ("(x b) d", "b d", ["all_gather"]),
    ("b d +x", "b d", ["all_reduce"]),
    ("b d +x", "(x b) d", ["reduce_scatter"]),
    ("b d", "b d +x", ["keep_first"]),
    ("b d", "b d max:x", []),
    ("(x b) d", "b (x d)", ["all_to_all"]),
    ("(x b) (y d)", "(y b) (x d)", ["permute"]),
    ("(x y b) d", "b d", ["all_gather"]),
    ("(z b) d +x", "(z b) d", ["all_reduce"]),
    ("(x y b) d +z", "(x y b) d", ["all_reduce"]),
]


def collectives(moves) -> list[str]:
    return [m.target for m in moves if m.target != "rearrange"]


@pytest.mark.parametrize(("src", "dst", "targets"), NAMED)
def test_named(src: str, dst: str, targets: list[str]) -> None:
    found = conversion(Spec(src).bind(CUBE, (8, 8)), Spec(dst).bind(CUBE, (8, 8)), CUBE, 4)
    assert collectives(found.moves) == targets


def test_moves_read_as_einops() -> None:
    src, dst = Spec("(x b) d").bind(CUBE, (4, 6)), Spec("b (x d)").bind(CUBE, (4, 6))
    assert list(map(str, conversion(src, dst, CUBE, 4).moves)) == [
        "rearrange('a (b c) -> b a c', ('b', 'c'), (2, 3))",
        "all_to_all(('x',), 2)",
        "rearrange('a b c -> (a b) c', (), ())",
    ]


@pytest.mark.parametrize("topology", ["8xh100", "8xh100:datasheet", "8xa100-80g", "8xrtx4090"])
def test_gradients_of_hybrid_sharding_are_reduced_with_no_gather(topology: str) -> None:
    """A reduce-scatter over all and a gather cost the same; nothing hides the gather, which the update reads."""
    mesh = Mesh(dpo=16, dp=8, topology=topology)
    src, dst = (Spec(text).bind(mesh, (4096, 4096)) for text in ("a b +dp +dpo", "(dp a) b"))
    found = conversion(src, dst, mesh, 2)
    assert collectives(found.moves) == ["reduce_scatter", "all_reduce"]
    parts = mesh.collective_s("reduce_scatter", 2 << 24, ("dp",)), mesh.collective_s("all_reduce", 2 << 21, ("dpo",))
    assert found.cost_s == pytest.approx(sum(parts))


def test_copies_share_the_work_of_an_all_reduce() -> None:
    """1.5 of the tensor over 4 ranks; sliced over the idle axis it is 0.75, and 0.5 to gather."""
    found = conversion(Spec("b d +x +y").bind(CUBE, (8, 8)), Spec("b d").bind(CUBE, (8, 8)), CUBE, 1)
    assert found.wire_bytes == 80 and collectives(found.moves) == ["take_shard", "all_reduce", "all_gather"]
    both = Mesh(x=2, y=2, topology="ideal")
    found = conversion(Spec("b d +x +y").bind(both, (8, 8)), Spec("b d").bind(both, (8, 8)), both, 1)
    assert found.wire_bytes == 96 and collectives(found.moves) == ["all_reduce"]


# ---- execution ----


def test_a_sample_of_major_only_pairs_runs() -> None:
    rng, layouts = random.Random(1), major_only(CUBE, (8, 8, 8))
    for _ in range(700):
        check_run(rng.choice(layouts), rng.choice(layouts), CUBE)


def test_a_sample_of_striped_and_block_cyclic_pairs_runs() -> None:
    rng = random.Random(2)
    for _ in range(300):
        check_run(anywhere(rng, CUBE, (8, 4, 4)), anywhere(rng, CUBE, (8, 4, 4)), CUBE)


@pytest.mark.sweep
def test_all_major_only_pairs_run() -> None:
    layouts = major_only(CUBE, (8, 8, 8))
    for src, dst in itertools.product(layouts, layouts):
        check_run(src, dst, CUBE)


LARGE = Mesh(dp=16, tp=8, topology="128xh100-80g")
ON_TWO_LARGE_AXES = (
    "(dp tp a) b", "(tp dp a) b", "(dp a) (tp b)", "(tp a) (dp b)", "a (dp tp b)", "a (tp dp b)", "(a dp) (tp b)", "(a tp) (dp b)",
    "(dp a) b", "(tp a) b", "(dp a) b +tp", "(tp a) b +dp", "a (dp b) +tp", "a b",
)  # fmt: skip


TRADES = [("(a dp) (tp b)", "(a tp) (dp b)"), ("(dp tp a) b", "(tp dp a) b"), ("a (tp dp b)", "a (dp tp b)")]


THREE = Mesh(dp=4, cp=2, tp=8, topology="64xh100-80g")
ON_THREE_AXES = (
    "(dp cp tp a) b", "(tp cp dp a) b", "(cp dp tp a) b", "(dp tp a) (cp b)", "(tp cp a) (dp b)", "(dp a) (tp cp b)", "a (cp tp dp b)",
    "(dp cp a) b +tp", "(tp a) b +dp +cp", "(a tp cp) (dp b)", "(a dp) (cp tp b)", "(cp a) (tp b)", "(tp a) (cp b)",
)  # fmt: skip


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How many moves the search has tried."""
    count = itertools.count()
    real = search.moves_from

    def counted(*args: Any) -> Iterator[Any]:
        for move in real(*args):
            next(count)
            yield move

    monkeypatch.setattr(search, "moves_from", counted)
    search.answer.cache_clear()
    yield lambda: next(count)


@pytest.mark.parametrize(("src", "dst"), TRADES + random.Random(3).sample([*itertools.permutations(ON_TWO_LARGE_AXES, 2)], 12))
def test_conversions_between_large_axes_run_and_are_found_soon(src: str, dst: str, tried: Callable[[], int]) -> None:
    """Axes of 16 and 8 ranks are up to seven pieces of two."""
    check_run(*(Spec(text).bind(LARGE, (128, 128)) for text in (src, dst)), LARGE)
    assert tried() <= 5_000


@pytest.mark.parametrize(("src", "dst"), random.Random(5).sample([*itertools.permutations(ON_THREE_AXES, 2)], 12))
def test_conversions_between_three_axes_run_and_are_found_soon(src: str, dst: str, tried: Callable[[], int]) -> None:
    """4, 2 and 8 ranks are up to six pieces of two, and what is left of such a puzzle is as large again."""
    check_run(*(Spec(text).bind(THREE, (64, 64)) for text in (src, dst)), THREE)
    assert tried() <= 15_000


@pytest.mark.parametrize(("src", "dst"), random.Random(7).sample([*itertools.permutations(ON_THREE_AXES, 2)], 20))
def test_a_large_puzzle_costs_at_most_what_one_permutation_and_the_rest_cost(src: str, dst: str) -> None:
    a, b = (Spec(text).bind(THREE, (64, 64)) for text in (src, dst))
    puzzle = refine(a, b, THREE)
    assert isinstance(puzzle, Puzzle)
    alike = normal(puzzle, THREE)
    for nbytes in (1 << 6, 1 << 20, 1 << 30):
        q = search.Question(alike.pieces, nbytes, alike.prices)
        start, goal = tuple(p.start for p in q.pieces), tuple(p.goal for p in q.pieces)
        found = search.answer(q)
        assert found is not None
        for way in (search._permuting_first(q, start, goal), search._permuting_last(q, start, goal)):
            if way is not None:
                assert search._cost(q, start, found) <= search._cost(q, start, way)


@pytest.mark.parametrize("mesh", [LARGE, Mesh(dp=32, tp=8, topology="ideal"), Mesh(dp=64, tp=16, topology="gloo-cpu")], ids=repr)
def test_large_axes_trade_places_in_one_permutation(mesh: Mesh) -> None:
    src, dst = (Spec(text).bind(mesh, (1024, 8)) for text in ("(dp tp a) b", "(tp dp a) b"))
    assert collectives(conversion(src, dst, mesh, 4).moves) == ["permute"]
    assert conversion_bytes(src, dst, mesh, 4) == 4 * src.local_numel


@given(problems())
def test_any_conversion_runs(problem) -> None:
    """Odd sizes, axes of size 1, padding, boundaries that do not nest, max and min."""
    mesh, src, dst = problem
    check_run(src, dst, mesh)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("(tp v~) d", "v d"),
        ("v d", "(tp v~) d"),
        ("(tp v~) d", "(dp v) d"),
        ("(tp v~) (dp d)", "(dp tp v~) d"),
        ("(tp v~) d", "v (tp d~)"),
        ("(tp v~) d +dp", "(dp v) d"),
    ],
)
def test_padded(src: str, dst: str) -> None:
    mesh = Mesh(dp=2, tp=4)
    check_run(Spec(src).bind(mesh, (10, 6)), Spec(dst).bind(mesh, (10, 6)), mesh)


def test_equal_padding_needs_no_gather() -> None:
    mesh = Mesh(tp=4)
    src, dst = Spec("(tp v~) d").bind(mesh, (10, 8)), Spec("(v 4~) (tp d)", v=3).bind(mesh, (10, 8))
    assert collectives(conversion(src, dst, mesh, 4).moves) == ["all_to_all"]
    check_run(src, dst, mesh)


def test_sums_are_reduced_before_maxima() -> None:
    """Pending over both: the value is the maximum over x of the sums over y."""
    mesh = Mesh(x=2, y=2)
    src, dst = Spec("b +y max:x").bind(mesh, (2,)), Spec("b").bind(mesh, (2,))
    x = torch.tensor([[1.0, 8.0], [5.0, -7.0], [2.0, 2.0], [3.0, 0.0]])  # ranks (x, y): 00, 01, 10, 11
    got = run_moves(list(x), conversion(src, dst, mesh, 8).moves, mesh)
    assert all(torch.equal(g, torch.tensor([6.0, 2.0])) for g in got)


def test_an_empty_tensor() -> None:
    mesh = Mesh(dp=2)
    src, dst = Spec("(dp b) d").bind(mesh, (0, 4)), Spec("b (dp d)").bind(mesh, (0, 4))
    got = run_moves([torch.empty(src.local_shape)] * 2, conversion(src, dst, mesh, 4).moves, mesh)
    assert [tuple(g.shape) for g in got] == [(0, 2)] * 2


# ---- records ----


def test_layouts_and_shapes_along_the_way() -> None:
    mesh = Mesh(dp=2, tp=2)
    src, dst = Spec("(dp tp b) d").bind(mesh, (8, 8)), Spec("b (tp dp d)").bind(mesh, (8, 8))
    moves = conversion(src, dst, mesh, 4).moves
    assert moves[-1].local_shape == dst.local_shape and moves[-1].layout is dst
    # Every move leaves a tensor of the shape that it says.
    x = torch.arange(64.0).reshape(8, 8)
    for count, move in enumerate(moves, 1):
        assert {tuple(part.shape) for part in run_moves(terms(x, src, mesh), moves[:count], mesh)} == {move.local_shape}


def test_seconds_are_the_meshs() -> None:
    mesh = Mesh(dp=2, tp=4, topology="8xa100-80g")
    src, dst = Spec("(tp b) d").bind(mesh, (64, 64)), Spec("b d").bind(mesh, (64, 64))
    gather_s = mesh.collective_s("all_gather", 64 * 64 * 4, ("tp",))
    assert conversion_s(src, dst, mesh, 4) == conversion(src, dst, mesh, 4).cost_s == gather_s
    assert conversion_bytes(src, dst, mesh, 4) == 3 * 64 * 64
    assert conversion_s(src, src, mesh, 4) == 0.0


def test_tiers_do_not_matter() -> None:
    src, dst = Spec("(x b) @host").bind(CUBE, (8,)), Spec("(x b)").bind(CUBE, (8,))
    assert conversion(src, dst, CUBE, 4).moves == ()


def test_shapes_must_agree() -> None:
    with pytest.raises(SpecError, match="the global shapes differ"):
        conversion(replicated((4,)), replicated((5,)), CUBE, 4)


@given(st.integers(0, 10_000))
def test_triangle(seed: int) -> None:
    """No detour is cheaper than the conversion itself."""
    rng = random.Random(seed)
    a, b, c = (anywhere(rng, CUBE, (8, 8, 8)) for _ in range(3))
    direct = conversion(a, c, CUBE, 1).wire_bytes
    assert direct <= conversion(a, b, CUBE, 1).wire_bytes + conversion(b, c, CUBE, 1).wire_bytes
