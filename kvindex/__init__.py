"""Hash chain, KV events and the shared index of who holds which block."""
