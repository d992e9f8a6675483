"""The OpenAI-compatible front process of one replica."""
