"""cf.checkpoint: the peak is within the budget, the numbers are the same, and a larger budget never costs time."""

from collections import Counter
from functools import partial
from typing import Any, cast

import attrs
import pytest
import torch
import transformers
from colofunc_plugins import tensor, zero
from torch import nn

import colofunc as cf
from colofunc.compiler import completion
from colofunc.planner.candidate import FinishedProgram
from colofunc.planner.recompute import fastest, orders
from colofunc.planner.recompute.cuts import forward_facts
from colofunc.planner.recompute.orders import Order
from colofunc.program.facts import is_product
from colofunc.program.ir import Program
from colofunc.program.passes.recompute import AGAIN
from colofunc.testing import check

AMPLE = "8xa100-80g"


class Block(nn.Module):
    def __init__(self, d: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def training(layers: int = 6, d: int = 16, rows: int = 256, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(d, dropout) for _ in range(layers)), nn.Linear(d, d)).double()
    batch = {k: torch.randn(rows, d, dtype=torch.float64) for k in "xy"}
    fn = lambda out, b: ((out - b["y"]) ** 2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), loss=fn, inputs=lambda b: ((b["x"],), {}))
    return step, state, batch


def made_again(program: Program) -> list[int]:
    """Indices of the nodes that run a second time."""
    return [k for k, node in enumerate(program.nodes) if node.note.startswith(AGAIN)]


def peak(staged: Any, *args: Any) -> int:
    return staged.lower(*args).memory().peak_bytes["device"]


def again(staged: Any, *args: Any) -> int:
    return len(made_again(staged.lower(*args).program))


def test_within_every_budget_down_to_the_least_and_less_is_never_cheaper() -> None:
    step, *args = training(layers=4)
    whole = peak(cf.shard(step, cf.Mesh()), *args)
    spent, peaks = [], []
    for share in (1.0, 0.9, 0.75, 0.6, 0.4):
        staged = cf.checkpoint(step, budget=int(whole * share))
        try:
            low = staged.lower(*args)
        except cf.PlanError as error:
            assert "the least found has a peak of" in str(error) and share < 0.6
            break
        peaks.append(low.memory().peak_bytes["device"])
        spent.append(low.cost().flops)
        assert peaks[-1] <= whole * share
    assert len(peaks) >= 4 and peaks == sorted(peaks, reverse=True) and spent == sorted(spent) and spent[-1] > spent[0]


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_what_is_made_again_has_the_same_numbers_with_dropout_too(share: float) -> None:
    step, *args = training(layers=4, dropout=0.1)
    staged = cf.checkpoint(step, budget=int(peak(cf.shard(step, cf.Mesh()), *args) * share))
    assert again(staged, *args) > 0
    assert check(staged, *args).worst <= 1e-12


def test_beside_sharding_a_gather_of_parameters_may_be_made_again() -> None:
    step, *args = training(layers=2, d=32, rows=64)
    mesh = cf.Mesh(dp=4, topology=AMPLE)
    plain = cf.shard(step, mesh, zero(3, "dp", regather=False)).on("simulated")  # where nothing is in flight
    staged = cf.checkpoint(plain, policy="nothing")
    low = staged.lower(*args)
    assert low.memory().peak_bytes["device"] < peak(plain, *args)
    assert low.cost().bytes["all_gather", "dp"] > plain.lower(*args).cost().bytes["all_gather", "dp"]
    assert check(staged, *args).worst < 1e-10


