"""Tests of trace formats and tools."""
