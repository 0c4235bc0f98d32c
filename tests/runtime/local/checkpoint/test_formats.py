"""Parsing of mountinfo and editing of CRIU images."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.runtime.local.checkpoint import manifest
from paddock.runtime.local.checkpoint.mounts import find_externals, parse_mountinfo
from paddock.wire.protobuf import encode_message

pytestmark = pytest.mark.timeout(120)


@given(
    st.integers(min_value=1, max_value=0xFFFF0000), st.integers(min_value=1, max_value=0xFFFFFFFF)
)
def test_the_id_range_in_an_image_is_replaced(base: int, count: int):
    extent = encode_message([(1, 0), (2, 100000), (3, 65536)])
    body = encode_message([(1, extent), (2, extent)])
    image = b"magicnum" + struct.pack("<I", len(body)) + body
    assert manifest.id_range(image) == (100000, 65536)
    changed = manifest.with_id_range(image, base, count)
    assert changed[:8] == b"magicnum"
    assert manifest.id_range(changed) == (base, count)


HOST = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw
"""
INSIDE = """\
40 39 0:50 / / rw,nodev - overlay paddock rw
41 40 0:6 /null /dev/null rw - devtmpfs devtmpfs rw
42 40 0:51 / /proc rw - proc none rw
43 40 254:0 /srv/my\\040data /mnt/my\\040volume rw - ext4 /dev/vda rw
44 40 0:52 / /dev/shm rw shared:7 - tmpfs none rw
"""


def test_external_mounts_are_found():
    externals = find_externals(parse_mountinfo(INSIDE), parse_mountinfo(HOST))
    assert [(one.point, one.source) for one in externals] == [
        ("/dev/null", "/dev/null"),
        ("/mnt/my volume", None),
    ]
    assert len({one.key for one in externals}) == 2


def test_an_invalid_line_is_rejected():
    with pytest.raises(ValueError, match="not a line of mountinfo"):
        parse_mountinfo("something else")
