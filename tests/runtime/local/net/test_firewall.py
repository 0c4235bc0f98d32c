"""Batches of nftables commands: atomic, with clear errors."""

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator

import pytest

from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.net import netns, nft

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]

Opener = Callable[[int], nft.Firewall]


def by_library(netns_fd: int) -> nft.Firewall:
    return nft.LibraryFirewall(ctypes.CDLL("libnftables.so.1"), netns_fd)


def by_program(netns_fd: int) -> nft.Firewall:
    program = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin")
    assert program is not None
    return nft.ProgramFirewall(program, netns_fd)


@pytest.fixture(params=[by_library, by_program])
def firewall(request: pytest.FixtureRequest, needs_root: None) -> Iterator[nft.Firewall]:
    space = netns.create()
    opened = request.param(space)
    yield opened
    opened.close()
    opened.close()
    os.close(space)


def elements(firewall: nft.Firewall) -> list[object]:
    (found,) = [one["set"] for one in firewall.query("list set inet t s") if "set" in one]
    return sorted(found.get("elem", []))


def test_a_batch_is_atomic(firewall: nft.Firewall):
    firewall.run(["add table inet t", "add set inet t s { type ipv4_addr; }"])
    firewall.run(["add element inet t s { 192.0.2.1 }", "add element inet t s { 192.0.2.2 }"])

    with pytest.raises(nft.NftError, match="rejected"):
        firewall.run(["add element inet t s { 192.0.2.3 }", "delete element inet t s { 1.1.1.1 }"])
    with pytest.raises(nft.NftError, match="Error"):
        firewall.run(["add element inet t s { 192.0.2.4 }", "this is no command"])

    assert elements(firewall) == ["192.0.2.1", "192.0.2.2"]
    firewall.run([])


def test_a_firewall_belongs_to_the_namespace_it_was_opened_in(firewall: nft.Firewall):
    firewall.run(["add table inet t"])
    space = netns.create()
    other = by_library(space)

    tables = [one["table"]["name"] for one in other.query("list tables") if "table" in one]

    assert tables == []
    other.close()
    os.close(space)


def test_without_nftables_the_hint_names_the_package(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)

    with pytest.raises(UnsupportedError) as caught:
        nft.open_firewall()

    assert "apt-get install nftables" in (caught.value.hint or "")


def test_without_the_library_the_program_is_used(monkeypatch: pytest.MonkeyPatch, needs_root: None):
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    space = netns.create()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    opened = nft.open_firewall(space)

    assert isinstance(opened, nft.ProgramFirewall)
    opened.close()
    os.close(space)
