"""From words to conditioning, and the cache that keeps it."""
