"""The zoo: small configurations of unmodified models, each with a batch and a loss, to try the engine on.

    module, batch, loss_fn = build("gpt2")
    loss = loss_fn(module(**batch), batch)

Sizes divide by 4 (dp=2, tp=2) except where a kind says otherwise. `LISTED` are the models that must work, `MORE` are
further architectures, `KINDS` are small modules with one difficulty each. Nothing is downloaded: weights are random.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colofunc as cf

BATCH, SEQ, VOCAB, CLASSES = 4, 8, 64, 8
Batch = dict[str, Any]
Loss = Callable[[Any, Batch], Tensor]
Built = tuple[nn.Module, Batch, Loss]


@attrs.frozen
class Entry:
    """One model.

    `make` gives module, batch (arguments of forward by name; `_names` are for the loss alone) and loss. `train`: its
    default mode. `least_bytes`: the share of bytes that must be split.
    """

    make: Callable[[], Built]
    family: str
    train: bool = True
    least_bytes: float = 0.9


# ---- batches and losses ----


def _ids(seq: int = SEQ, n: int = BATCH) -> Tensor:
    return torch.randint(4, VOCAB, (n, seq))


def _labels(seq: int = SEQ) -> Tensor:
    """Token labels of which an uneven part is masked: a mean of per-rank means would be wrong."""
    labels = _ids(seq)
    labels[0, : seq // 2] = -100
    labels[1, :2] = -100
    return labels


def _image(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def _classes() -> Tensor:
    return torch.randint(0, CLASSES, (BATCH,))


def _own_loss(out: Any, batch: Batch) -> Tensor:
    return out.loss  # type: ignore[no-any-return]


def _class_loss(out: Any, batch: Batch) -> Tensor:
    out = out[0] if isinstance(out, (tuple, list)) else out
    return F.cross_entropy(out, _target(batch))


def _target(batch: Batch) -> Tensor:
    return batch["_target"]  # type: ignore[no-any-return]


def _mean_square(out: Any, batch: Batch) -> Tensor:
    value = out[0] if isinstance(out, (tuple, list)) else out
    value = getattr(value, "last_hidden_state", value)
    return value.square().mean()


def _lm() -> Batch:
    return {"input_ids": _ids(), "labels": _labels()}


def _masked_lm() -> Batch:
    mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
    mask[2, 5:] = 0
    return {"input_ids": _ids(), "attention_mask": mask, "labels": _labels()}


def _pixels(size: int = 32) -> Batch:
    return {"pixel_values": _image(size), "labels": _classes()}


def _seq2seq() -> Batch:
    return {"input_ids": _ids(), "labels": _ids()}


def _pretraining_pairs() -> Batch:
    return {"input_ids": _ids(), "pixel_values": _image(), "return_loss": True}


# ---- transformers ----

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
_SPECIAL = dict(pad_token_id=1, bos_token_id=2, eos_token_id=3)


def _hf(model: str, config: str, options: Mapping[str, Any], batch: Callable[[], Batch], loss: Loss = _own_loss) -> Callable[[], Built]:
    def make() -> Built:
        transformers = _library("transformers")
        cfg = getattr(transformers, config)(**options)
        module = getattr(transformers, model)(cfg)
        return module, batch(), loss

    return make


@functools.cache
def _library(name: str) -> Any:
    """transformers or timm, imported at first use (seconds); quiet about weights that were never loaded."""
    library = importlib.import_module(name)
    if name == "transformers":
        library.logging.set_verbosity_error()
    return library


def _clip() -> Built:
    transformers = _library("transformers")
    text = dict(_ENCODER, projection_dim=16, **_SPECIAL)
    vision = {k: v for k, v in _VISION.items() if k != "num_labels"} | {"projection_dim": 16}
    cfg = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return transformers.CLIPModel(cfg), _pretraining_pairs(), _own_loss


def _blip() -> Built:
    transformers = _library("transformers")
    text = dict(_ENCODER, encoder_hidden_size=32, projection_dim=16, **_SPECIAL)
    vision = {k: v for k, v in _VISION.items() if k != "num_labels"}
    cfg = transformers.BlipConfig(text_config=text, vision_config=vision, projection_dim=16, image_text_hidden_size=16)
    return transformers.BlipForConditionalGeneration(cfg), {"input_ids": _ids(), "pixel_values": _image(), "labels": _labels()}, _own_loss


def _siglip() -> Built:
    transformers = _library("transformers")
    text = dict(_ENCODER, projection_size=32, **_SPECIAL)
    vision = {k: v for k, v in _VISION.items() if k != "num_labels"}
    cfg = transformers.SiglipConfig(text_config=text, vision_config=vision)
    return transformers.SiglipModel(cfg), _pretraining_pairs(), _own_loss


def _whisper_batch() -> Batch:
    return {"input_features": torch.randn(BATCH, 8, 16), "labels": _ids()}


def _segmentation(size: int) -> Callable[[], Batch]:
    return lambda: {"pixel_values": _image(size), "labels": torch.randint(0, CLASSES, (BATCH, size, size))}


def _waves() -> Batch:
    return {"input_values": torch.randn(BATCH, 640), "labels": _classes()}


_WAVE = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16), conv_stride=(8, 4),
    conv_kernel=(10, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, num_labels=CLASSES,
    classifier_proj_size=16, vocab_size=VOCAB,
)  # fmt: skip

_CAUSAL = {
    "gpt2": _hf("GPT2LMHeadModel", "GPT2Config", _GPT, _lm),
    "opt": _hf("OPTForCausalLM", "OPTConfig", dict(_HIDDEN, ffn_dim=64, word_embed_proj_dim=32), _lm),
    "bloom": _hf("BloomForCausalLM", "BloomConfig", dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCAB), _lm),
    "llama": _hf("LlamaForCausalLM", "LlamaConfig", _LLAMA, _lm),
    "mistral": _hf("MistralForCausalLM", "MistralConfig", dict(_LLAMA, sliding_window=4), _lm),
    "qwen2": _hf("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, _lm),
    "qwen3": _hf("Qwen3ForCausalLM", "Qwen3Config", _LLAMA, _lm),
    "gemma": _hf("GemmaForCausalLM", "GemmaConfig", _LLAMA, _lm),
    "phi": _hf("PhiForCausalLM", "PhiConfig", _ENCODER, _lm),
    "gpt_neox": _hf("GPTNeoXForCausalLM", "GPTNeoXConfig", _ENCODER, _lm),
    "gptj": _hf("GPTJForCausalLM", "GPTJConfig", dict(_GPT, rotary_dim=4), _lm),
    "falcon": _hf("FalconForCausalLM", "FalconConfig", dict(_HIDDEN, ffn_hidden_size=64, new_decoder_architecture=False), _lm),
}
_ENCODERS = {
    "bert": _hf("BertForMaskedLM", "BertConfig", _ENCODER, _masked_lm),
    "roberta": _hf("RobertaForMaskedLM", "RobertaConfig", dict(_ENCODER, pad_token_id=1), _masked_lm),
    "albert": _hf("AlbertForMaskedLM", "AlbertConfig", dict(_ENCODER, embedding_size=16), _masked_lm),
    "distilbert": _hf("DistilBertForMaskedLM", "DistilBertConfig", dict(vocab_size=VOCAB, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=32), _masked_lm),
    "electra": _hf("ElectraForMaskedLM", "ElectraConfig", dict(_ENCODER, embedding_size=16), _masked_lm),
    "deberta-v2": _hf(
        "DebertaV2ForMaskedLM", "DebertaV2Config",
        dict(_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True),
        _masked_lm,
    ),
}  # fmt: skip
_BOTH = {
    "t5": _hf("T5ForConditionalGeneration", "T5Config", _T5, _seq2seq),
    "bart": _hf("BartForConditionalGeneration", "BartConfig", _BART, _seq2seq),
    "whisper": _hf(
        "WhisperForConditionalGeneration", "WhisperConfig",
        dict({k: v for k, v in _BART.items() if k != "max_position_embeddings"}, num_mel_bins=8, max_source_positions=8, max_target_positions=16, decoder_start_token_id=2, **_SPECIAL),
        _whisper_batch,
    ),
}  # fmt: skip
_VISUAL = {
    "vit": _hf("ViTForImageClassification", "ViTConfig", _VISION, _pixels),
    "deit": _hf("DeiTForImageClassification", "DeiTConfig", _VISION, _pixels),
    "swin": _hf(
        "SwinForImageClassification", "SwinConfig",
        dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES), _pixels,
    ),
    "clip": _clip,
    "segformer": _hf(
        "SegformerForSemanticSegmentation", "SegformerConfig",
        dict(depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 32], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16, num_labels=CLASSES),
        _segmentation(64),
    ),
}  # fmt: skip

# ---- timm ----


def _timm(name: str, size: int = 32, **options: Any) -> Callable[[], Built]:
    def make() -> Built:
        timm = _library("timm")
        module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        return module, {"x": _image(size), "_target": _classes()}, _class_loss

    return make


def _timm_parts(make: Callable[[Any], nn.Module], size: int = 32) -> Callable[[], Built]:
    """A timm architecture put together from its class, where the named variants cannot be made small."""
    return lambda: (make(_library("timm").models), {"x": _image(size), "_target": _classes()}, _class_loss)


def _mixer(block: str | None, mlp: str | None = None, norm: str | None = None) -> Callable[[Any], nn.Module]:
    def make(models: Any) -> nn.Module:
        part, layers = models.mlp_mixer, _library("timm").layers
        options: dict[str, Any] = {"block_layer": getattr(part, block), "mlp_ratio": 4} if block else {"drop_path_rate": 0.1}
        options |= {"mlp_layer": getattr(layers, mlp)} if mlp else {}
        options |= {"norm_layer": getattr(part, norm)} if norm else {}
        return part.MlpMixer(num_classes=CLASSES, img_size=32, patch_size=8, embed_dim=32, num_blocks=2, **options)  # type: ignore[no-any-return]

    return make


def _nfnet(models: Any) -> nn.Module:
    cfg = _changed(models.nfnet.model_cfgs["nfnet_l0"], depths=(1, 1, 1, 1), channels=(16, 32, 32, 32), group_size=8, num_features=64, stem_chs=16)
    return models.nfnet.NormFreeNet(cfg, num_classes=CLASSES, drop_path_rate=0.1)  # type: ignore[no-any-return]


def _changed(record: Any, **changes: Any) -> Any:
    """A dataclass with some fields replaced."""
    return dataclasses.replace(record, **changes)


def _narrowed(cfg: Any) -> Any:
    """A nested configuration with its widths divided by 4."""
    if isinstance(cfg, dict):
        return {k: tuple(c // 4 for c in v) if k == "num_channels" else v // 4 if k == "stem_width" else _narrowed(v) for k, v in cfg.items()}
    return cfg


def _hrnet(models: Any) -> nn.Module:
    cfg = _narrowed(models.hrnet.cfg_cls["hrnet_w18_small"])
    return models.hrnet.HighResolutionNet(cfg, num_classes=CLASSES)  # type: ignore[no-any-return]


_VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)

_TIMM = {
    "resnet": _timm("resnet18", layers=(1, 1, 1, 1), drop_path_rate=0.1),
    "resnext": _timm("resnext50_32x4d", layers=(1, 1, 1, 1)),
    "efficientnet": _timm_parts(lambda m: m.efficientnet._gen_efficientnet("efficientnet_b0", 0.25, 0.2, num_classes=CLASSES, drop_rate=0.2, drop_path_rate=0.2)),
    "mobilenetv3": _timm("mobilenetv3_small_050", drop_rate=0.2),
    "convnext": _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), drop_path_rate=0.1),
    "densenet": _timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    "regnet": _timm("regnetx_002"),
    "vgg": _timm("vgg11_bn", mlp_ratio=1 / 64),
    "vision_transformer": _timm("vit_tiny_patch16_224", drop_path_rate=0.1, drop_rate=0.1, **_VIT),
    "deit3": _timm("deit3_small_patch16_224", drop_path_rate=0.1, **_VIT),
    "beit": _timm("beit_base_patch16_224", drop_path_rate=0.1, **_VIT),
    "timm_swin": _timm("swin_tiny_patch4_window7_224", img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)),
    "mixer": _timm_parts(_mixer(None)),
    "gmlp": _timm_parts(_mixer("SpatialGatingBlock", "GatedMlp")),
    "resmlp": _timm_parts(_mixer("ResBlock", None, "Affine")),
    "cait": _timm("cait_xxs24_224", **_VIT, depth_token_only=1),
    "coat": _timm("coat_tiny", img_size=64, size=64, embed_dims=(16, 16, 16, 16), serial_depths=(1, 1, 1, 1), parallel_depth=1),
    "convit": _timm("convit_tiny", **_VIT, local_up_to_layer=1),
    "hrnet": _timm_parts(_hrnet, 64),
    "inception_v3": _timm("inception_v3", size=96, aux_logits=False),
    "nfnet": _timm_parts(_nfnet),
    "maxvit": _timm("maxvit_pico_rw_256", size=64, img_size=64),
}

# ---- one difficulty each ----


class Tied(nn.Module):
    """One weight as embedding and as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(x)))).mean(1)  # type: ignore[no-any-return]


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(F.gelu(self.again(F.relu(self.first(x))))))  # type: ignore[no-any-return]


