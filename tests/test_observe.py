"""Taps of chosen values: against hooks on the source model's own modules, in eager, in every form a Program can take."""

from __future__ import annotations

import pytest
import torch
from hcx.passes.quantization import dequantised
from hcx.rewrite import NoMatchError, PlanError, UsageError, load, trace
from hcx.rewrite.pipeline.plan import Plan
from torch import nn

from tests import loops_by_hand
from tests.conftest import tiny_llama
from tests.zoo import traced


def first_tensor(output):
    return output[0] if isinstance(output, tuple) else output


class Seen:
    """What went into and came out of modules, call by call."""

    def __init__(self, model: nn.Module, paths):
        self.input, self.output = ({p: [] for p in paths} for _ in range(2))
        self._handles = []
        for path in self.input:
            module = model.get_submodule(path)
            before, after = self._before(path), self._after(path)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _before(self, path):
        def hook(module, args, kwargs):
            self.input[path].append((args[0] if args else next(iter(kwargs.values()))).clone())

        return hook

    def _after(self, path):
        def hook(module, args, kwargs, output):
            self.output[path].append(first_tensor(output).clone())

        return hook

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self._handles:
            handle.remove()


def names_of(program) -> list[str]:
    return [s["detail"]["name"] for s in program.history[-1]["plan"]["steps"][0]["sites"]]


# ---- values of modules

MODULES = {
    "llama": ("mlp.down_proj", "self_attn", "inner.model.layers.?"),
    "gpt2": ("mlp.c_proj", "attn", "inner.transformer.h.?"),  # Conv1D: weights lie the other way round
    "mixtral": ("mlp.gate", "mlp.experts", "mlp"),
    "bert": ("output.dense", "attention.self", "intermediate"),
    "vit": ("fc2", "attention", "inner.vit.layers.?"),
    "t5": ("wo", "EncDecAttention", "block.?"),
    "resnet_tv": ("layer1.?", "layer2.0.conv1"),
    "mamba2": ("mixer",),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] if n == "mamba2" else []) for n in MODULES])
def test_taps_are_what_hooks_on_the_source_model_see(name):
    model, args, kwargs, program = traced(name)
    for side in ("input", "output"):
        patterns = [p for p in MODULES[name] if (p, side) != ("mlp.gate", "output")]  # a router gives two tensors
        new = program.rewrite(f"observe{{modules=[{','.join(patterns)}],side={side}}}")
        assert all(c["holds"] for c in new.history[-1]["checks"])
        with Seen(model, names_of(new)) as seen, torch.no_grad():
            wanted = model(*args, **kwargs)
        with torch.no_grad():
            got, taps = new(*args, taps=True, **kwargs)
        assert torch.equal(first_tensor(got), first_tensor(wanted))
        assert len(taps) == len(new.taps) >= len(patterns)
        for path, tap in zip(names_of(new), taps.values(), strict=True):
            assert torch.equal(tap, getattr(seen, side)[path][0]), path


def test_units_and_the_last_position_are_cut_out_in_the_order_asked_for(llama):
    new = llama.program.rewrite(
        "observe{modules=[*.[24].mlp.down_proj],side=input,units=[63,0,17]},"
        "observe{modules=[*.2.mlp.down_proj],side=input,last=true},observe{at=[3],units=[5],last=true}"
    )
    ids = llama.ids(3, 7)
    paths = ["model.layers.2.mlp.down_proj", "model.layers.4.mlp.down_proj"]
    with Seen(llama.model, paths) as seen, torch.no_grad():
        states = llama.model(ids, output_hidden_states=True).hidden_states
    with torch.no_grad():
        taps = new(ids, taps=True)[1]
    assert list(taps) == [
        *(f"observe.{p}.input" for p in paths),
        f"observe_1.{paths[0]}.input",
        "observe_2.model.layers@3",
    ]
    for path in paths:
        assert torch.equal(taps[f"observe.{path}.input"], seen.input[path][0][..., [63, 0, 17]])
    assert torch.equal(taps[f"observe_1.{paths[0]}.input"], seen.input[paths[0]][0][:, -1:])
    assert torch.equal(taps["observe_2.model.layers@3"], states[3][:, -1:, 5:6])


