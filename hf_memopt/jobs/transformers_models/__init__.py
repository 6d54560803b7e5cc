"""Models of transformers: found, built from their configurations, and trained."""
