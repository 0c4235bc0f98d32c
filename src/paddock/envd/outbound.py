"""Writes the operator's CA certificates and mirrors into files of the sandbox.

What was written is recorded in the sandbox. A changed setting replaces it, and a removed one
removes it, also in a sandbox that was restored from a snapshot. Files that a user has changed since
are left alone.
"""

import contextlib
import errno
import logging
import os
import re
from collections.abc import Container, Generator

import msgspec
from msgspec import Struct

from paddock.envd import certificates
from paddock.envd.config import CA_BUNDLE, CA_DIRECTORY, CA_FILE, OutboundFiles
from paddock.envd.files import texts

log = logging.getLogger(__name__)

_STATE = f"{CA_DIRECTORY}/written.json"
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # Alpine
)
_LINKS = "/etc/ssl/certs"
_ANCHORS = (
    ("/usr/local/share/ca-certificates", "/usr/sbin/update-ca-certificates"),
    ("/etc/pki/ca-trust/source/anchors", "/etc/pki/ca-trust/source/anchors"),
)
"""Directories from which programs of the distribution make the bundle, and what shows them."""
_SUDO = "/etc/sudoers.d"
_SUDO_FILE = "paddock-variables"  # the image `host` has a file `paddock`
_APT_LISTS = ("/etc/apt/sources.list",)
_APT_PARTS = "/etc/apt/sources.list.d"
_APT_HOSTS = re.compile(
    r"https?://(?:deb\.debian\.org|security\.debian\.org|ftp\.(?:[a-z]{2}\.)?debian\.org"
    r"|(?:[a-z]{2}\.)?archive\.ubuntu\.com|security\.ubuntu\.com|ports\.ubuntu\.com(?=/ubuntu))"
    r"(?=/)"
)


_machine_bundle = ""
"""The bundle of this machine, for images without one."""


def preload() -> None:
    """Read the bundle of this machine; called once, before a sandbox is joined."""
    global _machine_bundle  # forked children share it
    found = next((path for path in _BUNDLES if os.path.isfile(path)), None)
    _machine_bundle = texts.read(found) if found else ""


class _Written(Struct, kw_only=True):
    """What is in the sandbox."""

    wanted: OutboundFiles = OutboundFiles()
    is_complete: bool = False
    """Whether everything was written: an envd may be killed meanwhile."""
    files: list[str] = []
    """Files and links that are ours alone."""
    bundles: list[str] = []
    sources: dict[str, str] = {}
    """The original texts of apt's sources, by path."""


class OutboundWriter:
    """The files of one sandbox."""

    def __init__(self) -> None:
        self._applied: OutboundFiles | None = None
        self.has_certificates = False
        """Whether the files that `CA_VARIABLES` names exist."""

    def apply(self, wanted: OutboundFiles) -> None:
        """Make the files what is wanted. A failure is logged: the sandbox stays usable."""
        if wanted == self._applied:
            return
        try:
            before = _read_state()
            if before is None or not before.is_complete or before.wanted != wanted:
                if before is not None:
                    _remove(before)
                if wanted != OutboundFiles():
                    _write(wanted)
        except (OSError, ValueError) as error:
            log.warning(
                "CA certificates and mirrors were not written into the sandbox",
                extra={"error": str(error)},
            )
            self.has_certificates = False
            return
        self._applied = wanted
        self.has_certificates = bool(wanted.ca_certificates)


def rewrite_sources(text: str, mirror: str) -> str:
    """Return a text of apt's sources with the hosts of Debian and Ubuntu replaced."""
    return _APT_HOSTS.sub(lambda _: mirror, text)


