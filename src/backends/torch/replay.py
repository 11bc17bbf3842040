"""Repeat the device operations of earlier calls of the same kind.

Most of the host's time in a small call goes into deciding what to launch. The decisions follow from the kind of the
call: its options, and the shapes, strides, dtypes, devices and alignment of its tensors. `replayed` records the
allocations, PyTorch operations and kernel launches of the second call of a kind. From the third call on it repeats them
with that call's tensors. Recordings contain no tensors.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from xent.backends.torch.devices import is_padded, looks_at_targets
from xent.backends.torch.private import PLAIN_TYPES
from xent.backends.torch.recorder import OtherwiseError, Recording, record

__all__ = ["forget", "replayed"]

_MOST = 1024
_ALIGNMENT = 16  # bytes: kernels choose by it how wide their loads are
_ONCE, _NEVER = "called once", "cannot be recorded"
_SIMPLE = frozenset((bool, int, str, torch.dtype))
_kinds: dict[Hashable, str | Recording] = {}


class _UnknownTensorError(Exception):
    """An argument is a tensor of another class than PyTorch's own."""


def replayed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, by a recording if there is one for this kind of arguments.

    Arguments are tensors, hashable values, tuples, objects whose `fields` are a tuple of these, and objects that their
    hashable `identity` tells apart. At least one is a tensor. Results are tensors, None, and tuples or lists of these.
    Apart from its results the function has no effect on the host.
    """
    tensors: list[Tensor] = []
    key: list[Any] = [function]
    try:
        _describe(arguments, tensors, key)
    except _UnknownTensorError:
        return function(*arguments)
    addresses = [tensor.data_ptr() for tensor in tensors]
    key += [address % _ALIGNMENT for address in addresses]
    key += map(is_padded, tensors)
    key.append(looks_at_targets(tensors[0].device))
    if len(set(addresses)) < len(addresses):
        key += map(addresses.index, addresses)
    kind = tuple(key)
    found = _kinds.get(kind)
    if isinstance(found, Recording) and not (found.waits and _is_capturing(tensors[0])):
        try:
            return found.repeat(tensors)
        except OtherwiseError:
            _kinds[kind] = _NEVER
    if found is _ONCE and not _is_capturing(tensors[0]):
        results, recording = record(function, arguments, tensors)
        _kinds[kind] = recording or _NEVER
        return results
    if found is None:
        if len(_kinds) >= _MOST:
            _make_room()
        _kinds[kind] = _ONCE
    return function(*arguments)


def forget() -> None:
    """Clear the recordings."""
    _kinds.clear()


def _make_room() -> None:
    """Drop the kinds that were called once; if there are none, all."""
    for kind, found in list(_kinds.items()):
        if found is _ONCE:
            _kinds.pop(kind, None)  # another thread may have dropped it
    if len(_kinds) >= _MOST:
        _kinds.clear()


def _is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is captured: a call then does not wait for the device, as it might outside."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _describe(values: Any, tensors: list[Tensor], key: list[Any]) -> None:
    """Append the tensors among nested values to `tensors`, and everything else that matters to `key`."""
    for value in values:
        if value is None:
            key.append(None)
            continue
        cls = value.__class__
        if cls in PLAIN_TYPES:
            tensors.append(value)
            key += (value.dtype, value.shape, value.stride(), value.device)
        elif cls is float:
            key += (cls, repr(value))  # 0.0 and -0.0 are equal
        elif cls in _SIMPLE:
            key += (cls, value)
        elif isinstance(value, tuple):
            key += (cls, len(value))
            _describe(value, tensors, key)
        elif hasattr(cls, "identity"):
            key += (cls, value.identity)
        elif hasattr(cls, "fields"):
            key.append(cls)
            _describe(value.fields, tensors, key)
        elif isinstance(value, Tensor):
            raise _UnknownTensorError
        else:
            key += (cls, value)
