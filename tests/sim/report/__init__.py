"""Tests of what a replay reports."""
