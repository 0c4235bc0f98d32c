"""Where objects lie in memory, so that children of one warm parent have little of their own.

A page is copied for a child when the child writes to it, and merely using an object writes: its
references are counted. What every child uses lies scattered among what hardly any does. Here holes
are filled, so that new objects come to lie side by side, and code that is used is moved together.
How that use is found out is `warmup`'s business.
"""

import ctypes
import gc
from collections.abc import Collection
from types import CodeType, FunctionType

_OVERHEAD = 33
"""Bytes that an empty `bytes` object takes."""
_SMALL = 512
"""Up to here Python has pools of its own, beyond them objects come from the C library's heap."""
_FILLERS = 300
_LARGE = (65536, 32768, 16384, 8192, *range(4096, _SMALL, -16))
_MOST_LARGE = 4096

_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_void_p


def fill_holes() -> list[object]:
    """Occupy the free places among objects; keep what is returned as long as they should be."""
    filler: list[object] = []
    for size in range(_OVERHEAD + 15, _SMALL, 16):
        filler += [bytes(size - _OVERHEAD) for _ in range(_FILLERS)]
    end = _libc.sbrk(0)
    for size in _LARGE:
        for _ in range(_MOST_LARGE):
            piece = bytes(size - _OVERHEAD)
            if id(piece) > end:  # the heap had to grow: no hole of this size is left
                break
            filler.append(piece)
    return filler


def gather(used: Collection[int]) -> int:
    """Move code objects, given by their ids, next to each other; gives how many functions had some.

    Only what functions lead to is moved. Code that is running stays what it is.
    """
    # Until all are moved what they leave stays occupied, too: it would be the next one's place.
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
