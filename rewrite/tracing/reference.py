"""The eager oracle of a Program that came from a file: a model that is loaded afterwards, behind the flat interface."""

from __future__ import annotations

import torch
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import tensor_indices
from hcx.rewrite.ir.structure import Structure, kinds

from .caches import blank, differs
from .capture import returned
from .tracer import EagerReference


def reference_for(program: Program, model: torch.nn.Module) -> EagerReference:
    """An eager model with the Program's own call, to compare the two over the same flat inputs.

    Caches and positions are left to the model where the caches are empty, as everywhere.
    """
    signature = program.signature
    arguments = signature.arguments
    spec = {"kind": "dict", "keys": [a.name for a in arguments], "items": [a.spec for a in arguments]}
    structure = Structure(spec, [i.name for i in signature.inputs])
    fills = {a.name: {signature.inputs[i].fill for i in tensor_indices(a.spec)} for a in arguments}
    optional = {n: "empty" in kind for n, kind in fills.items() if kind & {"empty", "positions"}}
    positions = {a.name: a.position for a in arguments if a.position is not None}
    reference = EagerReference(model, structure, positions, optional)
    if {"int", "float"} & set(kinds(signature.outputs.spec)):
        reference.outputs = signature.outputs
    cache = next((n for n, is_cache in optional.items() if is_cache), None)
    if cache is not None:
        own = returned(reference.result(program.check_inputs(1)[0]), cache)
        # where tracing took another kind of cache than the model's own, its tensors are of that kind
        reference.empty = blank(own) if own is not None and differs(own) else None
    return reference
