"""Memory that stays behind at every training step."""
