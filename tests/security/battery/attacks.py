"""The attacks of the battery as data: class, name, program, and what shows that it has failed.

Programs run as root inside. Attacks on kernel memory that end their sandbox are `BOUNDED`: each
needs a sandbox of its own.
"""

import base64

from msgspec import Struct

from tests.runtime.local.inside import Outcome
from tests.security.battery import escapes, facts, kernel_memory, networks
from tests.security.battery.kernel_memory import PRELUDE

STATES = ("new", "woken", "copied", "forked")
"""What happened to the sandbox before: nothing, hibernation, creation from a snapshot, a fork."""
PRIVILEGES = ("sudo", "locked")
_NOT_FOUND = 127
_SET_ATTRIBUTE = (
    """/usr/bin/python3 -c 'import os, sys; os.setxattr(sys.argv[1], "user.x", b"y")'"""
)
DEVICE_CHANGES = ("chmod 600", "chown 1000", _SET_ATTRIBUTE, "rm -f")
"""Commands that get the path of a device file."""


class Attack(Struct, frozen=True):
    """One attempt."""

    kind: str
    name: str
    script: str
    expected: str | None = None
    """The output of an attempt that failed; if `None`, the script itself must fail."""

    def is_held(self, outcome: Outcome) -> bool:
        """Whether the attempt has failed. A missing program proves nothing."""
        if self.expected is not None:
            return outcome.out == self.expected
        return outcome.status not in (0, _NOT_FOUND)


def python(program: str, *arguments: str) -> str:
    """Return a command that runs a program; encoded because of its quotes."""
    code = base64.b64encode(program.encode()).decode()
    return f"echo {code} | base64 -d | /usr/bin/python3 - {' '.join(arguments)}"


def _refused_memory(name: str) -> Attack:
    expected, program = kernel_memory.REFUSED[name]
    indented = "\n".join(f"    {line}" for line in program.splitlines())
    caught = "except OSError as problem:\n    print(errno.errorcode[problem.errno])"
    script = python(f"{PRELUDE}\ntry:\n{indented}\n{caught}")
    return Attack("kernel memory that is refused", name, script, f"{expected}\n")


ATTACKS = (
    *(Attack("privileged tools", one, f"{one} 2>/dev/null") for one in escapes.TOOLS),
    *(
        Attack("settings of the kernel", path, f"echo 0 2>/dev/null > {path}")
        for path in escapes.SETTINGS
    ),
    *(
        Attack("system calls", one, f"{python(escapes.call_script(one))} && echo held", "held\n")
        for one in escapes.SYSCALLS
    ),
    *(
        Attack("sockets", one, python(f"import socket\n{one}") + " 2>/dev/null")
        for one in escapes.SOCKETS
    ),
    *(
        Attack("device files", f"{change.split()[0]} {name}", f"{change} /dev/{name} 2>/dev/null")
        for change in DEVICE_CHANGES
        for name in ("null", "urandom")
    ),
    *(
        Attack(
            "facts of the machine", path, f"cat /proc/{path} 2>/dev/null | head -c 9 | wc -c", "0\n"
        )
        for path in facts.FILES
    ),
    *(
        Attack("facts of the machine", path, f"find {path} -mindepth 1 2>/dev/null | head -n 1", "")
        for path in facts.TREES
    ),
    *(
        Attack("networks", address, python(networks.TRY_TCP, "80", address), "")
        for address in " ".join(networks.CLOSED).split()
    ),
    Attack("networks", "addresses, routes and links", python(networks.CONFIGURE), "-1\n-1\n-1\n"),
    *map(_refused_memory, kernel_memory.REFUSED),
)
KINDS = tuple(dict.fromkeys(attack.kind for attack in ATTACKS))
BOUNDED_KIND = "kernel memory that is bounded"
BOUNDED = tuple(
    Attack(BOUNDED_KIND, name, python(PRELUDE + program), expected)
    for name, (expected, program) in kernel_memory.WATCHED.items()
)
"""`expected` is part of the reason with which the sandbox ends."""


def counts() -> dict[str, int]:
    """Return the number of attacks by class."""
    found = {kind: sum(one.kind == kind for one in ATTACKS) for kind in KINDS}
    return {**found, BOUNDED_KIND: len(BOUNDED)}
