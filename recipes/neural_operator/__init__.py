"""Parts of `train_neural_operator`."""
