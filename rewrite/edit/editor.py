"""All changes to a graph go through here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hcx.rewrite.ir.dataflow import results_of
from hcx.rewrite.ir.graphs import rename
from hcx.rewrite.ir.signature import Argument, Count, InputSpec
from torch import fx

from .cache_slots import add_cache_outputs, add_cache_slots, drop_cache_slots
from .inserting import Inserter
from .regions import Region, insert_cond, insert_repeat


class Editor(Inserter):
    """Edits the graph of one Program on behalf of one pass: inserts, moves parts into control flow, changes the call.

    Every node made here carries the module stack of its anchor, an entry for the pass, and ``meta["custom"]["hcx"]``.
    """

    # ---- control flow

    def cond(self, predicate: fx.Node, then: Region, otherwise: Region) -> tuple[fx.Node, ...]:
        """Run one of two parts of the graph: their nodes move into the bodies of a branch.

        Build both in the graph first, as if both ran: ``otherwise`` is usually what the model computes, ``then`` what
        stands for it. Whoever read a result of ``otherwise`` then reads the branch. Weights and other values from
        outside become operands.

        Args:
            predicate: a single bool; true runs ``then``.
            then, otherwise: with as many results, of the same shapes and dtypes.

        Returns:
            the results.

        Raises:
            PlanError: regions that overlap, write in place, or hold a value that is read outside and is no result.
        """
        return insert_cond(self, predicate, then, otherwise)

    def repeat(self, trips: fx.Node, body: Region, carried: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Run a part of the graph as often as a tensor says: its nodes move into the body of a loop.

        Args:
            trips: int64 without dimensions; 0 gives ``carried`` unchanged.
            body: one iteration, built in the graph as the first one: where it reads a value of ``carried``, a later
                iteration reads the result of the one before.
            carried: one value a result.

        Returns:
            the results of the last iteration.

        Raises:
            PlanError: as for :meth:`cond`.
        """
        return insert_repeat(self, trips, body, carried)

    # ---- the call

    def tap(self, name: str, node: fx.Node) -> None:
        """Add an auxiliary output."""
        output = self.graph.output_node()
        output.args = ((*results_of(self.graph), node),)
        output.meta["taps"] = [*output.meta.get("taps", ()), name]

    def drop_taps(self, prefix: str) -> None:
        """Remove the auxiliary outputs whose names begin so."""
        output = self.graph.output_node()
        count, names = len(self.program.output_names), list(output.meta.get("taps", ()))
        results = results_of(self.graph)
        taps = [(n, v) for n, v in zip(names, results[count:], strict=True) if not n.startswith(prefix)]
        output.args = ((*results[:count], *(v for _, v in taps)),)
        output.meta["taps"] = [n for n, _ in taps]

    def input(self, name: str, number: int) -> fx.Node:
        """A new input of the call: a count from 1 on, int64 without dimensions.

        Args:
            name: of the argument; a number is appended where the model has one of that name.
            number: what it is where a call leaves it out.
        """
        signature = self.program.signature
        taken = {a.name for a in signature.arguments} | {i.name for i in signature.inputs} | set(signature.others)
        name = next(n for n in (name, *(f"{name}_{k}" for k in range(1, 1 + len(taken)))) if n not in taken)
        last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        with self.graph.inserting_before(last.next):
            node = self.graph.placeholder(name)
        rename(self.graph, node, name)
        with self.fake_mode:
            node.meta = {"val": torch.zeros((), dtype=torch.int64, device=last.meta["val"].device), "hcx_name": name}
        signature.arguments.append(Argument(name, None, {"kind": "tensor", "index": len(signature.inputs)}, fill=True))
        signature.inputs.append(InputSpec(name, torch.int64, (), Count(int(number))))
        return node

    def drop_cache_slots(self, inputs: set[fx.Node]) -> None:
        """Take whole slots out of the cache, inputs and outputs; later slots move up.

        Args:
            inputs: cache placeholders of the slots. What reads them must be dead by then but for the outputs.
        """
        drop_cache_slots(self, inputs)

    def add_cache_slots(self, inputs: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Extend the cache by copies of the slots that some placeholders belong to.

        Args:
            inputs: cache placeholders of whole slots (a layer's key and value).

        Returns:
            old placeholder -> new placeholder.
        """
        return add_cache_slots(self, inputs)

    def add_cache_outputs(self, outputs: dict[fx.Node, fx.Node]) -> None:
        """Return new cache slots beside existing ones.

        Args:
            outputs: for whole slots: node that is an output now -> node of the new slot.
        """
        add_cache_outputs(self, outputs)
