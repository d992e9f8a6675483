"""Tests of the engine-core process and its clients."""
