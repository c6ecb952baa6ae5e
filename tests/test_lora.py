"""LoRA against PEFT, and against eager models whose weights are ``W + s B A``."""

from __future__ import annotations

import copy

import pytest
import torch
from hcx.rewrite import NoMatchError, PlanError, UsageError, load, trace
from hcx.rewrite.pipeline.plan import Plan
from hcx.rewrite.testing import conformance
from torch import nn

from tests.conftest import tiny_llama, token_ids
from tests.test_weights import EveryKind
from tests.trained_nets import llama_by_hand
from tests.zoo import traced

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
NEAR, FAR = 1e-4, 1e-3


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the rms of what is expected."""
    return ((got.double() - expected.double()).abs().max() / expected.double().square().mean().sqrt()).item()


def randomised(program, spread: float = 0.2):
    """The Program with factors away from zero."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in program.new_parameters().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return program


def own_name(name: str) -> str:
    """Our name of a factor of PEFT's."""
    stem, _, rest = name.removeprefix("base_model.model.").partition(".lora_")
    return f"hcx.lora_0.{stem}.{'A' if 'A' in rest.split('.')[0] else 'B'}"


def peft_with(model, program, **options):
    """The model with PEFT's adapters, holding the Program's factors."""
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options)).eval()
    missing = set(program.new_parameters())
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(program.tensor(own_name(name)).reshape(parameter.shape))
                missing.remove(own_name(name))
    assert not missing
    return wrapped


LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GPT2 = ["c_attn", "c_proj", "c_fc"]
ENDS = ["embed_tokens", "lm_head", "q_proj"]
CASES = {
    "llama": ("lora", LLAMA, {}),
    "rslora": ("lora{rank=4,alpha=6,rslora=true}", LLAMA, {"r": 4, "lora_alpha": 6, "use_rslora": True}),
    "ends": (f"lora{{alpha=16,target=[{','.join(ENDS)}]}}", ENDS, {"lora_alpha": 16}),
    "gpt2": ("lora{rank=3,alpha=5}", GPT2, {"r": 3, "lora_alpha": 5, "fan_in_fan_out": True}),
}


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    output = model(ids)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.fixture(scope="module")
def gpt2():
    model, (ids,), _, program = traced("gpt2")
    return model, program, ids


@pytest.mark.parametrize("case", CASES)
def test_it_is_peft_away_from_zero_outputs_and_gradients(case, llama, gpt2):
    text, targets, options = CASES[case]
    model, base, ids = gpt2 if case == "gpt2" else (llama.model, llama.program, llama.ids(2, 9))
    program = randomised(base.rewrite(text))
    reference = peft_with(model, program, **{"r": 8, "lora_alpha": 8, "target_modules": targets, **options})
    got, expected, before = logits(program, ids), logits(reference, ids), logits(model, ids)
    assert relative(got, expected) <= NEAR and relative(got, before) > FAR
    got.square().mean().backward()
    expected.square().mean().backward()
    ours = {n: p.grad for n, p in program.named_parameters() if n in program.origin}
    for name, parameter in reference.named_parameters():
        if "lora_" in name:
            assert relative(ours.pop(own_name(name)), parameter.grad) <= FAR, name
    assert not ours


def test_a_convolution_is_two_convolutions_of_peft(max_diff):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 3, stride=2)).eval()
    pixels = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    program = randomised(trace(net, (pixels,)).rewrite("lora{rank=2,target=[0.weight,2.weight]}"))
    with torch.no_grad():
        expected = peft_with(net, program, r=2, lora_alpha=2, target_modules=["0", "2"])(pixels)
        assert max_diff(program(pixels), expected) <= NEAR and max_diff(program(pixels), net(pixels)) > FAR


def test_every_kind_of_weight_is_updated_by_its_product():
    """Transposed, left, sliced, looked up, convolved, and 3-D experts: the oracle is eager with ``W + s B A``."""
    torch.manual_seed(0)
    model, ids = EveryKind().eval(), torch.randint(0, 9, (2, 5))
    names = "linear,conv1d,transposed,left,packed,low,conv,up,experts,dense,loop"
    program = randomised(trace(model, (ids,)).rewrite(f"lora{{rank=2,alpha=3,target=[{names}]}}"))
    axes = {s["address"]: s["detail"] for s in program.history[0]["plan"]["steps"][0]["sites"]}
    changed = copy.deepcopy(model)
    for name, parameter in changed.named_parameters():
        if name in axes:
            stem = f"hcx.lora_0.{name.removesuffix('.weight')}"
            delta = 1.5 * program.tensor(f"{stem}.B") @ program.tensor(f"{stem}.A")
            if name in ("conv1d", "dense", "loop"):
                delta = delta.mT
            elif name == "up.weight":
                delta = delta.reshape(6, 10, 3).transpose(0, 1)
            parameter.data += delta.detach().reshape(parameter.shape)
    with torch.no_grad():
        assert len(axes) == 11 and {d["form"] for d in axes.values()} == {"beside", "weight"}
        assert relative(program(ids), changed(ids)) <= NEAR and relative(program(ids), model(ids)) > FAR


