"""What makes a certificate one that can be served, and what is said of one that cannot."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from kvindex.foundation.errors import ConfigError, DependencyError
from kvindex.foundation.tls import Trust
from router.config import TlsConfig
from router.launch.config import load_fleet_config
from router.launch.doctor import examine
from router.tls import ListenerTls, load_certificate
from tests.certificates import Authority

END = datetime(2040, 1, 1, tzinfo=UTC)
PAST = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refusal(config: TlsConfig) -> str:
    """Return why a certificate is refused."""
    with pytest.raises(DependencyError) as refused:
        load_certificate(config)
    return str(refused.value)


def changed(config: TlsConfig, **fields: str) -> TlsConfig:
    return msgspec.structs.replace(config, **fields)


def test_a_certificate_tells_its_names_and_its_end(authority: Authority) -> None:
    certificate = load_certificate(authority.issue("fleet.example", "127.0.0.1", not_after=END))
    assert certificate.names == ("fleet.example", "127.0.0.1")
    assert certificate.expires_at == END.timestamp()


def test_a_gateway_is_called_by_a_name_of_its_certificate(authority: Authority) -> None:
    certificate = load_certificate(authority.issue("*.fleet.example", "127.0.0.1"))
    assert certificate.name_for("127.0.0.1") == "127.0.0.1"
    assert certificate.name_for("10.0.0.1") == "gateway.fleet.example"


def test_a_missing_file_is_named_with_its_setting(authority: Authority, tmp_path: Path) -> None:
    config, missing = authority.issue("fleet.example"), str(tmp_path / "none.pem")
    for setting in ("certificate", "key", "client_ca"):
        assert refusal(changed(config, **{setting: missing})) == (
            f"router.tls.{setting}: {missing}: No such file or directory"
        )


def test_a_file_with_something_else_in_it_is_named(authority: Authority) -> None:
    config = authority.issue("fleet.example")
    assert refusal(changed(config, certificate=config.key)) == (
        f"router.tls.certificate: {config.key}: no certificate in it; it must be PEM"
    )
    assert refusal(changed(config, key=config.certificate)) == (
        f"router.tls.key: {config.certificate}: no private key in it; it must be PEM"
    )
    assert refusal(changed(config, client_ca=config.key)) == (
        f"router.tls.client_ca: {config.key}: no certificate in it; it must be PEM"
    )


def test_the_key_of_another_certificate_is_refused(authority: Authority) -> None:
    config, other = authority.issue("fleet.example"), authority.issue("a.example", file="other")
    assert refusal(changed(config, key=other.key)) == (
        f"router.tls.key: {other.key} is not the key of {config.certificate}"
    )


def test_an_expired_certificate_is_refused(authority: Authority) -> None:
    config = authority.issue("fleet.example", not_after=PAST)
    assert refusal(config) == (
        f"router.tls.certificate: {config.certificate}: certificate has expired; issue a new one"
    )


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(
    authority: Authority,
) -> None:
    config = authority.issue("fleet.example")
    key = load_pem_private_key(Path(config.key).read_bytes(), None)
    encrypted = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    Path(config.key).write_bytes(encrypted)
    assert refusal(config).startswith(f"router.tls.key: {config.key} is encrypted; ")


async def test_a_renewal_is_taken_and_a_broken_one_is_not(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    config = authority.issue("old.example")
    tls = ListenerTls(config)
    authority.spoil(config.key)
    await tls.look()
    assert tls.certificate.names == ("old.example",)
    assert caplog.messages[-1] == (
        "changed certificate refused, the old one stays: "
        f"router.tls.key: {config.key}: no private key in it; it must be PEM"
    )
    authority.issue("new.example")
    await tls.look()
    assert tls.certificate.names == ("new.example",)


def test_an_authority_that_cannot_be_read_is_named(authority: Authority, tmp_path: Path) -> None:
    missing, key = str(tmp_path / "none.pem"), authority.issue("fleet.example").key
    with pytest.raises(ConfigError, match=f"{missing}: No such file or directory"):
        Trust(ca=missing).context()
    with pytest.raises(ConfigError, match=f"{key}: no certificate of an authority, as PEM"):
        Trust(ca=key).context()
    with pytest.raises(ConfigError, match=f"{key}: no certificate in it; it must be PEM"):
        Trust(certificate=key).context()


def test_doctor_says_how_long_a_certificate_still_lasts(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = authority.issue("fleet.example", not_after=datetime.now(UTC) + timedelta(days=3, hours=1))
    monkeypatch.setenv("PREFIXFLEET__ROUTER__TLS__CERTIFICATE", tls.certificate)
    monkeypatch.setenv("PREFIXFLEET__ROUTER__TLS__KEY", tls.key)
    config = load_fleet_config(None, {}, demo=True)
    (found,) = [finding for finding in examine(config) if finding.check == "certificate"]
    assert (found.status, found.detail) == ("warning", "for fleet.example, 3 days left")
