"""Tests of configuration, logging and process ties."""
