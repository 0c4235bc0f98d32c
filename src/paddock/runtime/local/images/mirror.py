"""Where this machine gets Debian packages from.

The address comes from the machine's own apt configuration, so that whatever mirror or proxy an
operator chose is used for our builds too; no address is built in.
"""

import os
import subprocess
from pathlib import Path

from paddock.kit.errors import UnsupportedError

MIRROR_VARIABLE = "PADDOCK_DEBIAN_MIRROR"
SUITE_VARIABLE = "PADDOCK_DEBIAN_SUITE"
_FALLBACK_SUITE = "stable"


def debian_mirror() -> str:
    """Give the address of a Debian archive this machine is set up to use."""
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
            f"this machine's apt does not say where its packages come from: {error}", hint=hint
        ) from error
    if not listed:
        raise UnsupportedError("this machine's apt knows no Debian archive", hint=hint)
    return listed[0]


def debian_suite() -> str:
    """Give the release to build from: this machine's own where it is Debian."""
    if chosen := os.environ.get(SUITE_VARIABLE):
        return chosen
    facts: dict[str, str] = {}
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        facts[key] = value.strip('"')
    if facts.get("ID") == "debian" and facts.get("VERSION_CODENAME"):
        return facts["VERSION_CODENAME"]
    return _FALLBACK_SUITE
