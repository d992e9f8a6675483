"""Tests of the replica's front."""
