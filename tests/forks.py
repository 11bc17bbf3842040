"""Processes that are forked from one that has imported PyTorch and the libraries, which takes longer than a test."""

import multiprocessing as mp
import os
from typing import Any

__all__ = ["forking"]

LIBRARIES = (
    "accelerate",
    "lightning",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "tests.integrations.sharded",
    "tests.integrations.tensor_parallel",
)


def forking() -> Any:
    """Return the context of multiprocessing that starts them. A forked process cannot use CUDA."""
    context = mp.get_context("forkserver")
    libraries = LIBRARIES if os.environ.get("XENT_TEST_INTEGRATIONS") == "1" else ()
    context.set_forkserver_preload(["tests.distributed.pool", *libraries])  # once; later calls change nothing
    return context
