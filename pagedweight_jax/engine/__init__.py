"""Continuous batching over the paged pool: requests, blocks, steps."""
