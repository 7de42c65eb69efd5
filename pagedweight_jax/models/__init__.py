"""Models as flax.nnx modules, each file read from top to bottom like its paper."""
