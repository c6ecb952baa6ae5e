"""Figures of mixers against closed forms and numpy, and ``hcx inspect --mixers`` on rewritten models."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from hcx.cli import inspect
from hcx.cli.main import main
from hcx.cli.mixer_report import line_chart
from hcx.kernels import maps
from hcx.passes.hyper_connections import diagnostics, inspect_mixers
from hcx.rewrite import UsageError, load, trace
from torch import nn

from tests.test_composition import llama, randomise, traced
from tests.test_hc import ByHand

pytestmark = pytest.mark.usefixtures("traced_once")

# ---- figures of matrices


def random_mixes(count: int = 50, n: int = 4) -> torch.Tensor:
    return torch.randn(count, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_figures_of_random_matrices_are_those_of_numpy():
    mixes = random_mixes()
    got = {k: v.numpy() for k, v in diagnostics.mix_figures(mixes).items()}
    for t, h in enumerate(mixes.numpy()):
        s = np.linalg.svd(h, compute_uv=False)
        ones = np.ones(4) / 2
        away = np.eye(4) - np.outer(ones, ones)
        expected = {
            "sigma1": s[0], "sigma2": s[1], "sigma_n": s[3], "det": np.linalg.det(h),
            "row_error": abs(h.sum(1) - 1).max(), "column_error": abs(h.sum(0) - 1).max(),
            "forward_gain": abs(h.sum(1)).max(), "backward_gain": abs(h.sum(0)).max(),
            "mean_gain": ones @ h @ ones, "to_mean": np.linalg.norm(ones @ h @ away),
            "from_mean": np.linalg.norm(away @ h @ ones),
        }  # fmt: skip
        for name, value in expected.items():
            assert got[name][t] == pytest.approx(value, abs=1e-12), name


def test_angles_of_quaternion_pairs_are_sum_and_difference_of_theirs():
    """q turns by phi_q, r by phi_r; the rotation has phi_q +- phi_r (docs/sources.md, ohc)."""
    phi_q, phi_r = torch.tensor([20.0, 70.0, 5.0]).deg2rad(), torch.tensor([3.0, 15.0, 40.0]).deg2rad()
    axis = torch.tensor([2.0, -1.0, 2.0]) / 3
    logits = torch.cat([f(p)[None] * w - o for p in (phi_q, phi_r) for f, w, o in
                        ((torch.cos, torch.ones(1), 1.0), *((torch.sin, a, 0.0) for a in axis))])  # fmt: skip
    mixes = maps.rotation(logits.double(), 4).movedim(-1, 0)
    expected = torch.rad2deg(torch.stack([phi_q + phi_r, (phi_q - phi_r).abs()], 1)).double()
    torch.testing.assert_close(diagnostics.rotation_angles(mixes), expected, rtol=0, atol=1e-4)


def test_angles_are_those_of_the_nearest_rotation_and_missing_where_none_is():
    turn = torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    stretched = turn @ torch.diag(torch.tensor([3.0, 0.2, 1.0], dtype=torch.float64))
    flat = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    got = diagnostics.rotation_angles(torch.stack([turn, stretched, flat]))
    assert got[:2, 0].tolist() == pytest.approx([90.0, 90.0]) and got[2].isnan().all()


def test_cosine_and_spread_of_known_streams():
    equal = torch.randn(1, 3, 6, dtype=torch.float64).expand(4, 3, 6)
    apart = torch.eye(4, dtype=torch.float64)[:, None] * 2.5
    opposite = torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None, None] * torch.ones(2, 1, 5)
    for streams, cosine, spread in ((equal, 1, 0), (apart, 0, math.sqrt(3 / 4)), (opposite, -1, 1)):
        got = diagnostics.stream_figures(streams)
        assert got["cosine"].mean().item() == pytest.approx(cosine, abs=1e-12)
        assert got["spread"].mean().item() == pytest.approx(spread, abs=1e-7)
    x = torch.randn(4, 2, 6, dtype=torch.float64)
    pairs = [np.corrcoef(x[i, t], x[j, t]) for t in range(2) for i in range(4) for j in range(i)]
    assert len(pairs) == 12  # centring is not what a cosine does: compare with the plain one
    plain = [torch.cosine_similarity(x[i, 1], x[j, 1], 0).item() for i in range(4) for j in range(i)]
    assert diagnostics.stream_figures(x)["cosine"][1].item() == pytest.approx(sum(plain) / 6)


def test_composites_multiply_in_the_order_of_depth():
    mixes = [random_mixes(5)[:, :3, :3], random_mixes(1, 3), random_mixes(5, 3).flip(0)]
    got = diagnostics.composites(mixes)
    whole = mixes[2] @ mixes[1] @ mixes[0]
    assert got["forward_gain"][-1].item() == pytest.approx(whole.sum(2).abs().max().item())
    assert got["backward_gain"][-1].item() == pytest.approx(whole.sum(1).abs().max().item())
    away = torch.eye(3, dtype=torch.float64) - 1 / 3
    gains = torch.linalg.svdvals(away @ whole @ away)[:, 0]
    assert got["difference_gain"][-1].item() == pytest.approx(gains.mean().item())


def test_differences_die_out_under_doubly_stochastic_mixes_and_not_under_rotations():
    soft = [maps.sinkhorn(torch.randn(4, 4, 9, dtype=torch.float64), 200).movedim(-1, 0) for _ in range(12)]
    turns = [maps.rotation(torch.randn(8, 9, dtype=torch.float64), 4).movedim(-1, 0) for _ in range(12)]
    got = diagnostics.composites(soft)
    assert (got["difference_gain"] <= got["sigma2_product"] * (1 + 1e-9)).all()
    assert got["sigma2_product"][-1] < diagnostics.HOMOGENEOUS and got["forward_gain"][-1].item() == pytest.approx(1)
    assert diagnostics.composites(turns)["sigma2_product"][-1].item() == pytest.approx(1, abs=1e-6)
    sigma2 = torch.cat([torch.linalg.svdvals(m)[:, 1] for m in soft])
    depth = diagnostics.effective_depth(sigma2)
    assert torch.exp(sigma2.log().mean() * depth).item() == pytest.approx(diagnostics.LEVEL)
    assert diagnostics.effective_depth(torch.ones(3)) == math.inf


# ---- spectrum of Jacobians


def test_energy_of_the_jacobian_is_its_closed_form():
    """For one layer E tr(J^T J) / N = |H|_F^2 / n + v; for L orthogonal ones (1 + v / L)^L."""
    mix = random_mixes(1)
    one = diagnostics.jacobian_spectrum([mix], draws=20, variance=0.5).square().mean().item()
    assert one == pytest.approx(mix.square().sum().item() / 4 + 0.5, rel=0.02)
    turns = [maps.rotation(torch.randn(8, 3, dtype=torch.float64), 4).movedim(-1, 0) for _ in range(6)]
    many = diagnostics.jacobian_spectrum(turns, draws=20, variance=2.0).square().mean().item()
    assert many == pytest.approx((1 + 2.0 / 6) ** 6, rel=0.03)


def test_spectrum_at_the_edge_of_free_probability():
    """One layer with H = I: values of I + G fill [lower, upper] with the edges of the free convolution."""
    variance = 0.05
    got = diagnostics.jacobian_spectrum([torch.eye(4, dtype=torch.float64)[None]], width=100, draws=2)
    assert predicted_edge(variance) == pytest.approx(got.amax(1).mean().item(), rel=0.02)


def predicted_edge(variance: float) -> float:
    """Largest singular value: beyond it G(z) of ``u = 1 - v G, G = u / (u^2 z - 1)`` is real.

    Source: docs/sources.md, random-jacobian.
    """
    for s in np.linspace(3.0, 1.0, 2001):
        # v u^2 z - ... as a cubic in u: u = 1 - v u / (u^2 z - 1)
        z = s * s
        roots = np.roots([z, -z, variance - 1, 1])
        if abs(roots.imag).max() > 1e-9:
            return s
    raise AssertionError("no edge")


def test_condition_of_48_layers():
    """Small for identity and rotations, vast for doubly stochastic mixes (docs/sources.md, random-jacobian)."""

    def condition(mixes) -> float:
        values = diagnostics.jacobian_spectrum(mixes, draws=2)
        return torch.log10(values[:, 0] / values[:, -1]).mean().item()

    eye = [torch.eye(4, dtype=torch.float64)[None]] * 48
    turns = [maps.rotation(torch.randn(8, 2, dtype=torch.float64), 4).movedim(-1, 0) for _ in range(48)]
    soft = [maps.sinkhorn(torch.randn(4, 4, 2, dtype=torch.float64), 20).movedim(-1, 0) for _ in range(48)]
    assert 0.2 < condition(eye) < 0.4 and 0.2 < condition(turns) < 0.4 and condition(soft) > 15


def test_small_singular_values_beyond_the_precision_of_a_product():
    """Without noise the values are those of the mixes: 1 and 0.01^12, beyond float64's 1e-16."""
    mix = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.01], dtype=torch.float64))[None]
    got = diagnostics.jacobian_spectrum([mix] * 12, variance=0.0, width=2, draws=1)
    expected = torch.tensor([[1.0] * 6 + [1e-24] * 2], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


# ---- Programs


@pytest.mark.parametrize("mixer", ["hc", "ohc", "ihc", "mhc"])
def test_figures_of_a_program_are_those_of_streams_by_hand(mixer):
    model, args, program = traced("llama")
    new = program.rewrite(f"hc{{mixer={mixer}}}", check=False)
    randomise(new)
    (stack,) = inspect_mixers(new, new.signature.bind(args, {}))
    hand = ByHand(new, mixer=mixer)
    mixes, coefficients = [], hand.coefficients

    def kept(site, number, streams):
        found = coefficients(site, number, streams)
        mixes.append(torch.as_tensor(found[1]).double())
        return found

    hand.coefficients = kept
    with torch.no_grad():
        llama(model, *args, hand)
    assert len(stack.sites) == len(mixes) == 8 and stack.streams == 4
    for site, mix, streams in zip(stack.sites, mixes, hand.seen, strict=True):
        each = mix.reshape(4, 4, -1).movedim(-1, 0).numpy()
        values = np.linalg.svd(each, compute_uv=False)
        assert site.mean["sigma2"] == pytest.approx(values[:, 1].mean(), abs=1e-4)
        assert site.worst["sigma1"] == pytest.approx(values[:, 0].max(), abs=1e-4)
        assert site.worst["row_error"] == pytest.approx(abs(each.sum(2) - 1).max(), abs=1e-4)
        assert site.mix == pytest.approx(each.mean(0), abs=1e-4)
        x = torch.stack(streams).double().flatten(1, -2)
        pairs = [torch.cosine_similarity(x[i], x[j], -1).mean().item() for i in range(4) for j in range(i)]
        assert site.mean["cosine"] == pytest.approx(sum(pairs) / 6, abs=1e-4)
    assert stack.sites[0].dynamic == (mixer != "hc")


class Picture(nn.Module):
    """Two convolutional residuals of one width."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_pictures_are_one_row_an_example():
    x = torch.randn(2, 3, 8, 8)
    new = trace(Picture().eval(), (x,)).rewrite("hc{mult=3}", check=False)
    randomise(new)
    (stack,) = inspect_mixers(new)
    assert stack.positions == 1 and len(stack.sites) == 2 and len(stack.sites[0].mean["angles"]) == 1


def test_without_streams_there_is_nothing_to_measure():
    with pytest.raises(UsageError, match="no mixers"):
        inspect_mixers(traced("llama")[2])


# ---- the command


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A random oHC on the small encoder-decoder: two stacks."""
    new = traced("t5")[2].rewrite("hc{mixer=ohc}", check=False)
    randomise(new)
    place = tmp_path_factory.mktemp("mixers") / "t5.hcx"
    new.save(place)
    return place


def test_the_table_the_json_and_the_page(written, tmp_path, capsys):
    page = tmp_path / "mixers.html"
    capsys.readouterr()
    assert main(["inspect", str(written), "--mixers", "--html", str(page), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema_version"] == 1 and data["exit_code"] == 0 and len(data["mixers"]) == 2
    stacks = inspect_mixers(load(written))  # the recorded inputs
    assert data["mixers"][1]["sites"][0]["mean"]["det"] == pytest.approx(1, abs=1e-5)
    assert data["mixers"][1]["depth"]["forward_gain"] == pytest.approx(stacks[1].depth["forward_gain"])
    html = page.read_text()
    sites = sum(len(s.sites) for s in stacks)
    assert html.count('class="cell"') == 16 * sites and html.count("<polyline") >= 2 * 10
    assert not re.search(r"\s(src|href)=|url\(|@import", html) and "default-src 'none'" in html
    assert main(["inspect", str(written), "--mixers"]) == 0
    out = capsys.readouterr().out
    assert all(s.address in out for stack in stacks for s in stack.sites) and "Jacobian (Monte Carlo)" in out
    assert main(["inspect", str(written), "--mixers", "--html", str(page)]) == 2  # it exists


def test_inputs_of_ones_own_change_dynamic_mixes(written, tmp_path):
    from safetensors.torch import save_file

    _, args, program = traced("t5")
    names = [a.name for a in sorted((a for a in program.signature.arguments if a.position is not None), key=lambda a: a.position)]  # fmt: skip
    kwargs = {n: t.flip(-1).contiguous() for n, t in zip(names, args, strict=False)}
    save_file(kwargs, tmp_path / "x.safetensors")
    got = inspect(str(written), mixers=True, inputs=str(tmp_path / "x.safetensors")).data["mixers"][0]["sites"][2]
    (expected, _) = inspect_mixers(load(written), load(written).signature.bind((), kwargs))
    assert got["mean"]["cosine"] == pytest.approx(expected.sites[2].mean["cosine"])
    assert got["mean"]["cosine"] != inspect_mixers(load(written))[0].sites[2].mean["cosine"]


def test_what_cannot_be_shown_is_refused(written, tmp_path):
    for options in ({"html": "x.html"}, {"mixers": True, "why": True}, {"mixers": True, "html": "x.svg"}):
        with pytest.raises(UsageError):
            inspect(str(written), **options)
    with pytest.raises(UsageError):
        (tmp_path / "a.txt").write_text("words"), (tmp_path / "b.safetensors").write_bytes(b"")
        inspect(str(written), mixers=True, text=str(tmp_path / "a.txt"), inputs=str(tmp_path / "b.safetensors"))


def test_a_chart_keeps_gaps_and_names():
    chart = line_chart({"a<b": [1.0, None, 2.0, 3.0], "flat": [1.0] * 4}, logarithmic=True)
    assert chart.count("<polyline") == 3 and "a&lt;b" in chart and "a<b" not in chart


def heights(chart: str) -> list[float]:
    return [float(p.partition(",")[2]) for line in re.findall(r'points="([^"]*)"', chart) for p in line.split()]


@pytest.mark.parametrize("logarithmic", [False, True])
def test_rounding_noise_is_drawn_as_a_straight_line_and_differences_are_not(logarithmic):
    noise = heights(line_chart({"a": [1.0, 1.0 + 3e-7, 1.0 - 2e-7]}, logarithmic=logarithmic))
    real = heights(line_chart({"a": [1.0, 1.02, 0.98]}, logarithmic=logarithmic))
    assert max(noise) - min(noise) <= 0.1 and max(real) - min(real) > 100


def test_an_axis_of_angles_does_not_begin_below_zero():
    assert ">0.0000<" in line_chart({"a": [0.4, 80.0]}) and "-" not in "".join(
        re.findall(r">([^<>]+)</text>", line_chart({"a": [0.4, 80.0]}))
    )
