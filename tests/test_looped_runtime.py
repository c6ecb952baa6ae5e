"""Loops whose number of steps is an input: equal to the unrolled form, one size for every number of steps."""

from __future__ import annotations

import pytest
import torch
from hcx.export import to_onnx, to_pt2
from hcx.passes import Exits, Looped
from hcx.rewrite import NoMatchError, PlanError, UsageError, load, trace
from hcx.rewrite.ir.control import While
from hcx.rewrite.testing import conformance, tiny_decoder
from torch.nn import functional as F

from tests.conftest import token_ids

WINDOW = {"start": 2, "end": 4}
FORMS = [("output", 0.25), ("input", 0.3), ("input_rms", 0.3)]


@pytest.fixture(scope="module")
def plain(llama_without_cache):
    return llama_without_cache.model, llama_without_cache.program


@pytest.fixture(scope="module")
def loops(plain):
    """(mix, scalar) -> runtime form with 3 steps where the call does not say."""
    return {(mix, scalar): plain[1].rewrite(Looped(**WINDOW, steps=3, mix=mix, scalar=scalar, runtime=True), check=False)
            for mix, scalar in FORMS}  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 4, None])
@pytest.mark.parametrize("form", FORMS, ids=[m for m, _ in FORMS])
def test_it_equals_the_unrolled_form_bitwise(plain, loops, form, steps):
    mix, scalar = form
    looped = loops[form]
    unrolled = plain[1].rewrite(Looped(**WINDOW, steps=steps or 3, mix=mix, scalar=scalar), check=False)
    for shape in [(2, 12), (1, 1), (3, 33)]:
        ids = token_ids(shape[0] * shape[1], seed=5).reshape(shape)
        given = {} if steps is None else {"steps": steps}
        with torch.no_grad():
            got = looped(ids, **given).logits
            assert torch.equal(got, unrolled(ids).logits)
            assert torch.equal(looped(ids, **{k: torch.tensor(v) for k, v in given.items()}).logits, got)
            assert torch.equal(got, plain[0](ids).logits) == (steps == 1)


def test_it_passes_every_check_and_neutral_is_bitwise_the_model(plain, tmp_path):
    model, program = plain
    neutral = program.rewrite(Looped(**WINDOW, steps=2, runtime=True))
    ids = token_ids(24).reshape(2, 12)
    neutral.save(tmp_path / "loop.hcx")
    loaded = load(tmp_path / "loop.hcx")
    for steps in (1, 2, 5):
        with torch.no_grad():
            assert torch.equal(loaded(ids, steps=steps).logits, model(ids).logits)
    checks = {c["name"]: c for c in neutral.history[-1]["checks"]}
    assert checks["contract of looped"]["measured"]["bitwise"] and checks["live gradients"]["holds"]


def test_gradients_are_those_of_the_unrolled_form(plain, loops):
    ids = token_ids(24).reshape(2, 12)
    unrolled = plain[1].rewrite(Looped(**WINDOW, steps=4, mix="input", scalar=0.3), check=False)
    runtime = loops["input", 0.3].as_module()
    for module, given in ((unrolled, {}), (runtime, {"steps": 4})):
        logits = module(ids, **given).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    theirs = dict(runtime.named_parameters())
    assert theirs["hcx.looped_0.scalar"].grad.abs().item() > 0
    for name, parameter in unrolled.named_parameters():
        assert (theirs[name].grad - parameter.grad).abs().max() <= 1e-6, name


def test_files_do_not_grow_with_the_steps(plain, loops, tmp_path):
    import onnxruntime

    sizes = {"hcx": [], "onnx": []}
    for steps in (2, 4):
        program = plain[1].rewrite(Looped(**WINDOW, steps=steps, scalar=0.3, runtime=True), check=False)
        program.save(tmp_path / f"{steps}.hcx")
        report = to_onnx(program, str(tmp_path / f"{steps}.onnx"))
        assert report.producer == "direct" and report.verified
        sizes["hcx"].append(sum(f.stat().st_size for f in (tmp_path / f"{steps}.hcx").rglob("*") if f.is_file()))
        sizes["onnx"].append((tmp_path / f"{steps}.onnx").stat().st_size)
    plain[1].save(tmp_path / "1.hcx")
    to_onnx(plain[1], str(tmp_path / "1.onnx"))
    once = {"hcx": sum(f.stat().st_size for f in (tmp_path / "1.hcx").rglob("*") if f.is_file()),
            "onnx": (tmp_path / "1.onnx").stat().st_size}  # fmt: skip
    for kind, (two, four) in sizes.items():
        assert abs(four - two) <= 64 and four <= 1.01 * once[kind] + 50 * 1024, (kind, two, four, once)
    session = onnxruntime.InferenceSession(tmp_path / "4.onnx", providers=["CPUExecutionProvider"])
    for steps in (1, 2, 4, 7):
        unrolled = plain[1].rewrite(Looped(**WINDOW, steps=steps, scalar=0.3), check=False) if steps > 1 else plain[1]
        ids = token_ids(3 * 9, seed=8).reshape(3, 9)
        feed = {i.name: {"input_ids": ids, "attention_mask": torch.ones_like(ids), "steps": torch.tensor(steps)}[i.name]
                for i in session.get_inputs()}  # fmt: skip
        got = torch.tensor(session.run(["logits"], {k: v.numpy() for k, v in feed.items()})[0])
        with torch.no_grad():
            assert (got - unrolled(ids).logits).abs().max() <= 1e-4, steps


