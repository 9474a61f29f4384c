"""Worker: SentencePiece encodes documents that it holds in memory already, all in one call, once a step."""

from __future__ import annotations

import gzip
import json

import sentencepiece
from serving import Session


def main() -> None:
    session = Session()
    wanted = session.settings
    processor = sentencepiece.SentencePieceProcessor(model_file=wanted["tokenizer"])
    texts = []
    for name in wanted["files"]:
        with gzip.open(name) as lines:
            texts += [json.loads(line)["text"] for line in lines]
    for _ in session.steps(lambda: None):
        processor.encode(texts, num_threads=wanted["workers"])


if __name__ == "__main__":
    main()
