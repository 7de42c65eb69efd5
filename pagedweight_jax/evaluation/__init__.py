"""Perplexity, byte budgets and benches; results are kept beside them."""
