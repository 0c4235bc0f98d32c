"""Arranging objects in memory so that forked children copy few pages.

A page is copied for a child when the child writes to it, and using an object writes its reference
count. The objects that every child uses are scattered among those that few children use. Here holes
in the heap are filled, so that new objects are adjacent, and code that is used is moved together.
Which code is used is found out in `warmup.py`.
"""

import ctypes
import gc
from collections.abc import Collection
from types import CodeType, FunctionType

_OVERHEAD = 33
"""The size of an empty `bytes` object."""
_SMALL = 512
"""Up to this size objects are in Python's pools, larger ones in the C library's heap."""
_FILLERS = 300
_LARGE = (65536, 32768, 16384, 8192, *range(4096, _SMALL, -16))
_MOST_LARGE = 4096

_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_void_p


def fill_holes() -> list[object]:
    """Fill the holes between objects; they stay filled while the returned list exists."""
    filler: list[object] = []
    for size in range(_OVERHEAD + 15, _SMALL, 16):
        filler += [bytes(size - _OVERHEAD) for _ in range(_FILLERS)]
    end = _libc.sbrk(0)
    for size in _LARGE:
        for _ in range(_MOST_LARGE):
            piece = bytes(size - _OVERHEAD)
            if id(piece) > end:  # the heap has grown: no hole of this size is left
                break
            filler.append(piece)
    return filler


def gather(used: Collection[int]) -> int:
    """Move code objects, given by id, next to each other; return the number of functions changed.

    Only code that belongs to functions is moved. Running code is not replaced.
    """
    # Keep the old objects until all are moved, so that their memory is not reused for copies.
    kept: list[object] = fill_holes()
    moved: dict[int, CodeType] = {}

    def move(code: CodeType) -> CodeType:
        if id(code) not in moved:
            kept.append(code)
            inner = tuple(move(c) if isinstance(c, CodeType) else c for c in code.co_consts)
            is_wanted = id(code) in used or any(
                one is not other for one, other in zip(inner, code.co_consts, strict=True)
            )
            moved[id(code)] = code.replace(co_consts=inner) if is_wanted else code
        return moved[id(code)]

    count = 0
    for function in gc.get_objects():
        if type(function) is FunctionType:
            code = move(function.__code__)
            if code is not function.__code__:
                function.__code__ = code
                count += 1
    kept.clear()
    return count