@pytest.mark.parametrize("axes", [{"dp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.sweep)], ids=str)
def test_order_of_transforms_does_not_matter_and_it_composes_with_accumulate(axes: dict[str, int]) -> None:
    step, *args = training(layers=2)
    mesh = cf.Mesh(**axes, topology=AMPLE)
    plans = (zero(1, "dp"), tensor("1d", "tp")) if "tp" in axes else (zero(1, "dp"),)
    one = cf.accumulate(cf.shard(step, mesh, *plans), microbatches=2)
    least = int(peak(one, *args) * 0.8)
    other = cf.shard(cf.checkpoint(step, budget=least), mesh, *plans)
    both = [cf.checkpoint(one, budget=least), cf.accumulate(other, microbatches=2)]
    texts = [staged.lower(*args).text() for staged in both]
    assert texts[0] == texts[1]
    assert peak(both[0], *args) <= least
    assert check(both[0], *args).worst < 1e-10


def test_policies_keep_what_they_say() -> None:
    step, *args = training(layers=4)
    everything, dots, nothing = (cf.checkpoint(step, policy=name).lower(*args) for name in ("everything", "dots", "nothing"))
    products = [len([k for k in made_again(low.program) if "linear" in low.program.nodes[k].target]) for low in (everything, dots, nothing)]
    assert len(made_again(everything.program)) == 0 and products[:2] == [0, 0] and products[2] >= 4
    assert len(made_again(dots.program)) > 0
    ups = cf.checkpoint(step, policy=cf.save_only("*.up")).lower(*args)
    again = {ups.program.nodes[k].path for k in made_again(ups.program) if "linear" in ups.program.nodes[k].target}
    assert not any(path.endswith(".up") for path in again)
    assert check(cf.checkpoint(step, policy="nothing"), *args).worst <= 1e-12
    assert check(cf.checkpoint(step, policy=cf.every(2)), *args).worst <= 1e-12


def test_every_n_stages_holds_fewer_inputs() -> None:
    step, *args = training(layers=6, rows=1024, d=8)
    one, two = (peak(cf.checkpoint(step, policy=cf.every(n)), *args) for n in (1, 3))
    assert one < peak(cf.shard(step, cf.Mesh()), *args) and two != one


@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("name", ["sharded", "pipelined"])
def test_a_policy_within_its_budget_asks_for_no_other_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes again was asked for; no sharding or cut that holds less would spare it.

    Named plans, and what was found with the buckets that run, are finished once each.
    """
    finished = []
    once = completion.Completion.finish

    def finish(self: completion.Completion, *args: Any) -> Any:
        if self.small_buckets and args[1] is not None:
            finished.append(args)
        return once(self, *args)

    monkeypatch.setattr(completion.Completion, "finish", finish)
    step, *args = training()
    chains = {
        "sharded": lambda: cf.shard(step, cf.Mesh(dp=2, tp=2, topology=AMPLE)),
        "pipelined": lambda: cf.pipeline(cf.shard(step, cf.Mesh(pp=2, dp=2)), microbatches=4),
    }
    low = cf.checkpoint(chains[name](), policy="nothing", budget="1GiB").lower(*args)
    assert len(finished) == 1 and any("made again" in words for words in low.plan.memory)


def test_a_policy_over_the_budget_and_words_that_mean_nothing_are_errors() -> None:
    step, *args = training(layers=2)
    with pytest.raises(cf.PlanError, match="the least found has a peak of"):
        cf.checkpoint(step, budget="1KB", policy="everything").lower(*args)
    with pytest.raises(cf.PlanError, match=r"no policy 'dotz'.*dots"):
        cf.checkpoint(step, policy="dotz")
    for word, policy in {"full": "nothing", "selective": "dots", "none": "everything"}.items():
        with pytest.raises(cf.PlanError, match=f"no policy '{word}'.* is policy='{policy}'"):
            cf.checkpoint(step, policy=word)
    with pytest.raises(cf.PlanError, match=r"policy=\['dots'\]\): a policy is one name .*'dots'.* cf.save_only\('\*\.attn', '\*\.mlp'\)"):
        cf.checkpoint(step, policy=["dots"])  # type: ignore[arg-type]
    with pytest.raises(cf.ColofuncError, match=r"'6 gigs' is no size"):
        cf.checkpoint(step, budget="6 gigs")
    for wrong in (lambda: cf.every(0), lambda: cf.save_only()):
        with pytest.raises(cf.PlanError, match="write cf"):
            wrong()


@pytest.mark.parametrize(
    ("globs", "says"),
    [
        (["*.nomatch"], r"no operator stands in a module '\*\.nomatch'; did you mean '\*\.norm'"),
        (["*.qqqqqqqq"], r"no operator stands in a module '\*\.qqqqqqqq'; modules: '\*\.down', '\*\.norm', '\*\.up', '0', "),
        (["*.up", "*.dwon"], r"no operator stands in a module '\*\.dwon'; did you mean '\*\.down'"),
        (["1.upp"], r"no operator stands in a module '1\.upp'; did you mean .*'1\.up'"),
    ],
)
def test_modules_that_no_step_has_are_refused_when_it_is_known(globs: list[str], says: str) -> None:
    step, *args = training(layers=2)
    for staged in (cf.checkpoint(step, policy=cf.save_only(*globs)), cf.checkpoint(cf.accumulate(step, 2), policy=cf.save_only(*globs))):
        with pytest.raises(cf.PlanError, match=says):
            staged.lower(*args)
    for found in ("*.up", "1.up", "1", "up", "[01].down"):
        assert again(cf.checkpoint(step, policy=cf.save_only(found)), *args)


def test_a_step_without_backward_is_left_alone() -> None:
    fn = lambda x: torch.relu(x @ x)  # noqa: E731
    staged = cf.checkpoint(fn, policy="nothing")
    assert again(staged, torch.randn(8, 8)) == 0
    assert torch.equal(staged(torch.eye(4)).full(), torch.eye(4))


@pytest.mark.parametrize("policy", ["nothing", "dots"])
def test_a_language_model_as_it_is(policy: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=64, bos_token_id=1, eos_token_id=1)
    torch.manual_seed(0)
    model = cf.functional(transformers.GPT2LMHeadModel(config).double())
    step, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3), clip=1.0)
    ids = torch.randint(0, 64, (8, 16))
    batch = {"input_ids": ids, "labels": ids}
    staged = cf.checkpoint(cf.shard(step, cf.Mesh(dp=2), zero(1, "dp")), policy=policy)
    assert again(staged, state, batch) > 0
    with cf.testing.float64():
        assert check(staged, state, batch).worst < 1e-10


def test_a_chain_that_is_equally_narrow_everywhere_has_stages_too() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(8) for m in (nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()))).double()
    batch = {k: torch.randn(256, 16, dtype=torch.float64) for k in "xy"}
    fn = lambda out, b: ((out - b["y"]) ** 2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2), loss=fn, inputs=lambda b: ((b["x"],), {}))
    budget = int(peak(cf.shard(step, cf.Mesh()), state, batch) * 0.6)
    staged = cf.checkpoint(step, budget=budget)
    assert peak(staged, state, batch) <= budget
    check(staged, state, batch)


SHARES = (0.0, 0.05, 0.10, 0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.50, 0.60, 0.70, 0.80, 0.90, 1.0)


@pytest.mark.parametrize(("layers", "shares"), [(2, SHARES[::5]), pytest.param(4, SHARES, marks=pytest.mark.sweep)], ids=["some", "all"])
def test_peaks_of_a_llama_fall_with_the_budget(layers: int, shares: tuple[float, ...]) -> None:
    """A LLaMA with random weights, two rows: the example of pytorch#197838, at whose budgets torch's peaks go up and down."""
    size = dict(hidden_size=64, intermediate_size=172, num_hidden_layers=layers, num_attention_heads=4, vocab_size=512)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, max_position_embeddings=128))
    step, state = cf.train_step(cf.functional(model), cf.adapt(torch.optim.SGD, lr=0.1))
    ids = torch.randint(0, 512, (2, 128))
    args = state, {"input_ids": ids, "labels": ids}
    most, least = peak(cf.shard(step, cf.Mesh()), *args), peak(cf.checkpoint(step, policy="nothing"), *args)
    budgets = [int(least + share * (most - least)) for share in shares]
    peaks = [peak(cf.checkpoint(step, budget=budget), *args) for budget in budgets]
    assert least < 0.9 * most and peaks == sorted(peaks) and all(p <= b for p, b in zip(peaks, budgets, strict=True))


def test_an_order_that_misses_narrowly_does_not_hide_a_faster_one_that_fits() -> None:
    peaks = [20_000, 19_000, 18_000, 17_000, 12_000, 10_000, 10_003, 9_900, 5_000]  # the seventh takes more than the faster sixth
    orders = [Order(partial(int, k), given_bytes=peak, at_most_s=1 + k) for k, peak in enumerate(sorted(peaks, reverse=True))]

    def tried(order: Any) -> FinishedProgram:
        return FinishedProgram(order, peaks[order], more_s=float(order))

    found = fastest._bisect(orders, tried, 10_000, again_s=lambda one: 0.0)
    assert min(one.more_s for one in found if one.fits(10_000)) == 5.0
    assert len(found) < len(orders)


def test_a_leanest_order_that_does_not_fit_with_its_copies_ends_no_search() -> None:
    """Where all ranks of a pipeline copy at once, an order that makes more again may need more room than the one before it."""
    peaks, seconds = [120, 95, 110, 110], [6.0, 5.0, 2.0, 1.0]
    proposed = [orders.Order(partial(int, k), given_bytes=100 - k, at_most_s=1.0 + k) for k in range(4)]

    def tried(order: Any, like: FinishedProgram | None = None, /, moves: bool = True) -> FinishedProgram:
        return FinishedProgram(order, peaks[order], more_s=seconds[order])

    whole = FinishedProgram(cast(Any, None), 95, more_s=9.0)
    found = orders.fastest(proposed, lambda one: float(proposed.index(one)), tried, whole, 100, work_s=1.0)
    assert min(one.more_s for one in found if one.fits(100)) == 5.0


def searched_in_full(
    sketches: list[float], in_full: list[float], whole_s: float, again_s: list[float], below_s: float
) -> tuple[set[int], set[int]]:
    """(orders that were sketched, those that were searched in full), of orders that all fit."""
    proposed = [orders.Order(partial(int, k), given_bytes=100 - k, at_most_s=1.0 + k) for k in range(len(sketches))]
    sketched, full = set[int](), set[int]()

    def tried(order: Any, like: FinishedProgram | None = None, /, moves: bool = True) -> FinishedProgram:
        (full if like is None else sketched).add(order)
        return FinishedProgram(order, 100, more_s=(in_full if like is None else sketches)[order])

    whole = FinishedProgram(cast(Any, None), 100, more_s=whole_s)
    orders.fastest(proposed, lambda one: again_s[proposed.index(one)], tried, whole, 100, work_s=100.0, below_s=below_s)
    return sketched, full


def test_the_best_order_is_found_where_copies_take_less_than_nothing() -> None:
    """The host takes work off: 4 s less from the 40th order on, while the 30th only hides its copies."""
    again_s = [0.1 * k for k in range(100)]
    sketches = [again + max(-4.0, 12.0 - 0.4 * k) for k, again in enumerate(again_s)]
    sketched, full = searched_in_full(sketches, sketches, 12.0, again_s, below_s=12.0)
    assert len(sketched) <= 10 and min(sketches[k] for k in full) <= min(sketches) + 0.6


def test_orders_whose_sketch_promises_less_than_what_they_come_to_are_not_all_searched_in_full() -> None:
    """The first came to 3 s more than its sketch says, and so would the second, whose sketch is below what the first came to."""
    again_s = [0.0, 3.0, 6.0, 9.0]
    sketches = [20.0, 4.0, 6.5, 9.5]
    sketched, full = searched_in_full(sketches, [one + 3.0 for one in sketches], 20.0, again_s, below_s=float("inf"))
    assert sketched >= {1, 2} and full == {1}


def test_orders_that_make_hardly_more_again_are_not_told_apart() -> None:
    """From the 60th on copies are hidden; 0.6 s of the step's 100 tell orders apart, each of which makes .1 s more again than the last."""
    again_s = [0.1 * k for k in range(100)]
    sketches = [max(again, 12.0 - again) for again in again_s]
    sketched, full = searched_in_full(sketches, sketches, 12.0, again_s, below_s=12.0)
    assert len(sketched) <= 10 and min(sketches[k] for k in full) <= min(sketches) + 0.6


def test_an_order_that_makes_nothing_again_is_not_searched_twice() -> None:
    """The whole is that order, and it was searched in full before."""
    _, full = searched_in_full([1.0, 2.0], [5.0, 6.0], 5.0, [0.0, 0.5], below_s=float("inf"))
    assert 0 not in full


class Gated(nn.Module):
    """A residual block whose products share their input, as those of a transformer do."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.back = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.layer_norm(x, (64,))
        return x + self.back(torch.tanh(self.one(rows)) * torch.tanh(self.two(rows)) * torch.tanh(self.three(rows)))


def test_nothing_but_what_goes_from_block_to_block_is_kept_beside_adapters() -> None:
    """With two small products beside each, fewest values are alive within blocks as well; cut there, what the block reads is kept."""
    torch.manual_seed(0)
    adapted = cf.lora(cf.functional(nn.Sequential(*[Gated() for _ in range(4)])), where="*", rank=2)
    step_fn, state = cf.train_step(adapted, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())
    low = cf.checkpoint(step_fn, policy="nothing").lower(state, torch.randn(512, 64))
    again = Counter(node.path for node in low.program.nodes if node.note.startswith("made again") and is_product(node.target))
    assert all(again[f"{block}.{name}"] == 3 for block in (1, 2) for name in ("one", "two", "three")), again


def test_weights_that_were_gathered_say_nothing_about_where_forward_is_cut() -> None:
    """Where parameters come in as casts that were made before a loop, they are no parameters by name, as here."""
    step, *args = training(layers=3)
    program = cf.shard(step, cf.Mesh(dp=2), zero(3, "dp")).on("simulated").lower(*args).program
    values = {id: attrs.evolve(v, role="activation") if v.role == "param" else v for id, v in program.values.items()}
    named, cast = forward_facts(program), forward_facts(attrs.evolve(program, values=values))
    gathered = {value for node in program.nodes if "all_gather" in node.target for value in node.results}
    assert gathered and gathered.isdisjoint(cast.streams())
    assert [cut.at for cut in cast.cuts] == [cut.at for cut in named.cuts]
