"""From OpenAI requests to token ids, and from token ids back to text."""
