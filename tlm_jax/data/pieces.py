"""What tokenizers with learnt pieces have in common: they are held to the promises, at loading and at every text.

Such a model may have been made by anyone, for other ends. What can be given to it without changing the ids of its text,
is: specials that it lacks get ids after its own. What would lose text is refused when it is loaded; where only a single
text suffers, when that is met.
"""

from __future__ import annotations

import unicodedata
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from tlm_jax.data.tokenizer import Tokenizer, UnfitText
from tlm_jax.errors import UserError

# SentencePiece and its like write a space as this character inside their pieces.
SPACE_SYMBOL = "\u2581"
_FORMS = ("", "NFC", "NFKC", "NFD", "NFKD")
# Strings that a lossy model changes: spaces at the ends and in runs, compatibility forms, controls, case, specials, …
_PROBES = (
    "a",
    " a",
    "a ",
    "a  b",
    "\n\t\r\n a",
    "A\u0130 don't ``x'' ,.",
    "\ufb01 \u2460 \uff21 A\u030a",
    "\x00\x01\x7f",
    "\U0001f9ea\U0010ffff",
    "<s></s><unk>",
    f"a{SPACE_SYMBOL}b {SPACE_SYMBOL}",
    SPACE_SYMBOL,
    # … and a character for every byte that may begin one in UTF-8, after all that may continue one.
    *map(chr, range(0xC0)),
    *(chr(0x40 * lead) for lead in range(3, 0x20)),
    *(chr(max(0x1000 * lead, 0x0800)) for lead in range(0x10)),
    *(chr(max(0x40000 * lead, 0x10000)) for lead in range(5)),
)


class PieceTokenizer(Tokenizer):
    """A tokenizer with learnt pieces. A subclass loads them, sets its attributes, and then calls `_examine`."""

    # Whether a text that begins with a space gets no prefix: then it is given a second one.
    _spares_spaces = False
    # Longer strings are encoded in parts of about this many characters: encoders need ~100 bytes a character.
    _part_characters = 1 << 16
    # Where no word ends, text is cut here all the same; None: never.
    _longest_part: int | None = None
    # Whether every text is compared with what its ids stand for.
    _watched = True
    # Ids of the bytes of SPACE_SYMBOL, if that means a space to the encoder.
    _symbol_ids: Sequence[int] = ()

    @abstractmethod
    def _encode_part(self, text: str, first: bool) -> Sequence[int] | np.ndarray:
        """Ids of a part that is not empty; with the prefix if it is the first."""

    def _add_specials(self, bos_id: int | None, eos_id: int | None, pad_id: int | None) -> None:
        """Sets the three ids, and gives those that are None or the same as another one after the vocabulary."""
        bos_id = None if bos_id == eos_id else bos_id
        pad_id = None if pad_id in (bos_id, eos_id) else pad_id
        self._added_from, added = self.vocab_size, self.vocab_size
        ids = []
        for token_id in (bos_id, eos_id, pad_id):
            ids.append(added if token_id is None else token_id)
            added += token_id is None
        self.bos_id, self.eos_id, self.pad_id = ids
        self.vocab_size = added

    def _examine(self, where: str, mend: str) -> None:
        """Finds out prefix and Unicode form, and refuses a tokenizer that changes text in any other way."""
        if self.spell(self._encode("a")) == b" a":
            self.prefix = b" "
            self._spares_spaces = self.spell(self._encode_part(" a", True)) == b" a"
        returned = {probe: self.decode(self._encode(probe)) for probe in _PROBES}
        fits = [form for form in _FORMS if all(text == _in_form(form, probe) for probe, text in returned.items())]
        if not fits:
            lost = [probe for probe in _PROBES if returned[probe] not in {_in_form(form, probe) for form in _FORMS}]
            lost = lost or [probe for probe in _PROBES if returned[probe] != probe]
            what = f"the tokenizer does not give back {lost[0]!r} as it was, but as {returned[lost[0]]!r}"
            raise UserError(what, where=where, mend=mend)
        self.unicode_form = fits[0]

    def encode_array(self, text: str) -> np.ndarray:
        data = text.encode()  # encoders would replace a lone surrogate in silence
        ids = self._encode(text)
        if self._watched and text and (spelled := self.spell(ids)) != self.prefix + data:
            self._check_form(self.prefix.decode() + text, spelled.decode("utf-8", errors="replace"))
        return ids

    def _check_form(self, text: str, returned: str) -> None:
        text, returned = _in_form(self.unicode_form, text), _in_form(self.unicode_form, returned)
        if text == returned:
            return
        at = next((i for i, (a, b) in enumerate(zip(text, returned, strict=False)) if a != b), -1)
        at = min(len(text), len(returned)) if at < 0 else at
        raise UnfitText(f"the tokenizer would change {text[at : at + 20]!r} to {returned[at : at + 20]!r}")

    def _encode(self, text: str) -> np.ndarray:
        found: list[Sequence[int] | np.ndarray] = []
        first = True
        for i, between in enumerate(text.split(SPACE_SYMBOL) if self._symbol_ids else [text]):
            if i:  # the space symbol itself can only be told from a space by its bytes
                if first and self.prefix:
                    found.append(self._encode_part(" ", False))
                found.append(self._symbol_ids)
                first = False
            for part in parts(between, self._part_characters, self._longest_part):
                if first and self._spares_spaces and part.startswith(" "):
                    part = " " + part
                found.append(self._encode_part(part, first))
                first = False
        arrays = [np.asarray(ids, np.int32) for ids in found]
        return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.int32), *arrays])


def _in_form(form: str, text: str) -> str:
    return unicodedata.normalize(form, text) if form else text  # type: ignore[arg-type]


def parts(text: str, characters: int, longest: int | None = None) -> Iterator[str]:
    """Cuts a long text where a word ends and a space begins; pieces split by whitespace never span such a place."""
    start = 0
    while len(text) - start > characters:
        stop, limit = start + characters, min(start + longest, len(text)) if longest else len(text)
        while stop < limit and (text[stop] != " " or text[stop - 1] == " "):
            stop += 1
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]
