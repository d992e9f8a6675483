"""Tests of the policies of other systems."""
