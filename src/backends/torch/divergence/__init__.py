"""Divergences in the PyTorch driver.

How a call flows: `entry` (from the backends) -> `call`, the call as it runs -> `autograd`, and `ops` below it
(`compiled` for transforms inside of torch.compile) -> `loop`, the chunks of rows, with `facts` -> what a backend
registered in `steps`: `plain` here. `harness` is the yardstick of the checks.
"""

__all__: list[str] = []
