"""Divergences in the PyTorch driver.

Data flow: `entry` (called by the backends) -> `call`, the arguments in one tuple -> `autograd` and `ops` (`compiled`
for transforms inside of torch.compile) -> `loop` over chunks of rows, with `facts` -> the function that a backend
registered in `steps`, here `plain`.
"""

__all__: list[str] = []
