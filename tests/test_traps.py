"""Traps that wait for whoever traces, shards and trains real models: one test each, named after its trap.

Traps that another file holds already are listed here, and `test_the_table_names_tests_that_exist` reads this table:

| trap | held by |
|---|---|
| models upcast losses and norms to float32 whatever their dtype | test_testing.test_float64_reaches_casts_factories_and_arrays |
| step counts of AdamW, Adagrad and NAdam become Python numbers | test_trace.test_torch_optimizers_inside_a_step |
| Adafactor guards on data | test_optimizers.test_refused |
| a functional update holds old and new state | test_optimizers.test_every_optimizer_shards_and_is_updated_in_place |
| the same under a loss scale | test_loss_scale.test_a_state_with_a_loss_scale_is_updated_in_place |
| autocast of an absent device silently computes in float32 | test_trace.test_autocast_of_an_absent_device_is_honoured |
| gradients over a dict of all parameters train frozen weights | test_functional.test_frozen_weights_are_used_and_not_trained |
| torch.utils.checkpoint throws away what is not computed yet | test_trace.test_checkpoint_is_a_hint |
| there is no fake CUDA autograd without a GPU | test_trace.test_one_symbolic_device |
| identical layers cost a search each | test_planner.test_layers_are_tied_and_cost_the_same_as_untied |
| checkpoint conversions and non-persistent buffers | test_pretrained.test_loaded_and_saved_it_computes_what_transformers_loads |
| a dropout mask that is fast has to be the same on all meshes | test_ops.test_dropped_weights_do_not_depend_on_who_computes_them |
| numbers of the host's generators are burned in | test_trace_refused.test_host_randomness_is_refused |
| a tensor of the trace is kept outside | test_trace_leaks.test_a_tensor_that_leaves_the_step_is_an_error_at_this_trace |
| a captured tensor is written to | test_trace_refused.test_write_to_a_captured_tensor |
| a float argument promotes, or retraces | test_trace_arguments.test_a_float_promotes_as_python_does |
| train or eval mode is burned in | test_second_function.test_train_or_eval_mode_is_part_of_the_key |
| a pending sum passes a narrowing cast | test_rules.test_a_pending_sum_does_not_pass_a_narrowing_cast |
| a bias is added on every rank of a split contraction | test_rules.test_a_bias_is_added_once_where_the_contraction_is_split |
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import colofunc as cf

tf = pytest.importorskip("transformers")

MESH = cf.Mesh(dp=2, topology="ideal")
SMALL = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
             max_position_embeddings=16)  # fmt: skip
GPT2 = dict(n_layer=1, n_embd=16, n_head=2, vocab_size=31, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
MODELS = {
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)),
    "mixtral": lambda: mixtral("batched_mm"),
}
LENGTH = 7  # of no other dim of these models


def mixtral(experts: str) -> nn.Module:
    config = tf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, experts_implementation=experts)
    return tf.MixtralForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(1, 31, (4, LENGTH))
    return {"input_ids": ids, "labels": ids}


def training(module: nn.Module) -> Any:
    return cf.train_step(cf.functional(module.train()), cf.adapt(torch.optim.SGD, lr=0.1))


def traced(module: nn.Module, data: Any = None) -> Any:
    step_fn, state = training(module)
    return cf.shard(step_fn, MESH).lower(state, batch() if data is None else data).traced.program


def counts(program: Any) -> Counter[str]:
    return Counter(node.target for node in program.nodes)


def test_the_table_names_tests_that_exist() -> None:
    named = re.findall(r"\| (test_\w+)\.(test_\w+) \|", __doc__ or "")
    assert len(named) == len((__doc__ or "").split("|---|---|\n")[1].strip().splitlines())
    for file, test in named:
        assert f"\ndef {test}(" in Path(__file__).with_name(f"{file}.py").read_text(), f"{file}.{test}"


@pytest.mark.parametrize("kind", MODELS)
def test_attention_is_not_the_cpus_fused_operator(kind) -> None:
    found = counts(traced(MODELS[kind]()))
    assert found["colofunc.attention"] == found["colofunc.attention_backward"] == 1
    assert not [t for t in found if "scaled_dot_product" in t or "flash" in t]


@pytest.mark.parametrize("kind", MODELS)
def test_a_causal_mask_that_depends_on_no_input_is_dropped(kind) -> None:
    program = traced(MODELS[kind]())
    read = {r for node in program.nodes for r in node.refs}
    assert not [v for v in program.values.values() if v.id in read and v.shape[-2:] == (LENGTH, LENGTH)]


def test_a_bias_of_attention_gets_its_gradient() -> None:
    config = tf.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=2, dropout_rate=0,
                         decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    torch.manual_seed(0)
    step_fn, state = training(tf.T5ForConditionalGeneration(config))
    step = cf.shard(step_fn, MESH)
    cf.testing.check(step, state, batch())
    new, _ = step(step.init(state, batch()), batch())
    moved = {n: float((new["params"][n].full() - p).abs().max()) for n, p in state["params"].items() if "relative_attention_bias" in n}
    assert len(moved) == 2 and min(moved.values()) > 1e-4


def test_linear_on_three_dims_stays_one_operator() -> None:
    program = cf.shard(lambda x, w: F.linear(x, w), MESH).lower(torch.ones(4, 3, 8), torch.ones(6, 8)).traced.program
    assert [node.target for node in program.nodes] == ["colofunc.linear"]


def test_a_factory_makes_each_ranks_part_of_its_numbers() -> None:
    def step(x):
        return x + torch.arange(8.0)[:, None] + torch.linspace(0, 1, 8)[:, None] + torch.eye(8, 3)

    sharded = cf.shard(step, MESH, in_specs=("(dp a) b",), out_specs="(dp a) b")
    out = sharded(torch.zeros(8, 3))
    assert not sharded.lower(torch.zeros(8, 3)).cost().bytes and [tuple(s.shape) for s in out.shards] == [(4, 3)] * 2
    torch.testing.assert_close(out.full(), step(torch.zeros(8, 3)))


def test_sizes_as_arguments_become_those_of_a_part() -> None:
    def step(x):
        return x.view(8, 2, 3).expand(8, 2, 3).reshape(8, 6) + x.new_zeros(8, 6) + torch.full((8, 6), 2.0)

    sharded = cf.shard(step, MESH, in_specs=("(dp a) b",), out_specs="(dp a) b")
    out = sharded(torch.arange(48.0).reshape(8, 6))
    assert not sharded.lower(torch.ones(8, 6)).cost().bytes
    torch.testing.assert_close(out.full(), torch.arange(48.0).reshape(8, 6) + 2)


def test_a_double_model_still_computes_in_float32_except_inside_float64() -> None:
    def narrow(program: Any) -> int:
        return sum(program.values[o].dtype is torch.float32 for n in program.nodes if n.phase != "update" for o in n.outs if o is not None)

    module = MODELS["llama"]().double()
    assert narrow(traced(module)) > 10
    with cf.testing.float64():
        assert narrow(traced(module)) == 0


def test_experts_in_a_python_loop_are_refused_by_name_and_the_others_trace() -> None:
    way_out = r"(?s)data-dependent control flow.*modeling_mixtral.*transformers: these experts.*experts_implementation=\"grouped_mm\""
    with pytest.raises(cf.TraceError, match=way_out):
        traced(mixtral("eager"))
    for experts in ("batched_mm", "grouped_mm"):
        assert counts(traced(mixtral(experts)))["colofunc.experts_backward"] == 1


def test_checkpointing_of_transformers_burns_no_recomputation_in() -> None:
    plain, hinted = MODELS["gpt2"](), MODELS["gpt2"]()
    name = "activation_checkpointing_enable" if hasattr(hinted, "activation_checkpointing_enable") else "gradient_checkpointing_enable"
    getattr(hinted, name)()
    a, b = counts(traced(plain)), counts(traced(hinted))
    heavy = [t for t in a | b if t.startswith("colofunc.") or "norm" in t or "gelu" in t or "tanh" in t]
    assert len(heavy) > 4 and {t: a[t] for t in heavy} == {t: b[t] for t in heavy}


def test_grad_scaler_is_refused_and_the_way_out_is_named() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def step(w, x):
        w = w.detach().requires_grad_()
        optimizer = torch.optim.SGD([w], lr=0.1)
        scaler.scale((x @ w).sum()).backward()
        scaler.step(optimizer)
        return w.detach()

    with pytest.raises(cf.TraceError, match=r"GradScaler decides in Python whether to step.*cf.precision\(step, 'fp16'\)"):
        cf.shard(step, MESH)(torch.ones(4, 4), torch.ones(2, 4))


def test_wav2vec2_in_train_mode_is_refused_with_the_line() -> None:
    config = tf.Wav2Vec2Config(
        vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8,), conv_stride=(4,),
        conv_kernel=(4,), num_feat_extract_layers=1, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8,
        num_labels=3,
    )  # fmt: skip
    with pytest.raises(cf.TraceError, match=r"a random number decides at modeling_wav2vec2.py:\d+ in forward what runs.*layerdrop=0.0"):
        traced(tf.Wav2Vec2ForSequenceClassification(config), {"input_values": torch.randn(2, 64), "labels": torch.tensor([0, 1])})
