"""The device of the demo: choose it, describe it, synchronise with it."""

import psutil
import torch

__all__ = ["choose_device", "describe", "free_cores", "synchronize"]

SAMPLE_SECONDS = 1.0


def choose_device(name: str | None) -> torch.device:
    """Return the named device, or the machine's accelerator if it has one, or the CPU.

    Raises ValueError if this machine does not have the named device, and RuntimeError if PyTorch has no such device.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return accelerator or torch.device("cpu")
    device = torch.device(name)
    present = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    if device.type not in present:
        raise ValueError(f"device {name!r} is not on this machine; there is {' and '.join(sorted(present))}")
    return device


def free_cores() -> int:
    """Return the number of cores that other programs leave to this one: at least 1, at most PyTorch's threads.

    With more threads than free cores each operation waits for the thread that has none. That takes longest in code of
    many small operations, and so would change which loss is faster.
    """
    busy = psutil.cpu_percent(SAMPLE_SECONDS) / 100 * (psutil.cpu_count() or 1)
    return max(1, min(torch.get_num_threads(), round((psutil.cpu_count() or 1) - busy)))


def describe(device: torch.device) -> str:
    """Return a description of the device for the report."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "Apple GPU (mps)"
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    return str(device)


def synchronize(device: torch.device) -> None:
    """Wait for pending work, so that a clock that is read after this call includes the work and not only its launch."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
