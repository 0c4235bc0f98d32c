"""CA certificates as text: splitting, sections in bundles, OpenSSL's names of links. Pure.

OpenSSL finds a certificate in a directory by a link whose name is a hash of the subject. The hash
is computed here, because an image need not have the `openssl` command.
"""

import base64
import binascii
import hashlib
import re

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_BEGIN, _END = "# Paddock: begin of the operator's CA certificates", "# Paddock: end"
_SECTION = re.compile(rf"\n?{re.escape(_BEGIN)}\n.*?{re.escape(_END)}\n", re.DOTALL)
_SPACES = re.compile(rb"[ \t\n\v\f\r]+")
_SEQUENCE, _EXPLICIT_VERSION, _UTF8 = 0x30, 0xA0, 0x0C
_TEXT_ENCODINGS = {0x0C: "utf-8", 0x13: "ascii", 0x14: "latin-1", 0x16: "ascii", 0x1A: "ascii",
                   0x1C: "utf-32-be", 0x1E: "utf-16-be"}  # fmt: skip
"""Text types of ASN.1: UTF8, Printable, Teletex, IA5, Visible, Universal, BMP."""


def split(text: str) -> list[str]:
    """Return the certificates of a PEM text, without comments between them."""
    return [f"{found[0]}\n" for found in _PEM.finditer(text)]


def with_section(bundle: str, certificates: str) -> str:
    """Return a bundle with our section replaced; empty `certificates` remove it."""
    own = _SECTION.sub("", bundle)
    if not certificates:
        return own
    return f"{own}\n{_BEGIN}\n{''.join(split(certificates))}{_END}\n"


def subject_hash(certificate: str) -> str:
    """Return the name of OpenSSL's link to a certificate, without the number after the dot.

    Raise `ValueError` if the text is not a certificate.
    """
    found = _PEM.search(certificate)
    if found is None:
        raise ValueError("there is no certificate in the text")
    try:
        names = _read(_subject(base64.b64decode(found[1])))
        canonical = b"".join(_encode(tag, _canonical_part(body)) for tag, body in names)
    except (IndexError, binascii.Error, UnicodeDecodeError) as error:
        raise ValueError(f"the certificate cannot be read: {error}") from error
    digest = hashlib.sha1(canonical, usedforsecurity=False).digest()
    return f"{int.from_bytes(digest[:4], 'little'):08x}"


def _subject(der: bytes) -> bytes:
    """Return the content of the subject: the fifth field after the optional version."""
    (_, outer), *_ = _read(der)
    (_, signed), *_ = _read(outer)
    fields = [body for tag, body in _read(signed) if tag != _EXPLICIT_VERSION]
    return fields[4]


def _canonical_part(attributes: bytes) -> bytes:
    """Return the canonical form of one relative name: a set of attributes."""
    found: list[bytes] = []
    for tag, attribute in _read(attributes):
        (kind, identifier), (value_tag, value) = _read(attribute)
        if value_tag in _TEXT_ENCODINGS:
            text = value.decode(_TEXT_ENCODINGS[value_tag]).encode()
            value = _SPACES.sub(b" ", text).strip(b" ").lower()
            value_tag = _UTF8
        found.append(_encode(tag, _encode(kind, identifier) + _encode(value_tag, value)))
    return b"".join(sorted(found))


def _read(data: bytes) -> list[tuple[int, bytes]]:
    """Return tag and content of each element of a DER sequence."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        tag, size = data[at], data[at + 1]
        at += 2
        if size & 0x80:
            count = size & 0x7F
            size = int.from_bytes(data[at : at + count], "big")
            at += count
        if at + size > len(data):
            raise IndexError("an element is longer than its certificate")
        found.append((tag, data[at : at + size]))
        at += size
    return found


def _encode(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + content
