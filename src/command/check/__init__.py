"""The gradient checks: cases, their judge, and the command `python -m xent check`."""

__all__: list[str] = []