def test_an_adapter_reads_what_the_adapter_before_it_wrote(max_diff):
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 3)).requires_grad_(False)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    program = randomised(trace(net, (x,)).rewrite("lora{rank=2,target=[0.weight,1.weight,2.weight]}"))
    before, changed = net(x), copy.deepcopy(net)
    for number in range(3):
        a, b = (program.tensor(f"hcx.lora_0.{number}.{k}") for k in "AB")
        changed[number].weight.data += b @ a
    assert max_diff(program(x), changed(x)) <= NEAR < FAR < max_diff(before, changed(x))


def test_an_adapter_on_one_end_of_a_tied_matrix_leaves_the_other_alone(max_diff):
    model, ids = tiny_llama(2, tie_word_embeddings=True), token_ids(14).reshape(2, 7)
    program = trace(model, (ids,))
    for target in ("lm_head", "embed_tokens"):
        new = randomised(program.rewrite(f"lora{{target=[{target}]}}"))
        assert any("tied" in n for n in new.history[0]["plan"]["steps"][0]["notes"])
        a, b = (new.tensor(n) for n in sorted(new.new_parameters()))
        with torch.no_grad():
            if target == "lm_head":
                states = model.model(ids).last_hidden_state
                expected = model.lm_head(states) + states @ a.T @ b.T
            else:
                vectors = model.model.embed_tokens(ids) + a.T[ids] @ b.T
                expected = model(inputs_embeds=vectors).logits
            assert max_diff(new(ids).logits, expected) <= NEAR < FAR < max_diff(new(ids).logits, model(ids).logits)
        assert new.tied_groups() == program.tied_groups()


def test_the_passes_of_a_loop_share_one_adapter(llama, tmp_path, max_diff):
    program = llama.program.rewrite("looped{start=2,end=4,steps=3,scalar=0.4,mix=output},lora", check=False)
    assert len([n for n in program.new_parameters() if ".lora_0." in n]) == 2 * 6 * 7
    with torch.no_grad():
        scalar = program.tensor("hcx.looped_0.scalar").clone()
        randomised(program).tensor("hcx.looped_0.scalar").copy_(scalar)
    only = copy.deepcopy(program)
    only.origin.pop("hcx.looped_0.scalar")
    adapted = peft_with(llama.model, only, r=8, lora_alpha=8, target_modules=LLAMA).base_model.model

    def middle(block, state):
        for number in range(4):
            state = block(number, state)
        for _ in range(2):
            state = state + scalar * (block(3, block(2, state)) - state)
        return block(5, block(4, state))

    ids = llama.ids(2, 12)
    expected = llama_by_hand(adapted, ids, middle)
    program.save(tmp_path / "a.hcx")
    with torch.no_grad():
        assert max_diff(program(ids).logits, expected) <= NEAR < FAR < max_diff(expected, llama.model(ids).logits)
        assert torch.equal(load(tmp_path / "a.hcx")(ids).logits, program(ids).logits)


def test_a_shared_module_has_one_adapter_at_every_call():
    model, args, _, program = traced("shared_block")
    program = randomised(program.rewrite("lora"))
    modules = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("h.")]
    assert len(program.new_parameters()) == 2 * len(modules)
    changed = copy.deepcopy(model)
    for name, parameter in changed.named_parameters():
        stem = f"hcx.lora_0.{name.removesuffix('.weight')}"
        if f"{stem}.A" in program.new_parameters():
            parameter.data += (program.tensor(f"{stem}.B") @ program.tensor(f"{stem}.A")).detach()
    with torch.no_grad():
        assert relative(program(*args), changed(*args)) <= NEAR < FAR < relative(program(*args), model(*args))


