"""The internet access of an installation or a team, as a ceiling for its sandboxes. Pure."""

from enum import StrEnum

from paddock.resources.kinds.template import NetworkPolicy


class Internet(StrEnum):
    """How much of the internet sandboxes may reach."""

    OPEN = "open"
    """What templates and requests allow."""
    REGISTRIES = "registries"
    """Package registries only."""
    CLOSED = "closed"
    """Nothing."""


PUBLIC_REGISTRIES = (
    *("pypi.org", "files.pythonhosted.org"),
    *("registry.npmjs.org", "registry.yarnpkg.com"),
    *("deb.debian.org", "security.debian.org", "archive.ubuntu.com", "security.ubuntu.com"),
    *("ports.ubuntu.com", "dl-cdn.alpinelinux.org"),
    *("index.crates.io", "static.crates.io", "crates.io"),
    *("proxy.golang.org", "sum.golang.org"),
    *("rubygems.org", "index.rubygems.org"),
    *("repo.maven.apache.org", "repo1.maven.org", "plugins.gradle.org"),
    *("conda.anaconda.org", "repo.anaconda.com"),
    *("repo.packagist.org", "cran.r-project.org"),
)
"""Hosts of public package registries. They serve packages of anybody, so data can leave through
those that accept uploads only with an account of the uploader's."""


def internet_ceiling(internet: Internet, registries: tuple[str, ...]) -> NetworkPolicy | None:
    """Return the ceiling for sandboxes; `None` if there is none.

    `registries` are hosts: names or addresses. Private networks and incoming traffic are not
    limited here.
    """
    if internet is Internet.OPEN:
        return None
    return NetworkPolicy(
        allow_internet_access=False,
        allow_out=registries if internet is Internet.REGISTRIES else (),
        allow_private_networks=True,
    )
