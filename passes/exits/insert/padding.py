"""Which positions of a row count: the value in the graph that says so, and which way round its inputs are meant.

An input that says what counts is told by what the model does, not by its name: data at positions that are left out does
not move the answers at the others, and moves them where nothing is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from hcx.rewrite.ir.dataflow import Dataflow, op_name, shape, value
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import Fill, InputSpec
from hcx.rewrite.ir.traced import sizes
from hcx.rewrite.run.pieces import is_size
from hcx.rewrite.run.reading import reader
from torch import fx

CLEAR = 10.0
"""Positions that are left out move the others so many times less than the other way round."""

NOTHING = 1e-4
"""Answers that move less than this share of the others do not depend on the data: a model that zeroes what is left out."""

Flat = list[torch.Tensor]


@dataclass(frozen=True)
class Said:
    """How an input says which positions count.

    Attributes:
        index: of the flat input.
        keep, left_out: its entries for the two; None for an input that gives the length of each row.
    """

    index: int
    keep: float | None = None
    left_out: float | None = None

    def whole(self, flat: Flat, size: int) -> torch.Tensor:
        """The input where all of ``size`` positions count."""
        return torch.full_like(flat[self.index], size if self.keep is None else self.keep)

    def partly(self, flat: Flat, size: int, at_start: bool = False) -> torch.Tensor:
        """The input where all but the last quarter of each row counts, or all but the first one (masks alone)."""
        quarter = size // 4
        if self.keep is None:
            return torch.full_like(flat[self.index], size - quarter)
        tensor = self.whole(flat, size)
        tensor[:, slice(0, quarter) if at_start else slice(size - quarter, size)] = self.left_out
        return tensor


def find_valid(program: Program, answer: fx.Node, notes: list[str] | None = None) -> tuple[fx.Node, bool] | str | None:
    """The value in the graph that says which positions of the answer count.

    An encoder that shortens its input computes such a value from the mask of its samples, and so does one that hides
    padding from attention: it has one entry a position, depends on masks or lengths alone, keeps all where these do and
    drops some where these drop the end. Inputs that may say so are masks ``[batch, time]`` and lengths ``[batch]``.

    Args:
        answer: ``[B, ..., C]``.
        notes: gets one for each integer input that may say what counts but is not understood.

    Returns:
        the value and whether it is 0 where positions count; None where no input says what counts, so that all positions
        do; or why it is not known.
    """
    rows = sizes(answer)[:-1]
    if len(rows) < 2:
        return None
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    flow = Dataflow(program.graph)
    reached = {i: n for i, n in enumerate(placeholders) if flow.reaches(n, answer)}
    specs = program.inputs
    masks = [i for i in reached if is_mask(specs[i])]
    doubtful = [i for i in reached if i not in masks and _may_say(specs[i], reached[i])]
    if not masks and not doubtful:
        return None
    seen = _Seen(program, answer, {*masks, *doubtful})

    def telling(said: list[Said]) -> list[tuple[fx.Node, bool, torch.Tensor]]:
        made = _made_from(program, {placeholders[s.index] for s in said})
        found = [n for n in made if (s := shape(n)) is not None and len(s) == len(rows) and s[1:] == rows[1:]]
        # steps on the way have no other reader
        return _told(program, seen, said, [n for n in found if any(u not in found for u in n.users)])

    said: list[Said] = []
    for i in masks:
        way = seen.way(i)
        if way is None and not _by_convention(specs[i]):
            return f"it is not clear from the answers which positions the mask `{specs[i].name}` leaves out"
        said.append(way or Said(i, 1, 0))
    for i in doubtful:
        # first what is cheap: the numbers tried may be none that the model knows
        guess = Said(i) if len(specs[i].shape) == 1 else Said(i, 1, 0)
        way = seen.way(i) if telling([guess]) else None
        if way is not None:
            said.append(way)
        elif notes is not None:
            notes.append(f"`{specs[i].name}` may say which positions count, but how is not known: it is not read")
    if not said:
        return None
    told = telling(said)
    if not told:
        return "no value made from the mask says which positions of the answer count"
    (node, inverted, kept), *others = reversed(told)
    if any(not torch.equal(kept, other) for _, _, other in others):
        return f"`{node.name}` and `{others[0][0].name}` disagree about which positions count"
    return node, inverted


def is_mask(spec: InputSpec) -> bool:
    """Whether an input has one entry a position that says something about it: filled with ones, bool, or called a mask."""
    if len(spec.shape) != 2 or spec.fill == Fill.EMPTY:
        return False
    return spec.fill == Fill.ONES or spec.dtype == torch.bool or spec.name.endswith("mask")


def _by_convention(spec: InputSpec) -> bool:
    """Whether ones keep where answers do not tell, e.g. behind a norm over time: Transformers' ``attention_mask``."""
    named = spec.name.split(".")[-1] == "attention_mask" and not spec.dtype.is_floating_point
    return spec.fill == Fill.ONES or named


