"""Executors run what the analysis decided: `local` on the threads of one process."""
