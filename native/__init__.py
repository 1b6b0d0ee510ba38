"""What the runtime and the kernels share: addresses that keep their arrays, blocks, entries."""
