"""The exits of a Program that has some: where they read, what they answer, and the model as it is without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.fork import fork
from hcx.rewrite.ir.history import Entry, runs_of, tensor_prefix
from hcx.rewrite.ir.program import Program, copy_graph
from hcx.rewrite.ir.tags import REDUCE, hcx_tag
from hcx.rewrite.ir.traced import results
from hcx.rewrite.ir.values import fake_mode_of
from hcx.rewrite.pipeline.passbase import tap_prefix
from hcx.rewrite.sites.finder import cache_nodes, find_in_graph
from hcx.rewrite.sites.views import Boundary
from torch import fx

from .insert.inserted import answer_of, is_selection
from .insert.places import Place, blocks_before, boundary, position, tensor_part
from .insert.scores import READ_TWICE

NAME = "exits"


@dataclass
class Applied:
    """The last ``exits`` of a Program's history, in select form.

    Attributes:
        number: how many ``exits`` came before it.
        places: blocks before each exit, in order, ``14~1`` for those in one pass of a loop; ``before``: the same as
            numbers of blocks executed; ``depth``: blocks of the model.
        details: plan details of each exit.
        graph: a copy of the Program's graph in which nothing leaves; node names are the Program's.
        streams: name of the plain stream at each exit; ``earlier``: a block before it, where the score reads that;
            ``end``: at the end of the stack.
        scores, logits: names of what the exits find; ``scored``: of the logits that the scores read; ``answer``: of the
            model's own logits.
        valid: name of what says which positions of a sequence count, None where all do or positions leave by themselves.
        own_score: with ``rule=max``, name of the score of the model's own answer.
    """

    program: Program
    number: int
    places: list[Place]
    before: list[int]
    depth: int
    details: list[dict[str, Any]]
    graph: fx.Graph
    streams: list[str]
    earlier: list[str]
    end: str
    scores: list[str]
    logits: list[str]
    scored: list[str]
    answer: str
    valid: str | None = None
    own_score: str | None = None

    @property
    def per(self) -> str:
        """What leaves together: ``position`` or ``sequence``."""
        return self.details[0].get("per", "position")

    @property
    def rule(self) -> str:
        """``first`` or ``max``."""
        return self.details[0].get("rule", "first")

    @property
    def entry(self) -> Entry:
        """Its entry in the history."""
        return runs_of(self.program.history, NAME)[self.number]

    def tensor(self, at: Place | None, name: str) -> str:
        """Full name of a tensor of the pass; ``at`` is None for one that all exits share."""
        return f"{tensor_prefix(NAME, self.number)}.{name if at is None else f'{tensor_part(at)}.{name}'}"

    def threshold(self, at: Place) -> float:
        """What the score must reach; infinite where nothing ever leaves."""
        return float(self.program.tensor(self.tensor(at, "threshold")))


def applied(program: Program) -> Applied:
    """Find the exits of a Program.

    Raises:
        UsageError: it has none, or not in select form.
    """
    entries = runs_of(program.history, NAME)
    sites = entries[-1].sites if entries else []
    if not sites:
        raise UsageError(
            "this program has no exits", where=program.signature.model, hint="rewrite it with `exits` first"
        )
    details = [s["detail"] for s in sites]
    form = entries[-1].step["options"].get("form", "select")
    if runs_of(program.history, "skipping"):
        form = "cond"
    if form != "select":
        raise UsageError(f"the exits are in {form} form", where=NAME, hint="fit and calibrate them in select form")
    number = len(entries) - 1
    fake_mode_of(program)
    graph = never_leaving(program)
    plain = without_taps(graph, len(program.output_names))
    caches = {n.name for n in cache_nodes(program)}
    stack = find_in_graph(plain, {n for n in plain.nodes if n.name in caches}).stack(details[0]["stack"])
    by_name = {n.name: n for n in graph.nodes}
    taps = dict(zip(program.taps, results(graph)[len(program.output_names) :], strict=True))
    prefix = tap_prefix(NAME, number)
    places = [d["at"] for d in details]
    *before, depth = blocks_before(stack, places)
    logits = [taps[f"{prefix}.{k}.logits"].name for k in places]
    tagged = {tag: n.name for n in graph.nodes if (tag := hcx_tag(n).get("scored"))}
    twice = details[0]["score"] in READ_TWICE
    return Applied(
        program,
        number,
        places,
        before,
        depth,
        details,
        graph,
        [_plain_stream(by_name, boundary(stack, k)) for k in places],
        [_plain_stream(by_name, stack.boundaries[position(stack, k) - 1]) for k in places if twice],
        _plain_stream(by_name, stack.boundaries[-1]),
        [taps[f"{prefix}.{k}.score"].name for k in places],
        logits,
        [tagged.get(f"{number}.{k}", name) for k, name in zip(places, logits, strict=True)],
        answer_of(plain, len(program.output_names), stack).name,
        *(taps[n].name if (n := f"{prefix}.{kind}") in taps else None for kind in ("valid", "score")),
    )


def never_leaving(program: Program) -> fx.Graph:
    """A copy of the graph in which every selection takes the late value; taps stay."""
    graph = copy_graph(program.graph)
    for node in graph.nodes:
        if is_selection(node):
            node.replace_all_uses_with(node.args[2])
    return graph


def without_taps(graph: fx.Graph, outputs: int, prefix: str = "") -> fx.Graph:
    """A copy of a graph with its first so many results, and what they need; taps go whose names begin so."""
    plain = copy_graph(graph)
    output = plain.output_node()
    taps = zip(output.meta.get("taps", ()), output.args[0][outputs:], strict=True)
    kept = [(name, node) for name, node in taps if not name.startswith(prefix)]
    output.args = ((*output.args[0][:outputs], *(node for _, node in kept)),)
    output.meta["taps"] = [name for name, _ in kept]
    plain.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return plain


def _plain_stream(by_name: dict[str, fx.Node], boundary: Boundary) -> str:
    node = by_name[boundary.node.name]
    if boundary.carrier.kind == "plain":
        return node.name
    return next(u.name for u in node.users if hcx_tag(u).word == REDUCE.word)


def with_values(program: Program, values: dict[str, torch.Tensor]) -> Program:
    """A new Program that shares all tensors with the given one but for some that get new values."""
    new = fork(program)
    for name, tensor in values.items():
        path, _, leaf = name.rpartition(".")
        owner = new.tree
        for part in path.split("."):
            owner = owner._modules[part]
        old = program.tensor(name)
        tensor = tensor.detach().to(old.device, old.dtype).reshape(old.shape).clone()
        if leaf in owner._parameters:
            owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=old.requires_grad)
        else:
            owner._buffers[leaf] = tensor
    return new
