"""A gateway that speaks TLS, as a process: who is served, who is not, and a renewal meanwhile."""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from kvindex.config import RedisConfig
from kvindex.foundation.tls import Trust
from router.cli import main
from router.config import StaticReplica, TlsConfig
from router.launch.http_call import answers_ok
from tests.certificates import Authority
from tests.conditions import until
from tests.redis_server import RedisServer, free_port
from tests.router.fake_replica import MODEL, FakeReplica
from tests.router.running_gateway import ADMIN_KEY, gateway_spec
from tests.router.test_gateway_process import ended, start, write_spec

HSTS = "strict-transport-security"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class Addresses(msgspec.Struct, frozen=True):
    """Where a gateway listens, by a name that its certificate is for."""

    port: int
    admin_port: int

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"https://localhost:{self.admin_port}"


@asynccontextmanager
async def running(folder: Path, tls: TlsConfig, **fields: Any) -> AsyncIterator[Addresses]:
    """Run a gateway with TLS before one stock engine; it must end with 0."""
    engine = FakeReplica("e0")
    await engine.start()
    at = Addresses(free_port(), free_port())
    redis = fields.pop("redis", RedisConfig())
    spec = gateway_spec(
        tenants=(),
        replicas=(StaticReplica(url=engine.url, name="e0"),),
        tls=tls,
        poll_s=0.05,
        port=at.port,
        admin_port=at.admin_port,
        **fields,
    )
    process = await start(write_spec(folder, msgspec.structs.replace(spec, redis=redis)))
    try:
        own = Trust(certificate=tls.certificate)
        url = f"{at.admin_url}/ready"
        await until(lambda: asyncio.to_thread(answers_ok, url, trust=own), seconds=30)
        yield at
        process.terminate()
        code, errors = await ended(process)
        assert code == 0, errors
        assert "Traceback" not in errors
    finally:
        if process.returncode is None:
            process.kill()
        await engine.stop()


async def ask(at: Addresses, ca: Path, **options: Any) -> str:
    """Send one request with the official client, which trusts one authority."""
    context = ssl.create_default_context(cafile=str(ca))
    if "certificate" in options:
        context.load_cert_chain(options["certificate"], options["key"])
    http = DefaultAsyncHttpxClient(verify=context)
    async with AsyncOpenAI(
        base_url=f"{at.url}/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        text = ""
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], stream=True
        ):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        return text


async def served_names(at: Addresses) -> list[str]:
    """Return the names of the certificate that a handshake shows, whoever issued it."""
    pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", at.port))
    return [name for name in ("one.example", "two.example") if name.encode() in _der(pem)]


def _der(pem: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem)


async def test_the_official_client_is_served_by_the_authority_it_knows_and_no_other(
    tmp_path: Path, authority: Authority
) -> None:
    async with running(tmp_path, authority.issue("localhost")) as at:
        assert await ask(at, authority.file) != ""
        with pytest.raises(openai.APIConnectionError) as refused:
            await ask(at, Authority(tmp_path, name="stranger").file)
    assert "CERTIFICATE_VERIFY_FAILED" in str(refused.value.__cause__)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
async def test_plain_http_and_old_tls_are_hung_up_on_and_others_go_on_being_served(
    tmp_path: Path, authority: Authority
) -> None:
    async with running(tmp_path, authority.issue("localhost")) as at:
        for port in (at.port, at.admin_port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"HTTP/1" not in await asyncio.wait_for(_rest(reader), 5)
            writer.close()
            at_most = ssl.create_default_context(cafile=str(authority.file))
            at_most.set_ciphers("DEFAULT@SECLEVEL=0")  # or this side would refuse its 1.1 itself
            at_most.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
            at_most.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await asyncio.open_connection("localhost", port, ssl=at_most)
            at_most.maximum_version = ssl.TLSVersion.TLSv1_2
            _, writer = await asyncio.open_connection("localhost", port, ssl=at_most)
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.2"
            writer.close()
        assert await ask(at, authority.file) != ""


async def test_who_never_ends_a_handshake_holds_up_neither_others_nor_the_end(
    tmp_path: Path, authority: Authority
) -> None:
    async with running(tmp_path, authority.issue("localhost")) as at:
        _, silent = await asyncio.open_connection("127.0.0.1", at.port)
        reader, garbage = await asyncio.open_connection("127.0.0.1", at.port)
        garbage.write(b"\x16\x03\x01\xff\xff" + b"x" * 70_000)
        assert await asyncio.wait_for(_rest(reader), 5) == b""
        assert await ask(at, authority.file) != ""
    for writer in (silent, garbage):
        writer.close()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, authority: Authority
) -> None:
    async with running(tmp_path, authority.issue("localhost", "one.example")) as at:
        assert await served_names(at) == ["one.example"]
        context = ssl.create_default_context(cafile=str(authority.file))
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(connector=connector) as session:
            async with session.get(f"{at.url}/ready") as answer:
                assert answer.status == 200
            authority.issue("localhost", "two.example")

            async def renewed() -> bool:
                return await served_names(at) == ["two.example"]

            await until(renewed)
            async with session.get(f"{at.url}/ready") as answer:  # over the connection of before
                assert answer.status == 200


