"""Large blocks are returned to the system when they are freed."""

import subprocess
import sys

import pytest

from offload.heap import steady_heap

_COUNT = """
import ctypes, sys
from offload.heap import steady_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
libc.mallinfo2.restype = Info
if sys.argv[1] == "steady":
    steady_heap()
libc.free(libc.malloc(30 << 20))  # by which glibc learns that 30 MB are an ordinary size
before = libc.mallinfo2().hblks
kept = libc.malloc(8 << 20)
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(not steady_heap(), reason="this C library has no mallopt")
@pytest.mark.parametrize(("how", "mapped"), [("as it is", 0), ("steady", 1)])
def test_a_large_block_stays_apart_from_the_heap(how, mapped):
    done = subprocess.run([sys.executable, "-c", _COUNT, how], capture_output=True, text=True, check=True)
    assert int(done.stdout) == mapped
