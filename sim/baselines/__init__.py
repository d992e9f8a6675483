"""Routing policies of other systems, to measure ours against; each one file, pure."""