def _may_say(spec: InputSpec, node: fx.Node) -> bool:
    """Whether an integer input may be lengths or a mask: one or two dimensions, and not numbers of rows of a table."""
    if spec.fill is not None or spec.dtype.is_floating_point or len(spec.shape) not in (1, 2):
        return False
    todo, indices = [node], False
    while todo:
        for user in todo.pop().users:
            if op_name(user) in ("to", "_to_copy", "view", "reshape", "unsqueeze", "clone", "clamp", "add", "expand"):
                todo.append(user)
            indices |= op_name(user) in ("embedding", "index", "index_select", "gather", "one_hot")
    return not indices


class _Seen:
    """What a Program's answers depend on, on its first example.

    Args:
        asked: numbers of the inputs that may say what counts; the others are data.
    """

    def __init__(self, program: Program, answer: fx.Node, asked: set[int]):
        self.specs, self.asked = program.inputs, asked
        self.flat = [t.clone() for t in program.signature.complete(program.examples[0])]
        self._read = reader(program, program.graph, [answer.name])

    def size(self, index: int) -> int:
        """Positions that an input is about: its own, or those of the data."""
        if len(self.specs[index].shape) == 2:
            return self.flat[index].shape[1]
        return next((self.flat[i].shape[axis] for i, axis in self._data(index)), 0)

    def way(self, index: int) -> Said | None:
        """How an input says what counts, None where it is not clear."""
        try:
            if len(self.specs[index].shape) == 1:
                way = Said(index)
                return way if self._says(way, False) else None
            ways = [Said(index, 1, 0), Said(index, 0, 1)]
            if self.flat[index].is_floating_point():
                ways.append(Said(index, 0, -inf))  # one that is added to attention's scores
            # at the start too: in a decoder the end never moves what is before it
            found = [w for w in ways if self._says(w, False) or self._says(w, True)]
        except (RuntimeError, IndexError):
            return None  # the model does not take such numbers, so they do not say this
        return found[0] if len(found) == 1 else None

    def _says(self, way: Said, at_start: bool) -> bool:
        """Whether positions that this way of saying it leaves out are left out, and only then."""
        size = self.size(way.index)
        some = self._moved(way.index, way.partly(self.flat, size, at_start), at_start)
        if some is None:
            return False
        silent = some[:, KEPT].sum() > 0 and some[:, OUT].sum() <= NOTHING * some[:, KEPT].sum()
        if not silent and some[KEPT].max() < CLEAR * some[OUT, KEPT]:
            return False
        whole = self._moved(way.index, way.whole(self.flat, size), at_start)
        if silent:
            return bool(whole[:, OUT].sum() > CLEAR * some[:, OUT].sum())
        # where a decoder never looks ahead, positions that count move themselves alone
        reference = some[KEPT, OUT] if whole[KEPT, OUT] > 0 else some[KEPT, KEPT]
        if reference > 0 and reference >= CLEAR * some[OUT, KEPT]:
            return bool(whole[OUT, KEPT] > CLEAR * some[OUT, KEPT])
        return False

    def _moved(self, index: int, tensor: torch.Tensor, at_start: bool) -> torch.Tensor | None:
        """How far answers move with data, ``[data, answers]``, both at positions that count and that may be left out."""
        flat = list(self.flat)
        flat[index] = tensor
        before = self._answers(flat)
        if min(before.shape[1], self.size(index)) < 4:
            return None
        moved = torch.zeros(2, 2)
        for source in (KEPT, OUT):
            change = (self._answers(self._altered(flat, index, source, at_start)) - before).abs().nan_to_num(0, 0, 0)
            for target in (KEPT, OUT):
                moved[source, target] = change[:, _part(target, before.shape[1], at_start)].mean()
        return moved

    def _answers(self, flat: Flat) -> torch.Tensor:
        return self._read(flat)[0].double()

    def _altered(self, flat: Flat, index: int, kind: int, at_start: bool) -> Flat:
        """Inputs with other data in one part."""
        result = list(flat)
        generator = torch.Generator().manual_seed(kind)
        for i, axis in self._data(index):
            old = flat[i]
            if old.is_floating_point():
                noise = torch.randn(old.shape, generator=generator).to(old.device, old.dtype)
                scale = old.std() if old.numel() > 1 and bool(old.std() > 0) else 1.0
                new = old + 2 * scale * noise
            else:
                new = (old + 1) % (old.max() + 1).clamp_min(1)  # numbers that the model knows
            part = _part(kind, old.shape[axis], at_start)
            result[i] = old.clone()
            result[i].movedim(axis, 0)[part] = new.movedim(axis, 0)[part]
        return result

    def _data(self, index: int) -> list[tuple[int, int]]:
        """Inputs with data along the time that an input is about, and the number of that axis."""
        batch, time = self.specs[index].shape[0], (*self.specs[index].shape, None)[1]
        found = []
        for i, spec in enumerate(self.specs):
            if i in self.asked or spec.fill is not None or len(spec.shape) < 2 or spec.shape[0] != batch:
                continue
            if spec.dtype == torch.bool:
                continue
            axes = range(1, len(spec.shape))
            same = [a for a in axes if spec.shape[a] == time]
            named = [a for a in axes if isinstance(spec.shape[a], str)]
            found.append((i, (*same, *named, 1)[0], bool(same)))
        exact = [f for f in found if f[2]]
        return [(i, axis) for i, axis, _ in exact or found]


