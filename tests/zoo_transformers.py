"""Small configurations of transformers' models: name -> maker of (module, batch, loss)."""

# One line per model, to be read beside one another.
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from zoo_batches import (
    BATCH,
    CLASSES,
    VOCAB,
    Batch,
    Built,
    Loss,
    classes,
    ids,
    image,
    labels,
    library,
    lm,
    masked_lm,
    own_loss,
    pixels,
    pretraining_pairs,
    seq2seq,
)

_HIDDEN = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB, max_position_embeddings=32)
_ENCODER = dict(_HIDDEN, intermediate_size=64)
_LLAMA = dict(_ENCODER, num_key_value_heads=2, head_dim=8)
_GPT = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=32)
_VISION = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8, num_labels=CLASSES)
_BART = dict(
    vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
)
_T5 = dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
_GPT_OSS = dict(
    _LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, pad_token_id=0, attn_implementation="eager",
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
)
_DEEPSEEK = dict(
    _ENCODER, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8, num_key_value_heads=4,
    index_topk=8, index_head_dim=16, index_n_heads=4, pad_token_id=0, experts_implementation="batched_mm",
    mlp_layer_types=["dense", "sparse"], layer_types=["indexed_attention"] * 2,
)
_SPECIAL = dict(pad_token_id=1, bos_token_id=2, eos_token_id=3)


def _hf(model: str, config: str, options: Mapping[str, Any], batch: Callable[[], Batch], loss: Loss = own_loss) -> Callable[[], Built]:
    def make() -> Built:
        transformers = library("transformers")
        cfg = getattr(transformers, config)(**options)
        module = getattr(transformers, model)(cfg)
        return module, batch(), loss

    return make


def _clip() -> Built:
    transformers = library("transformers")
    text = dict(_ENCODER, projection_dim=16, **_SPECIAL)
    vision = {k: v for k, v in _VISION.items() if k != "num_labels"} | {"projection_dim": 16}
    cfg = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return transformers.CLIPModel(cfg), pretraining_pairs(), own_loss


def _blip() -> Built:
    transformers = library("transformers")
    text = dict(_ENCODER, encoder_hidden_size=32, projection_dim=16, **_SPECIAL)
    vision = {k: v for k, v in _VISION.items() if k != "num_labels"}
    cfg = transformers.BlipConfig(text_config=text, vision_config=vision, projection_dim=16, image_text_hidden_size=16)
    return transformers.BlipForConditionalGeneration(cfg), {"input_ids": ids(), "pixel_values": image(), "labels": labels()}, own_loss


def _siglip() -> Built:
    transformers = library("transformers")
    text = dict(_ENCODER, projection_size=32, **_SPECIAL)
    vision = {k: v for k, v in _VISION.items() if k != "num_labels"}
    cfg = transformers.SiglipConfig(text_config=text, vision_config=vision)
    return transformers.SiglipModel(cfg), pretraining_pairs(), own_loss


def _whisper_batch() -> Batch:
    return {"input_features": torch.randn(BATCH, 8, 16), "labels": ids()}


def _segmentation(size: int) -> Callable[[], Batch]:
    return lambda: {"pixel_values": image(size), "labels": torch.randint(0, CLASSES, (BATCH, size, size))}


def _waves() -> Batch:
    return {"input_values": torch.randn(BATCH, 640), "labels": classes()}


_WAVE = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16), conv_stride=(8, 4),
    conv_kernel=(10, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, num_labels=CLASSES,
    classifier_proj_size=16, vocab_size=VOCAB,
)  # fmt: skip

