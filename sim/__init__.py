"""Replay of recorded traffic through the real planner and scheduler."""
