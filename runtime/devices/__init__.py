"""GPUs as processors: their machine, their executor, and how steps are enqueued."""
