"""Whole fleets under load while parts of them die."""
