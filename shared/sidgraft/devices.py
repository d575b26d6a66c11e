"""Where tensors compute. It imports torch alone, so that a stage without a language model does not load one."""

from __future__ import annotations

import os

import torch


def device() -> torch.device:
    """Where models compute: the GPU where there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))  # torchrun: one GPU a process
