"""The direct emitter: a flat ATen graph to an ONNX model, node by node, weights untouched and shared."""
