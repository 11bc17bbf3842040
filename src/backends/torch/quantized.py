"""The heads of bitsandbytes and torchao as `xent.QuantizedRows`: their weights, a range of classes at a time."""

from typing import Any

import torch
from torch import Tensor

from xent.core.spec import QuantizedRows

__all__ = ["classifier"]


def classifier(module: torch.nn.Module) -> tuple[Any, Tensor | None]:
    """Return the weight and bias of a classifier, to be passed to `xent.linear_cross_entropy`.

    Parameters
    ----------
    module : torch.nn.Linear; bitsandbytes Linear4bit or Linear8bitLt; or torch.nn.Linear quantized by torchao
        The classifier. A quantized one must be frozen.

    Returns
    -------
    linear_weight : tensor (V, D), or QuantizedRows
    linear_bias : tensor (V,), or None

    Raises
    ------
    ValueError
        bitsandbytes has not quantized the weight yet, or a row of a 4-bit weight does not consist of whole blocks.

    Examples
    --------
    >>> import torch, xent
    >>> from xent.integrations.torch import classifier
    >>> weight, bias = classifier(model.lm_head)  # doctest: +SKIP
    >>> loss = xent.linear_cross_entropy(hidden, weight, labels, linear_bias=bias, shift=1)  # doctest: +SKIP
    """
    head: Any = module
    weight, shape, bias = head.weight, tuple(head.weight.shape), head.bias
    library = type(weight).__module__.partition(".")[0]
    if library == "torchao":
        return QuantizedRows(weight, shape, lambda start, stop, dtype: weight[start:stop].dequantize().to(dtype)), bias
    if library != "bitsandbytes":
        return weight, bias
    state = getattr(weight, "quant_state", None)
    if hasattr(weight, "SCB"):  # the first call of the module moves it
        state = head.state.SCB if weight.SCB is None else weight.SCB
    if state is None:
        raise ValueError(
            f"the weight of this {type(module).__name__} is not quantized yet: bitsandbytes does that when the module "
            "is moved to its device"
        )
    if not isinstance(state, Tensor):
        return _of_4_bits(weight, state), bias
    scale = state[:, None] / 127
    return QuantizedRows(
        weight, shape, lambda start, stop, dtype: (weight.data[start:stop] * scale[start:stop]).to(dtype)
    ), bias


def _of_4_bits(weight: Any, state: Any) -> QuantizedRows:
    """Return the rows of a Params4bit. A row consists of whole blocks, so that it can be dequantized alone."""
    import bitsandbytes.functional as bnb  # pyright: ignore[reportMissingImports]

    (classes, width), scales = state.shape, state.absmax
    if width % state.blocksize:
        raise ValueError(
            f"the rows of a 4-bit classifier must consist of whole blocks of {state.blocksize} elements, got {width} "
            "elements: quantize it with another blocksize"
        )
    if state.nested:
        scales = bnb.dequantize_blockwise(scales, state.state2) + state.offset
    packed, scales = weight.data.view(torch.uint8).view(classes, -1), scales.view(classes, -1)

    def rows(start: int, stop: int, dtype: torch.dtype) -> Any:
        absmax, shape = scales[start:stop].flatten(), torch.Size((stop - start, width))
        part = bnb.QuantState(absmax, shape, state.code, state.blocksize, state.quant_type, dtype)
        return bnb.dequantize_4bit(packed[start:stop].reshape(-1, 1), part)

    return QuantizedRows(weight, (classes, width), rows)
