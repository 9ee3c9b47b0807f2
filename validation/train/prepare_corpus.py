"""Build the corpus of the small model: dictionary entries as questions and answers, and Python's documentation.

The text comes from four Debian packages, unpacked into one directory:

    apt-get download dict-foldoc dict-jargon dict-wn python3.11-doc
    for package in *.deb; do dpkg-deb -x "$package" SOURCES; done

The headwords and pages named in heldout_names.json are never trained on; they become the held-out text.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HELDOUT_NAMES = Path(__file__).with_name("heldout_names.json")
SEED = 7
VOCABULARY = 4096
# The first seven ids, in this order: end of text, the two tokens that open every document, four role markers.
SPECIAL_TOKENS = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
END_OF_TEXT, DOCUMENT_START = 0, [1, 2]
QUESTIONS = [
    "What is {}?",
    "Explain {}.",
    "Define {}.",
    "Explain {} in programming.",
    "What does {} mean?",
    "Tell me about {}.",
    "Explain the concept of {}.",
    "Explain the concept of {} in programming.",
]
SHORTEST_ENTRY = 40  # characters; shorter ones are cross-references
# WordNet is far larger than the computing dictionaries and would drown them: one entry in so many is taken.
WORDNET_SHARE = 11
BATCH = 2000


def entries(sources: Path, name: str, one_paragraph: bool = False) -> Iterator[tuple[str, str]]:
    """Headword and text of every entry of a dictd dictionary.

    Args:
        sources: directory that the packages were unpacked into.
        name: file name of the dictionary, without its endings.
        one_paragraph: join all lines and drop lists of synonyms and antonyms (WordNet).

    Raises:
        FileNotFoundError: the dictionary is not there.
    """
    found = sorted(sources.glob(f"**/usr/share/dictd/{name}.dict.dz"))
    if not found:
        raise FileNotFoundError(f"{name}.dict.dz under {sources}/**/usr/share/dictd")
    head: str | None = None
    body: list[str] = []
    # A headword starts in the first column, its text is indented; a last headword without text closes the file.
    for line in [*gzip.decompress(found[0].read_bytes()).decode("utf8", "replace").split("\n"), "end"]:
        if not line or line[0].isspace():
            body.append(line.strip())
            continue
        text = clean("\n".join(body).strip(), one_paragraph)
        if head and len(text) > SHORTEST_ENTRY and not head.startswith("00-"):  # 00-…: about the dictionary itself
            yield head, text
        head, body = line.strip(), []


def clean(text: str, one_paragraph: bool) -> str:
    """An entry without link braces and hard line ends; a blank line becomes a single line end."""
    if one_paragraph:
        text = re.sub(r"\[(syn|ant)[^\]]*\]", "", text.replace("\n", " "))
    text = re.sub(r"\n(?!\n)", " ", re.sub(r"[{}]", "", text))
    return re.sub(r" +", " ", re.sub(r"\s*\n\s*", "\n", text)).strip()


def documents(sources: Path) -> tuple[list[str], list[str]]:
    """Training and held-out documents, each shuffled. The same packages give the same lists."""
    held = json.loads(HELDOUT_NAMES.read_text(encoding="utf8"))
    held_heads, held_pages = set(held["heads"]), set(held["pages"])
    rng = random.Random(SEED)
    train: list[str] = []
    heldout: list[str] = []

    wordnet = (entry for entry in entries(sources, "wn", True) if zlib.crc32(entry[0].encode()) % WORDNET_SHARE == 0)
    for source, askings in ((entries(sources, "foldoc"), 4), (entries(sources, "jargon"), 3), (wordnet, 1)):
        for head, text in source:
            is_held = head in held_heads
            for question in rng.sample(QUESTIONS, 1 if is_held else askings):
                (heldout if is_held else train).append(f"<|user|>\n{question.format(head)}<|assistant|>\n{text}")

    for page in sorted(sources.glob("**/python3.11/html/_sources/**/*.rst.txt"), key=str):
        if "/whatsnew/" in str(page) or "changelog" in str(page):
            continue
        text = re.sub(r"\n{3,}", "\n\n", page.read_text(encoding="utf8", errors="replace"))
        (heldout if str(page).split("_sources/")[1] in held_pages else train).append(text)

    rng.shuffle(train)
    rng.shuffle(heldout)
    return train, heldout


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: any text can be encoded, and decoding gives it back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """uint16 ids of all documents, joined; each opens with [gMASK]<sop> and ends with <|endoftext|>."""
    parts = []
    for first in range(0, len(texts), BATCH):
        for document in tokenizer.encode_batch(texts[first : first + BATCH]):
            parts.append(np.array([*DOCUMENT_START, *document.ids, END_OF_TEXT], np.uint16))
    return np.concatenate(parts)


@click.command()
@click.argument("sources", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
def main(sources: Path, out: Path) -> None:
    """Read the packages unpacked in SOURCES and write OUT/{train,heldout}.bin (uint16 ids) and OUT/heldout.jsonl.

    OUT/tokenizer.json is used where it exists, and trained and written where not: to train an existing model on, put
    its tokenizer there first.
    """
    out.mkdir(parents=True, exist_ok=True)
    train, heldout = documents(sources)
    tokenizer_file = out / "tokenizer.json"
    if tokenizer_file.exists():
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    else:
        tokenizer = train_tokenizer(train[::3])  # a third of the text is enough to count pairs
        tokenizer.save(str(tokenizer_file))
    for name, texts in (("train", train), ("heldout", heldout)):
        ids = encode(tokenizer, texts)
        ids.tofile(out / f"{name}.bin")
        click.echo(f"{name}: {len(texts)} documents, {ids.size} tokens")
    with (out / "heldout.jsonl").open("w", encoding="utf8") as lines:
        for text in heldout:
            lines.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
