"""The Debian mirror and release of this machine.

The mirror is read from the machine's apt configuration, so that builds use the operator's mirror or
proxy; no address is built in.
"""

import os
import subprocess
from pathlib import Path

from paddock.kit.errors import UnsupportedError

MIRROR_VARIABLE = "PADDOCK_DEBIAN_MIRROR"
SUITE_VARIABLE = "PADDOCK_DEBIAN_SUITE"
_FALLBACK_SUITE = "stable"


def debian_mirror() -> str:
    """Return the URL of the Debian archive that this machine uses."""
    if chosen := os.environ.get(MIRROR_VARIABLE):
        return chosen
    hint = f"set {MIRROR_VARIABLE} to the address of a Debian archive"
    try:
        listed = subprocess.run(
            [
                "apt-get",
                "indextargets",
                "--format",
                "$(REPO_URI)",
                "Created-By: Packages",
                "Origin: Debian",
                "Label: Debian",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise UnsupportedError(
            f"the Debian archive of this machine cannot be read from apt: {error}", hint=hint
        ) from error
    if not listed:
        raise UnsupportedError("apt on this machine has no Debian archive configured", hint=hint)
    return listed[0]


def debian_suite() -> str:
    """Return the release to build from: this machine's own if it runs Debian."""
    if chosen := os.environ.get(SUITE_VARIABLE):
        return chosen
    fields: dict[str, str] = {}
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        fields[key] = value.strip('"')
    if fields.get("ID") == "debian" and fields.get("VERSION_CODENAME"):
        return fields["VERSION_CODENAME"]
    return _FALLBACK_SUITE