class Hung(nn.Module):
    """Parameters on a module that has children; a table computed in forward; a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.prefix = nn.Parameter(torch.ones(16)), nn.Parameter(torch.randn(1, 4, 16))
        self.inner, self.last = nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.cat([self.prefix.expand(x.shape[0], -1, -1), x[:, None]], 1) * self.scale
        return self.last(self.inner(x).relu().mean(1))  # type: ignore[no-any-return]


class Unused(nn.Module):
    """Parameters without a gradient, a frozen one, and one of which only a part is read."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(16, CLASSES), nn.Linear(16, 4), nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(12, 16))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.frozen(x) + self.table[3]) + self.table[5:6, :CLASSES]  # type: ignore[no-any-return]


class Uneven(nn.Module):
    """Sizes that 2 does not divide: heads, widths, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.last = nn.Linear(15, 45), nn.Linear(15, 15), nn.Linear(15, 7)
        self.inp, self.norm = nn.Linear(16, 5 * 15), nn.LayerNorm(15)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x).unflatten(1, (5, 15))
        q, k, v = (t.unflatten(2, (3, 5)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.last(x.mean(1))  # type: ignore[no-any-return]


class Statistics(nn.Module):
    """BatchNorm in train mode over a sharded batch, in 1 and 2 dims, with momentums."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm2 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc, self.norm1, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=0.3), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm2(self.conv(x))), 2).mean((2, 3))
        return self.last(F.relu(self.norm1(self.fc(x))))  # type: ignore[no-any-return]


