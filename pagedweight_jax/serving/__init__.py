"""What users call: serve() and LLM."""
