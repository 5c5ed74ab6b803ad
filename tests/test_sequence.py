"""ring, ulysses and gather_kv: every pattern against dense attention in float64, bytes against closed forms, and whole models.

Closed forms, forward, per rank, elements of (b, s, h) on n ranks (h of keys and values: g e): Ulysses moves q, k, v, out
by all-to-all, 4 (n-1)/n b s h / n; a ring sends K and V n - 1 times, 2 (n-1)/n b s h (2309.14509, 2310.01889). Backward:
Ulysses the same again; a ring sends K and V again and their gradients, too.
"""

from typing import Any

import colofunc_plugins
import pytest
import torch
from colofunc_plugins import gather_kv, ring, tensor, ulysses, zero
from hypothesis import given, settings
from hypothesis import strategies as st

import colofunc as cf
from colofunc.testing import check, check_strategies
from colofunc.testing.prove import sample

TOPOLOGY = "8xa100-80g"
FORWARD, BACKWARD = "colofunc.attention", "colofunc.attention_backward"
PLANS = {"ring": ring, "gather_kv": gather_kv, "ulysses": ulysses}


def mesh(**axes: int) -> cf.Mesh:
    return cf.Mesh(**axes, topology=TOPOLOGY)


# ---- one operator ----


def calls(
    b: int = 2, h: int = 4, g: int = 2, s: int = 12, t: int = 12, e: int = 4, f: int = 4, bias: Any = None, causal: bool = False,
    window: int = 0, dropout: float = 0.0, offset: Any = None, box: int = 0, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Calls of attention and of its backward on random tensors. `bias`: its shape, or a tensor. `box`: bounds, of so many batches."""
    gen = torch.Generator().manual_seed(seed)
    r = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)  # noqa: E731
    q, k, v = r(b, h, s, e), r(b, g, t, e), r(b, g, t, f)
    mask = r(*bias) if isinstance(bias, tuple) else bias
    options = (0.5, causal, window, dropout, torch.tensor(5) if dropout else None, 0, offset)
    number = lambda *shape: torch.randint(0, 4, shape, generator=gen)  # noqa: E731
    least = number(box, 2, s)
    bounds = dict(code=number(b, 2, t), least=least, most=least + 2) if box else {}
    out, lse = torch.ops.colofunc.attention(q, k, v, mask, *options, **bounds)
    needed = mask is not None and mask.is_floating_point()
    return {
        FORWARD: sample(q, k, v, mask, *options, **bounds),
        BACKWARD: sample(r(*out.shape), q, k, v, mask, out, lse, *options, need_dbias=needed, **bounds),
    }


def proved(plan: str, made: dict[str, Any], *meshes: cf.Mesh) -> set[str]:
    """Prove all strategies of a plan over axis `a`; their names."""
    found: set[str] = set()
    for target, call in made.items():
        for each in check_strategies(PLANS[plan]("a"), target, call, meshes=meshes or [mesh(a=3)]):
            assert each.worst < 1e-10
            found.add(each.strategy)
    return found


SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "wide window": {"causal": True, "window": 7},
    "window without order": {"window": 4},
    "cross": {"s": 12, "t": 24},
    "cross, fewer keys": {"s": 24, "f": 6},
    "one key head": {"g": 1, "causal": True},
    "all heads": {"g": 4, "causal": True},
    "bias": {"bias": (1, 4, 12, 12), "causal": True},
    "bias of columns": {"bias": (2, 1, 1, 12)},
    "bias of rows": {"bias": (1, 4, 12, 1)},
    "mask": {"bias": torch.arange(12)[None, None, None] < torch.tensor([12, 7])[:, None, None, None]},
    "bounds": {"box": 2, "causal": True},
    "bounds for all": {"box": 1, "window": 5, "t": 24},
    "dropout": {"dropout": 0.3, "causal": True},
    "rows that see nothing": {"causal": True, "offset": torch.tensor(-4)},
    "positions listed": {"causal": True, "offset": torch.arange(12).flip(0)},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", ["ring", "gather_kv"])
def test_blocks_of_keys_merge_to_dense_attention(plan: str, shape: str) -> None:
    words = {"ring": {"{a: ring}", "{a: striped}"}, "gather_kv": {"{a: gathered}", "{a: gathered striped}"}}
    assert proved(plan, calls(**SHAPES[shape])) == words[plan]


HEADS: dict[str, dict[str, Any]] = {
    "heads that do not divide": {"h": 5, "g": 5, "causal": True},
    "groups cut in two": {"h": 12, "g": 4, "causal": True, "window": 5},
    "fewer key heads than ranks": {"h": 6, "g": 2, "dropout": 0.3},
    "one key head": {"h": 6, "g": 1, "s": 24},
    "bias of heads": {"h": 5, "g": 5, "bias": (2, 5, 12, 12)},
    "bias of columns": {"h": 6, "g": 2, "bias": (1, 6, 1, 12)},
    "bias of all": {"h": 6, "g": 2, "bias": (1, 1, 12, 12)},
}


@pytest.mark.parametrize("shape", HEADS)
def test_heads_that_the_axis_does_not_divide(shape: str) -> None:
    assert proved("ulysses", calls(**HEADS[shape]), mesh(a=3)) == {"{a: heads}"}


# All heads in a ring; gathered keys with heads to fill up, and with a bias. The others in the sweep.
INSIDE = [
    pytest.param(plan, shape, marks=() if plan == "ring" or shape in ("heads that do not divide", "bias of columns") else pytest.mark.sweep)
    for plan in ("ring", "gather_kv")
    for shape in HEADS
]


@pytest.mark.parametrize(("plan", "shape"), INSIDE)
def test_blocks_of_keys_inside_an_exchange_of_heads(plan: str, shape: str) -> None:
    """Each rank has some heads of its column of ranks' rows, and these go round the others."""
    found = proved(plan, calls(**HEADS[shape]), mesh(a=2, o=3))
    inside = {"ring": ["ring", "striped"], "gather_kv": ["gathered", "gathered striped"]}[plan]
    assert {name for name in found if "heads" in name} == {f"{{a: {word}, o: heads}}" for word in inside}


@pytest.mark.parametrize("plan", PLANS)
def test_beside_another_axis(plan: str) -> None:
    """Batch, key heads, heads of a group: wherever the rule lets another axis lie."""
    found = proved(plan, calls(h=4, g=2 if plan != "ulysses" else 1, causal=True), mesh(a=2, o=2))
    assert {name.split(", ")[1].strip("}") for name in found if ", " in name} >= {"o: b", "o: r"}


@settings(max_examples=8)
@given(st.data())
def test_random_shapes(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([2, 3, 4]))
    g, r = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    rows, columns = n * data.draw(st.integers(1, 4)), n * data.draw(st.integers(1, 4))
    causal = data.draw(st.booleans())
    columns = rows if causal else columns
    made = calls(h=g * r, g=g, s=rows, t=columns, causal=causal, window=data.draw(st.integers(0, rows)), seed=n)
    plan = data.draw(st.sampled_from(["ring", "gather_kv", *(["ulysses"] if g % n else [])]))
    proved(plan, made, mesh(a=n))


def test_a_window_is_met_by_few_hops() -> None:
    """Blocks of 8 and a window of 9: the own block and the one before; nothing else is sent."""
    x = torch.randn(1, 2, 64, 4, dtype=torch.float64)
    step = lambda q: torch.ops.colofunc.attention(q, q, q, None, 0.5, True, 9)[0]  # noqa: E731
    low = cf.shard(step, mesh(a=8), Ring("a"), in_specs="b h (a s) e").lower(x)
    assert low.cost().calls["permute", "a"] == 1


class Ring:
    """A plan that wishes for the operator alone."""

    def __init__(self, axis: str) -> None:
        self.axes, self.name, self.inner = (axis,), "ring", ring(axis, balance=None)

    @cf.hookimpl
    def colofunc_strategies(self) -> Any:
        return self.inner.colofunc_strategies()

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        return [cf.ext.Wish("*", f"{{{self.axes[0]}: ring}}", self.axes, targets=(FORWARD, BACKWARD), phases=("forward", "backward"))]


# ---- whole models ----


def built(family: str, rows: int = 2, tokens: int = 16, optimizer: Any = torch.optim.SGD, **more: Any) -> Any:
    """(step, state, batch) of a small unmodified model. Plans are about tokens: an optimizer of few operators is planned sooner."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    base = dict(vocab_size=32, bos_token_id=1, eos_token_id=1, pad_token_id=0, decoder_start_token_id=0)
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=tokens)
    ffn = dict(encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0)
    name, options = {
        "gpt2": ("GPT2LMHeadModel", dict(n_embd=16, n_layer=1, n_head=4, n_positions=tokens, **dict.fromkeys(DROPS, 0.0))),
        "llama": ("LlamaForCausalLM", dict(num_key_value_heads=2, **size)),
        "mistral": ("MistralForCausalLM", dict(num_key_value_heads=2, sliding_window=5, **size)),
        "bart": ("BartForConditionalGeneration", dict(d_model=16, encoder_attention_heads=2, decoder_attention_heads=2, **ffn)),
        "t5": ("T5ForConditionalGeneration", dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0)),
    }[family]
    cls = getattr(transformers, name)
    net = cls(cls.config_class(**{**base, **options, **more})).double()
    ids = torch.randint(2, 32, (rows, tokens))
    labels = torch.where(torch.arange(tokens) < 3, -100, ids)
    step, state = cf.train_step(cf.functional(net), cf.adapt(optimizer, lr=1e-2), clip=1.0)
    return step, state, {"input_ids": ids, "labels": labels}


DROPS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def equal(step: Any, state: Any, batch: Any, on: cf.Mesh, *plans: Any, steps: int = 2) -> Any:
    """The lowered step, whose numbers are those of one device."""
    staged = cf.shard(step, on, *plans)
    with cf.testing.float64():
        checked = check(staged, state, batch, steps=steps)
        assert checked.worst < 1e-10
        return checked.low


def words(low: Any, axis: str) -> set[str]:
    """What attention does over an axis, forward and backward."""
    return {dict(d.axes)[axis] for d in low.plan.decisions if d.target in (FORWARD, BACKWARD)}


# Every family in a ring, one under every plan, t5 with its bias under heads too; the others in the sweep.
FAMILIES = [
    pytest.param(f, p, marks=() if p == "ring" or f == "llama" or (f, p) == ("t5", "ulysses") else pytest.mark.sweep)
    for f in ("llama", "gpt2", "mistral", "bart", "t5")
    for p in PLANS
]


@pytest.mark.parametrize(("family", "plan"), FAMILIES)
def test_models_equal_one_device_and_stay_split(family: str, plan: str) -> None:
    """Masked labels are shifted across ranks; only attention, the shift and sums of gradients communicate."""
    step, state, batch = built(family)
    low = equal(step, state, batch, mesh(cp=2), PLANS[plan]("cp"), steps=1)
    striped = family in ("llama", "gpt2", "bart")  # causal without a window: t5's mask is part of its bias
    assert words(low, "cp") == {{"ring": "striped" if striped else "ring", "ulysses": "g",
                                 "gather_kv": "gathered striped" if striped else "gathered"}[plan]}  # fmt: skip
    assert {leaf.name: leaf.spec for leaf in low.plan.inputs}["batch.input_ids"] == (
        "a (b cp)" if striped and plan != "ulysses" else "a (cp b)"
    )
    assert_split(low, "cp", rows=2 * 16 * 16)


def assert_split(low: Any, axis: str, rows: int) -> None:
    """No rank has a whole (b, s, d), and no all-gather but of parameters and keys."""
    for node in low.program.nodes:
        if node.phase == "update":
            continue
        if node.target.startswith("colofunc.linear") and node.target != "colofunc.linear_dw":
            assert low.program.values[node.refs[0]].shape[1] == 8, node


def test_bytes_of_one_block_forward() -> None:
    """FIGURES: s=8192, h=1024, P=8: Ulysses 3,670,016 elements, ring 14,680,064; here a sixteenth of the tokens and an eighth of h."""
    n, s, heads, e = 8, 512, 8, 16
    x = torch.randn(1, s, heads * e)

    def block(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        q, k, v = (batch[name].unflatten(-1, (heads, e)).transpose(1, 2) for name in "qkv")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    args = torch.zeros(1), {name: x.clone() for name in "qkv"}
    step = lambda state, batch: (state, block(batch))  # noqa: E731
    full = s * heads * e * 4
    for plan, moved in ((ulysses("cp"), {"all_to_all": 4 * full // n * (n - 1) // n}), (ring("cp"), {"permute": 2 * full * (n - 1) // n})):
        low = cf.shard(step, mesh(cp=n), plan, out_specs=(None, "b (cp s) d" if plan.mode == "ulysses" else "b (s cp) d")).lower(*args)
        assert {kind: nbytes for (kind, _), nbytes in low.cost().bytes.items()} == moved


def test_bytes_of_a_training_step() -> None:
    """Key heads only travel in a ring, n - 1 times forward, again backward, and their gradients."""
    step, state, batch = built("llama")
    n, kv = 4, 2 * 2 * 16 * (2 * 4) * 8  # K and V: rows x tokens x (key heads x width) x bytes
    low = cf.shard(step, mesh(cp=n), ring("cp", balance=None)).lower(state, batch)
    shift = 2 * 8  # one column of labels
    assert low.cost().bytes["permute", "cp"] == 3 * (n - 1) * kv // n + shift
    step, state, batch = built("llama", num_key_value_heads=4)
    low = cf.shard(step, mesh(cp=n), ulysses("cp")).lower(state, batch)
    stream = 2 * 16 * 16 * 8
    assert low.cost().bytes["all_to_all", "cp"] == 2 * 4 * (n - 1) * stream // n // n


# ---- combinations ----


COMBINED: dict[str, Any] = {
    "two axes": (dict(r=2, u=2), [ring("r", heads="u")], {}),
    "two axes, contiguous, in the other order": (dict(u=2, r=2), [ring("r", heads="u", balance=None)], {}),
    "two plans": (dict(u=2, r=2), [ulysses("u"), ring("r")], {}),
    "two axes, more ranks than key heads": (dict(r=2, u=4), [ring("r", heads="u")], {}),
    "two axes, contiguous, heads padded": (dict(r=2, u=3), [ring("r", heads="u", balance=None)], {"tokens": 12}),
    "two plans, heads padded": (dict(r=2, u=3), [ring("r"), ulysses("u")], {"tokens": 12}),
    "zero": (dict(dp=2, cp=2), [ring("cp"), zero(3, "dp")], {}),
    "tensor": (dict(cp=2, tp=2), [ring("cp"), tensor("1d", "tp")], {}),
    "tensor, its own sequence": (dict(cp=2, tp=2), [ring("cp", balance=None), tensor("1d", "tp", sequence=True)], {}),
    "ulysses, tensor": (dict(cp=2, tp=2), [ulysses("cp"), tensor("1d", "tp")], {}),
    "gather_kv, zero": (dict(dp=2, cp=2), [gather_kv("cp"), zero(1, "dp")], {}),
    "more ranks than key heads": (dict(cp=4), [ulysses("cp")], {}),
}


# Another order of axes, padded heads and few key heads stand beside another plan as well, a ring beside ZeRO and tensor on three axes.
TWICE = ("two axes, contiguous, in the other order", "two axes, more ranks than key heads", "two plans, heads padded", "zero", "tensor")
BESIDE = [pytest.param(name, marks=pytest.mark.sweep if name in TWICE else ()) for name in COMBINED]


@pytest.mark.parametrize("name", BESIDE)
def test_beside_other_plans(name: str) -> None:
    axes, plans, more = COMBINED[name]
    low = equal(*built("llama", **more), mesh(**axes), *plans, steps=1)
    for plan in plans:
        if plan.name.startswith(("ring", "ulysses", "gather")):
            assert words(low, plan.axes[0]) <= {"striped", "ring", "g", "heads", "gathered striped"}
    if "u" in axes:
        assert words(low, "u") == ({"g"} if axes["u"] == 2 else {"heads"})


def test_ring_tensor_and_zero_on_three_axes() -> None:
    made = built("llama", optimizer=torch.optim.AdamW)
    low = equal(*made, mesh(dp=2, cp=2, tp=2), ring("cp", balance=None), tensor("1d", "tp"), zero(3, "dp"), steps=1)
    assert words(low, "cp") == {"ring"} and words(low, "tp") == {"g"} and words(low, "dp") == {"b"}


def test_microbatches() -> None:
    step, state, batch = built("llama", rows=4)
    staged = cf.accumulate(cf.shard(step, mesh(cp=2), ring("cp")), microbatches=2)
    with cf.testing.float64():
        assert check(staged, state, batch, steps=1).worst < 1e-10


def test_bf16_sums_gradients_of_keys_in_float32() -> None:
    step, state, batch = built("llama")
    single = {k: {n: x.float() if x.is_floating_point() else x for n, x in v.items()} for k, v in state.items() if k == "params"}
    state = {**state, "params": single["params"], "opt": {k: _floats(v) for k, v in state["opt"].items()}}
    low = cf.precision(cf.shard(step, mesh(cp=2), ring("cp")), "bf16").lower(state, batch)
    sent = [low.program.values[n.refs[0]].dtype for n in low.program.nodes if n.target.startswith("colofunc.permute")]
    assert sent.count(torch.bfloat16) == 2 and sent.count(torch.float32) == 1  # K and V, K and V again, dK and dV


def _floats(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _floats(v) for k, v in tree.items()}
    return tree.float() if isinstance(tree, torch.Tensor) and tree.is_floating_point() else tree


def test_dropout_has_the_same_keys() -> None:
    step, state, batch = built("gpt2", attn_pdrop=0.2, resid_pdrop=0.1)
    equal(step, state, batch, mesh(cp=2), ring("cp"), steps=1)


def test_causal_work_is_balanced_by_stripes() -> None:
    """Pairs that each rank sees, of the layout that the plan gives; contiguous blocks differ by 15 to 1 on 8 ranks."""
    n, s = 8, 1024
    of = {"stripes": torch.arange(s).reshape(-1, n).T, "blocks": torch.arange(s).reshape(n, -1)}
    pairs = {name: (positions + 1).sum(1).double() for name, positions in of.items()}
    assert pairs["stripes"].max() / pairs["stripes"].mean() < 1.05
    assert pairs["blocks"].max() / pairs["blocks"].min() > 10


# ---- refused ----


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ring(("cp", "u")), r"takes the name of one axis, not \('cp', 'u'\)"),
        (lambda: ring("cp", balance="zigzag"), "balance 'auto', 'stripes', None, not 'zigzag'"),
        (lambda: ring("cp", heads="cp"), "cannot both hold blocks of tokens and split heads"),
    ],
)
def test_bad_arguments(make: Any, says: str) -> None:
    with pytest.raises(cf.PlanError, match=says):
        make()


@pytest.mark.parametrize(
    ("axes", "plans", "more", "says"),
    [
        (dict(cp=3), [ring("cp")], {}, "16 tokens do not divide over 3 ranks; take a multiple"),
        (dict(cp=8), [ulysses("cp")], {}, "4 heads over the 8 ranks of 'cp' leave ranks without any"),
        (dict(r=2, u=8), [ring("r", heads="u")], {}, "4 heads over the 8 ranks of 'u' leave ranks without any"),
        (dict(cp=2), [ring("cp"), zero(3, "cp")], {}, r"clash on axis 'cp' of 'batch.input_ids'"),
        (dict(cp=2), [ring("cp")], {"attn_implementation": "eager"}, r"finds no attention.*\ntransformers: attn_implementation='sdpa'"),
    ],
)
def test_refused(axes: Any, plans: Any, more: Any, says: str) -> None:
    step, state, batch = built("llama", **more)
    with pytest.raises(cf.PlanError, match=says):
        cf.shard(step, mesh(**axes), *plans).lower(state, batch)


def test_by_configuration() -> None:
    chain = cf.configure({"mesh": {"cp": 2}, "parallel": {"ring": {"axis": "cp"}}}, plugins=[colofunc_plugins])
    step, state, batch = built("gpt2")
    low = chain.apply(step).lower(state, batch)
    assert words(low, "cp") == {"striped"}
