"""Pallas GPU kernels over one paged pool: arrays in, arrays out.

This package knows no model and no engine; it imports jax only.
"""
