"""One ONNX form for each ATen operator; each file registers its own."""
