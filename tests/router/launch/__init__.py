"""Tests of launching and supervising a fleet."""
