"""Make of this process a rank of an engine on this machine, beside which other engines may run.

The ranks meet at a file. Of a port nobody knows that it is still free when the first rank listens:
another engine that is started at the same time may have been told the same one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["join"]


def join(rank: int, world: int, meeting: Path) -> None:
    """Join the process group of `world` ranks that meet at a file, which the first of them makes.

    DeepSpeed finds the group, and has nothing of its own to set up.
    """
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        DS_ACCELERATOR="cpu",
    )
    import deepspeed.ops
    import torch

    # Its all-reduce through shared memory takes a compiler half a minute, and leaves 69 MB for each
    # rank behind.
    operators: dict[str, Any] = deepspeed.ops.__compatible_ops__
    operators["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group(
        "gloo", init_method=meeting.absolute().as_uri(), rank=rank, world_size=world
    )
