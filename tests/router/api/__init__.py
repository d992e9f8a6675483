"""Tests of router.api."""
