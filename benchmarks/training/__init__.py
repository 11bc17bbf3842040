"""Training steps of whole models of transformers with each implementation of the loss: `python -m benchmarks.training`.

`models` are the shapes and `variants` the implementations. One process (`worker`) has the model and its optimizer,
which all variants share. `measure` sends it requests, `longest` chooses the lengths to try, and `table` prints the
results.
"""
