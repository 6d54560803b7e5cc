"""What becomes of each tensor that autograd saves. Read in this order:

- `tensor_views`: a tensor taken apart into memory, view and version.
- `device_bytes`: counts the device memory that saved activations hold.
- `storages`: a saved storage, kept or copied to the host and back.
- `packed`: what the autograd graph holds in place of a saved tensor.
- `forward_pass`: one pass, its storages in order, and what its backward needs next.
- `device_context`: what all passes on one device share.
- `pack_hook`: decides for each tensor where it goes.
"""
