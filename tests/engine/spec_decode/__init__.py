"""Tests of engine.spec_decode."""
