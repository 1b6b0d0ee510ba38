"""What kernels are written in: native entries, lanes of numbers, layouts, runs, copies."""
