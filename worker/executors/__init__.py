"""Executor implementations: where the model runner lives."""
