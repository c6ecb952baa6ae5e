"""Train and eval mode in the graph itself."""

from __future__ import annotations

from typing import Any

from hcx.rewrite.errors import UsageError
from torch import fx

from .control import change_bodies, every_node
from .dataflow import op_name, schema_of

MODES, EVAL_ONLY = "modes", "eval_only"
"""Keys of ``node.meta``: ``{argument: [eval value, train value]}`` of an op; on the output, why there is no train mode."""


DROPOUT = {"dropout", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout"}


_NORM = {"batch_norm": 5, "instance_norm": 5}


def switch(graph: fx.Graph, train: bool) -> None:
    """Put a graph into train or eval mode.

    Raises:
        UsageError: the source model computes something else in train mode than this graph can.
    """
    if train:
        refuse_train(graph)
    change_bodies(graph, lambda body: switch(body, train))
    for node in graph.nodes:
        for name, values in node.meta.get(MODES, {}).items():
            _set_argument(node, name, values[train])
        if MODES not in node.meta and op_name(node) in DROPOUT and len(node.args) >= 3:
            node.args = (*node.args[:2], train, *node.args[3:])


def refuse_train(graph: fx.Graph) -> None:
    """See :func:`switch`."""
    for node in every_node(graph):
        name = op_name(node)
        if name in _NORM and node.args[_NORM[name]] is not True:
            stack = list(node.meta.get("nn_module_stack", {}).values())
            raise UsageError(
                "this graph was traced in eval mode and BatchNorm computes something else in train mode",
                where=stack[-1][0] if stack else node.name,
                hint="train it with frozen statistics in eval mode, as now",
            )
    if reason := graph.output_node().meta.get(EVAL_ONLY):
        raise UsageError(
            f"this graph has no train mode: {reason}",
            where="train()",
            hint="train it in eval mode, without that noise; or turn the noise off in the source model and trace again",
        )


def _set_argument(node: fx.Node, name: str, value: Any) -> None:
    position = [a.name for a in schema_of(node).arguments].index(name)
    if position < len(node.args):
        node.args = (*node.args[:position], value, *node.args[position + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}