def test_streams_are_the_hidden_states_and_branches_add_up_to_them(llama):
    new = llama.program.rewrite("observe,observe{branches=[*.1/*]},observe{branches=[*.1/*],side=input}")
    ids = llama.ids(2, 9)
    with torch.no_grad():
        states = llama.model(ids, output_hidden_states=True).hidden_states
        taps = new(ids, taps=True)[1]
    for k in range(6):  # the last of Transformers is normed
        assert torch.equal(taps[f"observe.model.layers@{k}"], states[k])
    end = taps["observe.model.layers@6"]
    with torch.no_grad():
        assert torch.equal(llama.model.model.norm(end), states[6]) and not torch.equal(end, states[6])
    attn, mlp = (taps[f"observe_1.model.layers.1/{kind}.output"] for kind in ("attn", "mlp"))
    before, between = (taps[f"observe_2.model.layers.1/{kind}.input"] for kind in ("attn", "mlp"))
    assert torch.equal(before, states[1])
    assert torch.equal(between, states[1] + attn)
    assert torch.equal(between + mlp, states[2])


def test_calls_of_one_module_are_told_apart():
    model, args, kwargs, program = traced("tied_blocks")
    new = program.rewrite("observe{modules=[mlp.c_proj],side=input},observe{modules=[*.attn@[13]]}")
    with Seen(model, ["h.0.mlp.c_proj", "h.0.attn"]) as seen, torch.no_grad():
        model(*args, **kwargs)
        taps = new(*args, taps=True, **kwargs)[1]
    names = [f"observe.h.0.mlp.c_proj{call}.input" for call in ("", "@1", "@2", "@3")]
    assert list(taps) == [*names, "observe_1.h.0.attn@1.output", "observe_1.h.0.attn@3.output"]
    values = [*seen.input["h.0.mlp.c_proj"], seen.output["h.0.attn"][1], seen.output["h.0.attn"][3]]
    assert all(torch.equal(tap, value) for tap, value in zip(taps.values(), values, strict=True))
    assert not torch.equal(values[0], values[1])


def test_the_first_call_and_the_first_pass_have_names_of_their_own():
    """``@0`` and ``~1``, as ``at=[2~1]``; without them a path means every run."""
    program = traced("tied_blocks")[3].rewrite("looped{start=1,end=3,steps=2}", check=False)
    wanted = {
        "h.0.attn": ["", "@1", "@1~2", "@2", "@2~2", "@3"],
        "h.0.attn@0": [""],
        "h.0.attn@0~1": [""],
        "*.attn@[03]~1": ["", "@3"],
        "h.0.attn~1": [""],
        "h.0.attn@1": ["@1"],
        "h.0.attn@1~1": ["@1"],
        "*.attn@?~2": ["@1~2", "@2~2"],
        "*.attn@?~1": ["", "@1", "@2", "@3"],
    }
    for pattern, suffixes in wanted.items():
        (step,) = program.plan(f"observe{{modules=[{pattern}]}}").steps
        assert [s.address for s in step.sites] == [f"h.0.attn{s}.output" for s in suffixes], pattern
    for pattern in ("h.0.attn@4", "h.0.attn@0~2", "h.0.attn@00", "attn@0"):
        with pytest.raises(UsageError, match="nothing is called"):
            program.plan(f"observe{{modules=[{pattern}]}}")


