"""Low-rank adapters: against the layer written out, merged, on meshes; and peft's own models."""

from typing import Any

import pytest
import torch
from colofunc_plugins import tensor
from torch import nn

import colofunc as cf
from colofunc.errors import InputError
from colofunc.functional.lora import lora
from colofunc.testing import check
from colofunc.testing.models import Language, Mlp

D = torch.float64


def tokens() -> torch.Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))


def trained(model: cf.Model, seed: int = 3) -> dict[str, torch.Tensor]:
    """Parameters that are not zero."""
    draw = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, dtype=p.dtype, generator=draw) * 0.1 for n, p in model.params.items()}


def test_adapters_are_the_only_parameters_and_start_as_nothing() -> None:
    base = cf.functional(Language().double())
    model = lora(base, where="*.qkv", rank=4)
    assert list(model.params) == ["block.qkv.lora_A", "block.qkv.lora_B"]
    assert model.params["block.qkv.lora_A"].shape == (4, 16) and model.params["block.qkv.lora_B"].shape == (48, 4)
    assert model.frozen.keys() == base.params.keys()
    assert torch.equal(model.apply(model.params, {}, tokens())[0], base.apply(base.params, {}, tokens())[0])
    assert not any("lora" in n for n, _ in base.module.named_parameters())  # the user's module is as it was


def test_an_adapter_is_a_low_rank_change_of_the_weight() -> None:
    base = cf.functional(Mlp(16, 32).double())
    model = lora(base, where=("fc1", "fc2"), rank=2, alpha=6)
    params = trained(model)
    changed = {n: p.clone() for n, p in base.params.items()}
    for layer in ("fc1", "fc2"):
        changed[f"{layer}.weight"] += 3 * params[f"{layer}.lora_B"] @ params[f"{layer}.lora_A"]
    x = torch.randn(5, 16, dtype=D)
    torch.testing.assert_close(model.apply(params, {}, x)[0], base.apply(changed, {}, x)[0])
    made = model.to_module(params)
    assert type(made) is Mlp and [n for n, _ in made.named_parameters()] == [n for n, _ in base.module.named_parameters()]
    torch.testing.assert_close(made(x), model.apply(params, {}, x)[0])
    assert torch.equal(base.module.fc1.weight, base.params["fc1.weight"])


def test_training_on_a_mesh_is_training_on_one_device() -> None:
    torch.manual_seed(0)
    model = lora(cf.functional(Language().double()), where=("qkv", "*.up"), rank=4)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), loss=lambda out: (out**2).mean())
    state["params"] = trained(model)
    step = cf.shard(step_fn, cf.Mesh(dp=2, tp=2), {"*.up.weight": "(tp o) i"})
    low = step.lower(state, tokens())
    up = next(v for i in low.program.inputs if (v := low.program.values[i]).name == "frozen.block.up.weight")
    assert up.role == "frozen" and up.layout is not None and "tp" in up.layout.axes
    assert check(step, state, tokens(), steps=3).worst <= 1e-10


def test_dropout_of_adapters_is_drawn_in_train_mode_only() -> None:
    model = lora(cf.functional(Mlp().double()), where="fc1", dropout=0.5)
    params, x = trained(model), torch.randn(5, 16, dtype=D)
    assert not torch.equal(model.apply(params, {}, x)[0], model.apply(params, {}, x)[0])
    model.eval()
    assert torch.equal(model.apply(params, {}, x)[0], model.apply(params, {}, x)[0])


def test_what_cannot_be_adapted() -> None:
    model = cf.functional(Language())
    with pytest.raises(InputError, match=r"where='\*.qvk' matches no linear layer; known: .*'block.qkv'"):
        lora(model, where="*.qvk")
    with pytest.raises(InputError, match="where='embed' matches no linear layer; 'embed' is a Embedding"):
        lora(model, where="embed")
    with pytest.raises(InputError, match=r"matches no linear layer; 'proj' is a Conv1D\. Try: globs of layers that are nn.Linear"):
        lora(cf.functional(nn.ModuleDict({"proj": Conv1D(4, 6)})), where="proj")
    with pytest.raises(InputError, match=r"rank=0.*at least 1"):
        lora(model, where="*.qkv", rank=0)
    with pytest.raises(InputError, match=r"'block.qkv' has adapters already"):
        lora(lora(model, where="*.qkv"), where="*.qkv")


