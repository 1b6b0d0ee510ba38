"""From launches to operations: dependences, instances, copies, reductions, policies."""
