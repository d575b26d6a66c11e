"""Where tensors compute, in which precision they do it well, and whether the memory there is used up.

Of large packages it imports torch alone, so that a stage without a language model does not load one.
"""

from __future__ import annotations

import functools
import glob
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sidgraft.progress import say

GPU_FILES = "/dev/nvidia[0-9]*"  # one for each GPU of NVIDIA that a machine has or a container was given
# Whether an x86 processor multiplies in bfloat16; else such products are emulated, and slower than float32.
BFLOAT16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def device() -> torch.device:
    """Where models compute: the GPU where there is one.

    ValueError where torch cannot use GPUs that this machine or container has: a CPU would take their time for days.
    """
    if not torch.cuda.is_available():
        _check_that_none_is_here()
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))  # torchrun: one GPU a process


def _check_that_none_is_here() -> None:
    given = sorted(glob.glob(GPU_FILES))
    if not given or torch.version.cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    try:
        torch.cuda.init()
        why = "it names no reason"
    except (RuntimeError, AssertionError) as error:
        why = str(error).split("\n")[0]
    raise ValueError(
        f"{', '.join(given)}: GPUs that torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use: {why}."
        f" Expected a driver that CUDA {torch.version.cuda} runs on (nvidia-smi shows both) with libraries that are"
        " found (in a container on GKE by LD_LIBRARY_PATH=/usr/local/nvidia/lib64). To compute on the CPU all the"
        " same set CUDA_VISIBLE_DEVICES=-1."
    )


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
