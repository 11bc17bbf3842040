"""The gradient checks that `python -m xent check` and the tests share: cases, and how a result is judged."""

__all__: list[str] = []
