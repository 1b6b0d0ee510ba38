"""One set of threads: teams that work on parallel regions, OpenMP's functions on them, loops."""
