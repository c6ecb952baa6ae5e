"""Residual connections to hyper-connections: the stream becomes n streams with learned reads, mixes and writes.

Normal form (docs/sources.md, normal-form): ``X_0 = e x``; at each residual ``h = sum_i p_i X_i``, ``y = F(h)``,
``X <- H X + b y``; at the end ``x = sum_i r_i X_i``. F is the original branch with its own norm, untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, Literal

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import Dataflow, op_name, resolve, shape, value
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import REDUCE
from hcx.rewrite.pipeline.contracts import Contract, Exact, Rounding
from hcx.rewrite.pipeline.passbase import Pass
from hcx.rewrite.pipeline.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.sites.finder import find
from hcx.rewrite.sites.views import Residual, Stack
from torch import fx

from .inits import expand_start, is_power_of_two, reduce_start, site_start
from .mixers import MIXERS, Coefficients
from .mixers import Site as SiteOf
from .roles import CARRY, COEFFICIENTS, EXPAND, READ, WRITE
from .spine import REGROUPINGS, Link, is_post_norm, links, obstacle, restrided, tail

OPS = torch.ops.hcx


@dataclass(frozen=True)
class HyperConnections(Pass):
    """Carry every residual stream as ``mult`` streams.

    Args:
        mixer: ``hc`` (free coefficients), ``ihc`` (identity mix), ``mhc`` (Sinkhorn), ``mhc_lite`` (permutations),
            ``ohc`` (rotations), ``shc`` (spectral sphere), ``jpmhc`` (bistochastic, Cayley or Grassmann), ``kromhc``
            (Kronecker products of permutation mixtures), ``ddl`` (deep delta learning: streams are value channels).
        mult: number of streams n; 1 for ``ddl`` alone.
        init: ``mean`` keeps the mean over streams and lets them differ from the start; ``rotate`` keeps them equal with
            reads that differ (all that post-norm allows); ``replicate`` is bitwise where the mix starts at the
            identity, for goldens; ``transport`` keeps another functional, so that everything has a gradient at once;
            None chooses.
        dynamic: ``hc`` alone: coefficients also depend on the streams, per position; the other mixers always do.
        sinkhorn_iters: steps of ``mhc`` and of ``jpmhc{manifold=bistochastic}``.
        eps: inside the root of the rms of dynamic coefficients.
        gradient: of those steps: ``exact``, or ``implicit`` for the gradient of their limit (``mhc``).
        manifold: of ``jpmhc``.
        projector: rank of ``jpmhc{manifold=grassmann}``; default: half of n.
        stack: label of the stack to rewrite; default: all.
    """

    name: ClassVar[str] = "hc"
    rank: ClassVar[int | None] = 10
    aliases: ClassVar[dict[str, str]] = {"hc_mult": "mult", "hc_sinkhorn_iters": "sinkhorn_iters"}

    mixer: Literal["hc", "ihc", "mhc", "mhc_lite", "ohc", "shc", "jpmhc", "kromhc", "ddl"] = "hc"
    mult: int = 4
    init: Literal["mean", "rotate", "replicate", "transport"] | None = None
    dynamic: bool = False
    sinkhorn_iters: int = 20
    eps: float = 1e-6
    gradient: Literal["exact", "implicit"] = "exact"
    manifold: Literal["bistochastic", "cayley", "grassmann"] = "cayley"
    projector: int | None = None
    stack: str | None = None

    def __post_init__(self) -> None:
        system = MIXERS[self.mixer]
        if self.mult < 1 or (reason := system.refusal(self.mult)):
            reason = reason if self.mult > 0 else "a number of streams is at least 1"
            raise UsageError(f"{self.mixer} is not made for mult={self.mult} streams", where="mult", hint=reason)
        if not system.static_reads and self.init == "replicate" and not is_power_of_two(self.mult):
            raise UsageError(
                f"{self.mixer} cannot read one stream alone, and 1/{self.mult} is rounded; replicate needs mult to be a "
                "power of two",
                where="init",
            )
        if self.init == "transport" and not system.starts_at_identity(self):
            raise UsageError(
                f"transport needs a mix that starts at the identity; that of {self.mixer} does not", where="init",
                hint="use init=mean",
            )  # fmt: skip
        if self.dynamic and self.mixer != "hc":
            raise UsageError(f"{self.mixer} is always dynamic; `dynamic` belongs to mixer=hc", where="dynamic")
        if self.sinkhorn_iters < 1:
            raise UsageError("at least one Sinkhorn step is needed", where="sinkhorn_iters")
        if not 0 <= self.eps < 1:
            raise UsageError(f"hc{{eps={self.eps:g}}}: it is added to a mean square", where="eps", hint="0 <= eps < 1")
        self._refuse_foreign()
        if self.projector is not None and not 1 <= self.projector < self.mult:
            raise UsageError(f"projector={self.projector}: its rank is 1 to {self.mult - 1}", where="projector")

    def _refuse_foreign(self) -> None:
        """Options that the chosen mixer does not read."""
        bistochastic = self.mixer == "jpmhc" and self.manifold == "bistochastic"
        read = {
            "manifold": self.mixer == "jpmhc",
            "projector": self.mixer == "jpmhc" and self.manifold == "grassmann",
            "gradient": self.mixer == "mhc",
            "sinkhorn_iters": self.mixer == "mhc" or bistochastic,
        }
        for name, used in read.items():
            default = type(self).__dataclass_fields__[name].default
            if not used and getattr(self, name) != default:
                raise UsageError(
                    f"hc{{mixer={self.mixer}}} has no {name}", where=name, hint="`hcx passes hc` says what it is of"
                )

    @property
    def projector_rank(self) -> int:
        """Rank of a Grassmann mix."""
        return self.projector or max(1, self.mult // 2)

    def plan(self, program: Program) -> PassPlan:
        """One site a residual; whole stacks are skipped where the stream does not act row by row."""
        plan = self.new_plan(sites=[])
        assert plan.sites is not None
        sites = find(program)
        flow = Dataflow(program.graph)
        stacks = [s for s in sites.stacks if self.stack in (None, s.label)]
        if self.stack is not None and not stacks:
            raise UsageError(
                f"there is no stack `{self.stack}`",
                where="stack",
                hint="stacks: " + ", ".join(s.label for s in sites.stacks),
            )
        for stack in stacks:
            self._plan_stack(flow, stack, plan)
        if not stacks:
            plan.skips.append(Skip("model", Reason.NO_STREAM, f"no x + f(x) found; {len(sites.other_adds)} other adds"))
        plan.estimate = {"sites": len(plan.sites), "streams": self.mult}
        return plan

    def _plan_stack(self, flow: Dataflow, stack: Stack, plan: PassPlan) -> None:
        problem = self._problem(flow, stack)
        if problem is not None:
            plan.skips.append(Skip(stack.label, *problem))
            return
        found = [*links(flow, stack), tail(flow, stack)]
        init = self.init or ("rotate" if is_post_norm(found) else "mean")
        for number, link in enumerate(found[:-1]):
            address = "+".join(b.address for b in link.residual.branches)
            detail = {"stack": stack.label, "number": number, "init": init, "mixer": self.mixer}
            if len(link.residual.branches) > 1 and not any(
                resolve(a) is resolve(link.skip) for a in link.residual.add.args[:2]
            ):
                detail["reordered"] = True  # (x + a) + b becomes x + (a + b)
            if restrided(link):
                detail["restrided"] = True  # streams are contiguous, and a convolution sums by the strides of its input
            assert plan.sites is not None
            plan.sites.append(Site(address, "residual", detail))

    def _problem(self, flow: Dataflow, stack: Stack) -> tuple[Reason, str] | None:
        if not stack.residual:
            return Reason.NO_STREAM, "stages without x + f(x)"
        if stack.boundaries[0].carrier.kind != "plain":
            return Reason.ALREADY, "the stream is carried as several streams already"
        shapes = {shape(b.node) for b in stack.boundaries}
        if len(shapes) > 1:
            return Reason.WIDTH_CHANGES, "the stream changes its shape on the way"
        last_only = MIXERS[self.mixer].channels_last_only or self.dynamic
        if last_only and len(shape(stack.boundaries[0].node) or ()) >= 4:
            return Reason.UNSUPPORTED, f"{self.mixer} needs features in the last dimension; use mixer=hc, not dynamic"
        found = [*links(flow, stack), tail(flow, stack)]
        for link in found:
            text = obstacle(flow, link)
            if text is not None:
                return Reason.NOT_ROWWISE, text
        if self.init in ("mean", "transport") and is_post_norm(found):
            return Reason.UNSUPPORTED, f"init={self.init} is not exact on a post-norm stream; use rotate or replicate"
        return None

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Replace the adds of each planned stack by stream reads and writes."""
        chosen = {(s.detail["stack"], s.detail["number"]): s.detail for s in plan.sites or ()}
        sites = find(program)  # once: labels of stacks with one name are numbered, and a rewritten one may move
        for order, label in enumerate(dict.fromkeys(key[0] for key in chosen)):
            stack = sites.stack(label)
            assert stack is not None  # the plan is of this graph
            details = {number: d for (name, number), d in chosen.items() if name == label}
            _Spine(self, editor, program, stack, details, f"{order}").build()

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """Bitwise for ``replicate``; else each site rounds once more, and the branches behind it carry that on."""
        sites = plan.sites or ()
        system = MIXERS[self.mixer]
        exact = system.keeps_equal_streams(self) and (system.static_reads or system.reads_exactly(self.mult))
        moved = any(s.detail.get("reordered") or s.detail.get("restrided") for s in sites)
        if exact and not moved and all(s.detail["init"] == "replicate" for s in sites):
            return Exact()
        return Rounding(ROUNDING_PER_SITE * sqrt(len(sites)))

    def inert(self, name: str) -> str | None:
        """Starts that keep all streams parallel leave some coefficients without a gradient."""
        parts = name.split(".")
        if len(parts) > 2 and parts[1] == "0" and parts[2].startswith("read"):
            return "before the first write all streams are multiples of one vector, and the branch's norm removes its scale"
        if not MIXERS[self.mixer].static_reads and len(parts) > 2 and parts[2].startswith("read"):
            return "reads start behind a gate of 0.01, and the branch's norm removes their common scale"
        if self.init not in ("mean", "replicate", "transport") and parts[-1] in ("read", "reduce"):
            return "reads of equal streams get a gradient only when writes have separated the streams"
        if len(parts) > 2 and (reason := MIXERS[self.mixer].inert(parts[2:], self.init or "mean")):
            return reason
        if self.init == "replicate":
            return "equal streams stay equal"
        if self.mult == 1 and parts[-1] in ("expand", "reduce"):
            return "one stream: the norm behind it removes its scale"
        return None

    def caveat(self) -> str | None:
        """``replicate`` starts with equal streams and equal gradients, so they stay equal under training."""
        if self.init == "replicate":
            return "symmetric trap: equal streams stay equal; replicate is for goldens, train from rotate or mean"
        return None