class Conv1D(nn.Module):
    """A layer of a user, called as one of another library and with its weight the other way round."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width, dtype=D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_the_name_of_a_class_says_nothing_of_its_weight() -> None:
    named = type("Conv1D", (nn.Linear,), {})
    model = lora(cf.functional(nn.Sequential(named(4, 6, dtype=D))), where="0", rank=2)
    params, x = trained(model), torch.randn(3, 4, dtype=D)
    assert model.params["0.lora_A"].shape == (2, 4)
    torch.testing.assert_close(model.to_module(params)(x), model.apply(params, {}, x)[0])


def test_a_second_call_adapts_other_layers_and_merges_both() -> None:
    base = cf.functional(Mlp(16, 32).double())
    first = lora(base, where="fc1", rank=2)
    second = lora(first, where="fc2", rank=2)
    assert list(second.params) == ["fc2.lora_A", "fc2.lora_B"] and "fc1.lora_A" in second.frozen
    x = torch.randn(5, 16, dtype=D)
    params = trained(second)
    made = second.to_module(params)
    assert type(made) is Mlp
    torch.testing.assert_close(made(x), second.apply(params, {}, x)[0])


def tiny(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(config).double()
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=32
    )
    return transformers.LlamaForCausalLM(config).double()


@pytest.mark.parametrize(("kind", "where"), [("gpt2", "*.c_attn"), ("llama", "*.q_proj")])
def test_transformers_layers(kind: str, where: str) -> None:
    base = cf.functional(tiny(kind))
    model = lora(base, where=where, rank=2).eval()
    params, ids = trained(model), tokens()
    out = model.apply(params, model.buffers, input_ids=ids)[0].logits
    assert (out - base.eval().apply(base.params, base.buffers, input_ids=ids)[0].logits).abs().max() > 1e-4
    torch.testing.assert_close(model.to_module(params)(input_ids=ids).logits, out)


@pytest.mark.parametrize(("kind", "targets"), [("gpt2", ["c_attn"]), ("llama", ["q_proj", "v_proj"])])
def test_models_of_peft_train_with_their_base_sharded(kind: str, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    wrapped: Any = peft.get_peft_model(tiny(kind), peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    model = cf.functional(wrapped.double().train())
    assert model.params and all("lora_" in n for n in model.params) and len(model.frozen) > 10
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2))
    batch = {"input_ids": tokens(), "labels": tokens()}
    frozen_over_all = lambda name, shape: "(dp tp a) ..." if name.startswith("frozen.") and shape[0] % 4 == 0 else None  # noqa: E731
    step = cf.shard(step_fn, cf.Mesh(dp=2, tp=2), frozen_over_all)
    with cf.testing.float64():
        checked = check(step, state, batch, steps=2)
        assert checked.worst <= 1e-10
        low = checked.low
    frozen = [v for i in low.program.inputs if (v := low.program.values[i]).role == "frozen"]
    assert sum(v.nbytes for v in frozen) < 0.3 * sum(t.numel() * t.itemsize for t in model.frozen.values())


@pytest.mark.parametrize("order", [("table", "head"), ("head", "table")])
def test_a_weight_that_is_tied_to_another_place_is_refused(order: tuple[str, str]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in order:
                self.add_module(name, nn.Embedding(5, 4) if name == "table" else nn.Linear(4, 5, bias=False))
            self.head.weight = self.table.weight

    with pytest.raises(cf.InputError, match=r"'head' shares its weight with 'table.weight', and merging.*globs that leave it out"):
        cf.lora(cf.functional(Tied()), "head")


# ---- beside products that are split ----

PAIR = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))


def steps_of_a_pair() -> dict[str, tuple[Any, Any]]:
    """(step, state) that trains a pair of products: all of it, and adapters of both."""
    torch.manual_seed(0)
    models = {"whole": cf.functional(PAIR.double()), "adapters": cf.lora(cf.functional(PAIR.double()), where="*", rank=4)}
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2)
    loss = lambda out, batch: out.square().mean()  # noqa: E731
    return {name: cf.train_step(model, opt, loss=loss, inputs=lambda batch: ((batch,), {})) for name, model in models.items()}


def test_beside_split_products_nothing_wide_is_reduced_for_adapters() -> None:
    """What lies between an adapter's matrices is gathered or reduced, 4 columns of 64 and 128; what they give is not."""
    batch, mesh = torch.randn(32, 64, dtype=torch.float64), cf.Mesh(tp=4)
    on_the_wire = {}
    for name, (step, state) in steps_of_a_pair().items():
        sharded = cf.shard(step, mesh, tensor("1d", "tp"))
        low = sharded.lower(state, batch)
        on_the_wire[name] = sum(low.cost().bytes.values())
        assert check(sharded, state, batch).worst < 1e-12
        if name == "adapters":
            specs = {leaf.name: leaf.spec for leaf in low.plan.inputs}
            columns = specs["state.params.0.lora_A"], specs["state.params.0.lora_B"]
            assert all(spec.startswith(("tp ", "(tp ")) for spec in columns)
            assert "tp" in specs["state.params.2.lora_A"].split(" ", 1)[1]  # what it sums over
    assert on_the_wire["adapters"] < 1.3 * on_the_wire["whole"]


