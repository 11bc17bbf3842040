"""Training steps of whole models of transformers with each implementation of the loss: `python -m benchmarks.training`.

`models.toml` has the shapes and `variants` the implementations. One process (`worker`) has the model and its optimizer,
which all variants share; `measure` calls it.
"""
