"""Divergences in the MLX driver.

`entry` runs a call, `facts` has the data of the rows, `rows` computes them, and `harness` has the unfused computation
for the checks.
"""

__all__: list[str] = []
