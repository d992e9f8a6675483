"""Speculative decoding, as far as it needs no model: proposers, acceptance, and whether it pays."""
