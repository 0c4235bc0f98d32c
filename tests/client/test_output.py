"""The end of output is kept."""

from hypothesis import given
from hypothesis import strategies as st

from paddock.client.output import OutputTail


@given(st.lists(st.binary(max_size=40)))
def test_the_last_bytes_are_kept_and_the_others_counted(parts: list[bytes]) -> None:
    tail = OutputTail(limit=10)
    for part in parts:
        tail.add(part)
    whole = b"".join(parts)
    assert tail.received == len(whole)
    assert tail.omitted == max(len(whole) - 10, 0)
    kept = whole[-10:].decode(errors="replace")
    note = f"[{tail.omitted} bytes before this are left out]\n" if tail.omitted else ""
    assert tail.text == note + kept
