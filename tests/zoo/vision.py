"""Vision models: of Transformers, and plain torch ones from ``vision_nets``."""

from __future__ import annotations

from typing import Any

from . import vision_nets as nets
from .base import ZooModel, images, seeded
from .hf import TINY, FixedPixels, Pixels, from_config, other_pixels

VIT: dict[str, Any] = {
    **{key: TINY[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "initializer_range": 0.1,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 10,
}
CONVNEXT: dict[str, Any] = {
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [2, 2, 3, 2],
    "num_labels": 10,
    "initializer_range": 0.1,
    "layer_scale_init_value": 0.5,
}
RESNET: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [2, 2, 3, 2],
    "layer_type": "basic",
    "num_labels": 10,
}
DINO: dict[str, Any] = {key: VIT[key] for key in VIT if key != "intermediate_size"} | {
    "mlp_ratio": 2,
    "layerscale_value": 0.5,
}
SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
    "mlp_ratio": 2.0,
    "initializer_range": 0.1,
    "num_labels": 10,
}
NO_RESIDUAL: dict[str, Any] = {"branches": 0, "adds": 0, "blocks": (), "runs": (), "kinds": {}}
FIXED = "image height and width are fixed"


def picture(name: str, make: Any, size: int = 32, **rest: Any) -> ZooModel:
    expected = {"other": other_pixels(size, size), **rest}
    return ZooModel(name=name, build=lambda: (make(), (images(height=size, width=size),), {}), **expected)


def transformer(name: str, make: Any, linears: int, **rest: Any) -> ZooModel:
    """Four equal blocks of attention and MLP over patches."""
    expected: dict[str, Any] = {
        "branches": 8,
        "adds": 8,
        "blocks": (4,),
        "runs": (4,),
        "kinds": {"attn": 4, "mlp": 4},
        "note": FIXED,
    }
    return picture(name, make, linears=linears, **{**expected, **rest})


def convolutional(name: str, make: Any, *blocks: int, **rest: Any) -> ZooModel:
    """One convolution branch a block, stages as one trunk, one linear as the head.

    These nets shrink the image by 32; at 64 pixels the last stage keeps two, so an exported graph takes other sizes.
    """
    total = sum(blocks)
    expected: dict[str, Any] = {
        "branches": total,
        "adds": total,
        "blocks": (total,),
        "kinds": {"conv": total},
        "linears": 1,
        "size": 64,
        "other": other_pixels(96, 128),
    }
    return picture(name, make, **{**expected, **rest})


def classifier(family: str, **options: Any) -> Any:
    return from_config(family, "ForImageClassification", Pixels, **options)


MODELS = (
    # q, k, v, o, fc1, fc2: 6 a layer and the classifier
    transformer("vit", classifier("ViT", **VIT), 25),
    # pwconv1, pwconv2: 2 a block, nine blocks, and the classifier
    convolutional(
        "convnext", classifier("ConvNext", **CONVNEXT), 2, 2, 3, 2, runs=(2, 2, 3, 2), kinds={"conv-mlp": 9}, linears=19
    ),
    # stages 1 to 3 open with a projected shortcut: 1+1, 1+2, 1+1
    convolutional("resnet_hf", classifier("ResNet", **RESNET), 2, 2, 3, 2, runs=(2, 2), note="3 of 9 skips projected"),
    convolutional("resnet_tv", lambda: seeded(nets.ResNet), 2, 2, 3, 2, runs=(2, 2), note="3 of 9 skips projected"),
    transformer("deit", classifier("DeiT", **VIT), 25),
    transformer(
        "dinov2", classifier("Dinov2", **DINO), 25, note=f"each branch ends in a learned scale per channel; {FIXED}"
    ),
    # q, k, v, o, fc1, fc2: 6 a layer, four layers; patch merging 1; classifier 1
    transformer(
        "swin",
        from_config("Swin", "ForImageClassification", FixedPixels, **SWIN),
        26,
        runs=(2,),
        note=f"stage 0: plain and shifted window differ; stage 1: one window holds all, equal blocks; {FIXED}",
    ),
    # token mixing fc1, fc2 and channel mixing fc1, fc2: 4 a block, and the head
    transformer("mixer", lambda: seeded(nets.Mixer), 17, kinds={"mlp": 8}),
    # widths 8, 16, 16, 16, 24, 24: MBConvs 1 and 4 change the shape
    convolutional("mbconv_plain", lambda: seeded(nets.MBConvNet), 3, runs=(2,), note="2 of 5 MBConvs have no skip"),
    convolutional(
        "mbconv_projected",
        lambda: seeded(lambda: nets.MBConvNet(project=True)),
        5,
        runs=(2,),
        note="2 of 5 skips are projected",
    ),
    picture("plain_cnn", lambda: seeded(nets.PlainCNN), **NO_RESIDUAL, linears=2, note="three stages and a classifier"),
    picture("densenet", lambda: seeded(nets.DenseNet), **NO_RESIDUAL, linears=1, note="features are concatenated"),
)
