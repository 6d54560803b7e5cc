"""Parts of `train_sft`."""
