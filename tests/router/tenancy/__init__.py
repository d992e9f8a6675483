"""Tests of router.tenancy."""
