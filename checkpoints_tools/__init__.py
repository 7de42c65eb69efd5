"""From a Hugging Face checkpoint to bit planes, side tables and planner tables."""