def test_a_branch_without_module_names_is_called_by_its_address():
    class Nameless(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(30, 16)
            self.w = nn.ParameterList([nn.Parameter(torch.randn(16, 16) / 4) for _ in range(8)])

        def forward(self, input_ids):
            x = self.e(input_ids)
            for i in range(0, 8, 2):
                x = x + torch.tanh(x @ self.w[i]) @ self.w[i + 1]
            return x

    model, ids = Nameless().eval(), torch.arange(10).reshape(2, 5)
    new = trace(model, (ids,)).rewrite("observe{branches=[stack0[1]/mlp]},observe{branches=[stack0[1]/mlp],side=input}")
    with torch.no_grad():
        term, before = new(ids, taps=True)[1].values()
        first = model.e(ids) + torch.tanh(model.e(ids) @ model.w[0]) @ model.w[1]
        assert torch.equal(before, first) and torch.equal(term, torch.tanh(first @ model.w[2]) @ model.w[3])
    assert new.taps == ["observe.stack0[1]/mlp.output", "observe_1.stack0[1]/mlp.input"]


def test_a_value_is_taken_before_the_model_writes_to_it():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            h = self.one(x)
            early = h[:, :4]  # read after the write, so it stays in place
            h.mul_(3)
            return self.two(h) + early.sum()

    model, x = Writes().eval(), torch.randn(2, 8)
    program = trace(model, (x,))
    new = program.rewrite("observe{modules=[one]},observe{modules=[one],units=[6,1]}")
    with Seen(model, ["one"]) as seen, torch.no_grad():
        wanted = model(x)
    with torch.no_grad():
        got, taps = new(x, taps=True)
    assert torch.equal(got, wanted)
    assert torch.equal(taps["observe.one.output"], seen.output["one"][0])
    assert torch.equal(taps["observe_1.one.output"], seen.output["one"][0][:, [6, 1]])


# ---- behind other passes

LOOP = "looped{start=2,end=4,steps=3,mix=output,scalar=0.4}"


@pytest.fixture(scope="module")
def looped(llama):
    """Inputs of down_proj and streams behind a loop, and the same by hand."""
    new = llama.program.rewrite(
        f"{LOOP},observe{{modules=[down_proj],side=input}},observe{{at=[3,4]}},observe{{at=[3~2]}}"
    )
    ids = llama.ids(2, 9)
    paths = [f"model.layers.{i}.mlp.down_proj" for i in range(6)]
    by_hand = loops_by_hand.looped(llama.model.model.layers, 2, 4, 3, "output", 0.4)
    with Seen(llama.model, [*paths, "model.layers.2"]) as seen, torch.no_grad(), by_hand:
        logits = llama.model(ids, use_cache=False).logits
    with torch.no_grad():
        output, taps = new(ids, taps=True)
    return new, ids, logits, seen, output, taps


def test_behind_a_loop_every_pass_has_a_tap(looped, max_diff):
    new, _, logits, seen, output, taps = looped
    assert max_diff(output.logits, logits) <= 1e-4
    for i in range(6):
        path = f"model.layers.{i}.mlp.down_proj"
        calls = seen.input[path]
        names = [t for t in taps if t.startswith(f"observe.{path}")]
        suffixes = ["", "~2", "~3"] if i in (2, 3) else [""]
        assert names == [f"observe.{path}{s}.input" for s in suffixes] and len(calls) == len(names)
        for name, wanted in zip(names, calls, strict=True):
            assert max_diff(taps[name], wanted) <= 1e-4
        if i in (2, 3):
            assert max_diff(calls[0], calls[1]) > 1e-2  # else passes could be mixed up
    streams = [t for t in new.taps if t.startswith("observe_1.")]
    assert streams == [f"observe_1.model.layers@{k}" for k in ("3", "3~2", "3~3", "4", "4~2", "4~3")]
    assert list(t for t in taps if t.startswith("observe_2.")) == ["observe_2.model.layers@3~2"]
    assert torch.equal(taps["observe_2.model.layers@3~2"], taps["observe_1.model.layers@3~2"])


def test_streams_of_a_loop_are_what_its_blocks_give(llama, looped, max_diff):
    *_, taps = looped
    ids = llama.ids(2, 9)
    by_hand = loops_by_hand.looped(llama.model.model.layers, 2, 4, 3, "output", 0.4)
    with Seen(llama.model, ["model.layers.4"]) as after, torch.no_grad(), by_hand:
        llama.model(ids, use_cache=False)
    assert max_diff(taps["observe_1.model.layers@4~3"], after.input["model.layers.4"][0]) <= 1e-4


@pytest.mark.parametrize("first", [True, False])
def test_exits_that_fire_leave_the_taps_what_they_were(llama, first):
    """In either order: exits in select form compute every block."""
    observe, exits = "observe{modules=[down_proj],side=input},observe{at=[2,5]}", "exits{at=[2,4],threshold=0.06}"
    steps = (observe, exits) if first else (exits, observe)
    new = llama.program.rewrite(",".join(steps), check=False)
    ids = llama.ids(2, 9)
    paths = [f"model.layers.{i}.mlp.down_proj" for i in range(6)]
    with Seen(llama.model, paths) as seen, torch.no_grad():
        states = llama.model(ids, output_hidden_states=True).hidden_states
    with torch.no_grad():
        output, taps = new(ids, taps=True)
        assert not torch.equal(output.logits, llama.model(ids).logits) and taps["exits.depth"].unique().numel() > 1
    for path in paths:
        assert torch.equal(taps[f"observe.{path}.input"], seen.input[path][0])
    assert all(torch.equal(taps[f"observe_1.model.layers@{k}"], states[k]) for k in (2, 5))


COND = "exits{at=[3],form=cond,kv=propagate,threshold=0.06}"


def test_branches_that_skip_blocks_keep_taps_before_them_and_refuse_others(llama):
    ids = llama.ids(2, 9)
    with torch.no_grad():
        states = llama.model(ids, output_hidden_states=True).hidden_states
        for pipeline in (f"observe{{at=[1,3]}},{COND}", f"{COND},observe{{at=[1,3]}}"):
            taps = llama.program.rewrite(pipeline, check=False)(ids, taps=True)[1]
            assert all(torch.equal(taps[f"observe.model.layers@{k}"], states[k]) for k in (1, 3))
    for observe in ("observe{at=[5]}", "observe{modules=[*.5.*.down_proj],side=input}"):
        with pytest.raises(NoMatchError, match=r"tap `observe.* shows a value of blocks that would be skipped"):
            llama.program.rewrite(f"{observe},{COND}")
        for pipeline in (f"{observe},exits{{at=[3]}}", f"exits{{at=[3]}},{observe}"):
            with pytest.raises(NoMatchError, match="blocks that would be skipped"):
                llama.program.rewrite(pipeline, check=False).rewrite("skipping{kv=propagate}")
        with pytest.raises(UsageError, match=r"no stream after 5|nothing is called"):
            llama.program.rewrite(f"{COND},{observe}")


def test_skipping_keeps_taps_of_the_blocks_before(llama):
    ids = llama.ids(2, 9)
    new = llama.program.rewrite("observe{at=[1,3]},exits{at=[3],threshold=0.06}", check=False)
    with torch.no_grad():
        states = llama.model(ids, output_hidden_states=True).hidden_states
        taps = new.rewrite("skipping{kv=propagate}", check=False)(ids, taps=True)[1]
    assert all(torch.equal(taps[f"observe.model.layers@{k}"], states[k]) for k in (1, 3))


def test_an_adapter_belongs_to_its_module(llama, max_diff):
    new = llama.program.rewrite(
        "lora{rank=4,alpha=8,target=[down_proj]},observe{modules=[*.3.mlp.down_proj]}", check=False
    )
    a, b = (new.tensor(f"hcx.lora_0.model.layers.3.mlp.down_proj.{n}") for n in "AB")
    with torch.no_grad():
        b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(1)))
    ids = llama.ids(2, 9)
    path = "model.layers.3.mlp.down_proj"
    with Seen(llama.model, [path]) as seen, torch.no_grad():
        llama.model(ids)
        x = seen.input[path][0]
        wanted = seen.output[path][0] + 2 * (x @ a.T) @ b.T
        assert max_diff(wanted, seen.output[path][0]) > 0.1
        assert max_diff(new(ids, taps=True)[1][f"observe.{path}.output"], wanted) <= 1e-4


