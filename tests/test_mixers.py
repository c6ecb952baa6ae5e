"""Mixers against modules of Transformers at random parameters, and their invariants over many draws."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from hcx.kernels import maps
from hcx.rewrite import UsageError, trace
from hcx.rewrite.ir.dataflow import WRITES, op_name
from hcx.rewrite.pipeline.registry import passes
from hcx.rewrite.run.reading import observe
from torch import nn

DRAWS = 2000


def draws(*shape: int, std: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, DRAWS, generator=torch.Generator().manual_seed(seed)) * std


def matrices(mixed: torch.Tensor) -> torch.Tensor:
    return mixed.movedim(-1, 0).double()


# ---- coefficients of a site in a graph, against modules of Transformers on the same streams


class Two(nn.Module):
    """Two residuals on a stream ``[B, S, 8]``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def site_of(mixer: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Random parameters of the second site, the streams that reach it, and its read, mix and write."""
    torch.manual_seed(3)
    x = torch.randn(2, 5, 8)
    new = trace(Two().eval(), (x,)).rewrite(f"hc{{mixer={mixer},eps=1e-7}}", check=False)
    prefix = "hcx.hc_0.0.1."
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.startswith(prefix):
                parameter.add_(torch.randn_like(parameter))
    read = [n for n in new.graph.nodes if "stream_read" in str(n.target)][1]
    write = [n for n in new.graph.nodes if op_name(n) in WRITES][1]
    wanted = [read.args[0], read.args[1], *write.args[2:]]
    with torch.no_grad():
        streams, *coefficients = observe(new, wanted, [x])
    values = {n.removeprefix(prefix): t.detach() for n, t in new.named_tensors() if n.startswith(prefix)}
    return values, streams, coefficients


def config(**more) -> SimpleNamespace:
    return SimpleNamespace(hc_mult=4, hc_sinkhorn_iters=20, hc_eps=0.0, rms_norm_eps=1e-7, hidden_size=8, **more)


@pytest.mark.parametrize("name", ["deepseek_v4.DeepseekV4HyperConnection", "glm5_next.Glm5NextTextHyperConnection"])
def test_mhc_is_that_of_transformers(name):
    import importlib

    package, cls = name.split(".")
    module = getattr(importlib.import_module(f"transformers.models.{package}.modeling_{package}"), cls)(config())
    values, streams, (read, mix, write) = site_of("mhc")
    crossed = [*range(8), *(8 + 4 * j + i for i in range(4) for j in range(4))]  # theirs goes from stream i to stream j
    with torch.no_grad():
        module.fn.copy_(values["phi"][crossed])
        module.base.copy_(torch.cat([values["read_bias"], values["write_bias"], values["mix_bias"]])[crossed])
        module.scale.copy_(torch.cat([values[f"{k}_gate"] for k in ("read", "write", "mix")]))
        post, comb, collapsed = module(streams.movedim(0, 2).contiguous())
        mine = (read.unsqueeze(-1) * streams).sum(0)
    torch.testing.assert_close(write.movedim(0, -1), post, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mix.movedim((0, 1), (-1, -2)), comb, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine, collapsed, rtol=1e-4, atol=1e-5)


def test_ihc_is_that_of_transformers():
    from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

    module = HYV4HyperConnection(config(hc_magnitude=2.0))
    values, streams, (read, write) = site_of("ihc")
    with torch.no_grad():
        module.fn.copy_(values["phi"])
        module.base.copy_(torch.cat([values["read_bias"], values["write_bias"]]))
        module.scale.copy_(torch.cat([values["read_gate"], values["write_gate"]]))
        post, collapsed = module(streams.movedim(0, 2).contiguous())
        mine = (read.unsqueeze(-1) * streams).sum(0)
    torch.testing.assert_close(write.movedim(0, -1), post, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, collapsed, rtol=1e-4, atol=1e-5)


def test_mhc_is_that_of_liger_kernel():
    """It scales rows first and columns last: our map of transposed logits. Triton needs a GPU, or TRITON_INTERPRET=1."""
    pytest.importorskip("triton")
    ops = pytest.importorskip("liger_kernel.ops.mhc")
    if not torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("no GPU, and triton does not interpret")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values, streams, (read, mix, write) = site_of("mhc")
    bias = torch.cat([values["read_bias"], values["write_bias"], values["mix_bias"]])
    gates = [values[f"{k}_gate"][0] for k in ("read", "write", "mix")]
    tensors = [t.contiguous().to(device) for t in (streams.movedim(0, 2), values["phi"].T, bias, *gates)]
    with torch.no_grad():
        pre, post, res = ops.LigerMHCCoeffsFunction.apply(*tensors, True, 20, 1e-7, 0.0, 0.0, 2.0)
    torch.testing.assert_close(read.movedim(0, -1), pre.cpu(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(write.movedim(0, -1), post.cpu(), rtol=1e-5, atol=1e-5)
    logits = values["mix_gate"] * torch.ops.hcx.stream_head(streams, values["phi"], 1e-7)[8:]
    logits = (logits + values["mix_bias"][:, None, None]).unflatten(0, (4, 4))
    torch.testing.assert_close(maps.sinkhorn(logits, 20), mix, rtol=1e-4, atol=1e-5)
    turned = maps.sinkhorn(logits.transpose(0, 1), 20)
    torch.testing.assert_close(turned.movedim((0, 1), (-1, -2)), res.cpu(), rtol=1e-4, atol=1e-5)


# ---- invariants


@pytest.mark.parametrize("std", [1.0, 5.0])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_rotations_are_rotations(n, std):
    mixed = matrices(maps.rotation(draws(maps.logits_of_rotation(n), std=std), n))
    assert (mixed.mT @ mixed - torch.eye(n)).abs().max() <= 1e-6
    assert (torch.linalg.det(mixed) - 1).abs().max() <= 3e-6


def test_rotations_reach_more_than_cayley_can():
    """-I has no Cayley form; as quaternions it is q = -1, r = 1, that is l0 = -2."""
    logits = torch.zeros(8, 1)
    logits[0] = -2.0
    assert torch.equal(maps.rotation(logits, 4)[..., 0], -torch.eye(4))


@pytest.mark.parametrize("std", [1.0, 5.0])
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_cayley_is_the_transform(n, std):
    logits = draws(n, n, std=std)
    mixed, skew = matrices(maps.cayley(logits, 0.1)), -0.05 * matrices(logits - logits.transpose(0, 1))
    size = skew.square().sum((1, 2)).clamp_min(1.0)
    eye = torch.eye(n, dtype=torch.float64)
    assert ((mixed.mT @ mixed - eye).abs().amax((1, 2)) / size).max() <= 1e-6
    assert ((mixed - torch.linalg.inv(eye + skew) @ (eye - skew)).abs().amax((1, 2)) / size).max() <= 1e-6


def test_sinkhorn_rows_are_exact_and_columns_nearly():
    mixed = matrices(maps.sinkhorn(draws(4, 4, std=1.0), 20))
    columns = (mixed.sum(1) - 1).abs().amax(1)
    assert (mixed.sum(2) - 1).abs().max() <= 1e-6 and columns.max() <= 2e-3
    assert (columns <= 1e-5).double().mean() >= 0.99 and mixed.min() >= 0


@pytest.mark.parametrize("std", [1.0, 5.0])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_spectral_mixes_have_norm_one_and_keep_sums(n, std):
    m = n - 1
    left, right = (torch.tanh(draws(m * (m - 1) // 2, std=std, seed=s)) for s in (1, 2))
    mixed = matrices(maps.spectral_mix(left, right, draws(m, std=std, seed=3), n))
    assert max((mixed.sum(d) - 1).abs().max() for d in (1, 2)) <= 1e-6
    values = torch.linalg.svdvals(mixed)
    assert (values[:, 0] - 1).abs().max() <= 1e-6 and values.min() >= 0


@pytest.mark.parametrize("std", [1.0, 5.0])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_permutation_mixes_are_doubly_stochastic(n, std):
    mixed = matrices(maps.permutation_mix(draws(len(maps.permutations(n)), std=std), n))
    assert max((mixed.sum(d) - 1).abs().max() for d in (1, 2)) <= 1e-6 and mixed.min() >= 0


@pytest.mark.parametrize("std", [1.0, 5.0])
@pytest.mark.parametrize(("n", "logits"), [(2, 2), (3, 6), (4, 4), (6, 8), (8, 6)])
def test_kronecker_mixes_are_doubly_stochastic_and_commute(n, logits, std):
    mixed = matrices(maps.kronecker_mix(draws(logits, std=std), n))
    assert max((mixed.sum(d) - 1).abs().max() for d in (1, 2)) <= 1e-6 and mixed.min() >= 0
    if n in (2, 4, 8):  # the group of bit flips
        assert (mixed - mixed.mT).abs().max() <= 1e-6
        assert (mixed[1:] @ mixed[:-1] - mixed[:-1] @ mixed[1:]).abs().max() <= 1e-6
        assert torch.linalg.det(mixed).min() >= (-1e-6 if n > 2 else -1)


def test_the_first_kronecker_factor_is_the_most_significant_digit():
    logits = torch.tensor([-50.0, 50.0, 50.0, -50.0])[:, None]  # the first pair swaps
    order = maps.kronecker_mix(logits, 4)[..., 0].argmax(1).tolist()
    assert order == [2, 3, 0, 1]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_projectors_keep_the_mean_and_have_their_rank(rank):
    mixed = maps.pinned_projector(torch.randn(3, rank - 1, dtype=torch.float64))
    torch.testing.assert_close(mixed @ mixed, mixed)
    assert (mixed.sum(0) - 1).abs().max() <= 1e-12 and round(mixed.trace().item()) == rank


def test_zero_logits_are_the_identity_bit_for_bit():
    for n in (2, 3, 4, 8):
        eye = torch.eye(n).unsqueeze(-1).expand(n, n, 3)
        assert torch.equal(maps.rotation(torch.zeros(maps.logits_of_rotation(n), 3), n), eye)
        assert torch.equal(maps.cayley(torch.zeros(n, n, 3), 0.1), eye)


# ---- gradients


def test_the_exact_gradient_is_that_of_the_steps():
    logits = torch.randn(4, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: maps.sinkhorn(z, 20), (logits,))


def test_the_implicit_gradient_is_that_of_the_limit():
    logits = torch.randn(4, 4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weights = torch.randn(4, 4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (limit,) = torch.autograd.grad((maps.sinkhorn(logits, 2000) * weights).sum(), logits)
    (implicit,) = torch.autograd.grad((maps.sinkhorn(logits, 2000, True) * weights).sum(), logits)
    (short,) = torch.autograd.grad((maps.sinkhorn(logits, 1) * weights).sum(), logits)
    scale = limit.square().mean().sqrt()
    assert (implicit - limit).abs().max() <= 1e-5 * scale < (short - limit).abs().max()


# ---- deep delta learning


@pytest.mark.parametrize("mult", [1, 4])
def test_every_head_of_the_delta_rule_learns_after_one_step(mult):
    """Also where the first step makes the strength negative, which the clamp to [0, 2] would leave dead."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    program = trace(Two().double().eval(), (x,)).rewrite(f"hc{{mixer=ddl,mult={mult}}}")
    new = program.new_parameters()
    strengths = [p for n, p in new.items() if n.endswith("strength")]
    optimizer = torch.optim.SGD(new.values(), lr=0.1)
    signs = set()
    for direction in (1.0, -1.0):
        for parameter in strengths:
            parameter.detach().zero_()
        for _ in range(2):
            optimizer.zero_grad()
            (direction * program(x)[..., 0].mean()).backward()
            optimizer.step()
            signs |= {bool(s > 0) for s in strengths}
        heads = {n: p.grad for n, p in new.items() if "phi" in n}
        assert len(heads) == 4 and all(g.square().sum() > 0 for g in heads.values())
        assert all(s.grad.abs() > 0 for s in strengths)
    assert signs == {True, False}


def test_the_published_delta_rule_is_seen_to_change_the_function():
    """Without rho a branch gives its direction only."""
    from hcx.rewrite.pipeline.contracts import Rounding, compare

    program = trace(Two().eval(), (torch.randn(2, 5, 8),)).rewrite("hc{mixer=ddl,mult=1}")
    x = torch.randn(2, 5, 8)
    before = program(x)
    promise = Rounding(program.history[-1]["contract"]["k"])
    assert promise.check(compare([program(x)], [before]))
    with torch.no_grad():
        for name, parameter in program.new_parameters().items():
            parameter.fill_(1.0) if name.endswith("strength") else None
            parameter.zero_() if name.endswith("write") else None
    assert not promise.check(compare([program(x)], [before]))


# ---- export

KINDS = ["hc,dynamic=true", "ihc", "mhc", "mhc_lite", "ohc", "shc", "jpmhc", "jpmhc,manifold=grassmann", "ohc,mult=8"]
KINDS += ["kromhc", "kromhc,mult=6", "ddl", "ddl,mult=1"]


@pytest.mark.parametrize("mixer", KINDS)
def test_every_mixer_goes_through_a_file_and_onnx(mixer, tmp_path):
    import onnx
    from hcx.export import OnnxSession, to_onnx
    from hcx.rewrite import load

    torch.manual_seed(0)
    new = trace(Two().eval(), (torch.randn(2, 5, 8),)).rewrite(f"hc{{mixer={mixer}}}", check=False)
    with torch.no_grad():
        for parameter in new.new_parameters().values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    new.save(tmp_path / "a.hcx")
    to_onnx(load(tmp_path / "a.hcx"), tmp_path / "a.onnx")
    x = torch.randn(3, 7, 8)
    with torch.no_grad():
        torch.testing.assert_close(OnnxSession(tmp_path / "a.onnx")(x), new(x), rtol=1e-4, atol=1e-5)
    assert "Einsum" not in {node.op_type for node in onnx.load(tmp_path / "a.onnx").graph.node}


@pytest.mark.parametrize(
    "options",
    [
        "mixer=kromhc,mult=1", "mixer=ohc,manifold=grassmann", "mixer=ohc,gradient=implicit", "mixer=shc,sinkhorn_iters=3",
        "projector=2", "mixer=jpmhc,sinkhorn_iters=3", "mixer=mhc,eps=-1", "dynamic=true,eps=nan",
    ],
)  # fmt: skip
def test_options_that_a_mixer_does_not_have_are_refused(options):
    with pytest.raises(UsageError):
        passes(f"hc{{{options}}}")
