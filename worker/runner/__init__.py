"""Executes the scheduler's steps on a model with a paged KV cache."""