def test_behind_quantize_taps_are_those_of_the_rounded_model(llama, max_diff):
    new = llama.program.rewrite("quantize{bits=4,group=16},observe{modules=[down_proj],side=input}", check=False)
    model = tiny_llama()
    model.load_state_dict({**model.state_dict(), **dequantised(new)})
    ids = llama.ids(2, 9)
    paths = [f"model.layers.{i}.mlp.down_proj" for i in range(6)]
    with Seen(model, paths) as seen, Seen(llama.model, paths) as plain, torch.no_grad():
        model(ids), llama.model(ids)
        taps = new(ids, taps=True)[1]
    for path in paths:
        assert torch.equal(taps[f"observe.{path}.input"], seen.input[path][0])
        assert max_diff(seen.input[path][0], plain.input[path][0]) > 1e-2


def test_several_streams_are_reduced_and_branches_read_what_they_read(llama, max_diff):
    new = llama.program.rewrite(
        "hc{mult=2,init=mean},observe{at=[2,4]},observe{branches=[*.2/attn],side=input},observe{modules=[down_proj]}",
        check=False,
    )
    ids = llama.ids(2, 9)
    with Seen(llama.model, ["model.layers.2.mlp.down_proj"]) as seen, torch.no_grad():
        states = llama.model(ids, output_hidden_states=True).hidden_states
    with torch.no_grad():
        taps = new(ids, taps=True)[1]
    assert all(max_diff(taps[f"observe.model.layers@{k}"], states[k]) <= 1e-4 for k in (2, 4))
    assert max_diff(taps["observe_1.model.layers.2/attn.input"], states[2]) <= 1e-4
    assert (
        max_diff(taps["observe_2.model.layers.2.mlp.down_proj.output"], seen.output["model.layers.2.mlp.down_proj"][0])
        <= 1e-4
    )


