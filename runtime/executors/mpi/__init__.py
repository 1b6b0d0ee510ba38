"""One process a rank, over MPI."""
