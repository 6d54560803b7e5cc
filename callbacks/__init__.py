"""Transformers Trainer callbacks."""