class Noisy(nn.Module):
    """Dropout of three kinds, attention dropout, and whole rows dropped as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 32), nn.Dropout(0.3), nn.Linear(32, CLASSES)
        self.alpha, self.channels = nn.AlphaDropout(0.2), nn.Dropout1d(0.25)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.gelu(self.first(x))).unflatten(1, (4, 8))
        x = x + self.attend(x, x, x, need_weights=False)[0]
        keep = x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.8)
        return self.last(self.channels(self.alpha(x * keep / 0.8)).flatten(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A cell applied in a Python loop, with views written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(4, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (4, 4))
        h = x.new_zeros(x.shape[0], 16)
        states = x.new_zeros(x.shape[0], 4, 16)
        for t in range(4):
            h = self.cell(x[:, t], h)
            states[:, t] = h
        return self.last(states.max(1).values)  # type: ignore[no-any-return]


def _kind(module: Callable[[], nn.Module], batch: Callable[[], Tensor]) -> Callable[[], Built]:
    return lambda: (module(), {"x": batch(), "_target": torch.randint(0, 7, (BATCH,))}, _class_loss)


def _rows() -> Tensor:
    return torch.randn(BATCH, 16)


_KINDS = {
    "kind_tied": _kind(Tied, _ids),
    "kind_called_twice": _kind(Twice, _rows),
    "kind_hung": _kind(Hung, _rows),
    "kind_unused": _kind(Unused, _rows),
    "kind_uneven": _kind(Uneven, _rows),
    "kind_statistics": _kind(Statistics, lambda: _image(8)),
    "kind_noisy": _kind(Noisy, _rows),
    "kind_recurrent": _kind(Recurrent, _rows),
}

# ---- one family of layers each ----


class Wrap(nn.Module):
    """Layers in a row, then the mean over all dims but the first and a classifier."""

    def __init__(self, features: int, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(layers), nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.last(x.flatten(2).mean(2) if x.dim() > 3 else x.mean(1) if x.dim() == 3 else x)  # type: ignore[no-any-return]


class Fn(nn.Module):
    """A function of its input and of weights of the given shapes."""

    def __init__(self, fn: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.fn, self.weights = fn, nn.ParameterList(nn.Parameter(torch.randn(s) / 4) for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, *self.weights)


def _layer(features: int, batch: Callable[[], Tensor], *layers: Callable[[], nn.Module]) -> Callable[[], Built]:
    return _kind(lambda: Wrap(features, *(make() for make in layers)), batch)


def _fn(fn: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: Fn(fn, *shapes)


def _sequence() -> Tensor:
    return torch.randn(BATCH, SEQ, 16)


def _volume() -> Tensor:
    return torch.randn(BATCH, 4, 4, 8, 8)


def _picture() -> Tensor:
    return torch.randn(BATCH, 8, 8, 8)


def _route(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Top-2 of 4 experts, each run on all tokens."""
    weight, chosen = (x @ gate).softmax(-1).topk(2, -1)
    share = torch.zeros(*x.shape[:2], 4, dtype=x.dtype).scatter(-1, chosen, weight)
    return torch.einsum("bse,bsed->bsd", share, torch.einsum("bseh,ehd->bsed", torch.einsum("bsd,edh->bseh", x, up).relu(), down))


