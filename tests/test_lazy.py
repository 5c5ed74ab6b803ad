"""cf.lazy against eager construction, bit for bit; lazy leaves made straight into shards; lazy tensors by themselves."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import colofunc as cf
from colofunc.errors import InputError, TraceError
from colofunc.executors.launch import launch
from colofunc.functional.lazy import lazy
from colofunc.functional.tape import FromTape, Tape
from colofunc.program.lazy import LazyTensor, lazy_tensor, make, make_parts, zeros_like
from colofunc.spec.spec import bind
from colofunc.testing import check
from colofunc.testing.models import ConvNet, Language

Build = Callable[[], nn.Module]


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def assert_as_eager(build: Build, draw: bool | None = None) -> nn.Module:
    """Every tensor's values, dtype, strides, kind and ties, and the generator afterwards."""
    torch.manual_seed(3)
    eager = build()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    module = lazy(build, draw)
    assert torch.equal(torch.get_rng_state(), after) is (draw is not False)
    want, got = tensors(eager), tensors(module)
    assert list(got) == list(want) and any(isinstance(t, LazyTensor) for t in got.values())
    for name, old in want.items():
        new = make(got[name])
        assert new.dtype == old.dtype and new.stride() == old.stride() and torch.equal(new, old), name
        assert got[name].requires_grad == old.requires_grad and isinstance(got[name], nn.Parameter) == isinstance(old, nn.Parameter), name
    ties = [[n for n in want if want[n] is want[m]] for m in want]
    assert ties == [[n for n in got if got[n] is got[m]] for m in got]
    return module


# ---- models as they are ----

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
ENDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
TEXT = dict(vocab_size=99, **ENDS)
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("LMHeadModel", dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, **TEXT)),
    "Llama": ("ForCausalLM", dict(num_key_value_heads=2, **SMALL, **TEXT)),
    "OPT": ("ForCausalLM", dict(SMALL, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, **TEXT)),
    "Bert": ("ForMaskedLM", dict(**SMALL, **TEXT)),
    "ViT": ("ForImageClassification", dict(SMALL, image_size=32, patch_size=8)),
    "T5": ("ForConditionalGeneration", dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=99)),
    "Mistral": ("ForCausalLM", dict(num_key_value_heads=2, **SMALL, **TEXT)),
    "Bloom": ("ForCausalLM", dict(hidden_size=32, n_layer=2, n_head=4, **TEXT)),
    "Mixtral": ("ForCausalLM", dict(num_key_value_heads=2, num_local_experts=4, **SMALL, **TEXT)),
    "Whisper": ("ForConditionalGeneration", dict(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=32, max_target_positions=32, decoder_start_token_id=1, **TEXT)),
}  # fmt: skip
TIMM: dict[str, dict[str, Any]] = {
    "swin_tiny_patch4_window7_224": dict(embed_dim=12, depths=(2, 2), num_heads=(2, 4), img_size=56),
    "resnet18": dict(num_classes=10),
    "convnext_atto": dict(num_classes=10, dims=(8, 16, 24, 32), depths=(1, 1, 2, 1)),
    "beit_base_patch16_224": dict(embed_dim=32, depth=2, num_heads=4, img_size=64),
}


def of_transformers(kind: str) -> Build:
    transformers = pytest.importorskip("transformers")
    head, options = TRANSFORMERS[kind]
    return lambda: getattr(transformers, kind + head)(getattr(transformers, kind + "Config")(**options))


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_transformers(kind: str) -> None:
    assert_as_eager(of_transformers(kind))


@pytest.mark.parametrize("kind", ["GPT2", "T5", "Mixtral"])
def test_transformers_drawn_later(kind: str) -> None:
    assert_as_eager(of_transformers(kind), draw=False)


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    assert_as_eager(lambda: timm.create_model(name, **TIMM[name]))


def test_another_dtype() -> None:
    build = of_transformers("Llama")
    assert_as_eager(lambda: build().double())
    assert_as_eager(lambda: build().to(torch.bfloat16))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = assert_as_eager(ConvNet)
    finally:
        torch.set_default_dtype(default)
    assert module.last.weight.dtype == torch.float64 and make(module.last.weight).dtype == torch.float64


# ---- kinds of constructor code ----


