"""Tests of worker.cpu."""
