"""What tells one Program's structure from another's."""

from __future__ import annotations

import hashlib

from .program import Program


def fingerprint(program: Program) -> str:
    """Hash of a Program's structure: its ops in order, and the names, shapes and dtypes of its tensors.

    Equal for the same model at any example shape; a plan is refused for a Program with another fingerprint.
    """
    digest = hashlib.sha256()
    for node in program.graph.nodes:
        if node.op == "call_function":
            digest.update(f"{node.target};".encode())
    for name, tensor in sorted((n, t) for n, t in program.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
    return digest.hexdigest()[:16]


def base_fingerprint(program: Program) -> str:
    """Fingerprint of the Program before its first rewrite."""
    return program.history[0].plan["fingerprint"] if program.history else fingerprint(program)
