"""Chains of element-wise operators, each one kernel that is generated from their expressions."""
