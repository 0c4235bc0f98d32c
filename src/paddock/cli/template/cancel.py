"""Cancels a build that a command has started."""

from paddock.cli.http import CallError, Endpoint
from paddock.cli.output import notes
from paddock.cli.target import CliTarget
from paddock.cli.template.api import BuildId
from paddock.kit import bearer


def cancel(target: CliTarget, item: BuildId) -> None:
    """Delete a build, which ends its sandbox."""
    endpoint = Endpoint(target.url, bearer.header(target.api_key))
    path = f"/apis/paddock.dev/v1alpha1/namespaces/{item.team}/templatebuilds/{item.build}"
    try:
        endpoint.call("DELETE", path)
    except CallError as error:
        notes.print(f"build {item.build} goes on: {error.message}", markup=False, soft_wrap=True)
