"""Generating text: prompts in, one token after another out (docs/inference.md)."""