CAUSAL = {
    "gpt2": _hf("GPT2LMHeadModel", "GPT2Config", _GPT, lm),
    "opt": _hf("OPTForCausalLM", "OPTConfig", dict(_HIDDEN, ffn_dim=64, word_embed_proj_dim=32), lm),
    "bloom": _hf("BloomForCausalLM", "BloomConfig", dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCAB), lm),
    "llama": _hf("LlamaForCausalLM", "LlamaConfig", _LLAMA, lm),
    "mistral": _hf("MistralForCausalLM", "MistralConfig", dict(_LLAMA, sliding_window=4), lm),
    "qwen2": _hf("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, lm),
    "qwen3": _hf("Qwen3ForCausalLM", "Qwen3Config", _LLAMA, lm),
    "gemma": _hf("GemmaForCausalLM", "GemmaConfig", _LLAMA, lm),
    "phi": _hf("PhiForCausalLM", "PhiConfig", _ENCODER, lm),
    "gpt_neox": _hf("GPTNeoXForCausalLM", "GPTNeoXConfig", _ENCODER, lm),
    "gptj": _hf("GPTJForCausalLM", "GPTJConfig", dict(_GPT, rotary_dim=4), lm),
    "falcon": _hf("FalconForCausalLM", "FalconConfig", dict(_HIDDEN, ffn_hidden_size=64, new_decoder_architecture=False), lm),
}
ENCODERS = {
    "bert": _hf("BertForMaskedLM", "BertConfig", _ENCODER, masked_lm),
    "roberta": _hf("RobertaForMaskedLM", "RobertaConfig", dict(_ENCODER, pad_token_id=1), masked_lm),
    "albert": _hf("AlbertForMaskedLM", "AlbertConfig", dict(_ENCODER, embedding_size=16), masked_lm),
    "distilbert": _hf("DistilBertForMaskedLM", "DistilBertConfig", dict(vocab_size=VOCAB, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=32), masked_lm),
    "electra": _hf("ElectraForMaskedLM", "ElectraConfig", dict(_ENCODER, embedding_size=16), masked_lm),
    "deberta-v2": _hf(
        "DebertaV2ForMaskedLM", "DebertaV2Config",
        dict(_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True),
        masked_lm,
    ),
}  # fmt: skip
BOTH = {
    "t5": _hf("T5ForConditionalGeneration", "T5Config", _T5, seq2seq),
    "bart": _hf("BartForConditionalGeneration", "BartConfig", _BART, seq2seq),
    "whisper": _hf(
        "WhisperForConditionalGeneration", "WhisperConfig",
        dict({k: v for k, v in _BART.items() if k != "max_position_embeddings"}, num_mel_bins=8, max_source_positions=8, max_target_positions=16, decoder_start_token_id=2, **_SPECIAL),
        _whisper_batch,
    ),
}  # fmt: skip
VISUAL = {
    "vit": _hf("ViTForImageClassification", "ViTConfig", _VISION, pixels),
    "deit": _hf("DeiTForImageClassification", "DeiTConfig", _VISION, pixels),
    "swin": _hf(
        "SwinForImageClassification", "SwinConfig",
        dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES), pixels,
    ),
    "clip": _clip,
    "segformer": _hf(
        "SegformerForSemanticSegmentation", "SegformerConfig",
        dict(depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 32], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16, num_labels=CLASSES),
        _segmentation(64),
    ),
}  # fmt: skip

# ---- further architectures ----

