"""Hyper-connections against loops over the Transformers modules and over PyPI ``hyper-connections``, written by hand.

The eager side holds the streams as a list of tensors: ``h = sum_i p_i X_i``, ``X'_i = sum_j H_ij X_j + b_i F(h)``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hcx.rewrite import Plan, PlanError, UsageError, load, trace
from torch import nn
from torch.utils._pytree import tree_leaves

from tests import mixers_by_hand
from tests.test_composition import FAR, NEAR, Branch, Run, causal, distance, llama, randomise, same, t5, traced, vit

# ---- two more models taken apart, as in test_composition


def gpt_neox(model, ids: torch.Tensor, run: Run) -> torch.Tensor:
    inner, x = model.inner.gpt_neox, model.inner.gpt_neox.embed_in(ids)
    rotary = inner.rotary_emb(x, position_ids=torch.arange(ids.shape[1])[None])
    options = {"position_embeddings": rotary, "attention_mask": causal(ids.shape[1])}

    def parallel(b) -> Callable:
        return lambda h: b.mlp(b.post_attention_layernorm(h)) + b.attention(b.input_layernorm(h), **options)[0]

    blocks = [[(parallel(b), same)] for b in inner.layers]
    return run(blocks, x, lambda h: model.inner.lm_head(inner.final_layer_norm(h)))


def bert(model, ids: torch.Tensor, run: Run) -> torch.Tensor:
    def attention(part) -> Branch:
        return lambda h: part.output.dense(part.self(h)[0]), part.output.LayerNorm

    def feed(b) -> Branch:
        return lambda h: b.output.dense(b.intermediate(h)), b.output.LayerNorm

    inner = model.inner.bert
    blocks = [[attention(b.attention), feed(b)] for b in inner.encoder.layer]
    return run(blocks, inner.embeddings(input_ids=ids), model.inner.cls)


NETS = {"llama": llama, "gpt_neox": gpt_neox, "vit": vit, "bert": bert, "t5": t5}


def plain(blocks: list[list[Branch]], x: torch.Tensor, head: Callable) -> torch.Tensor:
    for branch, after in (r for b in blocks for r in b):
        x = after(x + branch(x))
    return head(x)


# ---- streams by hand


class ByHand:
    """Runs stacks with the coefficients of a rewritten Program, ``removed`` residuals plain; keeps the streams."""

    def __init__(self, program, removed: tuple[int, ...] = (), mult: int = 4, mixer: str = "hc"):
        self.values = {n: p.detach() for n, p in program.named_tensors() if n in program.origin}
        self.removed, self.mult, self.mixer, self.stack = removed, mult, mixer, 0
        self.seen: list[list[torch.Tensor]] = []

    def __call__(self, blocks: list[list[Branch]], x: torch.Tensor, head: Callable) -> torch.Tensor:
        prefix, n = f"hcx.hc_0.{self.stack}", self.mult
        streams = [self.values[f"{prefix}.expand"][i] * x for i in range(n)]
        for number, (branch, after) in enumerate(r for b in blocks for r in b):
            read, mix, write = self.coefficients(f"{prefix}.{number}.", number, torch.stack(streams))
            update = branch(sum(read[i] * streams[i] for i in range(n)))
            if self.mixer == "ddl" and number not in self.removed:
                streams = [after(s) for s in self.delta_rule(f"{prefix}.{number}.", torch.stack(streams), read, update)]
            else:
                streams = [after(sum(mix[i][j] * streams[j] for j in range(n)) + write[i] * update) for i in range(n)]
            self.seen.append(streams)
        self.stack += 1
        return head(self.reduced(streams, prefix))

    def reduced(self, streams: list[torch.Tensor], prefix: str = "hcx.hc_0.0") -> torch.Tensor:
        return sum(self.values[f"{prefix}.reduce"][i] * s for i, s in enumerate(streams))

    def delta_rule(self, site: str, streams: torch.Tensor, read: torch.Tensor, update: torch.Tensor):
        values = {k.removeprefix(site): v.double() for k, v in self.values.items() if k.startswith(site)}
        view = (read * streams).sum(0).double().flatten(0, -2)
        rows = zip(streams.double().flatten(1, -2).unbind(1), view, update.double().flatten(0, -2), strict=True)
        new = torch.stack([mixers_by_hand.delta_rule(values, *row) for row in rows], 1)
        return new.reshape(streams.shape).to(streams.dtype)

    def coefficients(self, site: str, number: int, streams: torch.Tensor):
        n = self.mult
        if number in self.removed:
            return [1 / n] * n, torch.eye(n), [1.0] * n
        if self.mixer == "hc":  # also where features are not in the last dimension
            return tuple(self.values[site + k] for k in ("read", "mix", "write"))
        values = {k.removeprefix(site): v.double() for k, v in self.values.items() if k.startswith(site)}
        rows = streams.double().reshape(n, -1, streams.shape[-1]).unbind(1)
        each = zip(*(mixers_by_hand.coefficients(self.mixer, values, row) for row in rows), strict=True)
        shape = streams.shape[1:-1]
        read, mix, write = (torch.stack(c, -1).to(streams.dtype) for c in each)
        return read.reshape(n, *shape, 1), mix.reshape(n, n, *shape, 1), write.reshape(n, *shape, 1)


# ---- away from neutral


@pytest.mark.parametrize("name", NETS)
def test_the_model_taken_apart_is_the_model(name):
    model, args, _ = traced(name)
    with torch.no_grad():
        assert distance(NETS[name](model, *args, plain), model(*args)) <= 1e-5


MIXERS = ["hc", "hc,dynamic=true", "ihc", "mhc", "mhc_lite", "ohc", "shc", "jpmhc", "kromhc", "ddl"]
MANIFOLDS = ["jpmhc,manifold=bistochastic", "jpmhc,manifold=grassmann", "jpmhc,manifold=grassmann,projector=3"]
FEWER = [("ohc", 2), ("ohc", 3), ("shc", 2), ("shc", 3), ("mhc", 3), ("mhc_lite", 3), ("jpmhc", 2), ("jpmhc", 3)]
FEWER += [("kromhc", 2), ("kromhc", 3), ("kromhc", 6), ("kromhc", 8), ("ddl", 1), ("ddl", 3)]


@pytest.mark.parametrize(("mixer", "mult"), [*((m, 4) for m in MANIFOLDS), *FEWER])
def test_other_manifolds_and_numbers_of_streams_by_hand(mixer, mult):
    model, args, program = traced("llama")
    new = program.rewrite(f"hc{{mixer={mixer},mult={mult}}}", check=False)
    randomise(new)
    with torch.no_grad():
        got, expected = new(*args), llama(model, *args, ByHand(new, mult=mult, mixer=mixer))
    assert distance(got, expected) <= NEAR and distance(got, model(*args)) > FAR


ANYWHERE = ("hc", "hc,dynamic=true", "mhc")
"""Mixers for every net: static and computed coefficients, and constrained ones. All of them on the Llama; what makes a
mixer's coefficients knows nothing of the net, so the rest is in the full matrix."""
BY_HAND = [
    pytest.param(name, mixer, marks=[] if name == "llama" or mixer in ANYWHERE else [pytest.mark.full])
    for name in NETS
    for mixer in MIXERS
]


