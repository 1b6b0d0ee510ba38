"""Memory, streams, copies and folds of NVIDIA GPUs, through Numba CUDA; nothing is imported before.

What runs on a device is enqueued: an object with `enqueue(stream)`, called with the device current.
"""
