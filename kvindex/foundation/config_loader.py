"""Settings from defaults, a YAML file, the environment and flags, as frozen Structs.

It composes the root from a table {section: "module:Struct"} and imports each module by name, so it
knows none of the sections. What a setting means is the business of the package that owns it.
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import yaml

from kvindex.foundation.config_errors import SettingPath, dotted, explain, nearest
from kvindex.foundation.errors import ConfigError

ENV_PREFIX = "PREFIXFLEET__"

S = TypeVar("S")


class LoadedConfig:
    """The validated sections of one configuration."""

    def __init__(self, sections: Mapping[str, object], secrets: Sequence[SettingPath]) -> None:
        self._sections = dict(sections)
        self._secrets = list(secrets)

    def section(self, name: str, kind: type[S]) -> S:
        """Return a section; TypeError when it is not a `kind`."""
        value = self._sections[name]
        if not isinstance(value, kind):
            raise TypeError(f"section {name} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def entries(self, name: str, kind: type[S]) -> list[S]:
        """Return a list section, such as `tenants`."""
        return [item for item in self.section(name, list) if isinstance(item, kind)]

    def plain(self, name: str) -> Any:
        """Return a section as JSON-able builtins, secrets included, for a child's config file."""
        return msgspec.to_builtins(self._sections[name])

    def shown(self) -> dict[str, Any]:
        """Return all sections as builtins, with what came from a secret replaced by `***`."""
        tree = {name: self.plain(name) for name in self._sections}
        for path in self._secrets:
            holder: Any = tree
            for step in path[:-1]:
                holder = holder[step]
            holder[path[-1]] = "***"
        return tree


def load_config(
    sections: Mapping[str, str],
    *,
    file: Path | None = None,
    environ: Mapping[str, str],
    overrides: Mapping[str, object],
) -> LoadedConfig:
    """Merge defaults < file < environment < overrides, and validate every section.

    `sections` maps a name to "module:Struct" or "list[module:Struct]". Environment variables are
    named `PREFIXFLEET__SECTION__FIELD`; overrides are keyed by dotted path and described in errors
    as flags. Raises ConfigError that names the source, the dotted path and the remedy.
    """
    source = str(file) if file is not None else "defaults"
    tree = {} if file is None else _read_yaml(file)
    origins: dict[SettingPath, str] = {}
    for name, raw in environ.items():
        if name.startswith(ENV_PREFIX):
            path = tuple(name[len(ENV_PREFIX) :].lower().split("__"))
            _place(tree, path, _env_value(name, raw), f"environment variable {name}")
            origins[path] = f"environment variable {name}"
    for key, value in overrides.items():
        path = tuple(key.split("."))
        _place(tree, path, value, f"flag for {key}")
        origins[path] = f"flag for {key}"
    secrets: list[SettingPath] = []
    base = file.parent if file is not None else Path.cwd()
    resolved = _resolve_secrets(tree, (), base, environ, secrets, source)
    types = {name: resolve_type(reference) for name, reference in sections.items()}
    _refuse_unknown_sections(resolved, types, origins, source)
    built = {
        name: _build(name, kind, resolved.get(name), origins, source)
        for name, kind in types.items()
    }
    return LoadedConfig(built, secrets)


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice instead of dropping the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; name an existing one with -c FILE") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    try:
        tree = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        raise ConfigError(f"{place}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: must be a mapping of sections, not a {type(tree).__name__}")
    return tree


def _env_value(name: str, raw: str) -> object:
    """Read a variable: lists and mappings in YAML flow style, anything else as text."""
    if not raw.lstrip().startswith(("[", "{")):
        return raw
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError:
        raise ConfigError(f"environment variable {name}: not a valid YAML value: {raw}") from None


def _place(tree: dict[str, Any], path: SettingPath, value: object, origin: str) -> None:
    holder: Any = tree
    for depth, step in enumerate(path[:-1]):
        if holder.get(step) is None:
            holder[step] = {}
        holder = holder[step]
        if not isinstance(holder, dict):
            raise ConfigError(f"{origin}: {dotted(path[: depth + 1])} is not a mapping")
    holder[path[-1]] = value


def _resolve_secrets(
    value: Any,
    path: SettingPath,
    base: Path,
    environ: Mapping[str, str],
    found: list[SettingPath],
    source: str,
) -> Any:
    """Replace every `{env: NAME}` and `{file: PATH}` by its text; remember where."""
    if isinstance(value, list):
        return [
            _resolve_secrets(item, (*path, i), base, environ, found, source)
            for i, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and path:
        (key, reference), *_ = value.items()
        if key in ("env", "file") and isinstance(reference, str):
            found.append(path)
            return _secret(key, reference, f"{source}: {dotted(path)}", base, environ)
    return {
        key: _resolve_secrets(item, (*path, str(key)), base, environ, found, source)
        for key, item in value.items()
    }


def _secret(kind: str, reference: str, place: str, base: Path, environ: Mapping[str, str]) -> str:
    if kind == "env":
        if reference not in environ:
            raise ConfigError(f"{place}: the environment variable {reference} is not set")
        return environ[reference]
    file = base / Path(reference).expanduser()
    try:
        return file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: the secret file cannot be read: {error}") from None


def resolve_type(reference: str) -> Any:
    """Import the type that "module:Struct" or "list[module:Struct]" names."""
    is_list = reference.startswith("list[")
    module, _, name = reference.removeprefix("list[").removesuffix("]").partition(":")
    kind = getattr(importlib.import_module(module), name)
    return list.__class_getitem__(kind) if is_list else kind


def _refuse_unknown_sections(
    tree: Mapping[str, Any],
    types: Mapping[str, Any],
    origins: Mapping[SettingPath, str],
    source: str,
) -> None:
    for name in tree:
        if name in types:
            continue
        place = next((o for path, o in origins.items() if path[0] == name), source)
        raise ConfigError(f"{place}: unknown section {name!r}{nearest(str(name), types)}")


def _build(
    name: str, kind: Any, value: Any, origins: Mapping[SettingPath, str], source: str
) -> object:
    is_list = bool(get_args(kind))
    if value is None:
        value = [] if is_list else {}
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        path, problem = explain(str(error), kind, value)
        full = (name, *path)
        origin = _origin(full, problem, origins, source)
        raise ConfigError(f"{origin}: {dotted(full)}: {problem}") from None
    except ConfigError as error:
        raise ConfigError(f"{_origin((name,), str(error), origins, source)}: {error}") from None


def _origin(
    path: SettingPath, problem: str, origins: Mapping[SettingPath, str], source: str
) -> str:
    """Name the layer that set what an error is about; the file when none of the others did.

    Of an error about several settings, such as a whole section, the problem names the one.
    """
    for candidate, origin in origins.items():
        shorter = min(len(candidate), len(path))
        is_told = len(path) >= len(candidate) or str(candidate[-1]) in problem
        if candidate[:shorter] == path[:shorter] and is_told:
            return origin
    return source
