"""Traces of routing for cache_policies.py: recorded from a model's decode steps, or drawn with popularity, drift and stickiness."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from colibri_jax.generate.protocol import LanguageModel
from colibri_jax.generate.sampling import SamplingOptions, sample
from colibri_jax.tokenizer import ChatTokenizer

TEMPERATURE = 0.8
PIECE = 256  # tokens of one answer or one text, before the next begins with an empty context
QUESTIONS = (
    "Explain recursion in programming.",
    "What is a compiler?",
    "Tell me about birds.",
    "What is a hash table?",
    "How do I open a file in Python?",
    "Tell me about the river.",
    "What does garbage collection do?",
    "What is a guitar?",
)


@dataclasses.dataclass(frozen=True)
class Trace:
    """What decode steps used.

    Attributes:
        name: for tables.
        source: how it came about, in words.
        experts: of a layer.
        used: int16 [steps, layers, top_k], ascending in the last dimension.
    """

    name: str
    source: str
    experts: int
    used: npt.NDArray[np.int16]

    @property
    def repeats(self) -> float:
        """Share of a step's experts that the step before used in the same layer."""
        before, after = self.used[:-1, :, :, None], self.used[1:, :, None, :]
        return float((before == after).any(axis=3).mean())

    @property
    def top_share(self) -> float:
        """Share of all uses that went to each layer's top_k most used experts."""
        top_k = self.used.shape[2]
        counts = [np.sort(np.bincount(self.used[:, layer].ravel(), minlength=self.experts)) for layer in range(self.used.shape[1])]
        return float(np.mean([count[-top_k:].sum() / count.sum() for count in counts]))

    def save(self, folder: Path) -> None:
        """Write `<name>.npz`."""
        folder.mkdir(parents=True, exist_ok=True)
        description = json.dumps({"name": self.name, "source": self.source, "experts": self.experts})
        np.savez_compressed(folder / f"{self.name}.npz", used=self.used, description=np.array(description))

    @classmethod
    def open(cls, path: Path) -> Trace:
        """Read what `save` wrote."""
        with np.load(path) as file:
            return cls(**json.loads(str(file["description"])), used=file["used"])


# ---- recorded ------------------------------------------------------------------------------------------------------


def record(name: str, source: str, lm: LanguageModel, steps: int, pieces: Iterator[Iterator[int]], on_step: Callable[[], None]) -> Trace:
    """Decode `steps` tokens, one a step, prompts too. Each piece begins with an empty context; `pieces` see what the model says to them.

    Raises:
        ValueError: the pieces end before the steps do.
    """
    used: list[npt.NDArray[np.int16]] = []
    for piece in pieces:
        lm.reset()
        for _ in piece:
            used.append(np.stack([selection.kept for selection in lm.selections]).astype(np.int16))
            on_step()
            if len(used) == steps:
                return Trace(name, source, lm.config.moe.n_experts, np.stack(used))
    raise ValueError(f"{name}: the text ends after {len(used)} of {steps} steps")


def texts(lm: LanguageModel, documents: Iterator[Sequence[int]]) -> Iterator[Iterator[int]]:
    """Each document's first tokens, as the text has them."""

    def follow(document: Sequence[int]) -> Iterator[int]:
        for token in document[:PIECE]:
            lm.forward([token], scope="decode", logits="last")
            yield token

    return (follow(document) for document in documents)


def answers(lm: LanguageModel, tokenizer: ChatTokenizer) -> Iterator[Iterator[int]]:
    """What the model says to QUESTIONS, again and again with other seeds, questions included; sampled: greedy, it would run in circles."""

    def say(question: str, seed: int) -> Iterator[int]:
        options = SamplingOptions(temperature=TEMPERATURE, seed=seed)
        to_come = list(tokenizer.encode_chat([{"role": "user", "content": question}]))
        for _ in range(PIECE):
            token = to_come.pop(0)
            logits_W = lm.forward([token], scope="decode", logits="last")[-1]
            yield token
            if not to_come:
                to_come.append(sample(logits_W, lm.position, options))
                if to_come[0] in tokenizer.stop_ids:
                    return

    return (say(question, seed) for seed in itertools.count() for question in QUESTIONS)


def documents(files: Sequence[Path], tokenizer: ChatTokenizer) -> Iterator[list[int]]:
    """Tokens of every text: a file is one, or one per line with the key "text" where its name ends in .jsonl."""
    for file in files:
        content = file.read_text(encoding="utf8")
        for text in [json.loads(line)["text"] for line in content.splitlines()] if file.suffix == ".jsonl" else [content]:
            yield tokenizer.encode_raw(text)


# ---- drawn ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drawn:
    """How a trace is drawn.

    Attributes:
        exponent: the expert of rank r is drawn with weight r^-exponent.
        drift: in a step two random experts of a layer exchange their ranks with this probability.
        stickiness: share of experts whose luck stays from one step to the next; 0: steps are independent.
    """

    exponent: float
    drift: float = 0.0
    stickiness: float = 0.0

    @property
    def name(self) -> str:
        parts = {"drift": self.drift, "sticky": self.stickiness}
        return "-".join([f"zipf{self.exponent:g}", *(f"{part}{value:g}" for part, value in parts.items() if value)])

    def draw(self, steps: int, *, layers: int = 3, experts: int = 256, top_k: int = 8, seed: int = 0) -> Trace:
        """The trace: top_k without replacement a step, by weight (largest log-weight plus Gumbel noise). Layers are independent."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        ranks = np.stack([rng.permutation(experts) for _ in range(layers)])
        used = np.empty((steps, layers, top_k), np.int16)
        luck = rng.gumbel(size=(layers, experts))
        for step in range(steps):
            fresh = rng.gumbel(size=(layers, experts))
            luck = np.where(rng.random((layers, experts)) < self.stickiness, luck, fresh)
            for layer in np.flatnonzero(rng.random(layers) < self.drift):
                pair = rng.choice(experts, 2, replace=False)
                ranks[layer, pair] = ranks[layer, pair[::-1]]
            values = luck - self.exponent * np.log1p(ranks)
            used[step] = np.sort(np.argpartition(values, -top_k, axis=1)[:, -top_k:], axis=1)
        source = f"drawn: Zipf exponent {self.exponent:g}, exchanges {self.drift:g} a step, stickiness {self.stickiness:g}, seed {seed}"
        return Trace(self.name, source, experts, used)


# With stickiness 0.4 two slots of LRU hit about 10 %; a public run of GLM-5.2 with colibri reports 9.3 %.
DRAWN = (
    Drawn(0.4),
    Drawn(0.8),
    Drawn(1.2),
    Drawn(0.8, drift=0.25),
    Drawn(0.8, stickiness=0.4),
    Drawn(0.4, drift=0.25, stickiness=0.4),
    Drawn(0.8, drift=0.25, stickiness=0.4),
)