async def test_clients_show_a_certificate_where_one_is_asked_for_and_admins_need_none(
    tmp_path: Path, authority: Authority
) -> None:
    clients = Authority(tmp_path, name="clients")
    own = clients.issue("app.example", file="app")
    server = authority.issue("localhost")
    tls = msgspec.structs.replace(server, client_ca=str(clients.file))
    async with running(tmp_path, tls) as at:
        shown = {"certificate": own.certificate, "key": own.key}
        assert await ask(at, authority.file, **shown) != ""
        with pytest.raises(openai.APIConnectionError):
            await ask(at, authority.file)
        stranger = authority.issue("app.example", file="stranger")
        with pytest.raises(openai.APIConnectionError):
            await ask(at, authority.file, certificate=stranger.certificate, key=stranger.key)
        assert answers_ok(f"{at.admin_url}/health", trust=Trust(ca=str(authority.file)))


async def test_the_dashboard_tells_browsers_to_come_by_tls_alone(
    tmp_path: Path, authority: Authority
) -> None:
    async with running(tmp_path, authority.issue("localhost")) as at:
        context = ssl.create_default_context(cafile=str(authority.file))

        def headers() -> Any:
            with urllib.request.urlopen(f"{at.admin_url}/ui", context=context) as page:
                return page.headers

        assert (await asyncio.to_thread(headers))[HSTS] == "max-age=2592000"


async def test_commands_trust_the_authority_they_are_given(
    tmp_path: Path,
    authority: Authority,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    async with running(tmp_path, authority.issue("localhost")) as at:

        async def command(*words: str) -> tuple[int, str]:
            options = ["--admin-url", at.admin_url, "--admin-key", ADMIN_KEY]
            code = await asyncio.to_thread(main, [*words, *options])
            out, errors = capsys.readouterr()
            return code, out or errors

        code, text = await command("top", "--once", "--ca", str(authority.file))
        assert (code, text.splitlines()[0]) == (
            0,
            "1 of 1 replicas live, 0 requests in flight, 0 waiting",
        )
        code, text = await command("replica", "list")
        assert code == 3
        assert text.endswith(
            f"{at.admin_url}/admin/replicas: its certificate is not trusted: unable to get local "
            "issuer certificate; name the authority behind it with --ca FILE or the variable "
            "SSL_CERT_FILE\n"
        )
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert (await command("replica", "list"))[0] == 0


async def test_the_end_of_the_certificate_that_is_served_is_a_metric(
    tmp_path: Path, authority: Authority
) -> None:
    first, second = datetime(2040, 1, 1, tzinfo=UTC), datetime(2041, 1, 1, tzinfo=UTC)
    tls = authority.issue("localhost", not_after=first)
    series = f'prefixfleet_tls_certificate_expires_timestamp_seconds{{file="{tls.certificate}"}}'
    async with running(tmp_path, tls) as at:
        context = ssl.create_default_context(cafile=str(authority.file))

        def exported() -> float:
            with urllib.request.urlopen(f"{at.admin_url}/metrics", context=context) as answer:
                lines = answer.read().decode().splitlines()
            (value,) = (line.removeprefix(series) for line in lines if line.startswith(series))
            return float(value)

        assert await asyncio.to_thread(exported) == first.timestamp()
        authority.issue("localhost", not_after=second)

        async def moved() -> bool:
            return await asyncio.to_thread(exported) == second.timestamp()

        await until(moved)


@pytest.mark.slow
async def test_several_processes_serve_and_renew_one_certificate(
    tmp_path: Path, authority: Authority, private_redis: RedisServer
) -> None:
    redis = RedisConfig(index_url=private_redis.url)
    server = authority.issue("localhost", "one.example")
    async with running(tmp_path, server, processes=2, redis=redis) as at:
        assert {await ask(at, authority.file) != "" for _ in range(8)} == {True}
        authority.issue("localhost", "two.example")

        async def all_renewed() -> bool:
            return {tuple(await served_names(at)) for _ in range(16)} == {("two.example",)}

        await until(all_renewed)


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_certificate_that_cannot_be_served_is_one_line_and_exit_code_three(
    tmp_path: Path, authority: Authority, processes: int
) -> None:
    tls = msgspec.structs.replace(authority.issue("localhost"), key=str(tmp_path / "none.key"))
    spec = gateway_spec(tenants=(), tls=tls, processes=processes)
    redis = RedisConfig(index_url="redis://127.0.0.1:1/0")
    spec = msgspec.structs.replace(spec, redis=redis)
    code, errors = await ended(await start(write_spec(tmp_path, spec)))
    assert (code, errors) == (
        3,
        f"prefixfleet gateway: router.tls.key: {tls.key}: No such file or directory\n",
    )
