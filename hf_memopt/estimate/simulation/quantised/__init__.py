"""Frozen weights in few bits: bytes for estimates, no numbers. Read in this order:

- `quantised_linear`: what such layers have in common.
- `nf4_linear`, `llm_int8_linear`, `weight_only_int8_linear`: the layers of bitsandbytes and torchao.
- `quantised_base`: a model whose linear layers are such, and adapters on it.
"""
