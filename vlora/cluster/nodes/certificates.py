"""The certificates of one run of a cluster. The head signs one for each machine that proves the token.

Ray's connections require a certificate of the head's authority of both ends. Replicas use them too.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable

import msgspec
import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vlora.cluster.on_ray.settings import Folder, write_private

_AUTHORITY = "vlora cluster"
_VALID = datetime.timedelta(days=3650)
_MOST_ADDRESSES = 256
_CLOCKS = datetime.timedelta(days=1)  # by which the clock of a machine may be behind the head's


def own_addresses() -> tuple[str, ...]:
    families = (socket.AF_INET, socket.AF_INET6)
    found = (each for addresses in psutil.net_if_addrs().values() for each in addresses if each.family in families)
    return tuple(sorted({each.address.partition("%")[0] for each in found}))[:_MOST_ADDRESSES]


class Certificates(msgspec.Struct, frozen=True):
    """Of one machine, in PEM: its own, its private key, and the authority's."""

    cert: str
    key: str
    authority: str

    def write(self, folder: Folder) -> None:
        """Write them to the files that `settings.node_environment` names."""
        for name, text in (("cert", self.cert), ("key", self.key), ("ca", self.authority)):
            path = f"{folder.path}/{name}.pem"
            with contextlib.suppress(FileNotFoundError):  # of an earlier head
                os.unlink(path)
            write_private(path, text)

    @property
    def validity(self) -> tuple[datetime.datetime, datetime.datetime]:
        """From when until when the machine's certificate is valid."""
        cert = x509.load_pem_x509_certificate(self.cert.encode())
        return cert.not_valid_before_utc, cert.not_valid_after_utc


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Authority:
    """Signs certificates until the end of this process. Its key is in memory only."""

    def __init__(self, clock: Callable[[], datetime.datetime] = utc_now) -> None:
        self.clock = clock
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name(_AUTHORITY)
        self._cert = (
            self._builder(name, name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, host: str, addresses: Iterable[str] = ()) -> Certificates:
        """A certificate for the machine at an address, with its other addresses.

        Parts of Ray connect to their own machine at the address of its default route, whatever address it is given.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName("localhost")]
        for each in sorted({host, *addresses}):
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(each)))
            except ValueError:
                names.append(x509.DNSName(each))
        cert = (
            self._builder(_name(host), self._cert.subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Certificates(_pem(cert), private.decode(), _pem(self._cert))

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = self.clock()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCKS)
            .not_valid_after(now + _VALID)
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _pem(cert: x509.Certificate) -> str:
    return cert.public_bytes(serialization.Encoding.PEM).decode()
