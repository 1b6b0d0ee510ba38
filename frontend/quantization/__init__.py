"""Static quantisation of ONNX models: what `soapstone.quantize` and its command do."""