def test_the_onnx_file_has_one_loop_and_its_patterns(loops, tmp_path):
    import onnx

    to_onnx(loops["input", 0.3], str(tmp_path / "loop.onnx"))
    graph = onnx.load(tmp_path / "loop.onnx").graph
    (loop,) = [n for n in graph.node if n.op_type == "Loop"]
    body = [n.op_type for a in loop.attribute for n in a.g.node]
    assert body.count("Attention") == 2 and body.count("RotaryEmbedding") == 4 and body.count("RMSNormalization") == 4
    assert not any(a.g.initializer for a in loop.attribute)
    assert [i.name for i in graph.input if not i.type.tensor_type.shape.dim] == ["steps"]


def test_the_torch_archive_takes_the_steps_too(loops, tmp_path):
    program = loops["output", 0.25]
    to_pt2(program, str(tmp_path / "loop.pt2"))
    loaded = torch.export.load(tmp_path / "loop.pt2").module()
    flat = program.signature.complete(program.examples[0])
    names = [i.name for i in program.inputs]
    with torch.no_grad():
        for steps in (1, 4):
            given = {n: torch.tensor(steps) if n == "steps" else t for n, t in zip(names, flat, strict=True)}
            expected = program.run_flat(list(given.values()))[0]
            assert (loaded(**given)["logits"] - expected).abs().max() <= 1e-5


def test_caches_fixed_single_steps_and_later_block_passes_are_refused(llama, loops):
    with pytest.raises(NoMatchError, match="slots of its own"):
        llama.program.rewrite(Looped(**WINDOW, runtime=True))
    with pytest.raises(UsageError, match="it does not loop"):
        Looped(**WINDOW, steps=1, runtime=True)
    with pytest.raises(PlanError, match="cannot follow"):
        loops["input", 0.3].rewrite("lora{rank=2}")
    program = loops["input", 0.3]
    assert sum(isinstance(n.target, While) for n in program.graph.nodes) == 1
    with pytest.raises(UsageError, match="steps"):
        program(token_ids(24).reshape(2, 12), step=3)


def test_exits_that_skip_find_the_blocks_around_the_loop(loops):
    """A loop is one node of the stream; an exit after it skips what follows."""
    ids = token_ids(24).reshape(2, 12)
    both = loops["input", 0.3].rewrite(Exits(at=(1,), form="cond"), check=False)
    with torch.no_grad():
        assert torch.equal(both(ids, steps=2).logits, loops["input", 0.3](ids, steps=2).logits)


@pytest.mark.usefixtures("traced_once")
def test_it_conforms():
    assert conformance("looped{start=1,end=3,runtime=true}", subprocesses=False)


@pytest.mark.parametrize("steps", [0, -3, 2.5, "a", torch.tensor(2.5), torch.tensor([2])])
def test_steps_of_a_call_are_a_count(steps):
    model, ids = tiny_decoder()
    program = trace(model, (ids,)).rewrite("looped{start=1,end=3,runtime=true}", check=False)
    with torch.no_grad(), pytest.raises(UsageError, match="`steps` is a whole number from 1 on"):
        program(ids, steps=steps)


def test_a_loop_of_runtime_steps_is_not_unlooped_and_says_so():
    model, ids = tiny_decoder()
    program = trace(model, (ids,)).rewrite("looped{start=1,end=3,runtime=true}", check=False)
    with pytest.raises(NoMatchError, match="runtime=true"):
        program.rewrite("unloop")
