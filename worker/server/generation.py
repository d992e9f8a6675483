"""One client request on its way through a replica: its prompts, its choices, its folds.

Preparing is pure and runs off the event loop; choices.py runs what is prepared here. It knows
no HTTP beyond the bytes of a body.
"""

from __future__ import annotations

import re
import secrets
import uuid
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from engine.frontend.dialect import Conversation
from engine.frontend.errors import RequestError, invalid_value
from engine.frontend.extension import ResumedChoice
from engine.frontend.logprobs import TokenLogprobs
from engine.frontend.message_fold import CallIds, MessageFold
from engine.frontend.openai import (
    UNSEEN_INTERVAL,
    ChatCompletionRequest,
    CompletionRequest,
    Usage,
    usage_of,
)
from engine.frontend.output_fold import Delta, OutputFold
from engine.frontend.params import check_token_ids, sampling_params
from engine.frontend.prompt import PromptEncoder
from engine.messages import EngineInfo, EngineOutput, EngineRequest, LoRARequest
from worker.core.client import finish_reason_of
from worker.server.echo import Echo, echo_of
from worker.server.output_rules import OutputRules

GenerateRequest = ChatCompletionRequest | CompletionRequest

_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(slots=True)
class Choice:
    """One choice: what the engine is asked, and what has come of it.

    `resumed` is what another replica has done of it; None when it begins here. `prompt_logprobs`
    are there with its first output, if they were asked for. `is_echo_only`: the one token that the
    engine samples is not shown. In a chat, `message` is what its text says, by the rules of the
    `conversation`.
    """

    index: int
    request: EngineRequest
    fold: OutputFold
    num_cached_tokens: int = 0
    resumed: ResumedChoice | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    is_echo_only: bool = False
    conversation: Conversation | None = None
    message: MessageFold | None = None

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Output tokens that were thinking, None where none can be."""
        if self.conversation is None or self.message is None:
            return None
        return self.conversation.num_reasoning_tokens(self.fold.token_ids, self.message)

    @property
    def resumed_text_length(self) -> int:
        """Characters of its text that the client has already."""
        return 0 if self.resumed is None else self.resumed.text_length

    def take_part(self, conversation: Conversation, request_id: str) -> None:
        """Begin the message of a chat, with what the client has of its text already."""
        self.conversation = conversation
        self.message = conversation.fold(CallIds(request_id, self.index))
        shown = self.fold.text[: self.resumed_text_length]
        if shown:
            self.message.push(shown, is_last=False)

    def push(self, output: EngineOutput) -> Delta:
        """Fold one engine output; RequestError when the engine gave up on the request."""
        reason = finish_reason_of(output)
        if output.num_cached_tokens is not None and self.resumed is None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self.is_echo_only:
            return self.fold.push([], finish_reason="length")
        return self.fold.push(
            output.token_ids,
            logprobs=output.logprobs,
            finish_reason=reason,
            stop_token_id=output.stop_token_id,
        )


@dataclass(slots=True)
class Generation:
    """A prepared request. Choice i belongs to prompt i // n, and so does its echo, if any."""

    request: GenerateRequest
    request_id: str
    prompts: list[list[int]]
    choices: list[Choice] = field(default_factory=list)
    echoes: list[Echo | None] = field(default_factory=list)

    @property
    def dp_rank(self) -> int | None:
        """The engine core that the gateway named, None when it named none."""
        extension = self.request.prefixfleet
        return extension.dp_rank if extension is not None else None

    @property
    def interval(self) -> int:
        """Tokens to take from the engine at a time: of a text with an end to be found, each."""
        if self.request.stop:
            return 1
        return self.request.stream_interval if self.request.stream else UNSEEN_INTERVAL

    @property
    def reports_progress(self) -> bool:
        """Whether chunks tell the gateway what a resume would need."""
        extension = self.request.prefixfleet
        return extension is not None and extension.return_token_ids

    @property
    def created(self) -> int | None:
        """The instant that its answer has carried so far, None when it begins here."""
        extension = self.request.prefixfleet
        resume = extension.resume if extension is not None else None
        return resume.created if resume is not None else None

    def usage(self) -> Usage:
        """Sum up; of each prompt, the first choice tells what was cached."""
        thought = [choice.num_reasoning_tokens for choice in self.choices]
        known = [count for count in thought if count is not None]
        return usage_of(
            num_reasoning_tokens=sum(known) if known else None,
            num_prompt_tokens=sum(map(len, self.prompts)),
            num_output_tokens=sum(len(choice.fold.token_ids) for choice in self.choices),
            num_cached_tokens=sum(
                choice.num_cached_tokens for choice in self.choices[:: self.request.n]
            ),
        )

    def chunk_usage(self) -> Usage | UnsetType | None:
        """Return what a chunk that is not the last says of usage: nothing, null, or how far it is.

        Where all chunks state it, as OpenAI has it for none but the last.
        """
        if self.request.states_usage:
            return self.usage()
        return None if self.request.include_usage else UNSET

    def echo_of(self, choice: Choice) -> Echo | None:
        """Return what precedes a choice's text, None when nothing does."""
        return self.echoes[choice.index // self.request.n]

    def prompt_of(self, choice: Choice) -> list[int]:
        """Return the prompt that a choice continues."""
        return self.prompts[choice.index // self.request.n]


class Preparer:
    """Turns requests into generations for one engine. Thread-safe.

    `trusts_extension` says that callers proved to be the fleet's gateway: only then is the
    `prefixfleet` field obeyed.
    """

    def __init__(
        self,
        prompts: PromptEncoder,
        info: EngineInfo,
        *,
        trusts_extension: bool,
        rules: OutputRules,
    ) -> None:
        self._prompts = prompts
        self._info = info
        self._rules = rules
        self._trusts_extension = trusts_extension

    def prepare(
        self, request: GenerateRequest, *, request_id: str, lora: LoRARequest | None = None
    ) -> Generation:
        """Render, tokenize and check; raise RequestError naming the field that is wrong.

        `lora` is the adapter that the request's model name stands for.
        """
        extension = request.prefixfleet
        if extension is not None:
            if not self._trusts_extension:
                raise invalid_value(
                    "prefixfleet", "only a gateway may send this field, with the internal token"
                )
            request_id = extension.request_id
        generation = Generation(request, request_id, self._prompt_token_ids(request))
        self._add_choices(generation, lora)
        return generation

    def _prompt_token_ids(self, request: GenerateRequest) -> list[list[int]]:
        extension = request.prefixfleet
        if extension is not None and extension.prompt_token_ids is not None:
            ids = extension.prompt_token_ids
            param = "prefixfleet.prompt_token_ids"
            if not ids:
                raise invalid_value(param, "must not be empty")
            if isinstance(request, CompletionRequest) and len(request.prompts) != 1:
                raise invalid_value(param, "stands for one prompt, but several were sent")
            check_token_ids(ids, vocab_size=self._info.vocab_size, param=param)
            return [ids]
        if isinstance(request, ChatCompletionRequest):
            return [self._prompts.chat(request, scope=request.cache_salt or "")]
        return self._prompts.completion(request)

    def _add_choices(self, generation: Generation, lora: LoRARequest | None) -> None:
        request, extension = generation.request, generation.request.prefixfleet
        drawn = extension.seed if extension is not None else None
        seed = secrets.randbits(63) if drawn is None else drawn
        # Two clients may use one request id at a time: the engine sees another for each.
        unique = f"{generation.request_id}-{uuid.uuid4().hex[:8]}"
        resumed = self._resumed_choices(generation)
        for prompt_token_ids in generation.prompts:
            conversation = self._rules.conversation(request, prompt_token_ids)
            params = sampling_params(
                request,
                num_prompt_tokens=len(prompt_token_ids),
                max_model_len=self._info.max_model_len,
                vocab_size=self._info.vocab_size,
                seed=seed,
                encoder=self._prompts.encoder,
            )
            if conversation is not None:
                params = conversation.params(params)
            generation.echoes.append(echo_of(request, prompt_token_ids, self._prompts.encoder))
            for i in range(request.n):
                index = len(generation.choices)
                engine_request = EngineRequest(
                    request_id=f"{unique}-{index}",
                    prompt_token_ids=prompt_token_ids,
                    sampling=params,
                    eos_token_ids=self._prompts.encoder.eos_token_ids,
                    choice=i,
                    cache_salt=extension.cache_salt if extension else request.cache_salt,
                    priority=extension.priority if extension else request.priority,
                    tenant=extension.tenant if extension else None,
                    weight=extension.weight if extension else 1.0,
                    lora=lora,
                )
                choice = self._choice(index, engine_request, resumed.get(index))
                choice.is_echo_only = (
                    isinstance(request, CompletionRequest) and request.is_echo_only
                )
                if conversation is not None:
                    choice.take_part(conversation, generation.request_id)
                generation.choices.append(choice)

    def _resumed_choices(self, generation: Generation) -> dict[int, ResumedChoice]:
        extension = generation.request.prefixfleet
        if extension is None or extension.resume is None:
            return {}
        resumed = {choice.index: choice for choice in extension.resume.choices}
        num_choices = len(generation.prompts) * generation.request.n
        for index, choice in resumed.items():
            if not 0 <= index < num_choices:
                raise _resume_error(index, f"this request has {num_choices} choices")
            check_token_ids(
                choice.token_ids,
                vocab_size=self._info.vocab_size,
                param=f"prefixfleet.resume.choices[{index}].token_ids",
            )
        return resumed

    def _choice(self, index: int, request: EngineRequest, resumed: ResumedChoice | None) -> Choice:
        """Make a choice; one that was begun elsewhere stands where its last chunk left it."""
        fold = OutputFold(self._prompts.encoder, request.prompt_token_ids, request.sampling)
        if resumed is None:
            return Choice(index, request, fold)
        if resumed.finished:
            fold.close(resumed.token_ids)
        else:
            try:
                fold.restore(resumed.token_ids, text_length=resumed.text_length)
            except ValueError as error:
                raise _resume_error(index, str(error)) from None
            # The client has those of the prompt already.
            sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=None)
            request = msgspec.structs.replace(
                request, sampling=sampling, resume_token_ids=resumed.token_ids
            )
        return Choice(index, request, fold, resumed.num_cached_tokens, resumed)


def _resume_error(index: int, problem: str) -> RequestError:
    return invalid_value(f"prefixfleet.resume.choices[{index}]", problem)


def choose_request_id(offered: str | None) -> str:
    """Return the client's request id if it is harmless to log and echo, else a new one."""
    if offered is not None and _SANE_ID.fullmatch(offered):
        return offered
    return uuid.uuid4().hex
