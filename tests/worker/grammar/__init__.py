"""Tests of the grammar back ends."""
