"""A decoder in pieces with their caches: segments of blocks, and the score and the head of each exit by themselves.

Scores and heads are Programs of their own, so that a head runs only where a token leaves, and for the tokens alone whose
answer is asked. What to run when is said in :mod:`hcx.passes.exits.run.runtime` and :mod:`hcx.passes.exits.run.speculate`.
"""

from __future__ import annotations

import contextlib

import torch
from hcx.passes.exits.applied import applied
from hcx.passes.exits.insert.heads_copied import OWN_CACHE
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import Dataflow, op_name
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import CACHE, Fill, InputSpec
from hcx.rewrite.ir.traced import traced
from hcx.rewrite.run.flops import counter
from hcx.rewrite.run.pieces import cut
from torch import fx

from .split import Layout, layout_of

Named = dict[str, torch.Tensor]
"""Tensors by flat name."""
END = "stream.end"


class Piece:
    """A Program with the cache slots that are its own.

    Attributes:
        length: tokens in its cache.
        takes: inputs that earlier pieces give, and the tokens.
        weight_bytes: what one call reads of its tensors, see :func:`weight_bytes`.
    """

    def __init__(self, program: Program, given: set[str]):
        self.program, self.weight_bytes = program, weight_bytes(program)
        self.takes = [i.name for i in program.inputs if i.name in given]
        self.forget()

    def forget(self) -> None:
        """Start again with an empty cache."""
        self.cache: Named = {}
        self.length = 0

    @property
    def slots(self) -> list[InputSpec]:
        """Inputs that are its cache."""
        return [s for s in self.program.inputs if s.fill == Fill.EMPTY]

    def keep(self, outputs: Named, tokens: int) -> None:
        """Take the cache after a call with so many tokens."""
        self.cache |= {CACHE + n.removeprefix("present"): t for n, t in outputs.items() if n.startswith("present.")}
        self.length += tokens

    def crop(self, length: int) -> None:
        """Forget the tokens behind the first ``length`` ones."""
        if length >= self.length:
            return
        for spec in self.slots:
            axis = spec.shape.index("past")
            self.cache[spec.name] = self.cache[spec.name].narrow(axis, 0, length).contiguous()
        self.length = length


