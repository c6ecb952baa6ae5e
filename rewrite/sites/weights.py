"""Where parameters meet activations: every use of a parameter by a weight-carrying op, told from the ops alone.

A use is seen through views, casts and slices of the parameter, so a packed projection that the model splits, a
transposed ``x @ w.T`` and a tied head are all uses of the parameter they read. Passes that change weights speak about
parameters by the names they have in the state dict; module classes are never asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hcx.rewrite.ir.dataflow import Dataflow, op_name, results_of, tensor_of
from hcx.rewrite.ir.values import fake_mode_of
from torch import fx

from .finder import find
from .weight_roles import Dim, Role, role_of, view_of

if TYPE_CHECKING:
    from hcx.rewrite.ir.program import Program


@dataclass(frozen=True, eq=False)
class WeightUse:
    """One place where a parameter is contracted with an activation.

    Attributes:
        address: name of the parameter, ``@2`` for its second use, ``@3`` for the third.
        name: state-dict name that this use goes by; for tied parameters the one of the module it stands in.
        names: every name of the tensor; more than one where it is tied.
        kind: linear, addmm, matmul, conv, embedding, einsum or experts.
        node: the op.
        operand: the argument of the op that holds the parameter or a view of it.
        source: the node that fetches the parameter.
        reader: the node that reads ``source`` on the way to the op; the op itself where no view lies between.
        input: the activation (for an embedding: the indices).
        left: the parameter stands left of the activation (``W x`` instead of ``x W``).
        out_axis: axis of the parameter that becomes the output features.
        in_axes: axes that are summed over (an embedding: the axis that is looked up); kernel axes come last.
        batch_axis: axis of the experts, if any.
        dims: how the operand's dimensions lie in the parameter.
        factor: what the op multiplies the product with (``addmm(alpha=...)``).
        calls: number of uses of the same tensor under the same name.
    """

    address: str
    name: str
    names: tuple[str, ...]
    kind: str
    node: fx.Node
    operand: fx.Node
    source: fx.Node
    reader: fx.Node
    input: fx.Node
    left: bool
    out_axis: int
    in_axes: tuple[int, ...]
    batch_axis: int | None
    dims: tuple[Dim, ...]
    factor: float = 1.0
    calls: int = 1

    def window(self, axis: int) -> tuple[int, int] | None:
        """The part of an axis of the parameter that this use reads; None where it is not sliced."""
        found = next((d for d in self.dims if d.axis == axis), None)
        return None if found is None else (found.start, found.stop)


@dataclass(frozen=True)
class Uncovered:
    """A parameter that no weight-carrying op reads, and why."""

    name: str
    count: int
    reason: str


def find_weights(program: Program) -> list[WeightUse]:
    """Every use of a parameter by a weight-carrying op, in graph order; parameters that passes added included."""
    fake_mode_of(program)
    tied = _names_by_tensor(program)
    found: list[WeightUse] = []
    for node in program.graph.nodes:
        if node.op == "get_attr" and node.target in tied:
            dims = tuple(Dim(i, 0, int(s)) for i, s in enumerate(tensor_of(node).shape))
            found += _uses(node, dims, tied[node.target], (node,))
    position = {n: i for i, n in enumerate(program.graph.nodes)}
    return _addressed(sorted(found, key=lambda u: position[u.node]))


def find_uncovered(program: Program, uses: Iterable[WeightUse]) -> list[Uncovered]:
    """Parameters of the base without any of these uses, each tensor once."""
    covered = {name for use in uses for name in use.names}
    readers: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            readers.setdefault(node.target, []).extend(op_name(u) or u.op for u in node.users)
    result = []
    for names in base_tensors(program):
        if not covered & set(names):
            ops = [o for n in names for o in readers.get(n, ())]
            tensor = program.tensor(names[0])
            if not ops:
                reason = "the graph does not read it"
            elif tensor.dim() < 2:
                reason = "a vector or scalar (bias, norm gain, scale)"
            else:
                reason = f"read by {', '.join(dict.fromkeys(ops))}, not by a weight-carrying op"
            result.append(Uncovered(names[0], tensor.numel(), reason))
    return result


def weights_in_branches(program: Program, uses: Iterable[WeightUse]) -> set[fx.Node] | None:
    """The ops of those uses that lie in a residual branch: on the way from the stream back to it, or beside it (a
    cross-attention's keys and values) with no other weight between; None where there is no residual stream."""
    residuals = find(program).residuals
    if not residuals:
        return None
    flow = Dataflow(program.graph)
    weighted = {u.node for u in uses}
    inside: set[fx.Node] = set()
    for residual in residuals:
        for branch in residual.branches:
            inside |= weighted & set(branch.body)
            frontier = [o for n in branch.body for o in n.all_input_nodes]
            seen = set(branch.body)
            while frontier:
                node = frontier.pop()
                if node in seen or node.op != "call_function" or flow.reaches(node, residual.skip):
                    continue
                seen.add(node)
                if node in weighted:
                    inside.add(node)
                elif not flow.carries_weight(node):
                    frontier += node.all_input_nodes
    return inside


def readout_weights(program: Program) -> set[fx.Node]:
    """Weight-carrying ops whose result reaches an output with no other weight on the way."""
    flow = Dataflow(program.graph)
    outputs = [n for n in results_of(program.graph) if isinstance(n, fx.Node)]
    return {
        n
        for n in flow.nodes
        if flow.carries_weight(n) and any(flow.reaches(n, o) and not flow.reaches_by_weight(n, o) for o in outputs)
    }


def _names_by_tensor(program: Program) -> dict[str, tuple[str, ...]]:
    """Parameter name -> all names of its tensor."""
    groups: dict[int, list[str]] = {}
    for name, parameter in program.tree.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {n: tuple(names) for names in groups.values() for n in names}


def base_tensors(program: Program) -> list[tuple[str, ...]]:
    """Names of each parameter of the base; several where it is tied."""
    return [g for g in dict.fromkeys(_names_by_tensor(program).values()) if not set(g) & set(program.origin)]


def _uses(node: fx.Node, dims: tuple[Dim, ...], names: tuple[str, ...], path: tuple[fx.Node, ...]) -> list[WeightUse]:
    found = []
    for user in node.users:
        uses = (_use(user, role, dims, names, path) for role in role_of(user, node))
        found += [use for use in uses if use is not None]
        after = view_of(user, node, dims)
        if after is not None:
            found += _uses(user, after, names, (*path, user))
    return found


def _use(
    node: fx.Node, role: Role, dims: tuple[Dim, ...], names: tuple[str, ...], path: tuple[fx.Node, ...]
) -> WeightUse | None:
    def axis(dim: int | None) -> int | None:
        return None if dim is None else dims[dim].axis

    rank = tensor_of(path[0]).dim()
    out, batch = axis(role.out), axis(role.batch)
    summed = tuple(a for d in role.summed if (a := axis(d)) is not None)
    if out is None or (not summed and role.kind != "conv"):
        return None
    kind = "experts" if role.kind != "conv" and rank >= 3 else role.kind
    if kind == "experts" and batch is None:
        batch = next((a for a in range(rank) if a != out and a not in summed), None)
    home = list((node.meta.get("nn_module_stack") or {}).values())
    prefix = f"{home[-1][0]}." if home else "."
    name = next((n for n in names if n.rpartition(".")[0] + "." == prefix), str(path[0].target))
    return WeightUse(
        address=name,
        name=name,
        names=names,
        kind=kind,
        node=node,
        operand=path[-1],
        source=path[0],
        reader=(*path, node)[1],
        input=role.input,
        left=role.left,
        out_axis=out,
        in_axes=summed,
        batch_axis=batch,
        dims=dims,
        factor=role.factor,
    )


def _addressed(uses: list[WeightUse]) -> list[WeightUse]:
    totals: dict[str, int] = {}
    for use in uses:
        totals[use.name] = totals.get(use.name, 0) + 1
    seen: dict[str, int] = {}
    result = []
    for use in uses:
        number = seen[use.name] = seen.get(use.name, 0) + 1
        address = use.name if number == 1 else f"{use.name}@{number}"
        result.append(replace(use, address=address, calls=totals[use.name]))
    return result
