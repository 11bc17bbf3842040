"""A training step of a whole model of transformers, unpatched and patched: `python -m benchmarks.training`."""