@pytest.mark.parametrize(("name", "mixer"), BY_HAND)
def test_random_coefficients_equal_streams_by_hand(name, mixer):
    model, args, program = traced(name)
    new = program.rewrite(f"hc{{mixer={mixer}}}", check=False)
    randomise(new)
    with torch.no_grad():  # ungated logits of a standard deviation near 1
        for parameter in (p for n, p in new.named_parameters() if mixer == "jpmhc" and n.endswith(".phi")):
            parameter.mul_(0.3)
    shapes = [args, tuple(torch.cat([a, a.flip(0)[:1]])[:, : a.shape[1] if name == "vit" else -2] for a in args)]
    for inputs in shapes:
        with torch.no_grad():
            got, original, expected = new(*inputs), model(*inputs), NETS[name](model, *inputs, ByHand(new, mixer=mixer))
        assert distance(got, expected) <= NEAR and distance(got, original) > FAR


def test_another_number_of_streams_and_a_saved_program(tmp_path):
    model, args, program = traced("llama")
    new = program.rewrite("hc{mult=3}", check=False)
    randomise(new)
    new.save(tmp_path / "a.hcx")
    with torch.no_grad():
        got, expected = new(*args), llama(model, *args, ByHand(new, mult=3))
        assert distance(got, expected) <= NEAR and distance(got, model(*args)) > FAR
        assert torch.equal(load(tmp_path / "a.hcx")(*args), got)


