"""HTTP handlers of the client and the admin listener."""
