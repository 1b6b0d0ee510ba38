"""Optimised models and training steps: searched for, checked, measured."""
