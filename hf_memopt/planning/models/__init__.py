"""Models of transformers and diffusers without memory: their configurations, sizes, batches and losses."""
