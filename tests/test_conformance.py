"""What every pass owes: the conformance kit on three models, legal orders, and certificates that say what is dead."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
from hcx.rewrite import NoMatchError, Pass, PlanError, trace
from hcx.rewrite.pipeline.registry import get, homes
from hcx.rewrite.testing import conformance, tiny_decoder

from tests.test_composition import traced

pytestmark = pytest.mark.usefixtures("traced_once")
OPTIONS = {
    "hc": "hc{mixer=ihc,mult=2}",
    "looped": "looped{start=1,end=3,steps=3,mix=output,scalar=0.3}",
    "exits": "exits{at=[1,3],head=affine,score=margin,threshold=0.05}",
    "unloop": "unloop{neutral=false}",
    "skipping": "skipping{kv=propagate}",
    "lora": "lora{rank=2,alpha=4,target=[*],rslora=true}",
    "normformer": "normformer{scale_residual=true}",
    "siamese": "siamese",
    "scale_vectors": "scale_vectors{form=direction}",
    "quantize": "quantize{bits=8,group=0,symmetric=true}",
    "observe": "observe{at=[2,1],branches=[*/mlp],side=input,units=[7,0]}",
}
BEFORE = {"unloop": "looped{start=1,end=3}", "skipping": "exits{at=[1,3]}"}
"""What a pass needs to find in a model."""
MODELS = {"decoder": tiny_decoder, "vit": "vit", "post-norm": "bert"}
REFUSED = {("siamese", "post-norm"): "post-norm"}
"""Models that a pass is not for, with its reason; the kit needs one that it changes."""
TEXT = 13
"""Checks in one process."""


@cache
def program(model: str):
    if model != "decoder":
        return traced(MODELS[model])[2]
    net, ids = tiny_decoder()
    return trace(net, (ids,))


def cases():
    for name in homes():
        for options in ("default", "other"):
            for model in MODELS:
                rest = options == "other" and model != "decoder"  # every model and both settings are in the others
                yield pytest.param(
                    name, options, model, id=f"{name}-{options}-{model}", marks=[pytest.mark.full] if rest else []
                )


@pytest.mark.parametrize(("name", "options", "model"), list(cases()))
def test_every_pass_conforms(name, options, model):
    step: Pass | str = get(name)() if options == "default" else OPTIONS.get(name, name)
    replayed = model == "decoder" and options == "other"
    if (name, model) in REFUSED:
        with pytest.raises(NoMatchError, match=REFUSED[name, model]):
            program(model).rewrite(step)
        return
    base = None if model == "decoder" else program(model)
    if name in BEFORE:
        base = program(model).rewrite(BEFORE[name], check=False)
        base.reference = None  # traced again, the model would not have what is needed
    done = conformance(step, base, subprocesses=replayed)
    assert len(done) == TEXT + replayed


def test_every_registered_pass_has_options_here():
    assert set(OPTIONS) >= set(homes())


# ---- orders

ORDER = ["hc", "looped", "exits", "lora", "quantize"]


@pytest.mark.parametrize(("later", "earlier"), list(itertools.combinations(ORDER[::-1], 2)))
def test_an_order_that_cannot_be_is_refused_at_plan_time_by_name(later, earlier):
    program = traced("llama")[2]
    for attempt in (
        lambda: program.plan(f"{later},{earlier}"),
        lambda: program.rewrite(f"{later},{earlier}", check=False),
        lambda: program.rewrite(later, check=False).plan(earlier),
    ):
        with pytest.raises(PlanError) as caught:
            attempt()
        assert f"`{earlier}` cannot follow `{later}`" in caught.value.what and later in caught.value.hint


def test_every_legal_pair_keeps_its_contract_at_the_start():
    program = traced("llama")[2]
    for earlier, later in itertools.combinations(ORDER, 2):
        new = program.rewrite(f"{earlier},{later}")
        failed = [c for e in new.history for c in e["checks"] if not c["holds"] and c["name"] != "live gradients"]
        assert not failed, (earlier, later, failed)
        assert all(math.isfinite(c["measured"].get("max_diff", 0)) for e in new.history for c in e["checks"])


# ---- certificates of hyper-connections

NETS = ("llama", "gpt_neox", "vit", "bert", "t5")


@cache
def rewritten(name: str, options: str):
    return traced(name)[2].rewrite(f"hc{{{options}}}")


PAIRS = [(n, m) for n in NETS for m in ("hc", "ihc")]


def cell(name: str, mixer: str, *rest: str):
    """The second mixer on one pre-norm and one post-norm net; on the others in the full matrix."""
    few = mixer == "hc" or name in ("llama", "bert")
    return pytest.param(name, mixer, *rest, marks=[] if few else [pytest.mark.full])


@pytest.mark.parametrize(("name", "mixer"), [cell(*pair) for pair in PAIRS])
def test_mean_and_rotate_stay_within_their_contract(name, mixer):
    for init in ("rotate",) if name == "bert" else ("mean", "rotate"):
        new = rewritten(name, f"mixer={mixer},init={init}")
        checks = {c["name"]: c for c in new.history[-1]["checks"]}
        failed = [c for c in checks.values() if not c["holds"] and c["name"] != "live gradients"]
        assert not failed, failed
        assert checks["against the source model in eager"]["measured"]["ulps"] <= new.history[-1]["contract"]["k"]


def test_mean_is_refused_on_a_post_norm_stream():
    _, _, program = traced("bert")
    (step,) = program.plan("hc{init=mean}").steps
    assert not step.sites and "rotate" in step.skips[0].detail


def live(name: str, options: str) -> dict:
    return next(c for c in rewritten(name, options).history[-1]["checks"] if c["name"] == "live gradients")


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "vit", "t5", "bert"])
def test_the_certificate_of_replicate_names_the_symmetric_trap(name):
    check = live(name, "init=replicate")
    assert "symmetric trap" in check["note"]


STARTS = [cell(n, m, i) for n, m in PAIRS for i in ("mean", "rotate") if (n, i) != ("bert", "mean")]


@pytest.mark.parametrize(("name", "mixer", "init"), STARTS)
def test_dead_parameters_have_a_reason(name, mixer, init):
    check = live(name, f"mixer={mixer},init={init}")
    assert check["holds"] and check["measured"]["unexplained"] == 0, check["note"]