@contextlib.contextmanager
def _read_only_ignored() -> Generator[None]:
    """Ignore that a directory of the image cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise


def _write(wanted: OutboundFiles) -> None:
    written = _Written(wanted=wanted)
    os.makedirs(CA_DIRECTORY, 0o755, exist_ok=True)
    _save_state(written)
    try:
        if wanted.ca_certificates:
            _write_certificates(wanted.ca_certificates, written)
        # On a node without root, directories of the image are read-only: sudo and apt do not work.
        with _read_only_ignored():
            if wanted.sudo_variables and os.path.isdir(_SUDO):
                names = " ".join(wanted.sudo_variables)
                text = f'Defaults env_keep += "{names}"\n'
                _put(f"{_SUDO}/{_SUDO_FILE}", text, written, mode=0o440)
            if wanted.apt_mirror:
                _rewrite_all_sources(wanted.apt_mirror, written)
        written.is_complete = True
    finally:
        _save_state(written)


def _rewrite_all_sources(mirror: str, written: _Written) -> None:
    for path in _source_files():
        text = texts.read(path)
        changed = rewrite_sources(text, mirror)
        if changed != text:
            written.sources[path] = text
            _save_state(written)  # first: the original must not be lost
            texts.replace(path, changed)


def _write_certificates(text: str, written: _Written) -> None:
    _put(CA_FILE, text, written)
    with _read_only_ignored():
        _write_system_store(text, written)
        return
    # The same on a node without root. Programs find this copy by their variables.
    if not os.path.lexists(CA_BUNDLE):
        path = next((path for path in _BUNDLES if os.path.isfile(path)), None)
        bundle = texts.read(path) if path else _machine_bundle
        _put(CA_BUNDLE, certificates.with_section(bundle, text), written)


def _write_system_store(text: str, written: _Written) -> None:
    found = {os.path.realpath(path) for path in _BUNDLES if os.path.exists(path)}
    bundles = sorted(found) or list(_BUNDLES[:1])
    files: dict[str, str] = {}
    links: dict[str, str] = {CA_BUNDLE: bundles[0]}
    for number, one in enumerate(certificates.split(text), 1):
        for directory, sign in _ANCHORS:
            if os.path.exists(sign):
                files[f"{directory}/paddock-{number}.crt"] = one
        if os.path.isdir(_LINKS):
            target = f"paddock-{number}.pem"
            files[f"{_LINKS}/{target}"] = one
            links[_free_link(certificates.subject_hash(one), target, links)] = target
    written.bundles += bundles
    written.files += [*files, *links]
    _save_state(written)  # first: what a killed envd leaves can be removed
    for path in bundles:
        bundle = texts.read(path) if found else _machine_bundle
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        texts.replace(path, certificates.with_section(bundle, text))
    for path, content in files.items():
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        texts.replace(path, content)
    for path, target in links.items():
        _link(target, path)


def _free_link(name: str, target: str, planned: Container[str]) -> str:
    """Return the first path with this hash that is not in use, or that leads to our file."""
    for number in range(100):
        path = f"{_LINKS}/{name}.{number}"
        if path in planned:
            continue
        if not os.path.lexists(path):
            return path
        if os.path.islink(path) and os.readlink(path) == target:
            return path
    raise OSError(f"{_LINKS} holds too many certificates with the same subject")


def _remove(before: _Written) -> None:
    for path in before.bundles:
        with contextlib.suppress(FileNotFoundError):
            text = texts.read(path)
            cleaned = certificates.with_section(text, "")
            if cleaned != text:
                texts.replace(path, cleaned)
    for path, original in before.sources.items():
        with contextlib.suppress(FileNotFoundError):
            if texts.read(path) == rewrite_sources(original, before.wanted.apt_mirror):
                texts.replace(path, original)
    for path in (*before.files, _STATE):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _source_files() -> list[str]:
    parts: list[str] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        parts = sorted(os.listdir(_APT_PARTS))
    listed = [f"{_APT_PARTS}/{name}" for name in parts if name.endswith((".list", ".sources"))]
    return [path for path in (*_APT_LISTS, *listed) if os.path.isfile(path)]


def _read_state() -> _Written | None:
    try:
        return msgspec.json.decode(texts.read(_STATE), type=_Written)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _save_state(written: _Written) -> None:
    texts.replace(_STATE, msgspec.json.encode(written).decode(), mode=0o600)


def _put(path: str, text: str, written: _Written, *, mode: int = 0o644) -> None:
    written.files.append(path)
    _save_state(written)
    texts.replace(path, text, mode=mode)


def _link(target: str, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.symlink(target, path)
