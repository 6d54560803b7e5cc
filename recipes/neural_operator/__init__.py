"""Parts of `train_neural_operator`, in the order to read them.

- `options`: its flags.
- `darcy`: coefficient fields and their solutions, as files.
- `data`: these files, or neuralop's, as datasets.
- `model`: neuralop's models, and what is checkpointed.
- `evaluation`: losses, and errors by resolution.
- `step`: the optimizer and one update in micro-batches.
- `trainer`: the same training by neuralop's Trainer; `report`: results and panels; `plan`: the update on fake tensors.
"""
