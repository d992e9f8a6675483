"""Builds the speculation that a configuration asks for, loading a draft model if need be."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from engine.config import EngineConfig, SpeculationConfig
from engine.spec_decode.ngram import NgramProposer
from engine.spec_decode.proposer import Proposer
from kvindex.foundation.errors import ConfigError
from worker.model.causal_lm import CausalLM
from worker.model.config import read_model_config
from worker.model.llama import LlamaModel
from worker.model.load import load_model
from worker.spec_decode.draft_model import DraftModelProposer
from worker.spec_decode.eagle import EagleHead, EagleProposer
from worker.spec_decode.features import HiddenTap
from worker.spec_decode.medusa import MedusaHeads, MedusaProposer
from worker.spec_decode.speculation import Speculation

_log = logging.getLogger("prefixfleet.worker.speculation")
_TOKENS_PER_REQUEST = 512
_HEAD_SEED = 1


def build_speculation(
    config: SpeculationConfig, model: CausalLM, *, engine_config: EngineConfig
) -> Speculation | None:
    """Return what guesses tokens for a model, None for method `none`.

    ConfigError when it cannot be served: a draft model must have the model's tokens, and all of its
    layers must read the whole past; heads need a model of the Llama family in plain operations.
    DependencyError when its folder cannot be loaded.
    """
    if config.method == "none":
        return None
    tap = None
    if config.method in ("medusa", "eagle"):
        tap = HiddenTap()
        if not isinstance(model, LlamaModel):
            raise ConfigError(
                f"engine.speculation.method {config.method} reads hidden states, which this model "
                "does not give; use none, ngram or draft"
            )
        model.tap = tap
    return Speculation(
        _proposer(config, model, engine_config),
        num_draft_tokens=config.num_draft_tokens,
        adaptive=config.adaptive,
        tap=tap,
    )


def _proposer(config: SpeculationConfig, model: CausalLM, engine_config: EngineConfig) -> Proposer:
    shape = model.config
    match config.method:
        case "draft":
            assert config.model is not None
            folder = Path(config.model)
            return _draft_model(folder, engine_config, vocab_size=shape.vocab_size)
        case "medusa":
            _log.warning("medusa heads are random: there is no checkpoint format to read")
            heads = MedusaHeads.random(
                num_heads=config.num_draft_tokens,
                hidden_size=shape.hidden_size,
                vocab_size=shape.vocab_size,
                seed=_HEAD_SEED,
            )
            return MedusaProposer(heads)
        case "eagle":
            assert isinstance(model, LlamaModel)
            _log.warning("the eagle head is random: there is no checkpoint format to read")
            head = EagleHead.random(
                hidden_size=shape.hidden_size,
                vocab_size=shape.vocab_size,
                head_dim=shape.head_dim,
                rotary=model.rotary,
                seed=_HEAD_SEED,
            )
            return EagleProposer(head)
        case _:
            return NgramProposer(min_ngram=config.min_ngram, max_ngram=config.max_ngram)


def _draft_model(
    folder: Path, engine_config: EngineConfig, *, vocab_size: int
) -> DraftModelProposer:
    """Load a draft model, with a cache for `max_num_seqs` texts of 512 tokens or fewer longer ones.

    It is computed in float32 on the CPU: small enough, and its guesses bind nobody.
    """
    model_config = read_model_config(folder)
    if model_config.vocab_size != vocab_size:
        raise ConfigError(
            f"engine.speculation.model {folder} has {model_config.vocab_size} tokens, the model "
            f"{vocab_size}; use a draft model with the same tokenizer"
        )
    if any(window is not None for window in model_config.windows):
        raise ConfigError(
            f"engine.speculation.model {folder} has layers that do not read the whole past, which "
            "draft models may not"
        )
    size = engine_config.block_size
    return DraftModelProposer(
        load_model(
            folder, model_config, dtype=torch.float32, num_positions=model_config.max_position
        ),
        num_blocks=1 + engine_config.max_num_seqs * -(-_TOKENS_PER_REQUEST // size),
        block_size=size,
    )
