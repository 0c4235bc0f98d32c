"""X.509 certificates that an installation issues to itself.

An authority signs server certificates. Clients trust the authority, so that a server certificate
can be renewed without telling them.
"""

import ipaddress
from collections.abc import Iterable
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

AUTHORITY_DAYS = 3650
SERVER_DAYS = 365
_SKEW = timedelta(hours=1)
"""A certificate is valid this long before it is issued: clocks differ."""


class KeyPair(Struct, frozen=True):
    """A certificate and its key, in PEM format."""

    certificate: bytes
    key: bytes

    @property
    def expires(self) -> datetime:
        """The end of its validity."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    @property
    def names(self) -> frozenset[str]:
        """The host names and addresses that it is valid for."""
        found = x509.load_pem_x509_certificate(self.certificate)
        extension = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        addresses = extension.get_values_for_type(x509.IPAddress)
        return frozenset((*extension.get_values_for_type(x509.DNSName), *map(str, addresses)))

    def is_issued_by(self, authority: "KeyPair") -> bool:
        """Whether an authority has signed it."""
        try:
            x509.load_pem_x509_certificate(self.certificate).verify_directly_issued_by(
                x509.load_pem_x509_certificate(authority.certificate)
            )
        except (ValueError, InvalidSignature):
            return False
        return True


def create_authority(name: str, *, now: datetime) -> KeyPair:
    """Create an authority that can sign server certificates only."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _builder(subject, subject, key, now=now, days=AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(is_authority=True), critical=True)
    return _pair(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: KeyPair, names: Iterable[str], *, now: datetime, days: int = SERVER_DAYS
) -> KeyPair:
    """Issue a server certificate for host names and addresses."""
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = serialization.load_pem_private_key(authority.key, password=None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise TypeError("the key of the authority is not an elliptic curve key")
    key = ec.generate_private_key(ec.SECP256R1())
    alternatives = [_alternative(name) for name in names]
    builder = _builder(_name("paddock"), issuer.subject, key, now=now, days=days)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(_usage(is_authority=False), critical=True)
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
    )
    return _pair(builder.sign(issuer_key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    now: datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
