"""What kernels of several families share: mathematics, rows and runs of floats, layouts."""
