"""Run a script (arguments: file, its arguments) and print how many losses were computed from hidden states.

Also print whether FSDP2, if the script uses it, adds gradients up instead of averaging them.

Under torchrun the script sleeps before it destroys its process group, so that its last tensors are released. PyTorch
2.13 waits for gloo's threads without releasing the interpreter lock, which they need to release a tensor; this can be a
deadlock. A forked process (`tests.integrations.processes`) ends without destroying its group.
"""

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import xent
from tests.distributed.fsdp import averages

__all__ = []


def main() -> None:
    """Run the script."""
    function, calls = xent.linear_cross_entropy, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return function(*args, **kwargs)

    destroy = dist.destroy_process_group

    def destroy_later(*group: Any) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if "fully_shard" in source and not averages(init_device_mesh(device, (dist.get_world_size(),))):
            print("FSDP2 adds up")
        if dist.is_torchelastic_launched():
            time.sleep(1)
            destroy(*group)

    xent.linear_cross_entropy, dist.destroy_process_group = watched, destroy_later
    del sys.argv[0]
    source = Path(sys.argv[0]).read_text(encoding="utf-8")
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    print(f"fused losses: {len(calls)}")


if __name__ == "__main__":
    main()
