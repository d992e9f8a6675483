"""Settings come from four layers, and every mistake is named with its place and its remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from kvindex.foundation.config_loader import LoadedConfig, load_config
from kvindex.foundation.errors import ConfigError


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hash: str
    alias: str | None = None


class Person(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    keys: list[Key] = []
    shares: dict[str, int] = {}


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: int = 8000
    host: str = "localhost"
    dtype: Literal["auto", "float32"] = "auto"
    secret: str | None = None

    def __post_init__(self) -> None:
        if self.port > 65535:
            raise ConfigError(f"server.port is {self.port}; ports end at 65535")


SECTIONS = {"server": f"{__name__}:Server", "people": f"list[{__name__}:Person]"}


def load(
    text: str | None = None,
    folder: Path | None = None,
    environ: dict[str, str] | None = None,
    **overrides: object,
) -> LoadedConfig:
    file = None
    if text is not None:
        assert folder is not None
        file = folder / "fleet.yaml"
        file.write_text(text)
    flags = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config(SECTIONS, file=file, environ=environ or {}, overrides=flags)


def server(config: LoadedConfig) -> Server:
    return config.section("server", Server)


def refusal(text: str, folder: Path, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, folder, environ)
    return str(caught.value).replace(f"{folder}/", "")


def test_without_any_source_the_defaults_hold() -> None:
    config = load()
    assert server(config) == Server()
    assert config.entries("people", Person) == []


def test_a_file_beats_defaults_the_environment_beats_it_and_flags_beat_all(tmp_path: Path) -> None:
    text = "server: {port: 1, host: file, dtype: float32}"
    environ = {"PREFIXFLEET__SERVER__PORT": "2", "PREFIXFLEET__SERVER__HOST": "env"}
    config = load(text, tmp_path, environ, server__port=3)
    assert server(config) == Server(port=3, host="env", dtype="float32")


def test_a_list_may_come_from_the_environment() -> None:
    config = load(environ={"PREFIXFLEET__PEOPLE": '[{name: ann, keys: [{hash: "00"}]}]'})
    assert config.entries("people", Person) == [Person(name="ann", keys=[Key(hash="00")])]


def test_secrets_come_from_variables_and_files_and_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "hash.txt").write_text("abc\n")
    text = "server: {secret: {env: TOKEN}}\npeople: [{name: ann, keys: [{hash: {file: hash.txt}}]}]"
    config = load(text, tmp_path, {"TOKEN": "hush"})
    assert server(config).secret == "hush"
    assert config.entries("people", Person)[0].keys[0].hash == "abc"
    shown = config.shown()
    assert shown["server"]["secret"] == "***"
    assert shown["people"][0]["keys"][0]["hash"] == "***"
    assert config.plain("server")["secret"] == "hush"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "server: {prot: 1}",
            "fleet.yaml: server.prot: unknown field; did you mean 'port'? "
            "Known: dtype, host, port, secret",
        ),
        (
            "sever: {}",
            "fleet.yaml: unknown section 'sever'; did you mean 'server'? Known: people, server",
        ),
        (
            "server: {dtype: int8}",
            "fleet.yaml: server.dtype: 'int8' is not allowed; choose one of auto, float32",
        ),
        ("server: {port: high}", "fleet.yaml: server.port: expected a whole number, got text"),
        ("server: {host: 5}", "fleet.yaml: server.host: expected text, got a whole number (5)"),
        ("server: {port: 70000}", "fleet.yaml: server.port is 70000; ports end at 65535"),
        ("server: [1]", "fleet.yaml: server: expected a mapping, got a list"),
        (
            "people: [{name: ann, keys: [{hash: x, alais: y}]}]",
            "fleet.yaml: people[0].keys[0].alais: unknown field; did you mean 'alias'? "
            "Known: alias, hash",
        ),
        (
            "people: [{name: ann, shares: {a: x}}]",
            "fleet.yaml: people[0].shares.*: expected a whole number, got text",
        ),
        (
            "people: [{keys: []}]",
            "fleet.yaml: people[0].name: this field is required",
        ),
        (
            "server: {secret: {env: NOWHERE}}",
            "fleet.yaml: server.secret: the environment variable NOWHERE is not set",
        ),
        (
            "server: {port: 1, port: 2}",
            "fleet.yaml:1:19: not valid YAML: the key 'port' is given twice",
        ),
        ("server: {port: 1", "fleet.yaml:1:17: not valid YAML: expected ',' or '}', but got"),
        ("- 1", "fleet.yaml: must be a mapping of sections, not a list"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_place_and_remedy(
    text: str, message: str, tmp_path: Path
) -> None:
    assert refusal(text, tmp_path).startswith(message)


def test_a_secret_file_that_is_missing_is_named(tmp_path: Path) -> None:
    message = refusal("server: {secret: {file: gone.txt}}", tmp_path)
    assert message.startswith("fleet.yaml: server.secret: the secret file cannot be read:")


def test_a_mistake_in_the_environment_names_the_variable(tmp_path: Path) -> None:
    message = refusal("server: {port: 1}", tmp_path, {"PREFIXFLEET__SERVER__PORT": "many"})
    assert message == (
        "environment variable PREFIXFLEET__SERVER__PORT: server.port: "
        "expected a whole number, got text"
    )
    message = refusal("", tmp_path, {"PREFIXFLEET__SERVRE__PORT": "1"})
    assert message.startswith("environment variable PREFIXFLEET__SERVRE__PORT: unknown section")


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: no such file; name an existing one"):
        load_config(SECTIONS, file=tmp_path / "gone.yaml", environ={}, overrides={})


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"fleet\.yaml: cannot be read"):
        load_config(SECTIONS, file=tmp_path / "fleet.yaml", environ={}, overrides={})