KEPT, OUT = 0, 1


def _part(kind: int, size: int, at_start: bool) -> slice:
    """Some positions that count or that may be left out.

    They lie apart, as convolutions look over the border. Those that count lie beyond the first quarter: a model that
    takes the number of ones for a length keeps that one whatever the mask means.
    """
    start, end = (size * 5 // 16, size // 2) if kind == KEPT else (size - max(1, size // 8), size)
    return slice(size - end, size - start) if at_start else slice(start, end)


def _made_from(program: Program, inputs: set[fx.Node]) -> list[fx.Node]:
    """Values that depend on some inputs, and otherwise on constants and sizes alone; the inputs among them."""
    free, found = set(), []
    reached: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node in inputs:
                free.add(node), reached.add(node), found.append(node)
            continue
        if node.op == "output":
            continue
        if is_size(node):
            free.add(node)
        elif all(o in free for o in node.all_input_nodes):
            free.add(node)
            if any(o in reached for o in node.all_input_nodes):
                reached.add(node), found.append(node)
    return [n for n in found if isinstance(value(n), torch.Tensor)]


def _told(
    program: Program, seen: _Seen, said: list[Said], found: list[fx.Node]
) -> list[tuple[fx.Node, bool, torch.Tensor]]:
    """Those of some values that tell which positions count, whether by 0, and what is kept of a part."""
    if not found:
        return []
    read = reader(program, program.graph, [n.name for n in found])
    whole, some = list(seen.flat), list(seen.flat)
    for s in said:
        whole[s.index] = s.whole(seen.flat, seen.size(s.index))
        some[s.index] = s.partly(seen.flat, seen.size(s.index))
    result = []
    for node, full, part in zip(found, read(whole), read(some), strict=True):
        everything = bool((full != 0).all())
        if everything or bool((full == 0).all()):
            kept = (part != 0) if everything else (part == 0)
            if bool(kept.any()) and not bool(kept.all()):
                result.append((node, not everything, kept))
    return result
