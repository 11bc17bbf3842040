"""Compile the Triton kernels for GPUs that this machine does not have. Nothing is run."""
