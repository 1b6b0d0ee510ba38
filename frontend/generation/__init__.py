"""Text generation: a prompt is continued token by token (docs/inference.md)."""
