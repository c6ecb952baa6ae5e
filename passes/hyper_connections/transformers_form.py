"""Coefficients of hyper-connections from and to the models of Transformers that are built with them.

=============  ========  =====================================================  =================
model_type     mixer     a site                                                 end
=============  ========  =====================================================  =================
deepseek_v4    mhc       ``fn [2n + n^2, nC]``, ``base``, ``scale [3]``         ``hc_head``
glm5_next      mhc       the same                                               mean
hy_v4          ihc       ``fn [2n, nC]``, ``base``, ``scale [2]``               ``hc_head``
=============  ========  =====================================================  =================

Their mix ``comb[j, i]`` is the weight from stream j to stream i and is applied transposed; ours is ``H[i, j]``, so rows
of fn and base change places. Reads, writes and ``vec(X)`` (streams first, then features) agree. A block has two sites,
``attn_hc`` and ``ffn_hc``. Their streams start as n copies: ``expand`` is 1. Their ``hc_head`` is a read that depends on
the streams; ours is static, the head at a projection of 0. Their ``hc_eps`` is added to sums that we make exact: 0 here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program

MIXER_OF = {"deepseek_v4": "mhc", "glm5_next": "mhc", "hy_v4": "ihc"}
SITES = ("attn_hc", "ffn_hc")
_KEY = re.compile(r"(?:^|\.)layers\.(\d+)\.(attn_hc|ffn_hc)\.(fn|base|scale)$")
_GATES = ("read_gate", "write_gate", "mix_gate")
_BIASES = ("read_bias", "write_bias", "mix_bias")


def pipeline_of(config: Any) -> str:
    """The pipeline that has the streams and steps of a config: ``hc{mixer=mhc,mult=4,sinkhorn_iters=20,eps=1e-06}``.

    Raises:
        UsageError: a model without such coefficients, or with another range of writes than 0 to 2.
    """
    config = getattr(config, "text_config", config)
    mixer = MIXER_OF[_kind(config.model_type)]
    if getattr(config, "hc_magnitude", 2.0) != 2.0:
        raise UsageError(
            f"writes range from 0 to hc_magnitude={config.hc_magnitude}, here from 0 to 2", where="hc_magnitude"
        )
    steps = f",sinkhorn_iters={config.hc_sinkhorn_iters}" if mixer == "mhc" else ""
    return f"hc{{mixer={mixer},mult={config.hc_mult}{steps},eps={config.rms_norm_eps!r},init=rotate}}"


def config_of(program: Program) -> dict[str, Any]:
    """The fields of a Transformers config that say what the hyper-connections of a Program are."""
    options = _options(program)
    fields = {"hc_mult": options["mult"], "hc_eps": 0.0}
    if options["mixer"] == "mhc":
        fields["hc_sinkhorn_iters"] = options["sinkhorn_iters"]
    return fields


def import_coefficients(
    program: Program, state: Mapping[str, torch.Tensor], model_type: str, *, stack: int = 0, static_head: bool = False
) -> None:
    """Take the coefficients of a state dict over into a rewritten Program, in place.

    Args:
        program: rewritten by :func:`pipeline_of`, with two residuals a block.
        state: state dict of the whole model; other entries are ignored.
        stack: which rewritten stack, in order.
        static_head: accept that the end's read loses what depends on the streams.

    Raises:
        UsageError: another mixer or number of sites, or an end that only ``static_head`` fits.
    """
    _check(program, model_type)
    found: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        if match := _KEY.search(key):
            number = len(SITES) * int(match[1]) + SITES.index(match[2])
            found.setdefault(number, {})[match[3]] = tensor
    prefix, numbers = _sites(program, stack)
    if set(found) != numbers:
        raise UsageError(
            f"the state dict has {len(found)} sites of hyper-connections, the program {len(numbers)}", where=model_type,
            hint="import into a model of as many blocks, rewritten at all of its sites",
        )  # fmt: skip
    values = {
        f"{prefix}.{number}.{k}": v for number, site in found.items() for k, v in site_from_transformers(site).items()
    }
    n = program.tensor(f"{prefix}.expand").numel()
    values[f"{prefix}.expand"] = torch.ones(n)
    values[f"{prefix}.reduce"] = _reduce(state, n, static_head)
    for name, value in values.items():
        if program.tensor(name).shape != value.shape:
            raise UsageError(
                f"{name} is {list(program.tensor(name).shape)}, in the state dict {list(value.shape)}", where=model_type,
                hint="hc_mult and hidden_size must be the same",
            )  # fmt: skip
    with torch.no_grad():
        for name, value in values.items():
            program.tensor(name).copy_(value)


def export_coefficients(program: Program, model_type: str, *, stack: int = 0) -> dict[str, torch.Tensor]:
    """State-dict entries of a Transformers model, ``layers.0.attn_hc.fn`` and so on, in float32.

    Raises:
        UsageError: another mixer, an odd number of sites, or a start or end that the architecture cannot say.
    """
    _check(program, model_type)
    prefix, numbers = _sites(program, stack)
    if numbers != set(range(2 * (len(numbers) // 2))):
        raise UsageError(
            "a block has two sites there", where=model_type, hint="rewrite a model with attention and MLP, at all sites"
        )
    expand, reduce = (program.read(f"{prefix}.{k}").detach() for k in ("expand", "reduce"))
    if not torch.equal(expand, torch.ones_like(expand)):
        raise UsageError("streams start as copies there", where=f"{prefix}.expand", hint="keep expand at 1 (init=rotate)")  # fmt: skip
    entries: dict[str, torch.Tensor] = {}
    for number in sorted(numbers):
        start = f"{prefix}.{number}."
        site = {n.removeprefix(start): t.detach() for n, t in program.named_tensors() if n.startswith(start)}
        for key, value in site_to_transformers(site).items():
            entries[f"layers.{number // 2}.{SITES[number % 2]}.{key}"] = value
    return entries | _head(program, prefix, model_type, reduce.float())


def site_from_transformers(site: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our parameters of one site from ``fn``, ``base`` and ``scale``."""
    base, scale = site["base"], site["scale"]
    order, n = _order(base.numel(), scale.numel())
    parts = base[order].split([n, n, base.numel() - 2 * n])
    count = scale.numel()
    return {
        "phi": site["fn"][order],
        **dict(zip(_BIASES[:count], parts, strict=False)),
        **dict(zip(_GATES[:count], scale.split(1), strict=True)),
    }


