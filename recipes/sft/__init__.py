"""The parts of `train_sft.py`, in the order to read them.

- `options`: its flags, beside TRL's.
- `conversations`: the data and the model that it makes where none are named.
- `base_model`: the model that is fine-tuned, with a quantised base and adapters where flags ask for them.
- `plan`: settings chosen by simulation, for `--plan`.
"""
