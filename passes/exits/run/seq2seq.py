"""Exits of an encoder that a decoder reads: the decoder is run on what the encoder holds after some blocks, and a row
keeps the hypothesis of the first exit that is sure of it, or of the surest one.

How sure an exit is of a sentence is the mean log posterior of the tokens that the decoder chose, its end included.

Source: docs/sources.md, sequence-exits (attention encoder-decoders for speech).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan

import torch
from hcx.passes.exits.applied import NAME, Applied, applied, never_leaving, without_taps
from hcx.passes.exits.insert.inserted import NEVER, answer_of
from hcx.passes.exits.insert.sequences import RULES, choose
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import Dataflow, value
from hcx.rewrite.ir.history import runs_of
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.traced import traced
from hcx.rewrite.run.flops import counter
from hcx.rewrite.run.pieces import cut, is_size
from hcx.rewrite.sites.finder import cache_nodes, find_in_graph
from torch import fx

Named = dict[str, torch.Tensor]
END = "stream.end"


@dataclass
class Attempt:
    """What the decoder says from one exit.

    Attributes:
        at: blocks of the encoder; rows: which rows of the call it was asked for.
        tokens: of each row, without the prompt, up to and with the one that ends it.
        confidence: mean log posterior of these, ``[rows]``.
        ended: whether the row came to its end within the limit, ``[rows]``.
        flops: of the decoder and of what it reads from the encoder's stream, for these rows.
    """

    at: int
    rows: list[int]
    tokens: list[list[int]]
    confidence: torch.Tensor
    ended: torch.Tensor
    flops: int

    def score(self, must_end: bool = True) -> torch.Tensor:
        """The confidence that exits are chosen by: none where a hypothesis has not ended, ``[rows]``."""
        return torch.where(self.ended, self.confidence, -NEVER) if must_end else self.confidence


@dataclass
class Decoded:
    """Hypotheses of a batch.

    Attributes:
        tokens, confidence, depth: of each row, from the exit that was taken; depth in blocks of the encoder.
        attempts: every exit that was tried, in order.
        encoder_flops: operations of the encoder's blocks that ran, and of what lies before them.
        flops: all operations, decoders of all attempts included.
    """

    tokens: list[list[int]]
    confidence: torch.Tensor
    depth: torch.Tensor
    attempts: list[Attempt] = field(default_factory=list)
    encoder_flops: int = 0

    @property
    def flops(self) -> int:
        return self.encoder_flops + sum(a.flops for a in self.attempts)


class EncoderExits:
    """Decodes greedily from exits of an encoder.

    The Program is cut into the encoder's blocks between exits, what the decoder reads of a stream (the encoder's final
    norm and the keys and values of cross-attention, computed once an attempt), and the decoder. It is traced without a
    cache: every step runs the decoder over all tokens so far.

    Args:
        program: an encoder-decoder; plain, or with ``exits`` in select form in the encoder, of which ``affine`` heads
            translate the stream.
        at: blocks before each exit, where the Program has none.
        stack: label of the encoder's stack; default: the first one.

    Raises:
        UsageError: no decoder reads the stack, a cache, no places, or heads that are not the model's own.
    """

    def __init__(self, program: Program, at: Sequence[int] | None = None, stack: str | None = None):
        self.program = program
        if program.signature.has_cache:
            raise UsageError("a Program with a cache runs its encoder in every step", where=program.signature.model,
                             hint="trace with cache=False")  # fmt: skip
        exits = applied(program) if runs_of(program.history, NAME) else None
        if exits is not None and at is None:
            at, stack = exits.places, exits.details[0]["stack"]
        if isinstance(at, int | str) or not all(type(k) is int for k in at or ()):
            raise UsageError(f"at={at!r} is no list of numbers of blocks", where="at", hint="e.g. at=[2, 3]")
        graph = never_leaving(program)
        plain = without_taps(graph, len(program.output_names))
        caches = {n.name for n in cache_nodes(program)}
        sites = find_in_graph(plain, {n for n in plain.nodes if n.name in caches})
        found = sites.stack(stack) if stack is not None else next(iter(sites.stacks), None)
        self.places = sorted(set(at or ()))
        if found is None or not self.places or not all(0 < k < found.depth for k in self.places):
            raise UsageError(f"no exits at {list(at or ())} in stack {stack or (found and found.label)}", where="at",
                             hint="at=[...] with 0 < at < depth; stacks: " + ", ".join(s.label for s in sites.stacks))  # fmt: skip
        if exits is not None and exits.details[0]["stack"] != found.label:
            exits = None  # of another stack, and so is what their numbers say
        heads = [d["head"] for d in exits.details if d["at"] in self.places] if exits is not None else []
        if odd := [h for h in heads if h not in ("shared", "affine")]:
            raise UsageError(f"head={odd[0]} is no view of the stream that the decoder could read",
                             where=program.signature.model, hint="head=shared or head=affine")  # fmt: skip
        self.depth = found.depth
        answer = answer_of(plain, len(program.output_names), found)
        reads = _memory(program, plain, found.boundaries[-1].node, answer)
        self.classes = int(traced(answer).shape[-1])
        self._cut(program, graph, exits, [found.boundary(k).node.name for k in self.places],
                  found.boundaries[-1].node.name, reads, answer.name)  # fmt: skip

    def _cut(
        self, program: Program, graph: fx.Graph, exits: Applied | None, streams: list[str], end: str,
        reads: list[str], answer: str,
    ) -> None:  # fmt: skip
        stages: dict[tuple[str, int], dict[str, str]] = {}
        for k, name in zip(self.places, streams, strict=True):
            stages["block", k] = {f"stream.{k}": name}
            if exits is not None and (view := _translated(graph, exits, k)) is not None:
                stages["view", k] = {f"view.{k}": view}
        stages["block", self.depth] = {END: end}
        stages["memory", 0] = {f"memory.{i}": name for i, name in enumerate(reads)}
        stages["decoder", 0] = {"logits": answer}
        self._pieces = dict(zip(stages, cut(program, graph, list(stages.values())), strict=True))
        for name in ("decoder", "memory"):
            taken = {i.name for i in self._pieces[name, 0].inputs}
            if odd := [n for n in taken if n.startswith(("stream.", "value.")) and n != END]:
                raise UsageError(f"the decoder also reads `{odd[0]}`, which is made before the end of the encoder",
                                 where=program.signature.model)  # fmt: skip

    @property
    def tokens(self) -> str:
        """Name of the input with the decoder's tokens."""
        inputs = self._pieces["decoder", 0].inputs
        return next(i.name for i in inputs if i.name.endswith("input_ids"))

    def __call__(
        self,
        inputs: Mapping[str, torch.Tensor],
        prompt: torch.Tensor,
        *,
        stop: int,
        limit: int,
        rule: str = "first",
        threshold: float | Mapping[int, float] | None = None,
        not_first: Sequence[int] = (),
        must_end: bool = True,
    ) -> Decoded:
        """Decode a batch; rows never depend on each other.

        Args:
            inputs: the encoder's, by name, ``[B, ...]``.
            prompt: first tokens of every row, ``[P]``.
            stop: token that ends a row; ``limit``: most new tokens.
            rule: ``first``: rows leave at the first exit whose confidence reaches the threshold, and only the others run
                the next blocks; ``max``: every exit is decoded, and the surest hypothesis kept, of equal ones the first.
            threshold: mean log posterior that an exit must reach, one for all or by place; None never leaves with
                ``first`` and lets every exit compete with ``max``.
            not_first: tokens that may not come right after the prompt.
            must_end: never take an exit whose hypothesis has not ended within the limit: a decoder that repeats itself
                is very sure of it. The model's own is taken as it is.

        Raises:
            UsageError: an input that there is none of, that is missing or empty; a prompt or ``not_first`` that are not
                tokens; no limit; another rule; thresholds for other places or that are no numbers.
        """
        rows = self._checked(inputs, prompt, limit, rule, threshold, not_first)
        default = NEVER if rule == "first" else -NEVER
        given = threshold if isinstance(threshold, Mapping) else dict.fromkeys(self.places, threshold)
        limits = {k: default if given[k] is None else given[k] for k in self.places}
        alive, known = torch.arange(rows), dict(inputs)
        found = Decoded([[]] * rows, torch.full((rows,), -NEVER), torch.zeros(rows, dtype=torch.long))
        for k in (*self.places, self.depth):
            known |= self._run("block", k, known, found)
            if limits.get(k) == NEVER:
                continue  # nobody can leave: the decoder is not asked
            found.attempts.append(attempt := self._attempt(k, known, alive, prompt, stop, limit, not_first))
            if rule == "max":
                continue
            leaves = torch.ones(len(alive), dtype=torch.bool)
            if k != self.depth:
                leaves = (attempt.confidence >= limits[k]) & (attempt.ended | (not must_end))
            self._take(found, attempt, leaves)
            stay = (~leaves).nonzero()[:, 0]
            if not len(stay):
                break
            alive, known = alive[stay], {n: t[stay] for n, t in known.items()}
        if rule == "max":
            *early, last = found.attempts
            scores = torch.stack([a.score(must_end) for a in early] or [torch.full((rows,), -NEVER)])
            taken = choose(scores, [limits[a.at] for a in early] or [NEVER], "max", last.confidence)
            taken[taken == len(scores)] = len(early)
            for number, attempt in enumerate(found.attempts):
                self._take(found, attempt, taken == number)
        return found

    def _checked(
        self, inputs: Mapping[str, torch.Tensor], prompt: torch.Tensor, limit: int, rule: str,
        threshold: float | Mapping[int, float] | None, not_first: Sequence[int],
    ) -> int:  # fmt: skip
        """Number of rows of a call."""
        taken = {i.name for piece in self._pieces.values() for i in piece.inputs}
        specs = {i.name: i for i in self.program.inputs if i.name in taken and i.name != self.tokens}
        hint = "it takes " + ", ".join(specs)
        if unknown := [n for n in inputs if n not in specs]:
            raise UsageError(f"there is no input `{unknown[0]}`", where="inputs", hint=hint)
        if missing := [n for n, i in specs.items() if i.fill is None and n not in inputs]:
            raise UsageError(f"the input `{missing[0]}` is missing", where="inputs", hint=hint)
        counts = {n: len(t) if t.dim() else 0 for n, t in inputs.items()}
        if len(set(counts.values())) != 1 or 0 in counts.values():
            raise UsageError(
                f"the inputs have {counts} rows", where="inputs", hint="[B, ...] each, with B of 1 and more"
            )
        whole = prompt.dtype in (torch.int32, torch.int64) and prompt.dim() == 1 and len(prompt) > 0
        if not whole or not bool(((prompt >= 0) & (prompt < self.classes)).all()):
            raise UsageError(f"a prompt of {list(prompt.shape)} {prompt.dtype} is no row of tokens", where="prompt",
                             hint=f"[P] integers from 0 to {self.classes - 1}, the same for every row")  # fmt: skip
        if odd := [t for t in not_first if not 0 <= t < self.classes]:
            raise UsageError(f"{odd[0]} is no token", where="not_first", hint=f"0 to {self.classes - 1}")
        if type(limit) is not int or limit < 1:
            raise UsageError(f"limit={limit!r} is no number of tokens", where="limit", hint="1 and more")
        if rule not in RULES:
            raise UsageError(f"there is no rule `{rule}`", where="rule", hint=" or ".join(RULES))
        limits = threshold if isinstance(threshold, Mapping) else dict.fromkeys(self.places, threshold)
        if set(limits) != set(self.places):
            raise UsageError(f"thresholds for {list(limits)}", where="threshold", hint=f"one for each of {self.places}")
        if any(t is not None and isnan(t) for t in limits.values()):
            raise UsageError("a threshold is nan: not a number", where="threshold", hint="infinity never leaves")
        return next(iter(counts.values()))

    @staticmethod
    def _take(found: Decoded, attempt: Attempt, chosen: torch.Tensor) -> None:
        for i in chosen.nonzero()[:, 0].tolist():
            row = attempt.rows[i]
            found.tokens[row], found.confidence[row], found.depth[row] = (
                attempt.tokens[i],
                attempt.confidence[i],
                attempt.at,
            )

    def _attempt(
        self, k: int, known: Named, alive: torch.Tensor, prompt: torch.Tensor, stop: int, limit: int,
        not_first: Sequence[int],
    ) -> Attempt:  # fmt: skip
        """Greedy hypotheses from the stream after k blocks."""
        spent = Decoded([], torch.zeros(0), torch.zeros(0))
        stream = known[END] if k == self.depth else known[f"stream.{k}"]
        if ("view", k) in self._pieces:
            stream = self._run("view", k, {f"stream.{k}": stream}, spent)[f"view.{k}"]
        memory = {END: stream, **self._run("memory", 0, {**known, END: stream}, spent)}
        ids = prompt.reshape(1, -1).expand(len(alive), -1)
        going = torch.ones(len(alive), dtype=torch.bool)
        total, count = torch.zeros(len(alive)), torch.zeros(len(alive))
        for step in range(limit):
            given = {**known, **memory, self.tokens: ids.contiguous()}
            logits = self._run("decoder", 0, given, spent)["logits"][:, -1].float()
            if step == 0 and len(not_first):
                logits[:, list(not_first)] = float("-inf")
            log_p, token = logits.log_softmax(-1).max(-1)
            total, count = total + torch.where(going, log_p, 0), count + going
            ids = torch.cat([ids, torch.where(going, token, stop)[:, None]], 1)
            going &= token != stop
            if not going.any():
                break
        said = [row[: int(n)] for row, n in zip(ids[:, prompt.numel() :].tolist(), count, strict=True)]
        return Attempt(k, alive.tolist(), said, total / count, ~going, spent.encoder_flops)

    def _run(self, kind: str, number: int, given: Mapping[str, torch.Tensor], spent: Decoded) -> Named:
        """Run a piece on what it takes of some values, and count its operations."""
        piece = self._pieces[kind, number]
        names = {i.name for i in piece.inputs}
        flat = piece.signature.by_name({n: t.contiguous() for n, t in given.items() if n in names})
        with torch.no_grad(), counter() as counted:
            outputs = piece.run_flat(flat)
        spent.encoder_flops += counted.get_total_flops()
        return dict(zip(piece.output_names, outputs, strict=True))


