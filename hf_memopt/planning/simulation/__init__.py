"""The accelerator without hardware: fake tensors that follow CUDA's rules."""

# torch's device meshes take letters alone.
DEVICE_TYPE = "virtualcuda"
