"""The interface of ONNX Runtime over soapstone's sessions: `soapstone.onnxruntime`."""