def test_at_the_end_of_a_whole_pipeline(llama, tmp_path, max_diff):
    pipeline = "hc{init=replicate,mult=2},looped{start=2,end=4},exits{at=[3]},lora,quantize{bits=8,group=16}"
    new = llama.program.rewrite(f"{pipeline},observe{{modules=[down_proj],side=input,units=[3,60]}}", check=False)
    new.save(tmp_path / "a.hcx")
    model = tiny_llama()
    model.load_state_dict({**model.state_dict(), **dequantised(new)})
    ids = llama.ids(2, 9)
    paths = [f"model.layers.{i}.mlp.down_proj" for i in range(6)]
    with Seen(model, paths) as seen, torch.no_grad():
        model(ids)
        taps = load(tmp_path / "a.hcx")(ids, taps=True)[1]
    for path in paths:  # a loop that is still neutral: its first pass and what follows are the model
        assert max_diff(taps[f"observe.{path}.input"], seen.input[path][0][..., [3, 60]]) <= 1e-4
    assert [t for t in taps if "~2" in t] == [f"observe.{paths[i]}~2.input" for i in (2, 3)]


@pytest.mark.parametrize(
    "after", ["looped{start=2,end=4}", "exits{at=[3]}", "lora", "hc{init=replicate,mult=2}", "quantize{bits=8}"]
)
def test_other_passes_find_what_they_find_without_taps(llama, after):
    observe = "observe,observe{modules=[down_proj,self_attn],side=input,units=[1,0]},observe{branches=[*]}"
    plain = llama.program.rewrite(after)
    new = llama.program.rewrite(f"{observe},{after}")
    sites = [s["address"] for s in new.history[-1]["plan"]["steps"][0]["sites"]]
    assert sites == [s["address"] for s in plain.history[-1]["plan"]["steps"][0]["sites"]]
    assert [b.address for b in new.sites().branches()] == [b.address for b in plain.sites().branches()]
    ids = llama.ids(2, 9)
    with torch.no_grad():
        assert torch.equal(new(ids).logits, plain(ids).logits)
        taps = new(ids, taps=True)[1]
    assert len([t for t in taps if t.startswith("observe")]) == 7 + 12 + 12


# ---- in a plain call, and in every form