def test_dropout_follows_the_mode_and_is_that_of_peft(llama, max_diff):
    program = randomised(llama.program.rewrite("lora{dropout=0.4,target=[o_proj,down_proj]}"))
    options = {"r": 8, "lora_alpha": 8, "target_modules": ["o_proj", "down_proj"]}
    reference = peft_with(llama.model, program, lora_dropout=0.4, **options).train()
    ids = llama.ids(2, 9)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        still = program(ids).logits
        assert torch.equal(program(ids).logits, still)
        program.train(), torch.manual_seed(3)
        got = program(ids).logits
        torch.manual_seed(3)
        assert max_diff(got, reference(ids).logits) <= NEAR < FAR < max_diff(got, still)
        assert torch.equal(program.eval()(ids).logits, still)


def test_the_start_is_bitwise_and_does_not_depend_on_what_else_is_adapted(llama):
    few, many = (llama.program.rewrite(f"lora{{target=[{t}]}}") for t in ("q_proj", "q_proj,v_proj"))
    for program in (few, many):
        assert torch.equal(program(llama.ids(3, 5)).logits, llama.program(llama.ids(3, 5)).logits)
    name = "hcx.lora_0.model.layers.3.self_attn.q_proj.A"
    assert torch.equal(few.tensor(name), many.tensor(name))
    bound = 32**-0.5
    assert 0.8 * bound < few.tensor(name).abs().max() <= bound
    gaussian = llama.program.rewrite("lora{init=gaussian,rank=4,target=[down_proj]}", check=False)
    values = torch.cat([p.flatten() for n, p in gaussian.new_parameters().items() if n.endswith(".A")])
    assert values.std().item() == pytest.approx(1 / 4, rel=0.05)


def test_counts_skips_and_dtypes():
    model, _, _, program = traced("moe_einsum")
    step = program.plan("lora").steps[0]
    everything = sum(p.numel() for p in model.parameters())
    assert step.estimate["parameters covered"] + step.estimate["parameters not covered"] == everything
    assert any("experts" in n and "8 parameters with 65,536 entries" in n for n in step.notes)
    skips = program.plan("lora{dropout=0.1,target=[w_in,c_attn]}").steps[0].skips
    assert [s.reason for s in skips] == ["unsupported"] * 4
    half = tiny_llama(2).bfloat16()
    new = trace(half, (token_ids(14).reshape(2, 7),)).rewrite("lora")
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    assert set(new.state_dict()) - set(new.new_parameters()) == set(half.state_dict())


def test_a_plan_says_everything_that_apply_needs(llama):
    plan = llama.program.plan("lora{rank=4,target=[q_proj]}")
    plan.steps[0].sites = plan.steps[0].sites[:2]
    plan.steps[0].sites[0].detail["rank"] = 2
    program = llama.program.rewrite(Plan.from_json(plan.to_json()), allow_partial=True)
    assert sorted(p.shape[0] for n, p in program.new_parameters().items() if n.endswith(".A")) == [2, 4]


@pytest.mark.parametrize("options", ["rank=0", "dropout=1.0", "target=[nothing]", "init=zeros"])
def test_options_that_cannot_be_are_refused(options, llama):
    with pytest.raises(UsageError):
        llama.program.rewrite(f"lora{{{options}}}")


def test_models_without_a_body():
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    convolutions = nn.Sequential(nn.Conv1d(4, 6, 1), nn.ReLU(), nn.Conv1d(6, 3, 1))
    assert [s.address for s in trace(convolutions, (x[..., None],)).plan("lora").steps[0].sites] == ["0.weight"]
    assert len(trace(nn.Linear(4, 3), (x,)).rewrite("lora").new_parameters()) == 2
    with pytest.raises(NoMatchError, match="found nothing"):
        trace(nn.LayerNorm(4), (x,)).rewrite("lora")


def test_weights_that_are_not_finite_are_refused_by_name():
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    net[0].weight.data[2, 3] = float("nan")
    with pytest.raises(PlanError, match=r"`0\.weight` holds 1 NaN and 0 Inf"):
        trace(net, (torch.randn(2, 8),)).rewrite("lora")


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("text", ["lora", "lora{rank=2,alpha=4,rslora=true,target=[head,qkv],dropout=0.1}"])
def test_conformance(text):
    conformance(text, subprocesses=text == "lora")


def test_smollm2_is_peft(smollm2):
    program = randomised(smollm2.program.rewrite("lora", check=False), 0.02)
    options = {"r": 8, "lora_alpha": 8, "target_modules": LLAMA}
    ids = smollm2.ids(1, 64)
    with torch.no_grad():
        expected = peft_with(smollm2.model, program, **options)(ids).logits
        assert relative(program(ids).logits, expected) <= NEAR < FAR < relative(smollm2.model(ids).logits, expected)
