"""PagedWeight in JAX: experts give way to the KV cache, bit plane by bit plane."""
