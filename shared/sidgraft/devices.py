"""Where tensors compute, and whether the memory there is used up.

It imports torch alone, so that a stage without a language model does not load one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def device() -> torch.device:
    """Where models compute: the GPU where there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))  # torchrun: one GPU a process


@contextmanager
def suppressing_out_of_memory() -> Iterator[None]:
    """End the body without an error where the memory of a GPU or the machine is used up; all else is raised.

    On a CPU there is no error of its own kind, only a RuntimeError with a text of torch's allocator or of C++. It comes
    where memory is limited (ulimit, no overcommit); a container that exceeds its own limit is killed.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:
        if not any(text in str(error) for text in ("can't allocate memory", "bad_alloc")):
            raise
