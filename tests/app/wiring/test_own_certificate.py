"""The certificate of an installation: created once, renewed in time, private."""

import shutil
import ssl
from datetime import timedelta
from pathlib import Path

import pytest

from paddock.app.wiring.tls.own_certificate import OwnCertificate, of_installation
from paddock.kit.certificates import AUTHORITY_DAYS, SERVER_DAYS, KeyPair
from paddock.kit.clock import ManualClock
from paddock.settings import Settings

NAMES = ("127.0.0.1", "localhost")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def certificate(tmp_path: Path, clock: ManualClock) -> OwnCertificate:
    return OwnCertificate(tmp_path / "tls", NAMES, clock)


def served(certificate: OwnCertificate) -> KeyPair:
    return KeyPair(certificate.certificate_file.read_bytes(), certificate.key_file.read_bytes())


def test_it_is_created_once_and_readable_by_its_owner_only(certificate: OwnCertificate):
    assert certificate.ensure()
    first = served(certificate)
    assert not certificate.ensure()

    assert served(certificate) == first
    assert first.names == frozenset(NAMES)
    directory = certificate.key_file.parent
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o600}


def test_it_is_renewed_before_it_ends_by_the_same_authority(
    certificate: OwnCertificate, clock: ManualClock
):
    certificate.ensure()
    authority = certificate.authority_file.read_bytes()
    clock.advance(timedelta(days=SERVER_DAYS - 20).total_seconds())

    assert certificate.ensure()

    assert served(certificate).expires > clock.now() + timedelta(days=300)
    assert certificate.authority_file.read_bytes() == authority


def test_an_authority_that_ends_is_replaced(certificate: OwnCertificate, clock: ManualClock):
    certificate.ensure()
    authority = certificate.authority_file.read_bytes()
    clock.advance(timedelta(days=AUTHORITY_DAYS - 20).total_seconds())

    assert certificate.ensure()

    assert certificate.authority_file.read_bytes() != authority


def test_other_names_need_another_certificate(
    certificate: OwnCertificate, tmp_path: Path, clock: ManualClock
):
    certificate.ensure()
    other = OwnCertificate(tmp_path / "tls", (*NAMES, "a.example"), clock)
    assert other.ensure()
    assert "a.example" in served(other).names


@pytest.mark.parametrize("lost", ["server.crt", "server.key", "ca.key", "ca.crt"])
def test_a_file_that_a_crash_lost_is_made_again(
    certificate: OwnCertificate, tmp_path: Path, clock: ManualClock, lost: str
):
    certificate.ensure()
    (tmp_path / "tls" / lost).unlink()
    assert certificate.ensure()
    certificate.context()


def test_a_key_that_does_not_match_is_replaced(
    certificate: OwnCertificate, tmp_path: Path, clock: ManualClock
):
    certificate.ensure()
    other = OwnCertificate(tmp_path / "other", NAMES, clock)
    other.ensure()
    shutil.copy(other.key_file, certificate.key_file)

    assert certificate.ensure()

    assert isinstance(certificate.context(), ssl.SSLContext)


def test_the_names_are_those_that_clients_use(tmp_path: Path, clock: ManualClock):
    settings = Settings(state_dir=str(tmp_path), domain="box.example", tls_host="192.0.2.7")
    found = of_installation(settings, clock)
    found.ensure()
    assert served(found).names >= {
        "localhost",
        "127.0.0.1",
        "::1",
        "192.0.2.7",
        "box.example",
        "*.box.example",
    }
