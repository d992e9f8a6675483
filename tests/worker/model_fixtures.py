"""Small random models in Hugging Face folders, and ways to run requests on them.

`transformers` writes the folders and is the reference; our code only reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.executor import Executor
from engine.frontend.sampling_params import SamplingParams
from engine.messages import EngineOutput, EngineRequest
from engine.output import NewRequestData, SchedulerOutput
from kvindex.foundation.clock import VirtualClock
from worker.executors.uniproc import UniprocExecutor

VOCAB_SIZE = 320

WIDE: dict[str, Any] = {
    "hidden_size": 96,
    "head_dim": 32,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
"""Widths that are whole vectors, and pairs of them, on every CPU: such models run compiled."""

_CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "gemma3": transformers.Gemma3TextConfig,
    "lfm2": transformers.Lfm2Config,
    "granite": transformers.GraniteMoeHybridConfig,
}

_UNUSUAL_NORMS = ("qwen3", "qwen3_moe", "gemma3", "granite")

WINDOW = 24
"""Of the families below that have one: no multiple of the block size."""

_GRANITE: dict[str, object] = {
    "shared_intermediate_size": 128,
    "num_local_experts": 0,
    "mamba_n_heads": 6,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
    "tie_word_embeddings": True,
}
_MAMBA: dict[str, object] = {
    "num_hidden_layers": 7,
    "layer_types": ["mamba", "mamba", "attention"] * 2 + ["mamba"],
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2 half windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "qwen3 moe, weights that add up to 1": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "num_hidden_layers": 7,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2
            + ["sliding_attention"],
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
            "block_multiple_of": 16,
            "tie_word_embeddings": True,
        },
    ),
    "granite": (
        "granite",
        {**_GRANITE, "layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
    ),
    "granite with mamba": ("granite", {**_GRANITE, **_MAMBA}),
    "granite with mamba and experts": (
        "granite",
        {
            **_GRANITE,
            **_MAMBA,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "position_embedding_type": "rope",
        },
    ),
}
"""Models that worker.model.decoder computes, by name: family and what differs from the default."""


def write_tiny_model(folder: Path, *, family: str = "llama", **overrides: object) -> Path:
    """Write a random model of two layers whose logits lie well apart; returns the folder."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 72,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    settings |= {"sliding_window": None} if family == "mistral" else {}
    config = _CONFIGS[family](**{**settings, **overrides})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif name.endswith("A_log"):
            parameter.data -= 3.0  # Random steps are long; states are to last for some tokens.
        elif name.endswith("norm.weight") and family in _UNUSUAL_NORMS:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Load the folder with transformers.

    On one thread, like our own executors here: where tests share cores, threads that wait for one
    another at every operation are many times slower than one alone.
    """
    torch.set_num_threads(1)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def reference_greedy(model: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what `generate` continues the prompt with, end tokens ignored."""
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def largest_gap_to_best(
    model: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int]
) -> float:
    """Return by how much a reference logit of `tokens` falls short of the best one at most.

    Zero when every token is the reference's own choice after the tokens before it.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    return float((logits.amax(dim=1) - chosen).max())


def random_prompts(count: int, *, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Return prompts of the given lengths in turn."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, vocab_size, (lengths[i % len(lengths)],), generator=generator).tolist()
        for i in range(count)
    ]


def greedy(num_tokens: int) -> SamplingParams:
    """Parameters for exactly `num_tokens` greedy tokens."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)


def executor_for(
    folder: Path, *, dtype: str = "float32", num_blocks: int = 512, async_depth: int = 0
) -> UniprocExecutor:
    """Load a folder in this process, on one thread."""
    return UniprocExecutor(
        folder,
        dtype=dtype,
        engine_config=EngineConfig(async_depth=async_depth),
        num_threads=1,
        num_blocks=num_blocks,
    )


class EngineRun:
    """An engine core over an executor, driven to the end of its requests.

    Request ids are made unique, so an executor can be reused by one run after another.
    `before_step` is called with the core between steps.
    """

    _runs = 0

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        before_step: Callable[[EngineCore], None] | None = None,
    ) -> None:
        self.core = EngineCore(config, executor, VirtualClock())
        self._before_step = before_step
        self.num_cached: list[int] = []
        EngineRun._runs += 1
        self._prefix = f"run{EngineRun._runs}-"
        self._count = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Run prompts together; return their tokens, and keep `num_cached` of each."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        ids = []
        for prompt, parameters in zip(prompts, each, strict=True):
            ids.append(f"{self._prefix}{self._count}")
            self._count += 1
            self.core.add(
                EngineRequest(
                    request_id=ids[-1],
                    prompt_token_ids=list(prompt),
                    sampling=parameters,
                    eos_token_ids=(2,),
                )
            )
        return self._drain(ids)

    def _drain(self, ids: list[str]) -> list[list[int]]:
        tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
        cached: dict[str, int] = {}
        while self.core.has_work:
            if self._before_step is not None:
                self._before_step(self.core)
            for output in self.core.step():
                self._take(output, tokens, cached)
        self.core.step()  # tells the runner to drop the last
        self.num_cached = [cached[request_id] for request_id in ids]
        return [tokens[request_id] for request_id in ids]

    @staticmethod
    def _take(output: EngineOutput, tokens: dict[str, list[int]], cached: dict[str, int]) -> None:
        assert output.error is None, output.error
        tokens[output.request_id] += output.token_ids
        if output.num_cached_tokens is not None:
            cached[output.request_id] = output.num_cached_tokens


def step_of(
    *,
    new: Sequence[NewRequestData] = (),
    scheduled: dict[str, int] | None = None,
    computed: dict[str, int] | None = None,
    blocks: dict[str, list[int]] | None = None,
    dropped: Sequence[str] = (),
) -> SchedulerOutput:
    """Write one step by hand, for a single cache group."""
    return SchedulerOutput(
        step=1,
        new_requests=list(new),
        new_block_ids={request_id: [ids] for request_id, ids in (blocks or {}).items()},
        num_scheduled_tokens=scheduled or {},
        num_computed_tokens=computed or {},
        dropped_request_ids=list(dropped),
    )


def new_request(
    request_id: str, token_ids: Sequence[int], block_ids: Sequence[int], *, num_computed: int = 0
) -> NewRequestData:
    """Describe a greedy request whose known tokens are all prompt."""
    return NewRequestData(
        request_id=request_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=num_computed,
        block_ids=[list(block_ids)],
        sampling=SamplingParams(temperature=0.0),
    )


def rewrite_weights(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Put another tensor in the place of one, or take it away."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights.pop(name, None)
    if tensor is not None:
        weights[name] = tensor
    save_file(weights, file, metadata={"format": "pt"})


def store_in_bfloat16(folder: Path) -> None:
    """Round all weights of a folder."""
    file = folder / "model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def reset_sometimes(core: EngineCore) -> None:
    """Preempt everything at every seventh step: for `EngineRun(before_step=...)`."""
    if core.stats().step % 7 == 6:
        assert core.reset_prefix_cache(preempt_running=True)
