"""Parts of `train_causal_lm`."""
