"""SentencePiece models, our own and others'."""

from __future__ import annotations

import functools

import numpy as np
import sentencepiece

from tlm_jax.data.pieces import SPACE_SYMBOL, PieceTokenizer
from tlm_jax.errors import UserError


class SentencePieceTokenizer(PieceTokenizer):
    """A SentencePiece model that loses no text: it has byte fallback and does not touch spaces.

    Args:
      model: the bytes of a `.model` file.
      where: the file's name, for messages.

    Raises:
      UserError: the bytes are no model, or the model lacks byte pieces or changes text.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, where: str = "tokenizer") -> None:
        self._model = model
        mend = "train one with `tlm tokenizer`"
        try:
            processor = self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError("not a SentencePiece model", where=where, mend=mend) from error
        self.vocab_size = processor.vocab_size()
        ids_of_bytes = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        if not all(processor.is_byte(i) for i in ids_of_bytes):
            raise UserError("the model has no byte fallback and would lose characters", where=where, mend=mend)
        self._symbol_ids = [ids_of_bytes[byte] for byte in SPACE_SYMBOL.encode()]
        # A model without a padding id lends its unknown id, which byte fallback leaves unused.
        pad_id = processor.pad_id() if processor.pad_id() >= 0 else processor.unk_id()
        bos_id, eos_id = (None if i < 0 else i for i in (processor.bos_id(), processor.eos_id()))
        self._add_specials(bos_id, eos_id, pad_id)
        self._examine(where, mend)
        self._watched = bool(self.prefix or self.unicode_form)  # the others have nothing that could go wrong

    @functools.cached_property
    def _without_prefix(self) -> sentencepiece.SentencePieceProcessor:
        if not self.prefix:
            return self._processor
        from sentencepiece import sentencepiece_model_pb2  # needs protobuf, which other models can do without

        model = sentencepiece_model_pb2.ModelProto.FromString(self._model)  # type: ignore[attr-defined]
        model.normalizer_spec.add_dummy_prefix = False
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    def _encode_part(self, text: str, first: bool) -> np.ndarray:
        return (self._processor if first else self._without_prefix).encode(text, return_type="numpy")

    def id_bytes(self, token_id: int) -> bytes:
        processor = self._processor
        if token_id >= self._added_from or processor.is_control(token_id) or processor.is_unknown(token_id):
            return b""
        piece = processor.id_to_piece(token_id)
        if processor.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE_SYMBOL, " ").encode()

    def special_name(self, token_id: int) -> str:
        return "added" if token_id >= self._added_from else self._processor.id_to_piece(token_id)

    def to_bytes(self) -> bytes:
        return self._model
