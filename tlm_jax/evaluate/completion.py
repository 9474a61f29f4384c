"""The text of one completion while its tokens come: characters and stop strings that span tokens, and the end."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tlm_jax.data.tokenizer import Tokenizer
from tlm_jax.errors import UserError


class Completion:
    """Grows by tokens until the end-of-document token, a stop string, or `finish`.

    Text is handed out as soon as it is certain: never part of a character, nor what may turn out to begin a stop
    string. Stop strings and end-of-document are not part of the text.

    Attributes:
      num_tokens: tokens taken, the end-of-document token included.
      text: what has been handed out so far; all of it once the completion has ended.
      finish_reason: "" while it grows; then "end" (of the document), "stop" (a stop string) or "length".

    Args:
      tokenizer: gives the bytes of a token.
      stop: strings that end the text.
      at_start: nothing comes before it, so that what the tokenizer puts before every text is not part of it.

    Raises:
      UserError: a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), at_start: bool = False) -> None:
        if "" in stop:
            raise UserError("a stop string is empty", where="stop")
        self._tokenizer = tokenizer
        self._stop = [text.encode() for text in stop]
        self._longest = max(map(len, self._stop), default=0)
        self._prefix = tokenizer.prefix if at_start else b""
        self._held = b""  # not handed out yet: too short to hold a whole stop string
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_tokens = 0
        self.text = ""
        self.finish_reason = ""

    def push(self, token: int) -> str:
        """Takes the next token and returns the text that has become certain. Tokens after the end change nothing."""
        if self.finish_reason:
            return ""
        self.num_tokens += 1
        if token == self._tokenizer.eos_id:
            return self._end("end")
        piece = self._tokenizer.id_bytes(token)
        self._held += piece.removeprefix(self._prefix)
        self._prefix = b"" if piece else self._prefix
        found = [at for at in (self._held.find(text) for text in self._stop) if at >= 0]
        if found:
            self._held = self._held[: min(found)]
            return self._end("stop")
        keep = self._may_begin_stop()
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return self._hand_out(certain)

    def finish(self) -> str:
        """Ends the completion for its length, if nothing has ended it, and returns the text that was held back."""
        return "" if self.finish_reason else self._end("length")

    def _end(self, reason: str) -> str:
        self.finish_reason = reason
        certain, self._held = self._held, b""
        return self._hand_out(certain, final=True)

    def _hand_out(self, certain: bytes, final: bool = False) -> str:
        text = self._decoder.decode(certain, final)
        self.text += text
        return text

    def _may_begin_stop(self) -> int:
        """Length of the longest end of the held bytes that is the beginning of a stop string."""
        lengths = range(min(self._longest - 1, len(self._held)), 0, -1)
        return next((n for n in lengths if any(text.startswith(self._held[-n:]) for text in self._stop)), 0)
