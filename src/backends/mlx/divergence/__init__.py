"""Divergences in the MLX driver.

`entry` runs a call, `facts` has the data of the rows, and `rows` computes them.
"""

__all__: list[str] = []
