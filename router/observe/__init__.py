"""Metrics, logs and decision records."""
