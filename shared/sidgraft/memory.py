"""The C library's allocator, told to keep what is freed."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Let this process reuse freed memory instead of returning it to the system; without effect outside glibc.

    glibc maps every large tensor anew and unmaps it when it is freed, so that each step of a training and each search
    touches some hundred thousand fresh pages, which the system fills with zeros first. Measured once each, in processor
    time on one core, of a model of 135M parameters: a search (16 histories, 20 beams, eight layers, bfloat16) takes
    1.63 s instead of 1.94 s; a step of fine-tuning (16 histories, four layers) 3.4 s instead of 4.2 s, at a peak of
    memory of 2.7 GB instead of 2.5.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_MAX, 0)
            mallopt(M_TRIM_THRESHOLD, -1)
