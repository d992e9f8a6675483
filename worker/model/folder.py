"""Checks that a model folder can be served, in milliseconds and without torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvindex.foundation.errors import DependencyError
from worker.model.config import SUPPORTED_ARCHITECTURES, read_json, read_model_config
from worker.model.weights import tensor_names, weight_files


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A checked folder and what it says of its model; `model` is a name to serve it under."""

    folder: str
    model: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def check_model_folder(folder: Path) -> ModelFolder:
    """Return what a folder holds; raise an error of one line that names what is wrong.

    DependencyError: no folder, or files missing or damaged. ConfigError: a model that is not
    supported; the message lists what is.
    """
    folder = folder.expanduser().absolute()
    if not folder.is_dir():
        raise DependencyError(_not_a_folder(folder))
    config = read_model_config(folder)
    for file in weight_files(folder):
        tensor_names(file)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise DependencyError(f"{folder}: tokenizer.json is missing; only fast tokenizers are read")
    read_json(tokenizer)
    if not (folder / "tokenizer_config.json").is_file():
        raise DependencyError(f"{folder}: tokenizer_config.json is missing")
    return ModelFolder(
        folder=str(folder),
        model=folder.name,
        architecture=config.architecture,
        max_model_len=config.max_position,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
    )


def _not_a_folder(folder: Path) -> str:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    found = "is a file, not a folder" if folder.exists() else "does not exist"
    return (
        f"model {folder} {found}; use 'demo' or a local Hugging Face folder "
        f"(config.json, tokenizer.json, *.safetensors) of {supported}"
    )
