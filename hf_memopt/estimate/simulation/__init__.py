"""The accelerator without hardware: fake tensors that follow CUDA's rules."""
