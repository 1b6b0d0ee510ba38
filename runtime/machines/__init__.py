"""Machines, described and real: processors, memories, links, processes."""
