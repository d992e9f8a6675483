"""Speculative decoding with models: draft models, heads, and the verification of their guesses."""
