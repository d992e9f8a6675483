"""Recorded traffic: formats, validation, statistics and tools that change a trace."""