def site_to_transformers(site: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``fn``, ``base`` and ``scale`` from our parameters of one site; the inverse of :func:`site_from_transformers`."""
    base = torch.cat([site[k] for k in _BIASES if k in site])
    scale = torch.cat([site[k] for k in _GATES if k in site])
    order, _ = _order(base.numel(), scale.numel())  # an exchange of rows is its own inverse
    return {"fn": site["phi"][order].float(), "base": base[order].float(), "scale": scale.float()}


def _order(size: int, gates: int) -> tuple[list[int], int]:
    """Where our rows are among theirs, and n."""
    if gates == 2:
        return list(range(size)), size // 2
    n = round((1 + size) ** 0.5) - 1  # n^2 + 2n rows
    return [*range(2 * n), *(2 * n + n * j + i for i in range(n) for j in range(n))], n


def _reduce(state: Mapping[str, torch.Tensor], n: int, static_head: bool) -> torch.Tensor:
    head = {k.rpartition(".")[2]: v for k, v in state.items() if k.rpartition(".")[2].startswith("hc_")}
    if not head:
        return torch.full((n,), 1.0 / n)
    if not static_head and bool((head["hc_fn"] * head["hc_scale"]).any()):
        raise UsageError(
            "the head reads the streams by weights that depend on them, here they are static", where="hc_head",
            hint="static_head=True keeps its base alone",
        )  # fmt: skip
    return torch.sigmoid(head["hc_base"].double()).float()


def _head(program: Program, prefix: str, model_type: str, reduce: torch.Tensor) -> dict[str, torch.Tensor]:
    if model_type == "glm5_next":
        if not torch.equal(reduce, torch.full_like(reduce, 1.0 / reduce.numel())):
            raise UsageError(
                "the streams end in their mean there", where=f"{prefix}.reduce", hint="keep reduce at 1/n in training"
            )
        return {}
    if bool(((reduce <= 0) | (reduce >= 1)).any()):
        raise UsageError("reads of the head are sigmoids there", where=f"{prefix}.reduce", hint="keep reduce in (0, 1)")
    width = program.tensor(f"{prefix}.0.phi").shape[1]
    return {
        "hc_head.hc_fn": torch.zeros(reduce.numel(), width),
        "hc_head.hc_base": torch.logit(reduce.double()).float(),
        "hc_head.hc_scale": torch.full((1,), 0.01),
    }


def _kind(model_type: str) -> str:
    kind = model_type.removesuffix("_text")
    if kind not in MIXER_OF:
        raise UsageError(
            f"{model_type} has no hyper-connections that are known here", where="model_type", hint=", ".join(MIXER_OF)
        )
    return kind


def _check(program: Program, model_type: str) -> None:
    mixer, mine = MIXER_OF[_kind(model_type)], _options(program)["mixer"]
    if mine != mixer:
        raise UsageError(
            f"{model_type} has {mixer}, the program {mine}", where="mixer", hint=f"rewrite with hc{{mixer={mixer}}}"
        )


def _options(program: Program) -> dict[str, Any]:
    from hcx.rewrite.pipeline.registry import passes

    steps = [p for e in program.history for p in passes(e.pipeline) if p.name == "hc"]
    if len(steps) != 1:
        raise UsageError(
            f"{len(steps)} rewrites to hyper-connections, not one", where="hc", hint="rewrite with hc once"
        )
    return steps[0].options()


def _sites(program: Program, stack: int) -> tuple[str, set[int]]:
    """Prefix of a stack's tensors, and the numbers of its sites."""
    found: dict[str, set[int]] = {}
    for name, origin in program.origin.items():
        if origin == "hc" and (match := re.match(r"(hcx\.hc_\d+\.(\d+))\.(\d+)\.", name)):
            found.setdefault(match[1], set()).add(int(match[3]))
    if not 0 <= stack < len(found):
        raise UsageError(f"there are {len(found)} stacks with hyper-connections", where="stack")
    return list(found.items())[stack]
