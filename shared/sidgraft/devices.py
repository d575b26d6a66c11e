"""Where tensors compute, in which precision they do it well, and whether the memory there is used up.

Of large packages it imports torch alone, so that a stage without a language model does not load one.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sidgraft.progress import say

# Whether an x86 processor multiplies in bfloat16; else such products are emulated, and slower than float32.
BFLOAT16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def device() -> torch.device:
    """Where models compute: the GPU where there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))  # torchrun: one GPU a process


def tell_if_emulated(dtype: torch.dtype) -> None:
    """Say, once a process, that bfloat16 is slower than float32 on an x86 processor that only emulates it."""
    on_x86 = device().type == "cpu" and platform.machine() in ("x86_64", "AMD64")
    if dtype == torch.bfloat16 and on_x86 and not BFLOAT16:
        _say_emulated()


@functools.cache
def _say_emulated() -> None:
    say(
        "this processor does not multiply in bfloat16, so that it is emulated: precision=float32 (embed: dtype=float32)"
        " is probably quicker."
    )


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
