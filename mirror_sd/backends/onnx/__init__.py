"""The ONNX Runtime back end: a program, or a draft head, as an ONNX graph."""
