"""The fold of one choice: token ids in, text and the reason to stop out.

One fold serves streamed and whole answers: the deltas add up to the text. It is pure; it knows
no HTTP, no OpenAI shape and no engine. Whoever feeds it aborts the engine when a stop string
ends the choice before the engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.frontend.detokenizer import Detokenizer
from engine.frontend.encoder import Encoder
from engine.frontend.logprobs import TokenLogprobs
from engine.frontend.sampling_params import SamplingParams
from engine.frontend.stop import find_stop, num_held_back

FoldFinishReason = Literal["stop", "length"]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one push added: text that is safe to show, and the tokens that count as output.

    Text may lag behind tokens (half characters, possible stop strings). `logprobs` has an entry for
    each token if they were asked for, and `text_offsets` where in the choice's text each begins
    (a token that a stop string cut off began behind its end); both are empty otherwise, as they
    are for tokens of before a resume. `stop_reason` is the
    stop string or the stop token id; None when the model's own end token ended it.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    text_offsets: list[int] = []
    finish_reason: FoldFinishReason | None = None
    stop_reason: str | int | None = None


class OutputFold:
    """The output of one choice so far.

    Stop strings are looked for in what is generated after `min_tokens`. The match that completes
    first ends the choice: tokens behind it, also of the same step, are no output. The text of a
    stop token is left out unless `include_stop_str_in_output`.
    """

    __slots__ = (
        "_detokenizer",
        "_emitted",
        "_params",
        "_scan_from",
        "_searched",
        "finish_reason",
        "logprobs",
        "stop_reason",
        "text",
        "text_offsets",
        "token_ids",
    )

    def __init__(
        self, encoder: Encoder, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = Detokenizer(
            encoder, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._params = params
        self._emitted = 0
        self._searched = 0
        self._scan_from = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text_offsets: list[int] = []
        self.finish_reason: FoldFinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """Tell whether the choice has ended; nothing may be pushed then."""
        return self.finish_reason is not None

    def push(
        self,
        token_ids: Sequence[int],
        *,
        logprobs: Sequence[TokenLogprobs] = (),
        finish_reason: FoldFinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> Delta:
        """Take the tokens of one step; return what they add.

        `logprobs` holds an entry for each of them, or nothing. `stop_token_id` says that the last
        token ended the choice. A stop string that completes in an earlier token, or at the very
        end, outranks the engine's own reason.
        """
        assert not self.finished, "push after the end of the choice"
        num_before, num_scored = len(self.token_ids), len(self.logprobs)
        for i, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if logprobs:
                self.logprobs.append(logprobs[i])
                self.text_offsets.append(len(self.text))
            is_stop_token = stop_token_id is not None and i == len(token_ids) - 1
            if not is_stop_token or self._params.include_stop_str_in_output:
                self._append(self._detokenizer.push(token_id))
            if self.finished:
                break
        if finish_reason is not None and not self.finished:
            self._append(self._detokenizer.flush())
        if finish_reason is not None and not self.finished:
            self.finish_reason = finish_reason
            if stop_token_id in self._params.stop_token_ids:
                self.stop_reason = stop_token_id
        return Delta(
            text=self._release(),
            token_ids=self.token_ids[num_before:],
            logprobs=self.logprobs[num_scored:],
            text_offsets=self.text_offsets[num_scored:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def restore(self, token_ids: Sequence[int], *, text_length: int) -> None:
        """Take the tokens of a choice that was begun elsewhere, whose text is known to the client.

        Everything that a fold remembers is as it was there. Raises ValueError when these tokens
        would not have shown just so many characters: then another tokenizer made them.
        """
        shown = len(self.push(token_ids).text)
        if self.finished or shown != text_length:
            raise ValueError(f"{len(token_ids)} tokens show {shown} characters, not {text_length}")

    def close(self, token_ids: Sequence[int]) -> None:
        """Take the tokens of a choice that ended elsewhere; its text is not needed any more."""
        self.token_ids.extend(token_ids)
        self.finish_reason = "stop"

    def _append(self, new: str) -> None:
        """Add text; end the choice when a stop string is complete in it."""
        self.text += new
        if not self._params.stop:
            return
        if len(self.token_ids) <= self._params.min_tokens:
            self._scan_from = self._searched = len(self.text)
            return
        match = find_stop(
            self.text, self._params.stop, searched=self._searched, scan_from=self._scan_from
        )
        self._searched = len(self.text)
        if match is not None:
            keep = match.end if self._params.include_stop_str_in_output else match.start
            self.text = self.text[:keep]
            self.finish_reason = "stop"
            self.stop_reason = match.stop

    def _release(self) -> str:
        """Return the text not yet emitted, less what may still begin a stop string."""
        end = len(self.text)
        if not (self.finished or self._params.include_stop_str_in_output):
            end -= num_held_back(self.text, self._params.stop, scan_from=self._scan_from)
        new = self.text[self._emitted : end]
        self._emitted = max(end, self._emitted)
        return new
