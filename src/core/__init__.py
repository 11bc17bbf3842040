"""The part of xent that needs no framework and no backend: description and validation of a call, sizes of chunks."""

__all__: list[str] = []