class Segments:
    """The pieces of one Program, and the values that go from one to the next.

    Args:
        program: takes tokens and a cache; with exits in select form. Its tensors are shared.
        count: count floating-point operations while running.
        fill: also make the pieces that compute keys and values from the stream at the start of a segment.
        decodes: the pieces are run token by token; else any model will do, see :mod:`hcx.passes.exits.run.compact`.

    Attributes:
        places: blocks before each exit; ``depth``: blocks of the model.
        flops: operations counted so far; ``weight_bytes``: of the weights that calls have read, counted or not.

    Raises:
        UsageError: no tokens, cache or exits; a value that crosses does not belong to single tokens.
    """

    def __init__(self, program: Program, *, count: bool = False, fill: bool = False, decodes: bool = True):
        if decodes and not (program.signature.tokens and program.signature.has_cache):
            raise UsageError("decoding in pieces needs a model that takes `input_ids` and a cache",
                             where=program.signature.model, hint="trace it with use_cache=True")  # fmt: skip
        self.program, self.count, self.flops, self.weight_bytes = program, count, 0, 0
        layout = layout_of(program)
        if decodes and any(d["head"] == "block" for d in applied(program).details):
            raise UsageError(
                f"head=block {OWN_CACHE}", where=program.signature.model, hint="another head, or the whole Program"
            )
        if missing := [k for k in layout.places if k not in layout.heads]:
            raise UsageError(f"there is no exit after {missing[0]} blocks", where=program.signature.model)
        if applied(program).rule == "max":
            raise UsageError("rule=max needs every exit and the model before it decides: there is nothing to skip",
                             where=program.signature.model, hint="exits{rule=first}")  # fmt: skip
        self.places, self.depth = layout.places, layout.depth
        self.answer, self.tokens = layout.answer[1], program.signature.tokens
        self._thresholds = [layout.thresholds[k] for k in self.places]
        self.streams = [*(f"stream.{k}" for k in self.places), END]
        self._cut(program, layout, fill)
        for piece in self.segments if decodes else ():
            for spec in piece.program.inputs:
                if spec.name in piece.takes and spec.shape[:2] != ("batch", "sequence"):
                    raise UsageError(f"`{spec.name}` of shape {list(spec.shape)} does not belong to single tokens",
                                     where=program.signature.model, hint="use form=select")  # fmt: skip

    def _cut(self, program: Program, layout: Layout, fill: bool) -> None:
        fills = add_fills(layout) if fill else [{} for _ in layout.stored]
        flow, nodes = Dataflow(layout.graph), {n.name: n for n in layout.graph.nodes}
        streams = [*layout.streams, layout.end]
        stages: dict[tuple[str, int], dict[str, str]] = {}
        for number, stored in enumerate(layout.stored):
            caches = {n: node for n, node in stored.items() if n.startswith("present.")}
            stages["segment", number] = {self.streams[number]: streams[number], **caches}
            if fills[number]:
                stages["fill", number] = fills[number]
            if number == len(self.places):
                stages["head", number] = {self.answer: layout.answer[0]}
                break
            k = self.places[number]
            score, logits = layout.heads[k]
            asked, told = {f"score.{k}": score}, {f"logits.{k}": logits}
            if flow.reaches(nodes[logits], nodes[score]):
                asked, told = asked | told, {}
            stages["score", number] = asked
            if told:
                stages["head", number] = told
        programs = cut(program, layout.graph, list(stages.values()))
        given = {self.tokens or ""} | {
            name for p in programs for name in p.output_names if not name.startswith("present.")
        }
        pieces = {home: Piece(p, given) for home, p in zip(stages, programs, strict=True)}
        self.segments = [pieces["segment", i] for i in range(len(layout.stored))]
        self.scores, self.heads, self.fills = (
            [pieces.get((kind, i)) for i in range(len(layout.stored))] for kind in ("score", "head", "fill")
        )
        self.crossing = {n for p in self.segments for n in p.takes}

    def threshold(self, number: int) -> float:
        """What the score of an exit must reach."""
        return float(self.program.tensor(self._thresholds[number]))

    def states(self) -> list[str]:
        """Cache slots of fixed size, which do not hold one entry a token."""
        return [s.name for p in self.segments for s in p.slots if "past" not in s.shape]

    @property
    def plain_bytes(self) -> int:
        """Bytes of weights that a call reads without exits: every segment, and the model's head."""
        return sum(p.weight_bytes for p in (*self.segments, self.heads[-1]))

    # ---- running

    def call(
        self, piece: Piece, given: Named, positions: torch.Tensor, seen: torch.Tensor, cache: Named | None = None
    ) -> Named:
        """Run a piece without keeping its cache.

        Args:
            given: what it takes, for its new tokens.
            positions: of the new tokens, ``[batch, n]``.
            seen: which tokens may be attended to, ``[batch, length + n]``.
            cache: of earlier tokens; default: the piece's own.
        """
        named = {**(piece.cache if cache is None else cache), **{n: given[n] for n in piece.takes}}
        for spec in piece.program.inputs:
            if spec.fill == Fill.POSITIONS:
                named[spec.name] = positions.contiguous()
            elif spec.fill == Fill.ONES and spec.shape == ("batch", "past+sequence"):
                named[spec.name] = seen.contiguous()
        flat = piece.program.signature.by_name(named)
        with torch.no_grad(), counter() if self.count else contextlib.nullcontext() as counted:
            found = piece.program.run_flat(flat)
        if self.count:
            self.flops += counted.get_total_flops()
        self.weight_bytes += piece.weight_bytes
        return dict(zip(piece.program.output_names, found, strict=True))

    def run(self, number: int, given: Named, positions: torch.Tensor, seen: torch.Tensor) -> Named:
        """Run a segment on the next tokens and keep its cache; its other results."""
        piece = self.segments[number]
        found = self.call(piece, given, positions, seen)
        piece.keep(found, positions.shape[1])
        return without_cache(found)

    def ask(self, number: int, known: Named) -> Named:
        """Score of an exit for the last token, and its logits where the score reads them."""
        return self._single(self.scores[number], known)

    def tell(self, number: int, known: Named, tokens: int = 1) -> torch.Tensor:
        """Logits of an exit, or of the model, for the last tokens: ``[batch, tokens, classes]``."""
        name = self.answer if number == len(self.places) else f"logits.{self.places[number]}"
        return known[name] if name in known else self._single(self.heads[number], known, tokens)[name]

    def _single(self, piece: Piece, known: Named, tokens: int = 1) -> Named:
        given = {n: known[n][:, -tokens:].contiguous() for n in piece.takes}
        ids = torch.zeros(next(iter(given.values())).shape[:2], dtype=torch.int64)
        return self.call(piece, given, ids, ids + 1)


def without_cache(found: Named) -> Named:
    """Results that are not the cache."""
    return {n: t for n, t in found.items() if not n.startswith("present.")}


def weight_bytes(program: Program) -> int:
    """Bytes of the tensors that one call reads as they are stored, packed codes as codes; tied ones once.

    A lookup reads the rows of its tokens alone, which are not counted, and a choice of rows (candidates) these rows.
    """
    found: dict[int, int] = {}
    rows = 0
    for node in program.graph.nodes:
        if node.op != "get_attr":
            continue
        chosen = [u for u in node.users if op_name(u) == "index_select" and u.args[0] is node]
        rows += sum(traced(u).numel() * traced(u).element_size() for u in chosen)
        if not all(u in chosen or (op_name(u) == "embedding" and u.args[0] is node) for u in node.users):
            tensor = program.tensor(node.target)
            found[id(tensor)] = tensor.nbytes
    return sum(found.values()) + rows


def add_fills(layout: Layout) -> list[dict[str, str]]:
    """Insert what blocks leave in the cache where their input is the stream at the start of their segment.

    Returns:
        for each segment output name -> node; nothing for the first one, which every token runs.
    """
    graph, nodes = layout.graph, {n.name: n for n in layout.graph.nodes}
    flow, result = Dataflow(graph), [{}]
    boundaries = [nodes[name] for name in layout.boundaries]
    for number, start in enumerate(layout.streams, 1):
        first = nodes[start]
        found: dict[str, str] = {}
        for name, stored in layout.stored[number].items():
            if name.startswith("present."):
                entry = [b for b in boundaries if flow.reaches(first, b) and flow.reaches(b, nodes[stored])][-1]
                mapping: dict[fx.Node, fx.Node] = {entry: first}
                with graph.inserting_before(graph.output_node()):
                    for node in flow.between(entry, nodes[stored]):
                        copy = graph.node_copy(node, lambda n, known=mapping: known.get(n, n))
                        mapping[node] = copy
                found[name] = mapping[nodes[stored]].name
        result.append(found)
    return result
