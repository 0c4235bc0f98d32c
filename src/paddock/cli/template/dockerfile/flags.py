"""The flags of instructions: which are used, which have no effect, which are refused."""

from collections.abc import Mapping

from e2b_dockerfile_utils import DockerfileInstruction

from paddock.cli.template.dockerfile.model import DockerfileError

_USED: Mapping[str, frozenset[str]] = {
    "FROM": frozenset({"platform"}),
    "COPY": frozenset({"from", "chown", "chmod", "link"}),
    "ADD": frozenset({"chown", "chmod", "link", "unpack"}),
    "RUN": frozenset({"mount", "network"}),
    "HEALTHCHECK": frozenset(
        {"interval", "timeout", "start-period", "start-interval", "retries"},
    ),
}

_ALTERNATIVES: Mapping[tuple[str, str], str] = {
    ("COPY", "parents"): "name each directory in a COPY of its own",
    ("COPY", "exclude"): "exclude the files in .dockerignore",
    ("ADD", "exclude"): "exclude the files in .dockerignore",
    ("ADD", "checksum"): "download and check the file in a RUN step",
    ("ADD", "keep-git-dir"): "clone the repository in a RUN step",
    ("ADD", "from"): "use COPY --from",
    ("RUN", "security"): "remove it: a build has the rights of a sandbox",
    ("RUN", "device"): "remove it: a build has no devices",
}
_SAFE_MOUNTS = frozenset({"cache"})
_MOUNTS: Mapping[str, str] = {
    "bind": "COPY the files, and delete them in the RUN step",
    "tmpfs": "use a directory of /tmp, and delete it in the RUN step",
    "secret": "pass a build argument; it is not stored in the template, but in the layers",
    "ssh": "COPY what the step clones",
}


def parse_flags(instruction: DockerfileInstruction) -> dict[str, tuple[str, ...]]:
    """Return the values of each flag; raise for one that cannot be followed."""
    found: dict[str, tuple[str, ...]] = {}
    for flag in instruction.flags:
        name, _, value = flag.removeprefix("--").partition("=")
        if name not in _USED.get(instruction.name, ()):
            raise DockerfileError(
                instruction.start_line,
                f"{instruction.name} --{name} is not supported",
                hint=_ALTERNATIVES.get((instruction.name, name), "remove the flag"),
            )
        found[name] = (*found.get(name, ()), value)
    return found


def is_on(values: tuple[str, ...]) -> bool:
    """Whether a flag without a value, or with true or false, is set."""
    return bool(values) and values[-1].lower() != "false"


def check_run(instruction: DockerfileInstruction) -> tuple[str, ...]:
    """Return notes on the flags of RUN; raise if the command would not do the same without them."""
    notes: list[str] = []
    flags = parse_flags(instruction)
    for network in flags.get("network", ()):
        if network != "default":
            raise DockerfileError(
                instruction.start_line,
                f"RUN --network={network} is not supported",
                hint="the network policy of the team and the installation applies to builds",
            )
    for mount in flags.get("mount", ()):
        kind = _mount_type(mount)
        if kind not in _SAFE_MOUNTS:
            raise DockerfileError(
                instruction.start_line,
                f"RUN --mount=type={kind} is not supported",
                hint=_MOUNTS.get(kind, "remove the mount"),
            )
        notes.append(
            f"line {instruction.start_line}: the cache of --mount=type=cache begins empty and "
            "stays in the layer"
        )
    return tuple(notes)


def _mount_type(mount: str) -> str:
    options = (part.partition("=") for part in mount.split(","))
    return next((value for name, _, value in options if name == "type"), "bind")