ROUNDING_PER_SITE = 32
"""Unit roundoffs a root of sites. The usual 8 holds where a site's rounding reaches the output as it is; here it goes
through every later branch, which amplify it (SmolLM2, 60 sites, init=mean: 181 roundoffs at the logits, 23 a root of
sites; tiny random models of 15 architectures: 4 to 11)."""


class _Spine:
    """Builds the streams of one stack."""

    def __init__(
        self,
        step: HyperConnections,
        editor: Editor,
        program: Program,
        stack: Stack,
        details: dict[int, dict[str, Any]],
        prefix: str,
    ):
        self.step, self.editor, self.program, self.stack = step, editor, program, stack
        self.details, self.prefix = details, prefix
        self.flow = Dataflow(program.graph)
        self.links = links(self.flow, stack)
        self.end = stack.boundaries[-1].node
        self.init = next(iter(details.values()))["init"]
        val = value(stack.boundaries[0].node)
        assert val is not None
        self.device = val.device
        self.dtype = torch.float64 if val.dtype == torch.float64 else torch.float32
        self.streams: dict[fx.Node, fx.Node] = {}
        self.own: set[fx.Node] = set()

    def build(self) -> None:
        """Insert expand, reads, writes and reductions; the old adds lose their readers."""
        entry = self.stack.boundaries[0].node
        for link in self.links:
            self._separate_aliases(link)
        plain_readers = {link.start: set(link.start.users) for link in self.links}
        for link in self.links:
            for node in [*link.path, link.residual.add, *link.residual.adds]:
                plain_readers[node] = set(node.users)
        weights = self._parameter("expand", expand_start(self.init, self.step.mult))
        with self.editor.after(max(entry, weights), role=EXPAND):
            self.streams[entry] = self.editor.call(OPS.stream_expand.default, entry, weights)
        for number, link in enumerate(self.links):
            self._site(number, link)
        last = self.links[-1].residual.add
        if self.end is not last:  # a post-norm block ends behind its add
            tail = self.flow.between(last, self.end)
            plain_readers.update({n: set(n.users) for n in tail})
            self._carry(self.streams[last], last, tail)
            self.own.update(tail)
        self._foreign_readers(entry, plain_readers)

    def _separate_aliases(self, link: Link) -> None:
        """A cast that changes nothing is shared by the branch and other readers of the stream; these read the stream."""
        inside = {n for branch in link.residual.branches for n in branch.body} | set(link.residual.adds)
        for node in [n for n in inside if n is not link.skip and resolve(n) is resolve(link.skip)]:
            self.editor.redirect(node, link.skip, only=lambda user: user not in inside)

    def _parameter(self, name: str, tensor: torch.Tensor) -> fx.Node:
        return self.editor.parameter(f"{self.prefix}.{name}", tensor.to(dtype=self.dtype, device=self.device))

    def _site(self, number: int, link: Link) -> None:
        residual = link.residual
        self.own.update(n for n in [*link.path, *link.scale, *residual.adds])
        streams = self._carry(self.streams[link.start], link.start, link.path)
        coefficients = self._coefficients(number, streams)
        with self.editor.after(max(streams, coefficients.read), role=READ, site=number):
            view = self.editor.call(OPS.stream_read.default, streams, coefficients.read)
        bodies = {n for branch in residual.branches for n in branch.body} - {link.skip}
        self.editor.redirect(link.skip, view, only=bodies.__contains__)
        last = max(branch.value if isinstance(branch.value, fx.Node) else view for branch in residual.branches)
        with self.editor.after(
            max(last, coefficients.write, *([coefficients.mix] if coefficients.mix else [])), role=WRITE, site=number
        ):
            update = self._update(residual)
            if coefficients.late is not None:
                coefficients.write = coefficients.late(view, update)
            carried = self._carry(streams, link.skip, link.scale)
            if coefficients.mix is None:
                written = self.editor.call(OPS.stream_add.default, carried, update, coefficients.write)
            else:
                op = OPS.stream_blend.default if coefficients.rows_sum_to_one else OPS.stream_write.default
                written = self.editor.call(op, carried, update, coefficients.mix, coefficients.write)
            written.meta["nn_module_stack"] = {
                **(residual.add.meta.get("nn_module_stack") or {}),
                **dict([list(written.meta["nn_module_stack"].items())[-1]]),
            }
        self.streams[residual.add] = written

    def _coefficients(self, number: int, streams: fx.Node) -> Coefficients:
        n = self.step.mult
        if number not in self.details:  # taken out of the plan: a plain residual on every stream
            return Coefficients(self._constant(reduce_start(self.init, n)), self._constant(torch.ones(n)))
        with self.editor.after(streams, role=COEFFICIENTS, site=number):
            site = f"{self.prefix}.{number}"
            return MIXERS[self.step.mixer].insert(
                SiteOf(self.editor, site, streams, site_start(self.init, n, number), self.dtype, self.step)
            )

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        return self.editor.constant("plain", tensor.to(dtype=self.dtype, device=self.device))

    def _carry(self, streams: fx.Node, start: fx.Node, path: list[fx.Node]) -> fx.Node:
        """Apply row-wise nodes of the plain stream to all streams."""
        if not path:
            return streams
        mapping = {start: streams}
        with self.editor.after(streams, role=CARRY):
            self.editor.clone(path, mapping, role=CARRY)
        for node in path:
            if op_name(node) in REGROUPINGS:  # of each stream alone
                first, regrouped, *_ = mapping[node].args
                assert isinstance(regrouped, list | tuple)
                mapping[node].args = (first, [self.step.mult, *regrouped])
            self._new_value(mapping[node])
            self.streams[node] = mapping[node]
        return mapping[path[-1]]

    def _new_value(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        assert callable(node.target)
        with self.editor.fake_mode, torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)

    def _update(self, residual: Residual) -> fx.Node:
        """The sum of the branch values, with the scale that ``add(alpha=)`` put on one."""
        total: fx.Node | None = None
        for branch in residual.branches:
            term = branch.value
            alpha = next((a.kwargs["alpha"] for a in residual.adds if "alpha" in a.kwargs and a.args[1] is term), 1)
            if alpha != 1:
                term = self.editor.call(torch.ops.aten.mul.Tensor, term, alpha)
            total = term if total is None else self.editor.call(torch.ops.aten.add.Tensor, total, term)
        assert total is not None  # a residual has a branch
        return total

    def _foreign_readers(self, entry: fx.Node, plain_readers: dict[fx.Node, set[fx.Node]]) -> None:
        """Everybody else who read the plain stream reads the reduced one."""
        weights = self._parameter("reduce", reduce_start(self.init, self.step.mult))
        for plain, streams in list(self.streams.items()):
            readers = {u for u in plain_readers.get(plain, ()) if u not in self.own} & set(plain.users)
            if plain is entry or not readers:
                continue
            with self.editor.after(max(streams, weights), role=REDUCE):
                reduced = self.editor.call(OPS.stream_read.default, streams, weights)
            self.editor.redirect(plain, reduced, only=readers.__contains__)