MORE_CAUSAL = {
    "gpt_neo": _hf("GPTNeoForCausalLM", "GPTNeoConfig", dict(hidden_size=32, num_layers=2, num_heads=4, vocab_size=VOCAB, max_position_embeddings=32, attention_types=[[["global", "local"], 1]], window_size=4), lm),
    "gpt_bigcode": _hf("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT, lm),
    "codegen": _hf("CodeGenForCausalLM", "CodeGenConfig", dict(_GPT, rotary_dim=4), lm),
    "mpt": _hf("MptForCausalLM", "MptConfig", dict(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCAB, max_seq_len=32, expansion_ratio=2), lm),
    "gemma2": _hf("Gemma2ForCausalLM", "Gemma2Config", dict(_LLAMA, sliding_window=4), lm),
    "gemma3": _hf("Gemma3ForCausalLM", "Gemma3TextConfig", dict(_LLAMA, sliding_window=4), lm),
    "phi3": _hf("Phi3ForCausalLM", "Phi3Config", dict(_LLAMA, pad_token_id=0), lm),
    "stablelm": _hf("StableLmForCausalLM", "StableLmConfig", dict(_ENCODER, num_key_value_heads=4), lm),
    "starcoder2": _hf("Starcoder2ForCausalLM", "Starcoder2Config", dict(_ENCODER, num_key_value_heads=2), lm),
    "olmo": _hf("OlmoForCausalLM", "OlmoConfig", dict(_ENCODER, num_key_value_heads=4), lm),
    "olmo2": _hf("Olmo2ForCausalLM", "Olmo2Config", dict(_ENCODER, num_key_value_heads=4), lm),
    "cohere": _hf("CohereForCausalLM", "CohereConfig", dict(_ENCODER, num_key_value_heads=2), lm),
    "granite": _hf("GraniteForCausalLM", "GraniteConfig", dict(_ENCODER, num_key_value_heads=2), lm),
    "nemotron": _hf("NemotronForCausalLM", "NemotronConfig", _LLAMA, lm),
    "glm": _hf("GlmForCausalLM", "GlmConfig", dict(_LLAMA, pad_token_id=0), lm),
    "smollm3": _hf("SmolLM3ForCausalLM", "SmolLM3Config", dict(_ENCODER, num_key_value_heads=2, pad_token_id=0), lm),
    "falcon_new": _hf("FalconForCausalLM", "FalconConfig", dict(_HIDDEN, ffn_hidden_size=64, new_decoder_architecture=True, num_kv_heads=2, alibi=False), lm),
    "falcon_alibi": _hf("FalconForCausalLM", "FalconConfig", dict(_HIDDEN, ffn_hidden_size=64, alibi=True, multi_query=False), lm),
    "biogpt": _hf("BioGptForCausalLM", "BioGptConfig", _ENCODER, lm),
    "xglm": _hf("XGLMForCausalLM", "XGLMConfig", dict(vocab_size=VOCAB, d_model=32, num_layers=2, attention_heads=4, ffn_dim=64, max_position_embeddings=32), lm),
    "mixtral_dense": _hf("MixtralForCausalLM", "MixtralConfig", dict(_LLAMA, num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm"), lm),
    "gpt_oss": _hf("GptOssForCausalLM", "GptOssConfig", dict(_GPT_OSS, experts_implementation="batched_mm"), lm),
    "gpt_oss_grouped": _hf("GptOssForCausalLM", "GptOssConfig", dict(_GPT_OSS, experts_implementation="grouped_mm"), lm),
    "deepseek_v32": _hf("DeepseekV32ForCausalLM", "DeepseekV32Config", _DEEPSEEK, lm),
    "mamba": _hf("MambaForCausalLM", "MambaConfig", dict(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1, use_mambapy=False), lm),
}  # fmt: skip
MORE = {
    **MORE_CAUSAL,
    "deberta": _hf("DebertaForMaskedLM", "DebertaConfig", dict(_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8), masked_lm),
    "modernbert": _hf("ModernBertForMaskedLM", "ModernBertConfig", dict(_ENCODER, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, local_attention=4, reference_compile=False), masked_lm),
    "mpnet": _hf("MPNetForMaskedLM", "MPNetConfig", dict(_ENCODER), masked_lm),
    "camembert": _hf("CamembertForMaskedLM", "CamembertConfig", dict(_ENCODER, pad_token_id=1), masked_lm),
    "xlm_roberta": _hf("XLMRobertaForMaskedLM", "XLMRobertaConfig", dict(_ENCODER, pad_token_id=1), masked_lm),
    "squeezebert": _hf("SqueezeBertForMaskedLM", "SqueezeBertConfig", dict(_ENCODER, embedding_size=32), masked_lm),
    "mobilebert": _hf("MobileBertForMaskedLM", "MobileBertConfig", dict(_ENCODER, embedding_size=32, intra_bottleneck_size=16, true_hidden_size=16), masked_lm),
    "convbert": _hf("ConvBertForMaskedLM", "ConvBertConfig", dict(_ENCODER, embedding_size=32, head_ratio=2, conv_kernel_size=3), masked_lm),
    "fnet": _hf("FNetForMaskedLM", "FNetConfig", dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, intermediate_size=64, max_position_embeddings=32), lm),
    "roformer": _hf("RoFormerForMaskedLM", "RoFormerConfig", dict(_ENCODER, embedding_size=32), masked_lm),
    "rembert": _hf("RemBertForMaskedLM", "RemBertConfig", dict(_ENCODER, input_embedding_size=16, output_embedding_size=16), masked_lm),
    "layoutlm": _hf("LayoutLMForMaskedLM", "LayoutLMConfig", _ENCODER, masked_lm),
    "xlnet": _hf("XLNetLMHeadModel", "XLNetConfig", dict(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=64), seq2seq),
    "mt5": _hf("MT5ForConditionalGeneration", "MT5Config", dict(_T5, feed_forward_proj="gated-gelu"), seq2seq),
    "mbart": _hf("MBartForConditionalGeneration", "MBartConfig", _BART, seq2seq),
    "pegasus": _hf("PegasusForConditionalGeneration", "PegasusConfig", _BART, seq2seq),
    "marian": _hf("MarianMTModel", "MarianConfig", dict(_BART, pad_token_id=0, decoder_start_token_id=0), seq2seq),
    "blenderbot": _hf("BlenderbotForConditionalGeneration", "BlenderbotConfig", _BART, seq2seq),
    "m2m_100": _hf(
        "M2M100ForConditionalGeneration", "M2M100Config", _BART | dict(encoder_layerdrop=0.0, decoder_layerdrop=0.0), seq2seq
    ),  # its layer drop is a Python branch on a random number
    "blip": _blip,
    "siglip": _siglip,
    "beit_hf": _hf("BeitForImageClassification", "BeitConfig", dict(_VISION), pixels),
    "dinov2": _hf("Dinov2ForImageClassification", "Dinov2Config", dict(_VISION), pixels),
    "convnext_hf": _hf("ConvNextForImageClassification", "ConvNextConfig", dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=CLASSES), pixels),
    "resnet_hf": _hf("ResNetForImageClassification", "ResNetConfig", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=CLASSES), pixels),
    "regnet_hf": _hf("RegNetForImageClassification", "RegNetConfig", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, num_labels=CLASSES), pixels),
    "mobilevit_hf": _hf("MobileViTForImageClassification", "MobileViTConfig", dict(hidden_sizes=[16, 16, 32], neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32], num_attention_heads=4, num_labels=CLASSES, image_size=64), lambda: pixels(64)),
    "pvt_v2_hf": _hf("PvtV2ForImageClassification", "PvtV2Config", dict(hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2, num_attention_heads=[1, 2], sr_ratios=[4, 2], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], num_labels=CLASSES), pixels),
    "poolformer_hf": _hf("PoolFormerForImageClassification", "PoolFormerConfig", dict(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_labels=CLASSES), pixels),
    "focalnet_hf": _hf("FocalNetForImageClassification", "FocalNetConfig", dict(image_size=32, embed_dim=8, hidden_sizes=[8, 16], depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3], num_labels=CLASSES), pixels),
    "levit_hf": _hf("LevitForImageClassification", "LevitConfig", dict(image_size=64, hidden_sizes=[16, 32, 48], num_attention_heads=[2, 4, 6], depths=[1, 1, 1], key_dim=[8, 8, 8], num_labels=CLASSES), lambda: pixels(64)),
    "hubert": _hf("HubertForSequenceClassification", "HubertConfig", _WAVE, _waves),
}  # fmt: skip


SOUND = {"wav2vec2": _hf("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _WAVE, _waves)}
