"""What a call means, before any framework is involved: validation, the description of a call, the choice of backend."""

__all__: list[str] = []
