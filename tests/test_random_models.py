"""Random small networks under random pipelines: a right result or an error of hcx, never a wrong result, never a crash.

``HCX_EXAMPLES=5000 python -m pytest tests/test_random_models.py`` draws that many, other ones at each run;
``HCX_SHRINK=1`` makes a failing example smaller (minutes); ``HCX_COUNTS=FILE`` appends a line an example.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import pytest
import torch
from hcx.rewrite import HcxError, NoMatchError, load, trace
from hcx.rewrite.pipeline import contracts
from hcx.rewrite.pipeline.registry import passes
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

from tests.random_models import NetSpec, Step, build, nets

TESTS = 5
EXAMPLES = int(os.environ.get("HCX_EXAMPLES", "200"))
settings.register_profile(
    "random_models",
    max_examples=max(1, EXAMPLES // TESTS),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, *([Phase.shrink] if "HCX_SHRINK" in os.environ else [])],
)
RANDOM = settings(settings.get_profile("random_models"))


PASSES = {
    "hc": ("", "mult=2", "mult=3,init=replicate", "init=rotate,mult=3", "mixer=ihc", "mixer=ihc,mult=2,init=rotate"),
    "looped": ("", "steps=3", "mix=output", "mix=input_rms", "start=0,end=1", "start=0,end=2,mix=output"),
    "exits": ("", "at=[1]", "head=affine", "head=classifier", "score=margin,at=[1]"),
    "lora": ("rank=2", "rank=1,rslora=true", "rank=2,init=gaussian"),
    "quantize": ("bits=16",),
}
AWAY = {"looped": "scalar=0.4", "exits": "threshold=0.2"}
QUANTIZED = ("bits=4", "bits=8,group=0", "bits=3,group=4,symmetric=true")


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, str]:
    """A random pipeline in its legal order, neutral and (the same passes) away from neutral."""
    chosen = draw(st.lists(st.sampled_from(sorted(PASSES)), min_size=1, max_size=3, unique=True))
    neutral, away = [], []
    for name in (n for n in PASSES if n in chosen):
        options = draw(st.sampled_from(PASSES[name]))
        neutral.append(f"{name}{{{options}}}")
        options = draw(st.sampled_from(QUANTIZED)) if name == "quantize" else options
        away.append(f"{name}{{{','.join(filter(None, (options, AWAY.get(name))))}}}")
    return ",".join(neutral), ",".join(away)


def note(stage: str, outcome: object, spec: NetSpec, pipeline: str = "") -> None:
    if "HCX_COUNTS" in os.environ:
        text = f"{type(outcome).__name__}: {outcome}".replace("\n", " ") if isinstance(outcome, Exception) else outcome
        with open(os.environ["HCX_COUNTS"], "a") as file:
            file.write(f"{stage}\t{text}\t{pipeline}\t{spec}\n")


def run(function: Any, args: tuple) -> tuple[list[Any], Any]:
    with torch.no_grad():
        return tree_flatten(function(*(a.clone() for a in args)))


def compare(program: Any, model: Any, args: tuple, contract: contracts.Contract, why: str) -> None:
    """The same structure, and tensors as the contract says."""
    (got, structure), (expected, wanted) = run(program, args), run(model, args)
    if contract is not RELOADED:  # a loaded Program makes up a namedtuple's class
        assert structure == wanted, f"{why}: {structure} for {wanted}"
    pairs = list(zip(got, expected, strict=True))
    assert all(g == e for g, e in pairs if not isinstance(e, torch.Tensor)), why
    tensors = [(g, e) for g, e in pairs if isinstance(e, torch.Tensor)]
    measured = contracts.compare([g for g, _ in tensors], [e for _, e in tensors])
    assert contract.check(measured), f"{why}: {contract} does not hold: {measured}"


RELOADED = contracts.Exact()


def traced(spec: NetSpec):
    """(model, program, two sets of arguments), or None where hcx refuses."""
    model, *shapes = build(spec)
    try:
        program = trace(model, shapes[0])
    except HcxError as error:
        note("trace", error, spec)
        return None
    usable = [shapes[0]]
    try:
        program.signature.bind(shapes[1], {})
        usable.append(shapes[1])
    except HcxError as error:
        note("shape", error, spec)
    contract = contracts.Exact() if program.trace_exact else contracts.Rounding(64)
    for args in usable:
        compare(program, model, args, contract, "the traced program")
    return model, program, usable


KNOWN_CRASH = "Attempting to broadcast a dimension"
"""Of exits whose own classifier pools positions where the model answers at each: see the test below."""


def rewritten(program: Any, pipeline: str, **options: Any) -> Any:
    """Passes that find nothing on this network are left out, as long as one is left."""
    steps = passes(pipeline)
    while True:
        try:
            return program.rewrite(steps, **options)
        except RuntimeError as error:
            if "exits" in pipeline and KNOWN_CRASH in str(error):
                raise NoMatchError(KNOWN_CRASH) from error
            raise
        except NoMatchError as error:
            steps = [s for s in steps if f"`{s.name}`" not in error.what]
            if not steps:
                raise


def check_neutral(spec: NetSpec, pipeline: str) -> None:
    found = traced(spec)
    if found is None:
        return
    model, program, shapes = found
    try:
        new = rewritten(program, pipeline)
    except HcxError as error:
        note("neutral", error, spec, pipeline)
        return
    contract = contracts.combined([contracts.from_json(e["contract"]) for e in new.history])
    if isinstance(contract, contracts.Rounding):
        contract = contracts.Rounding(2 * contract.k)  # the bound is for the check inputs
    elif isinstance(contract, contracts.Exact) and not program.trace_exact:
        contract = contracts.Rounding(64)
    for args in shapes:
        compare(new, model, args, contract, f"{pipeline} at its start")
    note("neutral", "right", spec, pipeline)


def check_away(spec: NetSpec, pipeline: str) -> None:
    found = traced(spec)
    if found is None:
        return
    model, program, shapes = found
    try:
        new = rewritten(program, pipeline, check=False)
    except HcxError as error:
        note("away", error, spec, pipeline)
        return
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for parameter in new.new_parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    for args in shapes:
        compare(new, model, args, contracts.Structural(), pipeline)
        assert all(torch.isfinite(t).all() for t in run(new, args)[0] if isinstance(t, torch.Tensor)), pipeline
    with tempfile.TemporaryDirectory() as folder:
        new.save(f"{folder}/a.hcx")
        again = load(f"{folder}/a.hcx")
    for args in shapes:
        compare(again, new, args, RELOADED, f"{pipeline}, saved and loaded")
    note("away", "right", spec, pipeline)


@pytest.mark.parametrize("part", range(TESTS))
def test_random_models(part: int) -> None:
    def every(spec: NetSpec, pipeline: tuple[str, str]) -> None:
        if spec.seed % 2:
            check_neutral(spec, pipeline[0])
        else:
            check_away(spec, pipeline[1])

    drawn = RANDOM(given(nets(), pipelines())(every))
    (drawn if "HCX_EXAMPLES" in os.environ else seed(part)(drawn))()


def test_loaded_tensors_are_aligned_as_torch_aligns_them(tmp_path):
    block = (Step(), Step())
    model, args, _ = build(NetSpec("tokens", 9, (block, block), (0, 1, 0)))
    program = trace(model, args)
    program.save(tmp_path / "a.hcx")
    again = load(tmp_path / "a.hcx")
    assert all(t.data_ptr() % 64 == 0 for _, t in again.named_tensors())


@pytest.mark.parametrize("options", ["head=classifier", "at=[1]"])
def test_a_classifier_exit_of_a_model_that_answers_at_each_position_is_right_or_refused(options):
    model, args, _ = build(NetSpec(width=8, blocks=((Step(),),) * 4, order=(0, 1, 2, 3), narrow=5))
    with contextlib.suppress(HcxError):
        trace(model, args).rewrite(f"exits{{{options}}}", allow_partial=True)


ROWS = {"width": 4, "final_norm": False}
FOUR = {"order": (0, 1, 2, 3), **ROWS}
STREAMS = {
    "adds to an earlier value of the stream": NetSpec(blocks=((Step(),),) * 4, join="add", **FOUR),
    "two stacks of one name": NetSpec(blocks=((Step("averaged"),),) * 4, join="concat", **FOUR),
    "one post-norm residual": NetSpec(blocks=((Step("post"),),), order=(0,), **ROWS),
}


@pytest.mark.parametrize("spec", STREAMS.values(), ids=STREAMS)
def test_hyper_connections_fit_or_are_skipped(spec):
    model, args, _ = build(spec)
    with contextlib.suppress(NoMatchError):
        trace(model, args).rewrite("hc")
