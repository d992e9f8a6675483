"""Tenants, keys and cache isolation."""
