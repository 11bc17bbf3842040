"""Whether MLX can use Metal on this machine; tested once, at the first call that could use it."""

import platform

__all__ = ["DEVICES", "MISSING", "VERSIONS", "find"]


def find() -> tuple[str | None, dict[str, str], tuple[str, ...]]:
    """Return (why Metal cannot be used or None, versions, device types)."""
    try:
        import mlx.core as mx

        from xent.backends.mlx.devices import version
    except ImportError as error:
        return f"MLX cannot be imported: {error}", {}, ()
    versions = {"mlx": version()}
    if not mx.metal.is_available():
        here = f"{platform.system()} on {platform.machine()}"
        return f"its kernels are for Apple GPUs, and MLX finds no Metal here ({here}); use backend 'mlx'", versions, ()
    return None, versions, ("gpu",)


MISSING, VERSIONS, DEVICES = find()
