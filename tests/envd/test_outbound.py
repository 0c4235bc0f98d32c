"""CA certificates and mirrors as files: OpenSSL's names, bundles, and changed settings."""

import contextlib
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from paddock.envd import certificates, outbound
from paddock.envd.config import OutboundFiles
from paddock.envd.outbound import OutboundWriter, rewrite_sources
from tests.gateway.certificates import issue

SYSTEM = Path("/etc/ssl/certs/ca-certificates.crt")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for the root of a sandbox."""

    def moved(value):
        if isinstance(value, str):
            return f"{tmp_path}{value}"
        return tuple(map(moved, value))

    names = ("CA_DIRECTORY", "CA_FILE", "CA_BUNDLE", "_STATE", "_BUNDLES", "_LINKS", "_ANCHORS")
    for name in (*names, "_SUDO", "_APT_LISTS", "_APT_PARTS"):
        monkeypatch.setattr(outbound, name, moved(getattr(outbound, name)))
    for directory in ("etc/ssl/certs", "etc/sudoers.d", "etc/apt/sources.list.d", "usr/sbin"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "etc/ssl/certs/ca-certificates.crt").write_text("public\n")
    (tmp_path / "usr/sbin/update-ca-certificates").touch()
    (tmp_path / "etc/apt/sources.list").write_text("deb http://deb.debian.org/debian sid main\n")
    return tmp_path


@pytest.fixture
def pem(tmp_path_factory: pytest.TempPathFactory) -> str:
    return issue(tmp_path_factory.mktemp("ca"), "a.example")[0].read_text()


def tree(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the command openssl is missing")
@pytest.mark.skipif(not SYSTEM.exists(), reason="this machine has no public CA certificates")
def test_links_have_the_names_that_openssl_gives_them(tmp_path: Path):
    found = certificates.split(SYSTEM.read_text())
    assert len(found) > 20
    chosen = found[:: len(found) // 20]
    for number, one in enumerate(chosen):
        (tmp_path / f"{number}.pem").write_text(one)
    subprocess.run(["openssl", "rehash", str(tmp_path)], check=True)
    named = {str(link.readlink()): link.name for link in tmp_path.iterdir() if link.is_symlink()}
    for number, one in enumerate(chosen):
        assert named[f"{number}.pem"].startswith(f"{certificates.subject_hash(one)}."), one


@pytest.mark.parametrize(
    "text", ["", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"]
)
def test_a_text_that_is_no_certificate_has_no_name(text: str):
    with pytest.raises(ValueError, match="certificate"):
        certificates.subject_hash(text)


def test_a_removed_setting_leaves_the_files_as_they_were(root: Path, pem: str):
    before = tree(root)
    writer = OutboundWriter()

    writer.apply(OutboundFiles(ca_certificates=pem, apt_mirror="http://m", sudo_variables=("A",)))
    written = tree(root)
    assert pem.strip() in written["etc/ssl/certs/ca-certificates.crt"]
    assert written["etc/paddock/ca-bundle.pem"].endswith("ca-certificates.crt")
    assert written["usr/local/share/ca-certificates/paddock-1.crt"] == pem
    assert written["etc/sudoers.d/paddock-variables"] == 'Defaults env_keep += "A"\n'
    assert written["etc/apt/sources.list"] == "deb http://m/debian sid main\n"
    assert writer.has_certificates

    # Another envd of the same sandbox, as after a restore.
    OutboundWriter().apply(OutboundFiles())
    assert tree(root) == before


def test_a_changed_setting_replaces_the_files(root: Path, pem: str, tmp_path_factory):
    other = issue(tmp_path_factory.mktemp("ca"), "b.example")[0].read_text()
    writer = OutboundWriter()
    writer.apply(OutboundFiles(ca_certificates=pem, apt_mirror="http://one"))

    writer.apply(OutboundFiles(ca_certificates=other, apt_mirror="http://two"))

    changed = tree(root)
    bundle = changed["etc/ssl/certs/ca-certificates.crt"]
    assert bundle.startswith("public\n")
    assert other.strip() in bundle
    assert pem.strip() not in bundle
    assert changed["etc/apt/sources.list"] == "deb http://two/debian sid main\n"


def test_a_user_keeps_sources_that_he_has_changed(root: Path):
    writer = OutboundWriter()
    writer.apply(OutboundFiles(apt_mirror="http://one"))
    sources = root / "etc/apt/sources.list"
    sources.write_text("deb http://mine/debian sid main\n")

    writer.apply(OutboundFiles())

    assert sources.read_text() == "deb http://mine/debian sid main\n"


def test_what_an_interrupted_envd_has_written_is_completed(root: Path, pem: str):
    wanted = OutboundFiles(ca_certificates=pem, apt_mirror="http://m")
    OutboundWriter().apply(wanted)
    complete = tree(root)
    state = root / "etc/paddock/written.json"
    for kept in (("wanted", "sources"), ("wanted",)):
        half = msgspec.json.decode(state.read_text())
        state.write_bytes(msgspec.json.encode({key: half[key] for key in kept}))
        (root / "etc/paddock/ca.pem").unlink()

        OutboundWriter().apply(wanted)

        found = tree(root)
        assert found.keys() == complete.keys()
        assert found["etc/ssl/certs/ca-certificates.crt"].count("BEGIN CERT") == 1


class KilledError(Exception):
    """Stands for SIGKILL: nothing catches it, and nothing is saved afterwards."""


def test_what_a_killed_envd_has_written_is_removed_with_the_setting(
    root: Path, pem: str, monkeypatch: pytest.MonkeyPatch
):
    before = tree(root)
    wanted = OutboundFiles(ca_certificates=pem, apt_mirror="http://m", sudo_variables=("A",))
    replace, steps = outbound.texts.replace, 0

    def counted(path: str, text: str, **options: int) -> None:
        nonlocal steps
        steps -= 1
        if steps < 0:
            raise KilledError
        replace(path, text, **options)

    for last in range(30):
        steps = last
        monkeypatch.setattr(outbound.texts, "replace", counted)
        with contextlib.suppress(KilledError):
            OutboundWriter().apply(wanted)
        is_complete = steps >= 0
        monkeypatch.setattr(outbound.texts, "replace", replace)

        OutboundWriter().apply(OutboundFiles())

        assert tree(root) == before, last
        if is_complete:
            return
    raise AssertionError("the writer needs more steps than this test has")


def test_two_certificates_of_one_subject_have_two_links(root: Path, pem: str):
    OutboundWriter().apply(OutboundFiles(ca_certificates=pem * 2))
    name = certificates.subject_hash(pem)
    found = tree(root)
    assert found[f"etc/ssl/certs/{name}.0"] == "paddock-1.pem"
    assert found[f"etc/ssl/certs/{name}.1"] == "paddock-2.pem"


def test_rules_of_the_image_for_sudo_are_kept(root: Path):
    """The image `host` has a file of the same directory, with the rule of `user`."""
    rule = root / "etc/sudoers.d/paddock"
    rule.write_text("user ALL=(ALL:ALL) NOPASSWD: ALL\n")
    before = tree(root)
    writer = OutboundWriter()
    writer.apply(OutboundFiles(sudo_variables=("A",)))
    assert "NOPASSWD" in rule.read_text()
    writer.apply(OutboundFiles())
    assert tree(root) == before


def test_an_image_without_certificates_gets_those_of_the_machine(
    root: Path, pem: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outbound, "_machine_bundle", "of the machine\n")
    (root / "etc/ssl/certs/ca-certificates.crt").unlink()

    OutboundWriter().apply(OutboundFiles(ca_certificates=pem))

    bundle = tree(root)["etc/ssl/certs/ca-certificates.crt"]
    assert bundle.startswith("of the machine\n")
    assert pem.strip() in bundle


def test_a_sandbox_that_cannot_be_written_stays_usable_and_names_no_missing_file(
    root: Path, pem: str, caplog: pytest.LogCaptureFixture
):
    (root / "etc/paddock").write_text("in the way")
    writer = OutboundWriter()

    writer.apply(OutboundFiles(ca_certificates=pem))

    assert not writer.has_certificates
    assert "CA certificates and mirrors were not written into the sandbox" in caplog.text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("deb http://security.debian.org/debian-security x main", "deb M/debian-security x main"),
        ("URIs: https://deb.debian.org/debian/", "URIs: M/debian/"),
        ("deb http://de.archive.ubuntu.com/ubuntu noble main", "deb M/ubuntu noble main"),
        ("deb https://other.example/debian x", "deb https://other.example/debian x"),
        ("deb http://ports.ubuntu.com/ubuntu-ports noble main", "deb M/ubuntu-ports noble main"),
    ],
)  # fmt: skip
def test_only_the_hosts_of_debian_and_ubuntu_are_replaced(text: str, wanted: str):
    assert rewrite_sources(text, "M") == wanted