class Odd(nn.Module):
    """What constructors do besides drawing into a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(6, 5))
        self.b = nn.Parameter(torch.empty(5, 6).t())  # strides of its own
        nn.init.orthogonal_(self.a)
        nn.init.trunc_normal_(self.b, std=0.5)
        self.b.data[2].zero_()  # a view is written
        self.c = nn.Parameter(torch.cat([torch.rand(3), self.a.detach()[0]]))
        rates = [x.item() for x in torch.linspace(0, 0.3, 4)] + torch.linspace(0, 1, 3).tolist()
        self.drops = nn.ModuleList(nn.Dropout(r) for r in rates[:4])
        self.scale = rates[-1] if float(self.c.detach().sum()) > -1e9 else 0.0  # a decision that takes a value
        generator = torch.Generator().manual_seed(5)
        self.register_buffer("noise", torch.randn(7, generator=generator))
        self.register_buffer("more", torch.empty(7).normal_(generator=generator))
        self.register_buffer("kept", torch.empty(7).bernoulli_(torch.full((7,), 0.5)))
        self.register_buffer("order", torch.randperm(9))
        positions = torch.arange(8)[:, None]
        frequencies = torch.exp(torch.arange(0, 6, 2) * (-math.log(10000.0) / 6))
        table = torch.zeros(8, 6)
        table[:, 0::2], table[:, 1::2] = torch.sin(positions * frequencies), torch.cos(positions * frequencies)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("some", torch.nonzero(table > 0.9)[:3])
        self.register_buffer("from_list", torch.tensor([1.0, 2.0]) * 3)
        self.position = nn.Parameter(torch.zeros(8, 6))
        self.position.data.copy_(table)
        self.plain = table + 1  # an attribute that is no buffer
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # deep copies
        self.head = nn.Linear(6, 6)
        self.head.weight = self.position if self.position.shape == (6, 6) else nn.Parameter(self.b.detach() @ self.a.detach().t())
        self.tied = self.head
        nn.init.eye_(self.head.bias.data.view(2, 3))
        with torch.no_grad():
            self.head.bias += torch.rand_like(self.head.bias)
            torch.ones(6, out=self.head.bias[:6])
            self.head.bias.mul_(0.5).add_(self.a[0, 0])


@pytest.mark.parametrize("draw", [None, False])
def test_what_constructors_do(draw: bool | None) -> None:
    module = assert_as_eager(Odd, draw)
    assert module.drops[3].p == pytest.approx(0.3) and module.scale == 1.0
    torch.testing.assert_close(make(module.plain), make(module.table) + 1)
    assert module.tied.weight is module.head.weight


def test_draws_that_were_overwritten_still_count() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(40, 30)
        for p in layer.parameters():
            nn.init.normal_(p)
        return layer

    assert_as_eager(build, draw=False)
    module = lazy(build)
    source = module.weight.source
    assert isinstance(source, FromTape)
    needed = [source.tape.entries[n].func for n in source.tape._needed(source.view.cell, len(source.tape.entries))[0]]
    assert needed == [torch.ops.aten.normal_.default]  # the first draw is not repeated


def test_numbers_after_a_model_that_draws_later_do_not_repeat_its_own() -> None:
    torch.manual_seed(0)
    module = lazy(lambda: nn.Linear(64, 64), draw=False)
    after = torch.empty(64, 64).uniform_(-1 / 8, 1 / 8)
    torch.manual_seed(0)
    assert torch.equal(make(module.weight), nn.Linear(64, 64).weight)
    assert not torch.isin(after, make(module.weight)).all()


def test_a_large_tensor_is_not_drawn_while_building(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tape, "_throw_away", lambda *args: pytest.fail("numbers were drawn"))
    module = lazy(lambda: nn.Embedding(1 << 20, 1 << 10))
    assert module.weight.source.tape.put_off


def test_making_leaves_the_generator_alone() -> None:
    module = lazy(lambda: nn.Linear(8, 8), draw=False)
    before = torch.get_rng_state()
    first = make(module.weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(make(module.weight), first) and make(module.weight) is not first


def test_what_lazy_refuses() -> None:
    with pytest.raises(InputError, match=r"build\(\) returned int, not an nn.Module"):
        lazy(lambda: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(InputError, match="draws for a tensor that has data"):
        lazy(lambda: nn.ParameterList([nn.Parameter(torch.empty(3).normal_()), torch.tensor([1.0]).normal_()]), draw=False)


# ---- from lazy to shards ----


def train(module: nn.Module) -> tuple[Any, dict[str, Any], cf.Model]:
    model = cf.functional(module)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), loss=lambda out: (out**2).mean())
    return step_fn, state, model


def tokens() -> torch.Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sizes", [dict(dp=1), dict(dp=2), dict(dp=2, tp=2), dict(tp=4)])
def test_a_lazy_state_on_a_mesh_is_the_eager_state(sizes: dict[str, int]) -> None:
    torch.manual_seed(4)
    _, eager, _ = train(Language(32, 16).double())
    torch.manual_seed(4)
    step_fn, state, _ = train(lazy(lambda: Language(32, 16).double()))
    placed = cf.shard(step_fn, cf.Mesh(**sizes)).init(state, cf.abstract((4, 8), torch.int64))
    for name, p in eager["params"].items():
        assert torch.equal(placed["params"][name].full(), p), name
        assert not placed["opt"]["exp_avg"][name].full().any()


def test_a_lazy_model_trains() -> None:
    step_fn, state, _ = train(lazy(lambda: Language(32, 16).double()))
    assert check(cf.shard(step_fn, cf.Mesh(dp=2, tp=2)), state, tokens(), steps=3).worst <= 1e-10


def test_lowering_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = lazy(lambda: nn.Sequential(nn.Linear(1 << 14, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, 8)))
    monkeypatch.setattr(FromTape, "make", lambda self: pytest.fail("a value was made"))
    step_fn, state, _ = train(module)
    low = cf.shard(step_fn, cf.Mesh(dp=2, tp=4)).lower(state, cf.abstract((8, 1 << 14)))
    assert low.memory().peak_bytes["device"] > 1 << 30


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most memory that tensors on the CPU had at once while `run` ran, beyond what they had before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        kept = run()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert kept is not None
    return peak


def test_the_profiler_counts_what_it_should() -> None:
    assert 8 << 20 <= peak_bytes(lambda: (torch.ones(1 << 20), torch.ones(1 << 20))) < 9 << 20


def test_init_holds_the_shards_and_one_tensor() -> None:
    width, layers = 512, 6
    step_fn, state, model = train(lazy(lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]), draw=False))
    step = cf.shard(step_fn, cf.Mesh(dp=2), lambda name, shape: "(dp a) ...")
    batch = cf.abstract((4, width))
    step.lower(state, batch)
    one = width * width * 4
    total = 3 * sum(p.numel() * 4 for p in model.params.values())
    assert 18 * one < total < 19 * one  # the whole state; all ranks are in this process
    peak = peak_bytes(lambda: step.init(state, batch))
    assert total <= peak <= total + 2.2 * one  # a tensor, and the parts that are cut from it


def test_frozen_lazy_weights_are_made_on_the_mesh_and_given_back() -> None:
    torch.manual_seed(5)
    eager = Language(32, 16).double()
    torch.manual_seed(5)
    model = cf.functional(lazy(lambda: Language(32, 16).double()), trainable="norm.*")
    step = cf.shard(lambda params, x: model.apply(params, {}, x)[0], cf.Mesh(dp=2, tp=2))
    torch.testing.assert_close(step(model.params, tokens()).full(), eager(tokens()))
    made = model.to_module()
    assert all(torch.equal(t, tensors(eager)[n]) and type(t) is nn.Parameter for n, t in tensors(made).items())
    assert made.head.weight is made.embed.weight


def test_a_lazy_module_runs_as_it_is() -> None:
    torch.manual_seed(6)
    eager = Odd()
    torch.manual_seed(6)
    module = lazy(Odd)
    x = torch.randn(3, 6)
    out = module.head(x)
    assert torch.equal(out, eager.head(x))
    out.sum().backward()
    assert module.head.weight.grad.shape == (6, 6)


class Tables(nn.Module):
    """Tensors in attributes that are neither parameters nor buffers, one small, one large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 256)
        self.small, self.large = torch.linspace(0, 1, 8), torch.rand(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.small) @ self.large