def test_a_plain_call_computes_nothing_more(llama):
    new = llama.program.rewrite("observe{modules=[down_proj],side=input,units=[1],last=true},observe")
    plain, observed = llama.program.flat_module().graph, new.flat_module().graph
    assert [str(n.target) for n in observed.nodes if n.op == "call_function"] == [
        str(n.target) for n in plain.nodes if n.op == "call_function"
    ]
    assert len(list(new.flat_module(taps=True).graph.nodes)) > len(list(plain.nodes)) + 6
    assert not new.new_parameters() and set(new.state_dict()) == set(llama.program.state_dict())
    assert len(new.run_flat(new.signature.complete(new.examples[0]))) == len(new.output_names)


def test_a_folder_of_transformers_is_the_one_without_taps(llama, tmp_path):
    from hcx.export import to_hf
    from safetensors.torch import load_file

    to_hf(llama.program.rewrite("observe,observe{modules=[down_proj],units=[1]}"), tmp_path / "hf")
    weights, own = load_file(tmp_path / "hf" / "model.safetensors"), llama.model.state_dict()
    assert set(weights) == set(own) and all(torch.equal(weights[n], own[n]) for n in own)


def test_taps_survive_saving_and_deep_copies_and_the_module(llama, looped, tmp_path):
    new, ids, *_, taps = looped
    new.save(tmp_path / "a.hcx")
    again = load(tmp_path / "a.hcx")
    with torch.no_grad():
        for other in (again, again.as_module()):
            got = other(ids, taps=True)[1]
            assert list(got) == list(taps)
            assert all(torch.equal(got[t], taps[t]) for t in taps)
    further = again.rewrite("observe{modules=[lm_head],side=input}", check=False)
    assert further.taps == [*taps, "observe_3.lm_head.input"]


def test_taps_are_exported_on_request(llama, tmp_path, max_diff):
    pytest.importorskip("onnxruntime")
    from hcx.export import OnnxSession, to_onnx, to_pt2

    new = llama.program.rewrite(
        "observe{modules=[*.2.mlp.down_proj],side=input,units=[9,2]},observe{at=[6],last=true},observe{modules=[lm_head]}"
    )
    ids = llama.ids(2, 9)
    with torch.no_grad():
        output, taps = new(ids, taps=True)
    assert torch.equal(taps["observe_2.lm_head.output"], output.logits)
    to_onnx(new, tmp_path / "plain.onnx")
    assert not [n for n in OnnxSession(tmp_path / "plain.onnx").output_names if n.startswith("observe")]
    to_onnx(new, tmp_path / "taps.onnx", taps=True)
    session = OnnxSession(tmp_path / "taps.onnx")
    flat = new.signature.by_name({"input_ids": ids})
    got = dict(zip(session.output_names, session.run_flat(flat), strict=True))
    assert [n for n in got if n.startswith("observe")] == list(taps)
    assert all(max_diff(got[t], taps[t]) <= 1e-4 for t in taps)
    to_pt2(new, tmp_path / "x.pt2", taps=True)
    inputs = dict(zip((i.name.replace(".", "_") for i in new.inputs), flat, strict=True))
    results = torch.export.load(tmp_path / "x.pt2").module()(**inputs)
    named = results if isinstance(results, dict) else dict(zip([*new.output_names, *new.taps], results, strict=True))
    assert all(max_diff(named[t], taps[t]) <= 1e-5 for t in taps)


@pytest.mark.parametrize("pipeline", ["", f"{LOOP},"])
def test_each_step_of_generate_hands_over_its_taps(llama, pipeline, max_diff):
    """Through the cache, rows padded on the left: what full forwards show at the same tokens."""
    pytest.importorskip("transformers")
    new = llama.program.rewrite(f"{pipeline}observe{{modules=[*.[13].mlp.down_proj],side=input}}", check=False)
    steps = []
    model = new.as_pretrained(on_taps=steps.append)
    ids, mask = llama.ids(3, 8), torch.ones(3, 8, dtype=torch.int64)
    mask[0, :3] = 0
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert [next(iter(s.values())).shape[:2] for s in steps] == [(3, 8), *[(3, 1)] * 4]
    assert all(list(s) == new.taps for s in steps)
    for row, skip in ((0, 3), (1, 0)):
        with torch.no_grad():
            full = new(tokens[row : row + 1, skip:], taps=True)[1]
        for tap in new.taps:
            got = torch.cat([s[tap][row] for s in steps])[skip:]
            assert max_diff(got, full[tap][0, : len(got)]) <= 1e-4
    model.on_taps = None
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False), tokens)
    assert len(steps) == 5


