"""Certificate authorities of tests, and certificates that they sign."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """An authority whose files lie in `directory`."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = _builder(self._name, self._name, self._key, _DAY).add_extension(constraints, critical=True)
        self._cert = builder.sign(self._key, hashes.SHA256())
        self.file = str(directory / f"{name}.pem")
        Path(self.file).write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, valid: timedelta = _DAY, file: str | None = None) -> Pair:
        """A certificate for `name` and loopback; a negative `valid` is over. Replaces existing files."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        alternatives = x509.SubjectAlternativeName([x509.DNSName(name), loopback])
        builder = _builder(subject, self._name, key, valid).add_extension(alternatives, critical=False)
        cert = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        stem = self._directory / (file or name)
        pair = Pair(f"{stem}.cert.pem", f"{stem}.key.pem")
        for path, data in ((pair.key, private), (pair.cert, cert)):
            new = Path(f"{path}.new")
            new.write_bytes(data)
            new.replace(path)
        return pair


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 3 * _DAY)
        .not_valid_after(now + valid)
    )