@pytest.mark.parametrize("dynamic", [False, True])
def test_hc_equals_the_pypi_package(dynamic):
    """Its alpha is ``[A_m | A_r]`` with ``H_ij = (A_r)_ji``; it repeats the input and sums the streams at the end. Its
    norm has ``gamma + 1`` and no epsilon; its dynamic part is always there, and 0 at the start."""
    package = pytest.importorskip("hyper_connections")
    model, args, program = traced("llama")
    new = program.rewrite("hc{dynamic=true,eps=1e-12}" if dynamic else "hc", check=False)
    randomise(new)
    values, n = new.new_parameters(), 4
    with torch.no_grad():
        values["hcx.hc_0.0.expand"].fill_(1), values["hcx.hc_0.0.reduce"].fill_(1)

    class Wrapped(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, h):
            return self.function(h)

    def run(blocks, x, head):
        make, expand, reduce = package.get_init_and_expand_reduce_stream_functions(n)
        streams = expand(x)
        for number, (branch, _) in enumerate(r for b in blocks for r in b):
            layer = make(dim=x.shape[-1], branch=Wrapped(branch), layer_index=number)
            read, mix, write = (values[f"hcx.hc_0.0.{number}.{k}"] for k in ("read", "mix", "write"))
            layer.static_alpha.copy_(torch.cat([read[:, None], mix.T], 1))
            layer.static_beta.copy_(write)
            if dynamic:
                norm, weight, gates = (values[f"hcx.hc_0.0.{number}.{k}"] for k in ("norm", "projection", "gates"))
                layer.norm.gamma.copy_(norm - 1)
                layer.dynamic_alpha_fn.copy_(torch.cat([weight[:1], weight[2:]]).T)
                layer.dynamic_beta_fn.copy_(weight[1])
                layer.dynamic_alpha_scale.copy_(gates[0]), layer.dynamic_beta_scale.copy_(gates[1])
            streams = layer(streams)
        return head(reduce(streams))

    with torch.no_grad():
        got, expected = new(*args), llama(model, *args, run)
        assert distance(got, expected) <= NEAR and distance(got, model(*args)) > FAR


# ---- starts


@cache
def in_bfloat16(name: str):
    model, args, _ = traced(name)
    model = copy.deepcopy(model).to(torch.bfloat16)
    args = tuple(a.to(torch.bfloat16) if a.is_floating_point() else a for a in args)
    return model, args, trace(model, args)


FIRST = ("mixer=hc", "mixer=ihc", "mult=3", "mixer=mhc", "mixer=mhc_lite")
OTHERS = ("mixer=ohc", "mixer=shc", "mixer=jpmhc", "mixer=kromhc", "mixer=ddl", "mixer=ddl,mult=1")
F32, B16 = torch.float32, torch.bfloat16
REPLICATED = [
    *((name, F32, FIRST) for name in NETS),
    ("llama", F32, OTHERS),
    ("llama", B16, FIRST),
    # the nets in bfloat16 are in test_hc_exactness too
    pytest.param("llama", B16, OTHERS, marks=pytest.mark.full),
    *(pytest.param(name, B16, FIRST, marks=pytest.mark.full) for name in NETS if name != "llama"),
]


@pytest.mark.parametrize(("name", "dtype", "mixers"), REPLICATED)
def test_replicate_is_bitwise(name, dtype, mixers):
    model, args, program = traced(name) if dtype == F32 else in_bfloat16(name)
    for options in mixers:
        new = program.rewrite(f"hc{{init=replicate,{options}}}", check=options == "mult=3")
        with torch.no_grad():
            assert torch.equal(new(*args), model(*args)), options


def train(program, args, steps: int = 3) -> None:
    new = list(program.new_parameters().values())
    optimizer = torch.optim.SGD(new, lr=0.05)
    target = torch.linspace(-1, 1, 7).sin()
    for _ in range(steps):
        optimizer.zero_grad()
        output = program(*args)
        (output[..., :7] - target).square().mean().backward()
        optimizer.step()


def spread(streams: list[torch.Tensor]) -> float:
    """How far the streams are from multiples of one vector."""
    units = [s / s.norm() for s in streams]
    return max((u - units[0]).norm().item() for u in units)


