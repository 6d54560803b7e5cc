"""Parts of `train_causal_lm`, in the order to read them.

- `options`: its flags.
- `data`: texts, tokenizer, blocks.
- `model`: a pretrained model, or one from scratch.
- `step`: the optimizer and one update, with the offloader around the forward pass.
- `report`: results and figure.
- `plan`: the update on fake tensors.
"""
