"""The command line, `python -m xent`: what this machine has, a check of its gradients, a comparison of losses.

One file a command; `xent.__main__` reads the arguments.
"""

__all__: list[str] = []
