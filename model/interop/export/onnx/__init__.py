"""ONNX files of exports, and the forms of layers that they hold."""
