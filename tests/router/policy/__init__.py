"""Tests of placement, without any network."""