@pytest.mark.parametrize(
    ("name", "init"), [(n, i) for n in ("llama", "bert") for i in ("mean", "rotate", "replicate")[n == "bert" :]]
)
def test_streams_separate_in_three_steps_unless_replicated(name, init):
    model, args, program = traced(name)
    new = program.rewrite(f"hc{{init={init}}}")
    train(new, args)
    hand = ByHand(new)
    with torch.no_grad():
        NETS[name](model, *args, hand)
    assert (spread(hand.seen[-1]) > 1e-6) == (init != "replicate")


# ---- who else reads the stream


def test_hidden_states_of_transformers_are_the_reduced_stream():
    model, args, _ = traced("llama")
    inner = model.inner
    program = trace(inner, args, {"output_hidden_states": True, "use_cache": False}, cache=False)
    new = program.rewrite("hc", check=False)
    randomise(new)
    hand = ByHand(new)
    with torch.no_grad():
        got = new(*args, output_hidden_states=True)
        logits = llama(model, *args, hand)
        expected = [inner.model.embed_tokens(*args), *(hand.reduced(s) for s in hand.seen[1::2])]
        expected[-1] = inner.model.norm(expected[-1])
    assert distance(got.logits, logits) <= NEAR and len(got.hidden_states) == 5
    for state, other in zip(got.hidden_states, expected, strict=True):
        assert distance(state, other) <= NEAR


def test_hidden_states_and_a_concat_of_them_see_the_mixing():
    from tests.cases.run_cases import load_cases

    cases = load_cases()
    if cases is None:
        pytest.skip("no shared cases here")
    model, args, _ = cases.REGISTRY["hidden-states-out"].build()
    program = trace(model, args)
    for flat in (program.rewrite("hc{init=replicate}"), program.rewrite("hc")):
        with torch.no_grad():
            for got, eager in zip(tree_leaves(flat(*args)), tree_leaves(model(*args)), strict=True):
                assert distance(got, eager) <= 1e-5
    new = program.rewrite("hc", check=False)
    randomise(new)
    hand = ByHand(new)
    with torch.no_grad():
        (x,) = args
        blocks = [[(lambda h, b=b: b.attn(b.n1(h)), same), (lambda h, b=b: b.mlp(b.n2(h)), same)] for b in model.blocks]
        last = hand(blocks, x, model.norm)
        states = [hand.reduced(s) for s in hand.seen[1::2]]
        expected = [last, *states, model.fuse(torch.cat(states, -1))]
        for got, other, eager in zip(tree_leaves(new(*args)), expected, tree_leaves(model(*args)), strict=True):
            assert distance(got, other) <= NEAR and distance(got, eager) > FAR


# ---- chosen sites


def edited(program, pipeline: str, *removed: int) -> Plan:
    data = json.loads(json.dumps(program.plan(pipeline).to_json()))
    sites = data["steps"][0]["sites"]
    data["steps"][0]["sites"] = [s for i, s in enumerate(sites) if i not in removed]
    return Plan.from_json(data)


@pytest.mark.parametrize("mixer", ["hc", "ihc"])
@pytest.mark.parametrize("removed", [(0,), (2, 3), (7,), (1, 2, 3, 4, 5, 6)])
def test_a_site_taken_out_of_the_plan_stays_a_plain_residual(removed, mixer):
    model, args, program = traced("llama")
    new = program.rewrite(edited(program, f"hc{{mixer={mixer}}}", *removed), check=False)
    assert not any(n.startswith(f"hcx.hc_0.0.{i}.") for n in new.new_parameters() for i in removed)
    randomise(new)
    with torch.no_grad():
        got, expected = new(*args), llama(model, *args, ByHand(new, removed, mixer=mixer))
        assert distance(got, expected) <= NEAR and distance(got, model(*args)) > FAR


@pytest.mark.parametrize("options", ["mult=4", "mult=3"])
def test_an_edited_plan_keeps_replicate_bitwise(options):
    model, args, program = traced("llama")
    new = program.rewrite(edited(program, f"hc{{init=replicate,{options}}}", 1, 4))
    with torch.no_grad():
        assert torch.equal(new(*args), model(*args))


@pytest.mark.parametrize(
    "options",
    [
        "mult=1",
        "mixer=ihc,init=replicate,mult=3",
        "stack=nowhere",
        "init=sum",
        "mixer=kromhc,mult=5",
        "mixer=kromhc,mult=10",
        "mixer=ddl,mult=0",
        "mixer=kromhc,mult=0",
    ],
)
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises((UsageError, PlanError)):
        traced("llama")[2].plan(f"hc{{{options}}}")
