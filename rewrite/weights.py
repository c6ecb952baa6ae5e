"""Where parameters meet activations: every use of a parameter by a weight-carrying op, told from the ops alone.

A use is seen through views, casts and slices of the parameter, so a packed projection that the model splits, a
transposed ``x @ w.T`` and a tied head are all uses of the parameter they read. Passes that change weights speak about
parameters by the names they have in the state dict; module classes are never asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch

from torch import fx

from .dataflow import Dataflow, op_name, value
from .errors import UsageError
from .finder import find
from .values import fake_mode_of
from .weight_roles import Dim, Role, role_of, view_of


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


@dataclass
class Selection:
    """Parameters that a pass was asked to change, with all their uses.

    Attributes:
        chosen: name -> uses, in order of first use.
        left: parameters of the base that are not chosen: name, entries and why; nothing is missing here.
    """

    chosen: dict[str, list[WeightUse]]
    left: list[Uncovered] = field(default_factory=list)

    def notes(self) -> list[str]:
        """One line for each reason why parameters are left alone."""
        by_reason: dict[str, list[Uncovered]] = {}
        for item in self.left:
            by_reason.setdefault(item.reason, []).append(item)
        return [
            f"not covered, {reason}: {len(items)} parameters with {sum(i.count for i in items):,} entries "
            f"({', '.join(i.name for i in items[:2])}{', ...' if len(items) > 2 else ''})"
            for reason, items in by_reason.items()
        ]


def find_weights(program) -> list[WeightUse]:
    """Every use of a parameter by a weight-carrying op, in graph order; parameters that passes added included."""
    fake_mode_of(program)
    tied = _names_by_tensor(program)
    found: list[WeightUse] = []
    for node in program.graph.nodes:
        if node.op == "get_attr" and node.target in tied:
            dims = tuple(Dim(i, 0, int(s)) for i, s in enumerate(value(node).shape))
            found += _uses(node, dims, tied[node.target], node.target, len(dims))
    position = {n: i for i, n in enumerate(program.graph.nodes)}
    return _addressed(sorted(found, key=lambda u: position[u.node]))


def find_uncovered(program, uses: Iterable[WeightUse]) -> list[Uncovered]:
    """Parameters of the base without any of these uses, each tensor once."""
    covered = {name for use in uses for name in use.names}
    readers: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            readers.setdefault(node.target, []).extend(op_name(u) or u.op for u in node.users)
    result = []
    for names in _base_groups(program):
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


def select(program, target: str | tuple[str, ...], kinds: Iterable[str], axes: int | None = None) -> Selection:
    """Choose parameters of the base by name, or the usual ones.

    ``auto`` takes the weights inside residual branches (of every stack, projections of another stream's output for
    cross-attention included), and where the model has no residual stream all weights but the readout; of these the
    ones of the given kinds. Patterns choose by name: a pattern fits a parameter's full name, the name without
    ``.weight``, or the last parts of that (``q_proj``, ``mlp.*``).

    Args:
        target: ``auto`` or fnmatch patterns.
        kinds: what ``auto`` takes.
        axes: number of axes that ``auto`` takes; None takes any.

    Raises:
        UsageError: a pattern that fits no weight.
    """
    uses = [u for u in find_weights(program) if u.name not in program.origin]
    by_name: dict[str, list[WeightUse]] = {}
    for use in uses:
        by_name.setdefault(use.name, []).append(use)
    if target == "auto":
        reasons = _usual(program, by_name, set(kinds), axes)
    else:
        patterns = (target,) if isinstance(target, str) else tuple(target)
        _check_patterns(patterns, by_name)
        reasons = {n: None if any(fits(n, p) for p in patterns) else "not in target" for n in by_name}
    chosen = {n: by_name[n] for n, reason in reasons.items() if reason is None}
    done = {n for us in chosen.values() for u in us for n in u.names}
    left: list[Uncovered] = []
    for name, reason in reasons.items():
        if reason is not None and name not in done:
            left.append(Uncovered(name, program.tensor(name).numel(), reason))
            done.update(by_name[name][0].names)
    return Selection(chosen, left + find_uncovered(program, uses))


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern means a parameter.

    >>> [fits("model.layers.0.self_attn.q_proj.weight", p) for p in ("q_proj", "*.0.*", "proj", "self_attn.*")]
    [True, True, False, True]
    """
    stem = name.removesuffix(".weight")
    return fnmatch(name, pattern) or fnmatch(stem, pattern) or fnmatch(stem, f"*.{pattern}")


