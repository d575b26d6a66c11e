"""The C library's allocator, told to keep what is freed."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Let this process reuse freed memory instead of returning it to the system; without effect outside glibc.

    glibc maps every large tensor anew and unmaps it when it is freed, so that each step of a training and each search
    touches some hundred thousand fresh pages, which the system fills with zeros first. Measured once, in processor time
    on one core (16 histories, 20 beams, eight layers of a model of 135M parameters, bfloat16): a search takes 1.63 s
    instead of 1.94 s.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_MAX, 0)
            mallopt(M_TRIM_THRESHOLD, -1)
