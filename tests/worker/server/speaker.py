"""A replica whose model says what a test wants, as far as a grammar lets it.

The prompt names the text: what stands in it behind "say:" up to the end of the turn.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from engine.core import EngineCore
from engine.frontend.encoder import Encoder
from engine.frontend.prompt import PromptEncoder
from engine.frontend.tokenizer_bundle import TokenizerBundle
from engine.grammar import allowed_token_ids
from engine.runner_state import RunningRequest
from engine.scripted_executor import ScriptedExecutor
from kvindex.foundation.clock import SystemClock
from tests.engine.frontend.tiny_tokenizer import IM_END_ID, MAX_MODEL_LEN
from tests.worker.server.replica import NUM_BLOCKS, RunningReplica, replica_spec, serving
from worker.core.inproc_client import AsyncInprocClient
from worker.grammar.llguidance_backend import GrammarTokenizer, LlguidanceBackend
from worker.server.front import ReplicaFront


class Speaker(ScriptedExecutor):
    """Says `text_of(prompt)` and ends; where that is ruled out, whatever leads to an end."""

    def __init__(
        self, encoder: Encoder, text_of: Callable[[str], str], grammars: LlguidanceBackend
    ) -> None:
        super().__init__(
            num_blocks=NUM_BLOCKS,
            block_size=16,
            vocab_size=encoder.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            grammars=grammars,
        )
        self._encoder = encoder
        self._text_of = text_of

    def _drawn(self, request: RunningRequest, num_ahead: int) -> int:
        prompt = request.token_ids[: request.num_prompt_tokens]
        text = self._text_of(self._encoder.decode(prompt, skip_special_tokens=False))
        wanted = self._encoder.encode(text, add_special_tokens=False)
        position = len(request.token_ids) - request.num_prompt_tokens + num_ahead
        token_id = (wanted + [IM_END_ID] * (position + 1))[position]
        request_id = request.source.request_id
        if request_id not in self._grammars:
            return token_id
        allowed = allowed_token_ids(self._grammars.mask(request_id))
        wishes = (token_id, IM_END_ID, *b'"}]')
        return next((wish for wish in wishes if wish in allowed), allowed[0])


def behind_say(prompt: str) -> str:
    """Return what the last turn of the prompt asks to be said."""
    return prompt.rpartition("say:")[2].partition("<|im_end|>")[0]


@asynccontextmanager
async def running_speaker(
    bundle: TokenizerBundle, *, text_of: Callable[[str], str] = behind_say, **spec: Any
) -> AsyncIterator[RunningReplica]:
    """Serve a speaker as production serves a model."""
    clock = SystemClock()
    front = ReplicaFront(replica_spec(**spec), bundle, clock)
    encoder = Encoder(bundle)
    grammars = LlguidanceBackend(
        lambda: GrammarTokenizer.of(bundle, encoder), vocab_size=encoder.vocab_size
    )
    core = EngineCore(front.spec.engine, Speaker(encoder, text_of, grammars), clock)
    client = await AsyncInprocClient.start(core, clock)
    prompts = PromptEncoder(bundle, clock=clock, max_model_len=MAX_MODEL_LEN, encoder=encoder)
    front.become_ready(client, prompts)
    try:
        async with serving(front, core, client) as replica:
            yield replica
    finally:
        grammars.close()
