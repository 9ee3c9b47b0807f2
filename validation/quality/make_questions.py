"""Write the questions of the task score: which of four definitions belongs to a held-out dictionary headword.

    python validation/quality/make_questions.py            # writes questions.jsonl beside this file
    python validation/quality/make_questions.py --check    # says whether that file is what these rules make

Text: the held-out entries of the small model's corpus, cut to one definition each. They come from WordNet (WordNet licence, Princeton
University), FOLDOC (GNU Free Documentation License) and the Jargon File (public domain); questions.jsonl stands under these licences,
as `validation/train/heldout.jsonl` does.

The rules look at texts alone, never at what a model makes of them. They know two domains: general English (WordNet) and computing
(FOLDOC and the Jargon File).

- An entry becomes its first definition: of a WordNet entry the first sense without its examples; of the others the first
  sentence. Labels of domain, pronunciation, part of speech, origin and abbreviation are taken off, and addresses out.
- Definitions have 20 to 160 characters and name no web address. What starts in lower case in the computing dictionaries is the rest of
  an entry that was torn apart, and left out, as are headwords that are no words.
- Of several entries of a headword in a domain the first one counts.
- All definitions start with a capital and end without a full stop, so that their form does not tell the dictionary that they are from.
- Three distractors are drawn from the 20 definitions nearest in length that are of the other domain, belong to a headword that shares
  no word with this one, and share no stem (a word's first five letters) with this headword and its definition.
  That they come from the other domain was chosen for the task to tell settings apart: with distractors of the same domain the shipped
  model, exact, is right in 42 % of the questions, of either domain in 51 %, of the other one in 58 % (57.7 to 59.5 % with four seeds).
  Only these totals were looked at.
- The right answer's place goes around 0, 1, 2, 3 through the shuffled questions, so that each place is right in a quarter of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

HERE = Path(__file__).parent
HELDOUT = HERE.parent / "train" / "heldout.jsonl"
HEADWORDS = HERE.parent / "train" / "heldout_names.json"
QUESTIONS = HERE / "questions.jsonl"
SEED = 5
CHOICES = 4
LEAST_QUESTIONS = 400
SHORTEST, LONGEST = 20, 160  # characters of a definition
NEAREST = 20  # definitions of like length that distractors are drawn from
STEM = 5  # letters
COMMON_WORDS = (
    "about also and any are been being but can for from had has have having her his into its made may most not often one other over same "
    "she some such than that the their them then there these they this those through used usually was were when where which who whose "
    "will with within without"
)
# What no definition ends in, unless the entry was torn apart.
TORN_END = re.compile(r".*\b(?:an?|and|at|by|e\.g|for|from|i\.e|in|is|of|on|or|see|that|the|to|which|with)", re.IGNORECASE)
HEADWORD = re.compile(r"\.?[\w$][^(){}<>]*")
ENTRY = re.compile(r"<\|user\|>\n(?P<question>[^\n]+)<\|assistant\|>\n(?P<text>.+)", re.DOTALL)
# How the corpus asks for a headword.
ASKINGS = [
    re.compile(pattern)
    for pattern in (
        r"What is (.+)\?",
        r"What does (.+) mean\?",
        r"(?:Explain|Define|Tell me about) (.+)\.",
        r"Explain (.+) in programming\.",
        r"Explain the concept of (.+)\.",
        r"Explain the concept of (.+) in programming\.",
    )
]
WORDNET_LABEL = re.compile(r"(?:n|v|adj|adv) 1?: ")
NEXT_SENSE = re.compile(r" 2: | (?:n|v|adj|adv) 1?: ")
PART_OF_SPEECH = r"(?:n|v|vt|vi|adj|adv|interj|excl|prov|pref|suff|abbrev|quant|conj)\."
# In the order in which they stand before a definition; each may be absent.
COMPUTING_LABELS = [
    re.compile(pattern)
    for pattern in (
        r"1\. ",
        r"<[^<>]*> ",
        r"//?[^/]*/,?\s*(?:or /[^/]*/\s*)?",
        rf"{PART_OF_SPEECH}(?:, ?{PART_OF_SPEECH})*\s+",
        r"1\. ",
        r"\[[^\[\]]*\] ",
        r"\([^()]*\) ",
        r"1\. ",
    )
]
# Two letters or closing marks before the full stop: initials and "e.g." end no sentence.
SENTENCE_END = re.compile(r"(?<!\b[MD]r\.)(?<=[\w)\]\"”’%]{2}[.!?]) +(?=[\"“‘(\[]?[A-Z0-9])")


@dataclasses.dataclass(frozen=True)
class Definition:
    """A headword with its first definition. `general` says that it is WordNet's."""

    term: str
    text: str
    general: bool

    @functools.cached_property
    def stems(self) -> frozenset[str]:
        """Stems of what headword and definition say."""
        return frozenset(word[:STEM] for word in words(f"{self.term} {self.text}") - words(COMMON_WORDS))


