"""Divergences in the MLX driver.

`entry` is the call, from the backends to autograd and back; `facts` is what is known about the rows, `rows` the row
algebra, and `harness` the yardstick of the checks.
"""

__all__: list[str] = []
