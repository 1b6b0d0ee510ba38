"""What the runtime and the kernels share: addresses, blocks, calls, compiled entries, copies."""