def _rotary(x: Tensor) -> Tensor:
    """Complex rotation by position."""
    angle = torch.outer(torch.arange(SEQ, dtype=x.dtype), 10.0 ** -torch.arange(8, dtype=x.dtype))
    turned = torch.view_as_complex(x.unflatten(-1, (8, 2))) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def _sample(x: Tensor, theta: Tensor) -> Tensor:
    grid = F.affine_grid(theta.expand(x.shape[0], 2, 3) + torch.eye(2, 3, dtype=x.dtype), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _gumbel(x: Tensor) -> Tensor:
    return F.gumbel_softmax(x, tau=0.7, dim=-1) + torch.rand_like(x) + 0.1 * torch.randn_like(x)


def _scatter(x: Tensor, table: Tensor) -> Tensor:
    index = (x > 0).long().cumsum(1)
    out = torch.zeros_like(x).scatter_add(1, index.clamp(max=SEQ - 1), x)
    out = out.index_add(1, torch.tensor([0, 2, 0]), x[:, :3]) + table[index[..., 0] % 4]
    out[:, 1] = out[:, 1] * 2
    out[x < -1] = 0.5
    return out.masked_fill(x > 2, -1.0) + torch.where(x > 0, x, table[0])


def _distances(x: Tensor, centres: Tensor) -> Tensor:
    near = torch.cdist(x, centres) + F.cosine_similarity(x[:, :, None], centres, dim=-1)
    return near.logsumexp(-1, keepdim=True) * x + x.var(-1, keepdim=True) + x.norm(dim=-1, keepdim=True)


def _scans(x: Tensor) -> Tensor:
    return x.cumsum(1) + x.sigmoid().cumprod(1) + x.logcumsumexp(1) + x.cummax(1).values + x.flip(1) + x.roll(2, 1) + x.sort(1).values


def _spectrum(x: Tensor, filters: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * filters, n=SEQ, dim=1) + torch.fft.fft2(x).real


def _windows(x: Tensor) -> Tensor:
    blocks = F.unfold(x, 3, padding=1).softmax(1)
    return F.fold(blocks, (8, 8), 3, padding=1) + F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2)


def _resizes(x: Tensor) -> Tensor:
    out = F.interpolate(x, scale_factor=2, mode="bilinear") + F.interpolate(x, size=(16, 16), mode="nearest")
    out = out + F.interpolate(x, size=16, mode="bicubic", align_corners=True)
    return F.avg_pool2d(F.pad(out, (1, 1, 2, 2), mode="reflect"), 3, 2) + F.adaptive_max_pool2d(x, (9, 8)) + F.adaptive_avg_pool2d(x, (1, 1))


def _losses(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).sigmoid(), x[:, :, :8]
    each = [F.smooth_l1_loss(a, b), F.huber_loss(a, b), F.binary_cross_entropy(a, b.sigmoid()), F.kl_div(a.log(), b.softmax(-1), reduction="batchmean")]
    each += [F.binary_cross_entropy_with_logits(a, b.sigmoid()), F.l1_loss(a, b), F.triplet_margin_loss(a[:, 0], b[:, 0], b[:, 1])]
    return a + torch.stack(each).sum() + F.nll_loss(a.flatten(0, 1).log_softmax(-1), b.flatten(0, 1).argmax(-1))