def test_tables_of_a_lazy_module_that_are_no_buffers() -> None:
    step_fn, state, _ = train(lazy(Tables))
    step, x = cf.shard(step_fn, cf.Mesh(dp=2, tp=2)), torch.randn(4, 8)
    low = step.lower(state, x)
    assert [t.shape for t in low.hidden] == [(256, 256)]
    model = cf.functional(lazy(Tables))
    step = cf.shard(lambda p, x: model.apply(p, {}, x)[0], cf.Mesh(dp=2, tp=2))
    torch.testing.assert_close(step(model.params, x).full(), model.to_module()(x))


def make_on_ranks(seed: int) -> torch.Tensor:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(7 + seed * rank)
    step_fn, state, _ = train(lazy(lambda: Language(32, 16).double()))
    step = cf.shard(step_fn, cf.Mesh(dp=2), lambda name, shape: "(dp a) ..." if shape[0] % 2 == 0 else None)
    placed = step.init(state, tokens())
    return placed["params"]["embed.weight"].full().detach()


@pytest.mark.dist
def test_real_ranks_make_the_same_values() -> None:
    torch.manual_seed(7)
    want = Language(32, 16).double().embed.weight
    assert all(torch.equal(got, want) for got in launch(make_on_ranks, 2, 0))


@pytest.mark.dist
def test_ranks_that_would_make_other_values_are_told() -> None:
    with pytest.raises(Exception, match=r"argument 'state.params.* must be equal on all ranks"):
        launch(make_on_ranks, 2, 1)


# ---- lazy tensors by themselves ----


