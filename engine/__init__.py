"""What turns a graph and a strategy into something that runs: lowering, launches, sessions."""
