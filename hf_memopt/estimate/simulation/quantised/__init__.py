"""Weights and states that bitsandbytes and torchao keep in few bits: bytes for estimates. Read in this order:

- `quantised_linear`: the common base of such layers.
- `nf4_linear`, `llm_int8_linear`, `weight_only_int8_linear`: the layers of bitsandbytes and torchao.
- `quantised_base`: a model whose frozen linear layers are such, and adapters on it.
- `block_wise_adamw`: an optimizer's states.
"""