def counted() -> tuple[LazyTensor, list[Any]]:
    """A lazy (4, 6) tensor and a list of what was asked of it."""
    value, asked = torch.arange(24.0).reshape(4, 6), []

    def whole() -> torch.Tensor:
        asked.append("whole")
        return value.clone()

    def read(box: tuple[slice, ...]) -> torch.Tensor:
        asked.append(box)
        return value[box]

    return lazy_tensor((4, 6), torch.float32, whole, read), asked


def test_operators_on_lazy_tensors_are_lazy() -> None:
    x, asked = counted()
    y = (x.to(torch.float64) * 2).t()[1:, :3]
    assert isinstance(y, LazyTensor) and y.shape == (5, 3) and y.dtype == torch.float64 and not asked
    assert torch.equal(make(y), (torch.arange(24.0).reshape(4, 6).double() * 2).t()[1:, :3]) and asked == ["whole"]
    assert isinstance(copy.deepcopy(nn.Parameter(x)), nn.Parameter)


def test_operators_with_data_give_data() -> None:
    x, _ = counted()
    assert torch.equal(x + torch.ones(6), torch.arange(24.0).reshape(4, 6) + 1)
    assert x.sum().item() == 276 and bool((x >= 0).all()) and x[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert x.numpy().shape == (4, 6) and torch.equal(pickle.loads(pickle.dumps(x)), make(x))


def test_a_rank_reads_its_part_only() -> None:
    x, asked = counted()
    mesh = cf.Mesh(dp=2, tp=3)
    layout = bind("(dp a) (tp b)", mesh, (4, 6))
    piece = make_parts(x.to(torch.float64), layout, mesh, [4])[0]
    assert asked == [(slice(2, 4), slice(2, 4))] and piece.tolist() == [[14, 15], [20, 21]] and piece.dtype == torch.float64
    striped = bind("(a dp) b", mesh, (4, 6))
    assert make_parts(x, striped, mesh, [3])[0].tolist() == [[6, 7, 8, 9, 10, 11], [18, 19, 20, 21, 22, 23]] and asked[-1] == "whole"


def test_zeros_of_large_lazy_and_abstract_tensors_are_lazy() -> None:
    x, asked = counted()
    for like in (x, cf.abstract((3, 4)), torch.ones(1 << 18), nn.Parameter(x)):
        zeros = zeros_like(like, torch.float64)
        assert isinstance(zeros, LazyTensor) and zeros.shape == like.shape and not make(zeros).any()
    assert type(zeros_like(torch.ones(3))) is torch.Tensor and not asked
    assert isinstance(torch.zeros_like(x), LazyTensor) and isinstance(torch.empty_like(nn.Parameter(x)), LazyTensor) and not asked


def test_a_lazy_tensor_cannot_be_written_to() -> None:
    x, _ = counted()
    with pytest.raises(TraceError, match=r"aten.add_.Tensor writes to a lazy tensor of shape \(4, 6\)"):
        x.add_(1)
    with pytest.raises(TraceError, match="writes to a lazy tensor"):
        x += 1
    with pytest.raises(InputError, match="cannot be given data in place"):
        x.data = torch.ones(4, 6)


def test_lazy_values_inside_float64_are_those_outside(tmp_path) -> None:
    """The values are drawn in float32 and are doubled then; zeros made inside are float64 at once."""
    model = cf.functional(cf.lazy(lambda: nn.Linear(8, 8)))
    outside = make(model.params["weight"]).double()
    with cf.testing.float64():
        assert torch.equal(make(model.params["weight"].double()), outside)
        zeros = zeros_like(model.params["weight"])
        assert make(zeros).dtype is zeros.dtype
        fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), loss=lambda out: out.square().mean())
        assert cf.testing.check(cf.shard(fn, cf.Mesh(dp=2, topology="ideal")), state, torch.randn(4, 8)).steps == 2


def test_a_lazy_tensor_is_distributed_part_by_part() -> None:
    model = cf.functional(cf.lazy(lambda: nn.Linear(8, 6)))
    weight = model.params["weight"]
    placed = cf.distribute(weight, "(dp o) i", cf.Mesh(dp=2))
    assert torch.equal(placed.full(), make(weight)) and placed.shards[0].shape == (3, 8)


class Legacy(torch.nn.Module):
    """Constructors of long ago, as wav2vec2 has them."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.Tensor(4).uniform_())
        self.b = torch.nn.Parameter(torch.FloatTensor(2, 3).normal_())
        self.register_buffer("c", torch.Tensor([1.0, 2.0]))


def test_legacy_constructors():
    torch.manual_seed(0)
    want = Legacy().state_dict()
    torch.manual_seed(0)
    model = cf.functional(cf.lazy(Legacy))
    got = {**model.params, **model.buffers}
    assert all(torch.equal(cf.distribute(got[name], "...", cf.Mesh()).full(), value) for name, value in want.items())
