"""Tests against systems of other make, where they are installed."""
