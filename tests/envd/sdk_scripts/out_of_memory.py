"""Commands that use up the 64 MiB of their sandbox, as the E2B SDK reports them.

Usage: out_of_memory.py URL TOKEN. Prints `done` at the end; any failed expectation is an exception.
"""

import sys

from e2b import CommandExitException, Sandbox
from e2b.connection_config import ConnectionConfig
from packaging.version import Version

CAUSE = "the sandbox used its 64 MiB of memory"
EAT = "python3 -c 'x = bytearray(1 << 30)'"

url, token = sys.argv[1:3]
box = Sandbox(
    sandbox_id="isbx",
    envd_version=Version("0.6.13"),
    envd_access_token=token,
    sandbox_domain=None,
    traffic_access_token=None,
    connection_config=ConnectionConfig(
        api_key="e2b_" + "0" * 40,
        sandbox_url=url,
        extra_sandbox_headers={"X-Access-Token": token},
    ),
)


def end_of(command: str) -> CommandExitException:
    try:
        box.commands.run(command)
    except CommandExitException as error:
        return error
    raise AssertionError(f"{command} succeeded")


killed = end_of(f"exec {EAT}")
assert (killed.exit_code, killed.error) == (-1, f"signal: killed: {CAUSE}"), killed.error
assert f"killed: {CAUSE}" in str(killed), killed

below_a_shell = end_of(f"{EAT}; exit $?")
assert (below_a_shell.exit_code, below_a_shell.error) == (137, f"exit status 137: {CAUSE}")

not_for_memory = end_of("kill -9 $$")
assert not_for_memory.error == "signal: killed", not_for_memory.error
assert CAUSE not in str(not_for_memory)

assert end_of("exit 3").error == "exit status 3"
print("done")
