"""Tests of engine.frontend."""
