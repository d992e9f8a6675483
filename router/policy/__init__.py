"""Placement decisions as pure code: no I/O, no clock."""