def _memory(program: Program, graph: fx.Graph, end: fx.Node, answer: fx.Node | None) -> list[str]:
    """Values of the stream alone that the decoder reads together with its tokens.

    Raises:
        UsageError: no decoder reads the stream.
    """
    flow = Dataflow(graph)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    others = [n for n in placeholders if answer is not None and flow.reaches(n, answer) and not flow.reaches(n, end)]
    tokens = [n for n in others if value(n) is not None and not traced(n).is_floating_point()]
    if not tokens:
        raise UsageError("no decoder with tokens of its own reads this stack", where=program.signature.model,
                         hint="stack=LABEL of the encoder of an encoder-decoder; see exits{per=sequence} for CTC")  # fmt: skip

    def alone(node: fx.Node) -> bool:
        return flow.reaches(end, node) and not any(flow.reaches(o, node) for o in others)

    reads = flow.between(end, answer)
    return [
        n.name
        for n in reads
        if alone(n) and not is_size(n) and isinstance(value(n), torch.Tensor)
        and any(not alone(u) and not is_size(u) and flow.reaches(u, answer) for u in n.users)
    ]  # fmt: skip


def _translated(graph: fx.Graph, exits: Applied, k: int) -> str | None:
    """Name of the translated stream of an exit, None where the stream is read as it is."""
    weight = exits.tensor(k, "weight")
    return next(
        (
            n.name
            for n in graph.nodes
            if n.op == "call_function" and any(o.op == "get_attr" and o.target == weight for o in n.all_input_nodes)
        ),
        None,
    )