# ---- what cannot be meant


@pytest.mark.parametrize(
    ("pipeline", "where", "says"),
    [
        ("observe{modules=[down_prj]}", "modules", "model.layers.0"),
        ("observe{branches=[*/moe]}", "branches", "model.layers.0/attn"),
        ("observe{modules=[down_proj],side=input,units=[3,64]}", "units", "64 units, not one number 64"),
        ("observe{units=[32]}", "units", "32 units"),
        ("observe{units=[]}", "units", "list of units"),
        ("observe{units=[1,1]}", "units", "list of units"),
        ("observe{units=[-1]}", "units", "list of units"),
        ("observe{at=[7]}", "at", "0 to 6"),
        ("observe{at=[2~2]}", "at", "in pass 2"),
        ("observe{at=[x]}", "at", "14~1"),
        ("observe{stack=encoder}", "stack", "model.layers"),
        ("observe{side=both}", "side", "input"),
        ("observe{at=[]}", "at", "every boundary"),
        ("observe{at=[2],side=input}", "side", "branches or modules"),
        ("observe{modules=[lm_head],stack=model.layers}", "stack", "`at` counts"),
    ],
)
def test_a_place_that_is_not_there_is_refused(llama, pipeline, where, says):
    with pytest.raises(UsageError) as caught:
        llama.program.plan(pipeline)
    assert where in caught.value.where and says in str(caught.value) and caught.value.hint


def test_values_that_are_no_single_tensor_are_skipped_with_the_reason(llama):
    with pytest.raises(NoMatchError, match="gives 2 tensors"):
        traced("mixtral")[3].rewrite("observe{modules=[mlp.gate]}")
    (step,) = llama.program.plan("observe{modules=[rotary_emb,*.0.mlp]}").steps
    assert [s.address for s in step.sites] == ["model.layers.0.mlp.output"]
    assert "gives 2 tensors" in step.skips[0].detail
    (step,) = traced("mixtral")[3].plan("observe{modules=[mlp.experts,mlp],side=input,last=true}").steps
    assert len(step.sites) == 4 and {s.detail for s in step.skips} == {
        "the value is [s36*s39, 32], not [batch, position, ...]"
    }
    with pytest.raises(NoMatchError, match="no tokens"):
        traced("vit")[3].rewrite("observe{last=true}")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"units": [99]}, "99"),
        ({"side": "both"}, "both"),
        ({"name": "nowhere"}, "nowhere"),
        ({"of": "weight"}, "weight"),
    ],
)
def test_an_edited_plan_is_checked(llama, change, says):
    plan = llama.program.plan("observe{modules=[*.1.mlp],units=[3]}").to_json()
    plan["steps"][0]["sites"][0]["detail"].update(change)
    with pytest.raises(PlanError, match=says):
        llama.program.rewrite(Plan.from_json(plan))
    plan["steps"][0]["sites"][0]["detail"].update({"units": [31], "side": "output", "of": "module"})
    plan["steps"][0]["sites"][0]["detail"]["name"] = "model.layers.1.mlp"
    ids = llama.ids(1, 4)
    with torch.no_grad():
        edited = llama.program.rewrite(Plan.from_json(plan), check=False)(ids, taps=True)[1]
        whole = llama.program.rewrite("observe{modules=[*.1.mlp]}", check=False)(ids, taps=True)[1]
    assert torch.equal(
        edited["observe.model.layers.1.mlp.output"], whole["observe.model.layers.1.mlp.output"][..., 31:]
    )
