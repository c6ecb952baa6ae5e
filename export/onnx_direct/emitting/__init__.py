"""Making ONNX nodes: values, constants, sizes; what has no form says so."""
