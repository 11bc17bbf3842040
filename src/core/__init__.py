"""The part of xent that uses no framework: public functions, validation, description of a call, choice of backend."""

__all__: list[str] = []
