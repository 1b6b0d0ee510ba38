"""Steps captured, compiled into native programs, and replayed."""
