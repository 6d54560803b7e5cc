"""What becomes of each tensor that autograd saves. Read in this order:

- `hf_memopt/autograd_state.py`: what autograd does now, and a tensor taken apart into memory, view and version.
- `device_state`: what all passes on one device share: bytes held, copies on their way, orders learned.
- `storages`: a saved storage, kept or copied to the host and back.
- `offloaded_pass`: one pass: where it puts what it saves, and what its backward needs next.
- `hooks`: decides which tensors are the pass's business, and what the autograd graph holds in their place.
"""
