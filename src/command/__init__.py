"""The command line `python -m xent`: environment report, check of gradients, comparison with the unfused loss.

Each command has one file; `xent.__main__` parses the arguments.
"""

__all__: list[str] = []
