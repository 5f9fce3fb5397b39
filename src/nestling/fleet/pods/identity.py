"""A run's identity towards its pods: a TLS certificate to be pinned and a boot key.

Both lie in the state folder with mode 0600, never in the run folder. The certificate itself goes
into a pod's environment (it is public); the boot key reaches a pod only as a secret of the account.
"""

from __future__ import annotations

import base64
import datetime
import os
import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from nestling.core.errors import ConfigError
from nestling.core.rundir import write_atomic

__all__ = ["PodIdentity", "pinned_context"]

_VALID = datetime.timedelta(days=36500)
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """What a controller proves itself with, and what its pods prove themselves with."""

    boot_key: bytes = field(repr=False)
    certificate: str
    """PEM."""
    certificate_file: Path
    key_file: Path

    @classmethod
    def load_or_create(cls, folder: Path) -> PodIdentity:
        """The identity kept in `folder`, made on first use; `ConfigError` without the extra."""
        certificate, key, boot = folder / "cert.pem", folder / "key.pem", folder / "boot.key"
        if not boot.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            pem, private = _make_certificate()
            _write(certificate, pem)
            _write(key, private)
            _write(boot, secrets.token_bytes(_KEY_BYTES))
        return cls(
            boot_key=boot.read_bytes(),
            certificate=certificate.read_text("ascii"),
            certificate_file=certificate,
            key_file=key,
        )

    @property
    def boot_secret(self) -> str:
        """The boot key as text, for a secret of the account."""
        return base64.urlsafe_b64encode(self.boot_key).decode().rstrip("=")

    @staticmethod
    def boot_key_of(text: str) -> bytes:
        """The boot key out of that text; `ConfigError` when it is none."""
        try:
            key = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except ValueError:
            key = b""
        if len(key) != _KEY_BYTES:
            raise ConfigError(
                "the boot key in the environment is not one; expected the account's secret to be "
                "filled in; check that the pod was made by `nestling fleet up` or `nestling run`"
            )
        return key


def pinned_context(certificate: str) -> ssl.SSLContext:
    """Trusts exactly this certificate, whatever the host is called; for a client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is pinned; tunnels have any name
    context.load_verify_locations(cadata=certificate)
    return context


def _make_certificate() -> tuple[bytes, bytes]:
    """A self-signed certificate for one run and its key, both PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigError(
            "pods need the package cryptography, which is not installed; fix: "
            "pip install 'nestling[runpod]'"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nestling controller")])
    # Clocks of rented machines are not to be trusted with the validity of a pinned certificate.
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + _VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _write(path: Path, data: bytes) -> None:
    """`write_atomic` makes temporary files with mode 0600, which the rename keeps."""
    write_atomic(path, data)
    os.chmod(path, 0o600)  # noqa: PTH101
