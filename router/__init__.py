"""The gateway: one URL, tenants, placement, relay; and the command line."""
