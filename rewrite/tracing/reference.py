"""The eager oracle of a Program that came from a file: a model that is loaded afterwards, behind the flat interface."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import Fill
from hcx.rewrite.ir.structure import Structure, flatten, kinds, outputs_of, tensor_indices
from hcx.rewrite.run.inputs import check_inputs

from .caches import blank, differs
from .capture import Call, invoke, own_cache, reference_mode, returned


def reference_for(program: Program, model: torch.nn.Module) -> EagerReference:
    """An eager model with the Program's own call, to compare the two over the same flat inputs.

    Caches and positions are left to the model where the caches are empty, as everywhere.
    """
    signature = program.signature
    arguments = signature.arguments
    spec = {"kind": "dict", "keys": [a.name for a in arguments], "items": [a.spec for a in arguments]}
    structure = Structure(spec, [i.name for i in signature.inputs])
    fills = {a.name: {signature.inputs[i].fill for i in tensor_indices(a.spec)} for a in arguments}
    optional = {n: Fill.EMPTY in kind for n, kind in fills.items() if kind & {Fill.EMPTY, Fill.POSITIONS}}
    positions = {a.name: a.position for a in arguments if a.position is not None}
    reference = EagerReference(model, structure, positions, optional)
    if {"int", "float"} & set(kinds(signature.outputs.spec)):
        reference.outputs = signature.outputs
    cache = next((n for n, is_cache in optional.items() if is_cache), None)
    if cache is not None:
        own = returned(reference.result(check_inputs(program, 1)[0]), cache)
        # where tracing took another kind of cache than the model's own, its tensors are of that kind
        reference.empty = blank(own) if own is not None and differs(own) else None
    return reference


class EagerReference:
    """The source model behind the Program's flat interface: the oracle of every check.

    A call with empty caches goes to the model as the user would make it, without caches; where the graph keeps more in
    its cache than the model does, with an empty cache of that kind.

    Args:
        optional: arguments that calls may leave out -> whether it is the cache (else positions).
        growing: flat inputs of the cache that get longer with every token; the rest of it has a fixed size.
        empty: the empty cache of that kind, or None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        structure: Structure,
        positions: dict[str, int],
        optional: dict[str, bool],
        growing: frozenset[int] = frozenset(),
        empty: Any = None,
    ):
        self.model, self.structure, self.positions, self.optional = model, structure, positions, optional
        self.growing, self.empty = growing, empty
        self.outputs: Structure | None = None

    def __call__(self, flat: list[torch.Tensor], *, grad: bool = False) -> list[torch.Tensor]:
        return self.flat(self.result(flat, grad=grad))

    def named(self, flat: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs by name. Only those outside the cache are sure to have the names that they have in a Program: a
        model may keep its cache in other tensors than the graph does."""
        result = self.result(flat)
        if self.outputs is not None:
            return dict(zip(self.outputs.names, self.flat(result), strict=True))
        tensors, structure = flatten(result)
        return dict(zip(structure.names, tensors, strict=True))

    def result(self, flat: list[torch.Tensor], *, grad: bool = False) -> Any:
        """The output as the model gives it."""
        values = dict(self.structure.rebuild(list(flat)))
        cache = next((n for n, is_cache in self.optional.items() if is_cache), None)
        if cache is not None and self._starts(flat, cache):
            for name, is_cache in self.optional.items():
                if is_cache and self.empty is not None:
                    values[name] = copy.deepcopy(self.empty)
                elif is_cache or _counts_from_zero(values[name]):
                    del values[name]
        with reference_mode(self.model), torch.set_grad_enabled(grad):
            return own_cache(invoke(self.model, Call(values, self.positions)), cache)

    def flat(self, result: Any) -> list[torch.Tensor]:
        """The model's output as flat tensors; numbers that follow the input's sizes are among them."""
        return flatten(result)[0] if self.outputs is None else outputs_of(self.outputs.spec, result, [])

    def _starts(self, flat: list[torch.Tensor], cache: str) -> bool:
        """Whether the cache is that before the first token: nothing in what grows, zeros in the rest."""
        own = [i for i, n in enumerate(self.structure.names) if n.split(".")[0] == cache]
        return all(flat[i].numel() == 0 if i in self.growing else not flat[i].any() for i in own)


def _counts_from_zero(positions: torch.Tensor) -> bool:
    return torch.equal(positions, torch.arange(positions.shape[-1], device=positions.device).expand_as(positions))
