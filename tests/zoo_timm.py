"""Small variants of timm's models: name -> maker of (module, batch, loss)."""

# One line per model, to be read beside one another.
# ruff: noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn
from zoo_batches import (
    CLASSES,
    Built,
    class_loss,
    classes,
    image,
    library,
)


def _timm(name: str, size: int = 32, **options: Any) -> Callable[[], Built]:
    def make() -> Built:
        timm = library("timm")
        module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        return module, {"x": image(size), "_target": classes()}, class_loss

    return make


def _timm_parts(make: Callable[[Any], nn.Module], size: int = 32) -> Callable[[], Built]:
    """A timm architecture put together from its class, where the named variants cannot be made small."""
    return lambda: (make(library("timm").models), {"x": image(size), "_target": classes()}, class_loss)


def _mixer(block: str | None, mlp: str | None = None, norm: str | None = None) -> Callable[[Any], nn.Module]:
    def make(models: Any) -> nn.Module:
        part, layers = models.mlp_mixer, library("timm").layers
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

LISTED = {
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

MORE = {
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
