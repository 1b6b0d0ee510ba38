"""What all CUDA kernels are made of: the compiler, views of memory, launch geometry, folds."""