def test_the_second_factor_of_a_low_rank_matrix_is_a_column_for_who_asks() -> None:
    step, state = steps_of_a_pair()["adapters"]
    mesh = cf.Mesh(tp=4)
    program = cf.shard(step, mesh, tensor("1d", "tp")).lower(state, torch.randn(32, 64, dtype=torch.float64)).global_program
    names = lambda products: {program.values[product.leaf].name.removeprefix("state.params.") for product in products}  # noqa: E731
    pairs = cf.ext.product_pairs(program, mesh, "tp")
    assert {"0.lora_A"} <= names(pairs.columns) and {"0.lora_B", "2.lora_A"} <= names(pairs.rows)
    both = cf.ext.product_pairs(program, mesh, "tp", adapters_by_columns=True)
    assert {"0.lora_A", "0.lora_B"} <= names(both.columns) and {"2.lora_A"} <= names(both.rows)
    assert "2.lora_B" not in names(both.columns) | names(both.rows)  # what the row product gives is summed whole


class Branches(nn.Module):
    """A pair of products with a low-rank branch beside its second one, and an LSTM, whose product has four results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        self.thin, self.back = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.cells = nn.LSTM(64, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = self.down(torch.relu(self.up(x))) + self.back(self.thin(x))
        return beside + self.cells(beside)[0].mean()


def test_a_low_rank_branch_beside_a_row_product_is_summed_with_it() -> None:
    """Its own pending sum joins the other's; an operator with several results is no adapter."""
    torch.manual_seed(0)
    model = cf.functional(Branches().double())
    loss = lambda out, batch: out.square().mean()  # noqa: E731
    step, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=1e-2), loss=loss, inputs=lambda batch: ((batch,), {}))
    batch = torch.randn(4, 8, 64, dtype=torch.float64)
    sharded = cf.shard(step, cf.Mesh(tp=2), tensor("1d", "tp"))
    specs = {leaf.name.removeprefix("state.params."): leaf.spec for leaf in sharded.lower(state, batch).plan.inputs}
    assert [specs[f"{name}.weight"] for name in ("up", "down", "thin", "back")] == ["(tp a) b", "a (tp b)", "(tp a) b", "a (tp b)"]
    assert check(sharded, state, batch).worst < 1e-12
