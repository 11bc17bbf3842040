"""A training step of a whole model, as transformers made it and patched: `python -m benchmarks.training`."""
