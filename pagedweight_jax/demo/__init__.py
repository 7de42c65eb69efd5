"""The embedded model, and the demonstration that `make demo` runs."""