_LAYERS = {
    "layer_lstm": _layer(16, _sequence, lambda: nn.LSTM(16, 16, num_layers=2, batch_first=True)),
    "layer_gru_both_ways": _layer(16, _sequence, lambda: nn.GRU(16, 8, bidirectional=True)),
    "layer_rnn": _layer(16, _sequence, lambda: nn.RNN(16, 16, batch_first=True)),
    "layer_transformer": _layer(16, _sequence, lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), lambda: nn.TransformerEncoderLayer(16, 4, 32, norm_first=True)),
    "layer_attention_weights": _layer(16, _sequence, _fn(lambda x, w, o: F.multi_head_attention_forward(x, x, x, 16, 4, w, None, None, None, False, 0.0, o, None)[0], (48, 16), (16, 16))),
    "layer_conv1d": _layer(8, _sequence, lambda: nn.Conv1d(SEQ, 8, 3, padding="same"), lambda: nn.ConvTranspose1d(8, 8, 4, 2), lambda: nn.MaxPool1d(2), lambda: nn.AvgPool1d(2), lambda: nn.Flatten(2), _fn(lambda x: x.transpose(1, 2))),
    "layer_conv2d": _layer(8, _picture, lambda: nn.Conv2d(8, 8, 3, groups=8), lambda: nn.ConvTranspose2d(8, 8, 3, 2, output_padding=1), lambda: nn.Conv2d(8, 8, 3, dilation=2, padding_mode="reflect", padding=1)),
    "layer_conv3d": _layer(8, _volume, lambda: nn.Conv3d(4, 8, 3, padding=1), lambda: nn.BatchNorm3d(8), lambda: nn.AvgPool3d(2), lambda: nn.ConvTranspose3d(8, 8, 2)),
    "layer_norms": _layer(8, _picture, lambda: nn.GroupNorm(4, 8), lambda: nn.InstanceNorm2d(8, affine=True), lambda: nn.LocalResponseNorm(3), lambda: nn.LayerNorm((8, 8)), lambda: nn.RMSNorm((8,)), lambda: nn.BatchNorm2d(8, track_running_stats=False)),
    "layer_parametrized": _layer(16, _sequence, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), lambda: nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))),
    "layer_activations": _layer(16, _sequence, nn.Mish, nn.Hardswish, nn.SELU, nn.Softplus, lambda: nn.PReLU(SEQ), nn.GELU, nn.Softsign, lambda: nn.RReLU(0.1, 0.3), _fn(lambda x: torch.cat([x, x], -1)), nn.GLU, nn.ELU, nn.LogSigmoid),
    "layer_bilinear": _layer(16, _sequence, _fn(lambda x, w, b: F.bilinear(x, x.flip(1), w, b), (16, 16, 16), (16,))),
    "layer_bag": _layer(16, _ids, lambda: nn.EmbeddingBag(VOCAB, 16, mode="mean")),
    "layer_route": _layer(16, _sequence, _fn(_route, (16, 4), (4, 16, 32), (4, 32, 16))),
    "layer_rotary": _layer(16, _sequence, _fn(_rotary)),
    "layer_sample": _layer(8, _picture, _fn(_sample, (1, 2, 3))),
    "layer_gumbel": _layer(16, _sequence, _fn(_gumbel)),
    "layer_scatter": _layer(16, _sequence, _fn(_scatter, (4, 16))),
    "layer_distances": _layer(16, _sequence, _fn(_distances, (8, 16))),
    "layer_scans": _layer(16, _sequence, _fn(_scans)),
    "layer_spectrum": _layer(16, _sequence, _fn(_spectrum, (SEQ // 2 + 1, 16))),
    "layer_windows": _layer(8, _picture, _fn(_windows)),
    "layer_resizes": _layer(8, _picture, _fn(_resizes)),
    "layer_losses": _layer(8, _sequence, _fn(_losses, (16, 8))),
    "layer_checkpointed": _layer(16, _sequence, _fn(lambda x, a, b: torch.utils.checkpoint.checkpoint(lambda y: F.dropout(torch.tanh(y @ a) @ b, 0.2), x, use_reentrant=False), (16, 32), (32, 16))),
    "layer_mapped": _layer(16, _sequence, _fn(lambda x, w: torch.func.vmap(lambda row: torch.tanh(row @ w))(x), (16, 16))),
    "layer_inplace": _layer(16, _sequence, nn.Sequential, lambda: nn.Linear(16, 16), lambda: nn.ReLU(inplace=True), lambda: nn.Linear(16, 16), lambda: nn.Dropout(0.2, inplace=True), nn.Sigmoid),
}  # fmt: skip

# ---- further architectures ----

_MORE_HF = {
    "gpt_neo": _hf("GPTNeoForCausalLM", "GPTNeoConfig", dict(hidden_size=32, num_layers=2, num_heads=4, vocab_size=VOCAB, max_position_embeddings=32, attention_types=[[["global", "local"], 1]], window_size=4), _lm),
    "gpt_bigcode": _hf("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT, _lm),
    "codegen": _hf("CodeGenForCausalLM", "CodeGenConfig", dict(_GPT, rotary_dim=4), _lm),
    "mpt": _hf("MptForCausalLM", "MptConfig", dict(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCAB, max_seq_len=32, expansion_ratio=2), _lm),
    "gemma2": _hf("Gemma2ForCausalLM", "Gemma2Config", dict(_LLAMA, sliding_window=4), _lm),
    "gemma3": _hf("Gemma3ForCausalLM", "Gemma3TextConfig", dict(_LLAMA, sliding_window=4), _lm),
    "phi3": _hf("Phi3ForCausalLM", "Phi3Config", dict(_LLAMA, pad_token_id=0), _lm),
    "stablelm": _hf("StableLmForCausalLM", "StableLmConfig", dict(_ENCODER, num_key_value_heads=4), _lm),
    "starcoder2": _hf("Starcoder2ForCausalLM", "Starcoder2Config", dict(_ENCODER, num_key_value_heads=2), _lm),
    "olmo": _hf("OlmoForCausalLM", "OlmoConfig", dict(_ENCODER, num_key_value_heads=4), _lm),
    "olmo2": _hf("Olmo2ForCausalLM", "Olmo2Config", dict(_ENCODER, num_key_value_heads=4), _lm),
    "cohere": _hf("CohereForCausalLM", "CohereConfig", dict(_ENCODER, num_key_value_heads=2), _lm),
    "granite": _hf("GraniteForCausalLM", "GraniteConfig", dict(_ENCODER, num_key_value_heads=2), _lm),
    "nemotron": _hf("NemotronForCausalLM", "NemotronConfig", _LLAMA, _lm),
    "glm": _hf("GlmForCausalLM", "GlmConfig", dict(_LLAMA, pad_token_id=0), _lm),
    "smollm3": _hf("SmolLM3ForCausalLM", "SmolLM3Config", dict(_ENCODER, num_key_value_heads=2, pad_token_id=0), _lm),
    "falcon_new": _hf("FalconForCausalLM", "FalconConfig", dict(_HIDDEN, ffn_hidden_size=64, new_decoder_architecture=True, num_kv_heads=2, alibi=False), _lm),
    "falcon_alibi": _hf("FalconForCausalLM", "FalconConfig", dict(_HIDDEN, ffn_hidden_size=64, alibi=True, multi_query=False), _lm),
    "biogpt": _hf("BioGptForCausalLM", "BioGptConfig", _ENCODER, _lm),
    "xglm": _hf("XGLMForCausalLM", "XGLMConfig", dict(vocab_size=VOCAB, d_model=32, num_layers=2, attention_heads=4, ffn_dim=64, max_position_embeddings=32), _lm),
    "deberta": _hf("DebertaForMaskedLM", "DebertaConfig", dict(_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8), _masked_lm),
    "modernbert": _hf("ModernBertForMaskedLM", "ModernBertConfig", dict(_ENCODER, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, local_attention=4, reference_compile=False), _masked_lm),
    "mpnet": _hf("MPNetForMaskedLM", "MPNetConfig", dict(_ENCODER), _masked_lm),
    "camembert": _hf("CamembertForMaskedLM", "CamembertConfig", dict(_ENCODER, pad_token_id=1), _masked_lm),
    "xlm_roberta": _hf("XLMRobertaForMaskedLM", "XLMRobertaConfig", dict(_ENCODER, pad_token_id=1), _masked_lm),
    "squeezebert": _hf("SqueezeBertForMaskedLM", "SqueezeBertConfig", dict(_ENCODER, embedding_size=32), _masked_lm),
    "mobilebert": _hf("MobileBertForMaskedLM", "MobileBertConfig", dict(_ENCODER, embedding_size=32, intra_bottleneck_size=16, true_hidden_size=16), _masked_lm),
    "convbert": _hf("ConvBertForMaskedLM", "ConvBertConfig", dict(_ENCODER, embedding_size=32, head_ratio=2, conv_kernel_size=3), _masked_lm),
    "fnet": _hf("FNetForMaskedLM", "FNetConfig", dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, intermediate_size=64, max_position_embeddings=32), _lm),
    "roformer": _hf("RoFormerForMaskedLM", "RoFormerConfig", dict(_ENCODER, embedding_size=32), _masked_lm),
    "rembert": _hf("RemBertForMaskedLM", "RemBertConfig", dict(_ENCODER, input_embedding_size=16, output_embedding_size=16), _masked_lm),
    "layoutlm": _hf("LayoutLMForMaskedLM", "LayoutLMConfig", _ENCODER, _masked_lm),
    "xlnet": _hf("XLNetLMHeadModel", "XLNetConfig", dict(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=64), _seq2seq),
    "mt5": _hf("MT5ForConditionalGeneration", "MT5Config", dict(_T5, feed_forward_proj="gated-gelu"), _seq2seq),
    "mbart": _hf("MBartForConditionalGeneration", "MBartConfig", _BART, _seq2seq),
    "pegasus": _hf("PegasusForConditionalGeneration", "PegasusConfig", _BART, _seq2seq),
    "marian": _hf("MarianMTModel", "MarianConfig", dict(_BART, pad_token_id=0, decoder_start_token_id=0), _seq2seq),
    "blenderbot": _hf("BlenderbotForConditionalGeneration", "BlenderbotConfig", _BART, _seq2seq),
    "m2m_100": _hf("M2M100ForConditionalGeneration", "M2M100Config", _BART, _seq2seq),
    "blip": _blip,
    "siglip": _siglip,
    "beit_hf": _hf("BeitForImageClassification", "BeitConfig", dict(_VISION), _pixels),
    "dinov2": _hf("Dinov2ForImageClassification", "Dinov2Config", dict(_VISION), _pixels),
    "convnext_hf": _hf("ConvNextForImageClassification", "ConvNextConfig", dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=CLASSES), _pixels),
    "resnet_hf": _hf("ResNetForImageClassification", "ResNetConfig", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=CLASSES), _pixels),
    "regnet_hf": _hf("RegNetForImageClassification", "RegNetConfig", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, num_labels=CLASSES), _pixels),
    "mobilevit_hf": _hf("MobileViTForImageClassification", "MobileViTConfig", dict(hidden_sizes=[16, 16, 32], neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32], num_attention_heads=4, num_labels=CLASSES, image_size=64), lambda: _pixels(64)),
    "pvt_v2_hf": _hf("PvtV2ForImageClassification", "PvtV2Config", dict(hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2, num_attention_heads=[1, 2], sr_ratios=[4, 2], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], num_labels=CLASSES), _pixels),
    "poolformer_hf": _hf("PoolFormerForImageClassification", "PoolFormerConfig", dict(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_labels=CLASSES), _pixels),
    "focalnet_hf": _hf("FocalNetForImageClassification", "FocalNetConfig", dict(image_size=32, embed_dim=8, hidden_sizes=[8, 16], depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3], num_labels=CLASSES), _pixels),
    "levit_hf": _hf("LevitForImageClassification", "LevitConfig", dict(image_size=64, hidden_sizes=[16, 32, 48], num_attention_heads=[2, 4, 6], depths=[1, 1, 1], key_dim=[8, 8, 8], num_labels=CLASSES), lambda: _pixels(64)),
    "hubert": _hf("HubertForSequenceClassification", "HubertConfig", _WAVE, _waves),
    "mixtral_dense": _hf("MixtralForCausalLM", "MixtralConfig", dict(_LLAMA, num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm"), _lm),
    "mamba": _hf("MambaForCausalLM", "MambaConfig", dict(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1, use_mambapy=False), _lm),
}  # fmt: skip

_MORE_TIMM = {
    "wide_resnet": _timm("wide_resnet50_2", layers=(1, 1, 1, 1)),
    "seresnet": _timm("seresnet18", layers=(1, 1, 1, 1)),
    "resnetv2": _timm("resnetv2_50", layers=(1, 1, 1, 1)),
    "resnest": _timm("resnest14d"),
    "res2net": _timm("res2net50_26w_4s", layers=(1, 1, 1, 1)),
    "mobilenetv2": _timm("mobilenetv2_035"),
    "mobilenetv4": _timm("mobilenetv4_conv_small_035"),
    "mnasnet": _timm("mnasnet_050"),
    "ghostnet": _timm("ghostnet_050"),
    "efficientnetv2": _timm_parts(lambda m: m.efficientnet._gen_efficientnetv2_s("efficientnetv2_rw_s", 0.25, 0.2, num_classes=CLASSES)),
    "convnextv2": _timm("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "convmixer": _timm_parts(lambda m: m.convmixer.ConvMixer(dim=16, depth=2, patch_size=4, kernel_size=3, num_classes=CLASSES)),
    "regnety": _timm("regnety_002"),
    "vgg_plain": _timm("vgg11", mlp_ratio=1 / 64),
    "xception": _timm("xception41", size=64),
    "dla": _timm("dla34"),
    "dpn": _timm("dpn48b", size=64),
    "inception_v4": _timm("inception_v4", size=96),
    "repvgg": _timm("repvgg_a0"),
    "mobileone": _timm("mobileone_s0"),
    "fastvit": _timm("fastvit_t8", size=64),
    "edgenext": _timm("edgenext_xx_small", size=64),
    "mobilevit": _timm("mobilevit_xxs", size=64),
    "mobilevitv2": _timm("mobilevitv2_050", size=64),
    "efficientvit_mit": _timm("efficientvit_b0", size=64),
    "efficientformer": _timm("efficientformer_l1", size=224),
    "efficientformerv2": _timm("efficientformerv2_s0", size=224),
    "pvt_v2": _timm("pvt_v2_b0", size=64),
    "poolformer": _timm("poolformer_s12", size=64),
    "caformer": _timm("caformer_s18", size=64),
    "focalnet": _timm_parts(lambda m: m.focalnet.FocalNet(embed_dim=16, depths=(1, 1), focal_levels=(2, 2), focal_windows=(3, 3), num_classes=CLASSES)),
    "twins": _timm("twins_svt_small", img_size=64, size=64, embed_dims=(16, 32, 32, 64), num_heads=(2, 4, 4, 8), depths=(1, 1, 1, 2)),
    "swinv2": _timm("swinv2_cr_tiny_224", img_size=64, size=64, embed_dim=16, depths=(1, 1), num_heads=(2, 4)),
    "swin_v2": _timm("swinv2_tiny_window8_256", img_size=64, size=64, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=8),
    "levit": _timm("levit_128s", size=224),
    "visformer": _timm("visformer_tiny", img_size=64, size=64),
    "pit": _timm("pit_ti_224", size=224),
    "tnt": _timm("tnt_s_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads_outer=4),
    "xcit": _timm("xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=2, num_heads=4),
    "crossvit": _timm("crossvit_tiny_240", size=240, depth=[[1, 1, 0]]),
    "eva": _timm("eva02_tiny_patch14_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "davit": _timm("davit_tiny", size=64, depths=(1, 1, 1, 1), embed_dims=(8, 16, 32, 32), num_heads=(2, 2, 4, 4), window_size=2),
    "gcvit": _timm("gcvit_xxtiny", img_size=64, size=64),
    "volo": _timm_parts(lambda m: m.volo.VOLO((1, 1, 1, 1), img_size=64, num_classes=CLASSES, embed_dims=(16, 32, 32, 32), num_heads=(2, 4, 4, 4), use_mix_token=False), 64),
    "coatnet": _timm("coatnet_pico_rw_224", img_size=64, size=64),
    "hiera": _timm("hiera_tiny_224", img_size=(64, 64), size=64, embed_dim=16, num_heads=2, stages=(1, 1, 2, 1)),
    "mvitv2": _timm("mvitv2_tiny", img_size=64, size=64),
    "nest": _timm("nest_tiny", img_size=64, size=64),
    "vovnet": _timm("ese_vovnet19b_slim"),
    "cspnet": _timm("cspresnet50"),
    "lcnet": _timm("lcnet_035"),
    "tinynet": _timm("tinynet_e"),
    "hardcorenas": _timm("hardcorenas_a"),
    "rexnet": _timm("rexnet_100"),
    "selecsls": _timm("selecsls42"),
    "skresnet": _timm("skresnet18", layers=(1, 1, 1, 1)),
    "eca_resnet": _timm("ecaresnet26t", layers=(1, 1, 1, 1)),
    "halonet": _timm("halonet26t", size=256),
    "lambda_resnet": _timm("lambda_resnet26t", size=64),
    "botnet": _timm("botnet26t_256", img_size=64, size=64),
    "repvit": _timm("repvit_m0_9"),
    "starnet": _timm("starnet_s1"),
    "inception_next": _timm("inception_next_atto"),
    "nextvit": _timm("nextvit_small", size=64),
    "tiny_vit": _timm("tiny_vit_5m_224", size=224),
    "ghostnetv2": _timm("ghostnetv2_100", size=64),
    "rdnet": _timm("rdnet_tiny"),
    "shvit": _timm("shvit_s1", size=64),
    "sequencer": _timm("sequencer2d_s", img_size=32, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32), hidden_sizes=(4, 8, 8, 8)),
}

LISTED: dict[str, Entry] = {
    **{n: Entry(m, "transformers") for d in (_CAUSAL, _ENCODERS, _BOTH, _VISUAL) for n, m in d.items()},
    "wav2vec2": Entry(_hf("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _WAVE, _waves), "transformers", train=False),
    **{n: Entry(m, "timm") for n, m in _TIMM.items()},
}
KINDS: dict[str, Entry] = {n: Entry(m, "kind") for n, m in _KINDS.items()}
# Its odd widths can be split nowhere: weights and their moments are copies.
KINDS["kind_uneven"] = attrs.evolve(KINDS["kind_uneven"], least_bytes=0.7)
_EVAL = {"hubert"}
MORE: dict[str, Entry] = {
    **{n: Entry(m, "transformers", n not in _EVAL) for n, m in _MORE_HF.items()},
    **{n: Entry(m, "timm", n not in _EVAL) for n, m in _MORE_TIMM.items()},
}
LAYERS: dict[str, Entry] = {n: Entry(m, "layer") for n, m in _LAYERS.items()}
# Two factorisations of 16x16 matrices are computed whole.
LAYERS["layer_parametrized"] = attrs.evolve(LAYERS["layer_parametrized"], least_bytes=0.85)
ALL: dict[str, Entry] = {**LISTED, **KINDS, **LAYERS, **MORE}


def build(name: str, dtype: torch.dtype = torch.float64, train: bool | None = None, seed: int = 0) -> Built:
    """(module, batch, loss_fn) of one model. `train`: None takes the entry's default mode."""
    entry = ALL[name]
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, batch, loss_fn = entry.make()
    module = module.to(dtype).train(entry.train if train is None else train)
    batch = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    return module, batch, loss_fn


def inputs_of(batch: Batch) -> Batch:
    """What forward takes; names with an underscore are for the loss alone."""
    return {k: v for k, v in batch.items() if not k.startswith("_")}


def step_of(name: str, dtype: torch.dtype = torch.float64, train: bool | None = None) -> tuple[Callable[..., Any], Any, Batch]:
    """(step_fn, state, batch): one AdamW training step of a model; state is {"params", "buffers", "opt"}."""
    module, batch, loss_fn = build(name, dtype, train)
    model = cf.functional(module)
    # A gradient that is zero but for rounding (a bias in front of a norm) is divided by its own size plus eps: with the
    # default 1e-8 the reference itself moves by 1e-9 when a sum is taken in another order.
    opt = cf.adapt(torch.optim.AdamW, lr=1e-3, eps=1e-5)

    def step_fn(state: Any, batch: Batch) -> Any:
        def loss_of(params: Any) -> Any:
            out, buffers = model.apply(params, state["buffers"], **inputs_of(batch))
            return loss_fn(out, batch), buffers

        (loss, buffers), grads = cf.value_and_grad(loss_of, has_aux=True)(state["params"])
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": buffers, "opt": opt_state}, loss

    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    return step_fn, state, batch