def base_count(program) -> int:
    """Entries of the base's parameters, tied ones once."""
    return sum(program.tensor(names[0]).numel() for names in _base_groups(program))


def _check_patterns(patterns: tuple[str, ...], by_name: dict[str, list[WeightUse]]) -> None:
    for pattern in patterns:
        if not any(fits(n, pattern) for n in by_name):
            raise UsageError(
                f"no weight is called `{pattern}`",
                where="target",
                hint=f"weights of this model: {', '.join(list(by_name)[:6])}{', ...' if len(by_name) > 6 else ''}",
            )


def _usual(program, by_name: dict[str, list[WeightUse]], kinds: set[str], axes: int | None) -> dict[str, str | None]:
    """Name -> None if taken, else the reason."""
    inside, readouts = weights_in_branches(program), readout_weights(program)
    reasons: dict[str, str | None] = {}
    for name, uses in by_name.items():
        if inside and not any(u.node in inside for u in uses):
            reasons[name] = f"{uses[0].kind} outside the residual branches"
        elif not inside and all(u.node in readouts for u in uses):
            reasons[name] = "the readout"
        elif uses[0].kind not in kinds:
            reasons[name] = f"{uses[0].kind} is not among the usual targets; name it in target"
        elif axes is not None and program.tensor(name).dim() != axes:
            reasons[name] = f"{program.tensor(name).dim()} axes; name it in target"
        else:
            reasons[name] = None
    return reasons


def weights_in_branches(program) -> set[fx.Node]:
    """Weight-carrying ops in the residual branches: on the way from the stream back to it, or beside it (a
    cross-attention's keys and values) with no other weight between; empty where there is no residual stream."""
    flow = Dataflow(program.graph)
    inside: set[fx.Node] = set()
    for residual in find(program).residuals:
        for branch in residual.branches:
            body = set(branch.body)
            inside |= {n for n in body if flow.carries_weight(n) or op_name(n) == "embedding"}
            frontier = [o for n in body for o in n.all_input_nodes]
            seen = set(body)
            while frontier:
                node = frontier.pop()
                if node in seen or node.op != "call_function" or flow.reaches(node, residual.skip):
                    continue
                seen.add(node)
                if flow.carries_weight(node):
                    inside.add(node)
                else:
                    frontier += node.all_input_nodes
    return inside


def readout_weights(program) -> set[fx.Node]:
    """Weight-carrying ops whose result reaches an output with no other weight on the way."""
    flow = Dataflow(program.graph)
    outputs = [n for n in program.graph.output_node().args[0] if isinstance(n, fx.Node)]
    return {
        n
        for n in flow.nodes
        if flow.carries_weight(n) and any(flow.reaches(n, o) and not flow.reaches_by_weight(n, o) for o in outputs)
    }


def _names_by_tensor(program) -> dict[str, tuple[str, ...]]:
    """Parameter name -> all names of its tensor."""
    groups: dict[int, list[str]] = {}
    for name, parameter in program._root.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {n: tuple(names) for names in groups.values() for n in names}


def _base_groups(program) -> list[tuple[str, ...]]:
    return [g for g in dict.fromkeys(_names_by_tensor(program).values()) if not set(g) & set(program.origin)]


def _uses(node: fx.Node, dims: tuple[Dim, ...], names: tuple[str, ...], name: str, rank: int) -> list[WeightUse]:
    found = []
    for user in node.users:
        for role in role_of(user, node):
            if (use := _use(user, node, role, dims, names, name, rank)) is not None:
                found.append(use)
        after = view_of(user, node, dims)
        if after is not None:
            found += _uses(user, after, names, name, rank)
    return found


def _use(node, operand, role: Role, dims, names, name: str, rank: int) -> WeightUse | None:
    def axis(dim: int | None) -> int | None:
        return None if dim is None else dims[dim].axis

    out, batch = axis(role.out), axis(role.batch)
    summed = tuple(a for d in role.summed if (a := axis(d)) is not None)
    if out is None or (not summed and role.kind != "conv"):
        return None
    kind = "experts" if role.kind != "conv" and rank >= 3 else role.kind
    if kind == "experts" and batch is None:
        batch = next((a for a in range(rank) if a != out and a not in summed), None)
    home = list((node.meta.get("nn_module_stack") or {}).values())
    prefix = f"{home[-1][0]}." if home else ""
    own = next((n for n in names if n.rpartition(".")[0] + "." == prefix), name)
    return WeightUse(own, own, names, kind, node, operand, role.input, role.left, out, summed, batch, dims, role.factor)


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
