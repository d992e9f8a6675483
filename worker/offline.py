"""Text generation without a server: `LLM(...)` runs lists of prompts on an engine of its own.

The engine is the one that replicas run, in a process of its own, so this module needs no torch.
It serves one caller at a time and knows no HTTP.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from engine.config import EngineConfig
from engine.frontend.encoder import Encoder
from engine.frontend.errors import RequestError, invalid_value
from engine.frontend.openai import ChatCompletionRequest, ChatMessage, CompletionRequest
from engine.frontend.output_fold import OutputFold
from engine.frontend.params import check_token_ids
from engine.frontend.prompt import PromptEncoder
from engine.frontend.sampling_params import SamplingParams as SamplingParams
from engine.frontend.tokenizer_bundle import load_bundle
from engine.messages import EngineRequest
from kvindex.foundation.clock import SystemClock
from kvindex.foundation.errors import ConfigError
from worker.config import cache_directory
from worker.core.spec import CoreSpec, ScriptedModel
from worker.core.sync_client import SyncProcessClient
from worker.model.prepare import prepare_model
from worker.offline_batch import Batch, Job
from worker.offline_progress import batch_progress
from worker.offline_result import PromptResult, result_of

Prompt = str | list[int]
Conversation = list[dict[str, Any]]

_AHEAD = 2
"""So many times the engine's batch is handed to it at once; the rest waits here."""


class LLM:
    """A model that is loaded and ready; a context manager that ends its engine.

    `model` is "demo" or a Hugging Face folder. `engine` takes the fields of EngineConfig, for
    example `max_num_seqs=8`. Prompts without a seed draw from `seed`, so a program prints the same
    whenever it runs. `executor` "scripted" needs no weights and makes up its tokens.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        dtype: str = "auto",
        num_threads: int = 0,
        kv_cache_memory_bytes: int | None = None,
        cache_dir: str | None = None,
        executor: Literal["model", "scripted"] = "model",
        seed: int = 0,
        **engine: Any,
    ) -> None:
        """Prepare and load the model; raises ConfigError or DependencyError saying why not."""
        try:
            self._config = msgspec.convert(engine, EngineConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"LLM: {error}") from None
        folder = Path(model)
        if executor == "model":
            cache = cache_directory(cache_dir)
            folder = Path(prepare_model(model, cache=cache, progress=lambda done: None).folder)
        bundle = load_bundle(folder)
        self.encoder = Encoder(bundle)
        self._random = random.Random(seed)
        self._num_calls = 0
        self._resources = ExitStack()
        scripted = ScriptedModel.sized(
            vocab_size=self.encoder.vocab_size, max_model_len=self.encoder.max_model_len
        )
        spec = CoreSpec(
            replica_id="offline",
            engine=self._config,
            scripted=scripted if executor == "scripted" else None,
            model_folder=str(folder),
            dtype=dtype,
            num_threads=num_threads,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            publish_events=False,
        )
        sockets = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="prefixfleet-"))
        self._client = self._resources.enter_context(
            SyncProcessClient(spec, socket_dir=Path(sockets))
        )
        self._prompts = PromptEncoder(
            bundle,
            clock=SystemClock(),
            max_model_len=self._client.info.max_model_len,
            encoder=self.encoder,
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._resources.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
        *,
        n: int = 1,
        show_progress: bool = True,
    ) -> list[PromptResult]:
        """Continue prompts, texts or token ids; results come in the order of the prompts.

        `sampling` is for all of them, or one each; `n` choices are made of each. Raises
        RequestError naming the prompt that cannot be served, before any is computed.
        """
        several = prompts if isinstance(prompts, str) else [*prompts]
        request = CompletionRequest(model="", prompt=several)
        return self._run(self._prompts.completion(request), sampling, n, show_progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
        *,
        n: int = 1,
        show_progress: bool = True,
    ) -> list[PromptResult]:
        """Answer conversations, lists of messages as OpenAI writes them; see `generate`."""
        single = bool(conversations) and isinstance(conversations[0], dict)
        several = [conversations] if single else list(conversations)
        token_ids = [self._prompts.chat(_chat_request(turns)) for turns in several]
        return self._run(token_ids, sampling, n, show_progress)

    def _run(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int,
        show_progress: bool,
    ) -> list[PromptResult]:
        if n < 1:
            raise invalid_value("n", f"must be at least 1, got {n}")
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise invalid_value("sampling", f"{len(each)} for {len(prompts)} prompts")
        self._num_calls += 1
        jobs = [
            job
            for i, (token_ids, params) in enumerate(zip(prompts, each, strict=True))
            for job in self._jobs(i, token_ids, params, n)
        ]
        with batch_progress(len(jobs), wanted=show_progress) as progress:
            max_live = _AHEAD * self._config.max_num_seqs
            Batch(self._client, jobs, max_live=max_live, progress=progress).run()
        return [result_of(jobs[i : i + n]) for i in range(0, len(jobs), n)]

    def _jobs(
        self, index: int, token_ids: list[int], sampling: SamplingParams, n: int
    ) -> list[Job]:
        info, param = self._client.info, f"prompts[{index}]"
        if len(token_ids) >= info.max_model_len:
            raise RequestError(
                "context_length_exceeded",
                f"{param}: has {len(token_ids)} tokens; at most {info.max_model_len - 1} leave "
                f"room for an answer (context length {info.max_model_len})",
                param=param,
            )
        check_token_ids(token_ids, vocab_size=info.vocab_size, param=param)
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._random.getrandbits(63))
        return [
            Job(
                EngineRequest(
                    request_id=f"{self._num_calls}-{index}-{choice}",
                    prompt_token_ids=token_ids,
                    sampling=sampling,
                    eos_token_ids=self.encoder.eos_token_ids,
                    choice=choice,
                ),
                OutputFold(self.encoder, token_ids, sampling),
            )
            for choice in range(n)
        ]


def _chat_request(turns: Any) -> ChatCompletionRequest:
    try:
        messages = msgspec.convert(turns, list[ChatMessage])
    except msgspec.ValidationError as error:
        raise invalid_value("conversations", str(error)) from None
    return ChatCompletionRequest(model="", messages=messages)
