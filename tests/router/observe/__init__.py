"""Tests of what the gateway writes down."""
