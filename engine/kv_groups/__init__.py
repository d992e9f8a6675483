"""Cache groups: which part of the past the layers of a model read, and what follows for blocks."""