def words(text: str) -> frozenset[str]:
    """Words of three or more letters, in lower case."""
    return frozenset(re.findall(r"[^\W\d_]{3,}", text.lower()))


def general_definition(text: str) -> str:
    """The first sense of a WordNet entry, without label and examples."""
    label = WORDNET_LABEL.match(text)
    sense = NEXT_SENSE.split(text[label.end() if label else 0 :])[0]
    return re.sub(r"^\([^()]*\) ", "", sense.split('; "')[0].strip())


def computing_definition(text: str) -> str:
    """The first sentence of a FOLDOC or Jargon File entry, without labels; empty where it is the rest of a torn entry."""
    for label in COMPUTING_LABELS:
        found = label.match(text)
        text = text[found.end() :] if found else text
    sentence = SENTENCE_END.split(text.split("\n")[0])[0].strip()
    return "" if sentence[:1].islower() else sentence


def read_definitions(heldout: Path, headwords: Path) -> Iterator[Definition]:
    """The usable definitions, in the order of the file.

    Raises:
        ValueError: a headword of the file is none of those that were held out.
    """
    seen: set[tuple[str, bool]] = set()
    held = frozenset(json.loads(headwords.read_text(encoding="utf8"))["heads"])
    for line in heldout.read_text(encoding="utf8").split("\n"):
        entry = ENTRY.fullmatch(json.loads(line)["text"]) if line else None
        if entry is None:  # a page of documentation
            continue
        found = [asked[1] for asking in ASKINGS if (asked := asking.fullmatch(entry["question"])) and asked[1] in held]
        if not found:
            raise ValueError(f"{heldout}: no held-out headword: {entry['question']}")
        term = found[0]
        general = WORDNET_LABEL.match(entry["text"]) is not None
        text = (general_definition if general else computing_definition)(entry["text"])
        text = " ".join(re.sub(r"<[^<>]*@[^<>]*>", "", text).split()).removesuffix(".")
        text = text[:1].upper() + text[1:]
        if (term.lower(), general) not in seen and HEADWORD.fullmatch(term) and is_usable(text):
            seen.add((term.lower(), general))
            yield Definition(term, text, general)


def is_usable(text: str) -> bool:
    """Whether a definition is a whole one, and of a length to be compared with others."""
    whole = text[:1].isalnum() and "http" not in text and not TORN_END.fullmatch(text)
    return whole and SHORTEST <= len(text) <= LONGEST


def make_questions(definitions: Sequence[Definition], seed: int) -> list[dict[str, object]]:
    """One question for every definition that has distractors enough."""
    rng = random.Random(seed)
    questions = []
    for right in rng.sample(definitions, len(definitions)):
        fit = [other for other in definitions if _is_distractor(other, right)]
        fit.sort(key=lambda other: (abs(len(other.text) - len(right.text)), other.term, other.text))
        fit = list({other.text: other for other in reversed(fit[:NEAREST])}.values())
        if len(fit) < CHOICES - 1:
            continue
        choices = [other.text for other in rng.sample(fit, CHOICES - 1)]
        answer = len(questions) % CHOICES
        choices.insert(answer, right.text)
        questions.append({"term": right.term, "question": f"What is {right.term}?", "choices": choices, "answer": answer})
    return questions


def _is_distractor(other: Definition, right: Definition) -> bool:
    return other.general != right.general and not words(other.term) & words(right.term) and not other.stems & right.stems


@click.command()
@click.option("--heldout", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=HELDOUT, help='Lines of {"text": …}.')
@click.option("--headwords", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=HEADWORDS, help="Names held out.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=QUESTIONS)
@click.option("--seed", default=SEED, show_default=True)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 unless the file is what would be written.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(heldout: Path, headwords: Path, out: Path, seed: int, check: bool, as_json: bool) -> None:
    """Make the questions; exit 1 if there are fewer than 400."""
    definitions = list(read_definitions(heldout, headwords))
    questions = make_questions(definitions, seed)
    lines = "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in questions)
    failures = []
    if len(questions) < LEAST_QUESTIONS:
        failures.append(f"{len(questions)} questions, {LEAST_QUESTIONS} required")
    if check and (not out.exists() or out.read_text(encoding="utf8") != lines):
        failures.append(f"{out.name} is not what these rules make")
    if not check:
        out.write_text(lines, encoding="utf8")
    found = {
        "questions": len(questions),
        "general": sum(definition.general for definition in definitions),
        "computing": sum(not definition.general for definition in definitions),
        "answers": dict(sorted(Counter(str(question["answer"]) for question in questions).items())),
        "seed": seed,
        "failures": failures,
    }
    click.echo(json.dumps(found) if as_json else ", ".join(f"{name} {value}" for name, value in found.items() if name != "failures"))
    for failure in failures:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
