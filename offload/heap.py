"""How the C library hands out memory, so that what a process takes stays what was planned."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGE_BYTES = 4 << 20
_KEPT_BYTES = 256 << 20


def steady_heap() -> bool:
    """From now on large blocks go back to the system when they are freed; whether this C library can do that.

    glibc raises the size from which it does so with every block freed, up to 32 MB. Scratch of ever different sizes,
    as trees of ever different sizes need it, then tears holes into the heap: 200 MB over two answers were seen.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
