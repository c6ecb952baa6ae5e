"""Plain torch sequence models: nanoGPT and its variations, nn.TransformerEncoder, odd skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from . import skip_nets as skips
from . import text_nets as nets
from .base import BATCH, DEPTH, HEADS, HIDDEN, INNER, OTHER_BATCH, OTHER_SEQ, SEQ, Inputs, ZooModel, floats, ids, seeded
from .hf import other_ids


def gpt(name: str, make: Callable[[], nn.Module], **rest: Any) -> ZooModel:
    """Four blocks of attention (2 linears) and MLP (2 linears) and a head: 17 linears."""
    expected: dict[str, Any] = {
        "branches": 8,
        "adds": 8,
        "blocks": (4,),
        "runs": (4,),
        "kinds": {"attn": 4, "mlp": 4},
        "linears": 17,
        "other": other_ids,
    }
    return ZooModel(name=name, build=lambda: (seeded(make), (ids(),), {}), **{**expected, **rest})


def blocks(kind: Callable[[], nn.Module], trunk: Callable[..., nn.Module] = nets.GPT) -> Callable[[], nn.Module]:
    return lambda: trunk(kind() for _ in range(DEPTH))


def torch_encoder(norm_first: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, INNER, batch_first=True, norm_first=norm_first)
        encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        for parameter in encoder.parameters():  # the clones of one layer would all be equal
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        return encoder

    return make


def states(name: str, make: Callable[[], nn.Module], **rest: Any) -> ZooModel:
    """A model over float32[batch, seq, hidden]."""
    return ZooModel(
        name=name, build=lambda: (seeded(make), (floats(BATCH, SEQ, HIDDEN),), {}), **{"other": other_states, **rest}
    )


def other_states() -> Inputs:
    return (floats(OTHER_BATCH, OTHER_SEQ, HIDDEN, seed=2),), {}


NO_RESIDUAL: dict[str, Any] = {"branches": 0, "adds": 0, "blocks": (), "runs": (), "kinds": {}, "linears": 9}
FUSED = "without grad, eager takes a fused path that differs by 1e-6; see torch.backends.mha.set_fastpath_enabled"
# in_proj (packed), out_proj, linear1, linear2: 4 a layer
TORCH_ENCODER: dict[str, Any] = {
    "branches": 8,
    "adds": 8,
    "blocks": (4,),
    "runs": (4,),
    "kinds": {"attn": 4, "mlp": 4},
    "linears": 16,
    "note": FUSED,
}

MODELS = (
    states("nn_tenc_post", torch_encoder(norm_first=False), **TORCH_ENCODER),
    states("nn_tenc_pre", torch_encoder(norm_first=True), **TORCH_ENCODER),
    gpt("nanogpt_tied_wte", blocks(nets.Block)),
    gpt("data_dep_if", blocks(nets.DataDependentBlock), traceable=False, note="branches on the value of a tensor"),
    gpt("py_loop_tuple", blocks(nets.TupleBlock, nets.TupleGPT)),
    gpt("inplace_add", blocks(nets.InPlaceBlock), note="eager raises in backward: a saved tensor is overwritten"),
    gpt("stoch_depth_if", blocks(nets.StochasticIfBlock), note="plain in eval; not traceable in train mode"),
    gpt("stoch_depth_mask", blocks(nets.StochasticMaskBlock), note="plain in eval"),
    gpt("tied_blocks", nets.TiedGPT, note="one block object called four times"),
    states(
        "unetish",
        nets.UNetLike,
        branches=1,
        adds=1,
        blocks=(1,),
        runs=(),
        kinds={"mlp": 1},
        linears=4,
        note="the one skip is owned by the root module",
    ),
    gpt("deepnorm", blocks(skips.DeepNormBlock), note="alpha * x + f(x), then the norm"),
    gpt("skip_after_norm", blocks(skips.SkipAfterNormBlock), note="n + f(n) with n = norm(x)"),
    gpt("add_in_gate", blocks(skips.GatedBlock), linears=21, note="sigmoid(n + f(n)) with n = norm(x) is a gate"),
    gpt("sandwich_norm", blocks(skips.SandwichBlock), note="norms before and after each branch"),
    gpt("layer_scale", blocks(skips.LayerScaleBlock), note="a learned scale per channel on each branch"),
    gpt("rezero", blocks(skips.ReZeroBlock), note="a learned scalar on each branch, no norms in the blocks"),
    gpt("averaged", blocks(skips.AveragedBlock), note="(x + f(x)) / 2"),
    gpt("alpha_add", blocks(skips.AlphaBlock), note="torch.add(x, f(x), alpha=0.5)"),
    # attention 2, router 1: 3 a block, and the head; the experts are two einsums
    gpt("moe_einsum", blocks(skips.MoEBlock), kinds={"attn": 4, "moe": 4}, linears=13, note="3-D experts, einsum"),
    gpt("residual_wrappers", skips.WrapperGPT, note="eight modules in a Sequential, a block is two of them"),
    gpt("attribute_blocks", skips.AttributeGPT, note="layer1 to layer4 without a container"),
    gpt(
        "shared_block",
        skips.SharedMiddleGPT,
        branches=10,
        adds=10,
        blocks=(5,),
        runs=(3,),
        kinds={"attn": 5, "mlp": 5},
        linears=21,
        note="the middle block is one object called three times, first and last are wider",
    ),
    gpt(
        "preview",
        blocks(skips.PreviewBlock),
        branches=4,
        adds=4,
        kinds={"attn": 4},
        note="x + mlp(x + attn(x)); a branch with an attention in it is called attn",
    ),
    # two linears a layer and the head
    gpt(
        "hybrid",
        skips.HybridGPT,
        branches=6,
        adds=6,
        blocks=(6,),
        runs=(6,),
        kinds={"attn": 2, "mlp": 4},
        linears=13,
        note="layers in turns mlp, attn, mlp: every layer is a block, the run repeats after three",
    ),
    gpt("layer_table", skips.TableGPT, note="every layer takes its own entry of one table"),
    # two linears a layer and the head
    gpt("highway", blocks(skips.HighwayLayer), **NO_RESIDUAL, note="g * f(x) + (1 - g) * x"),
    gpt("concat", blocks(skips.ConcatLayer), **NO_RESIDUAL, note="x and f(x) are concatenated"),
)
