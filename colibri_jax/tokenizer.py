"""Text to token ids and back: chat template, stop ids, and a decoder that streams whole characters.

Only byte-level BPE tokenizers (`tokenizer.json`) are known; that is what every supported family ships.
"""

from __future__ import annotations

import codecs
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer, decoders

from colibri_jax.errors import ConfigError, MissingFileError

END_OF_TEXT = "<|endoftext|>"

# Where a model writes one of these, someone else's turn would begin: its own has ended, whatever the files list as end of text.
ROLE_MARKERS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

# GLM models were trained with these two before every text.
PREFIX_TOKENS = ("[gMASK]", "<sop>")


class ChatTokenizer:
    """A checkpoint's tokenizer with everything that a conversation needs.

    Attributes:
        stop_ids: token ids that end a turn.
        prefix_ids: ids that stand before every text (`[gMASK]<sop>`), empty for models without such a prefix.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        special_texts: Mapping[str, str] | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`.

        Args:
            tokenizer: byte-level BPE; its truncation and padding are switched off, a prompt is never cut.
            chat_template: Jinja text over `messages` and `add_generation_prompt`.
            special_texts: template variables such as `bos_token`.
            stop_ids: ids that end a turn, beside the role markers of the vocabulary.

        Raises:
            ConfigError: the tokenizer is of another kind, or the template does not parse.
        """
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise ConfigError(
                "unsupported tokenizer", where="tokenizer.json: decoder", expected="ByteLevel", got=type(tokenizer.decoder).__name__
            )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_texts = dict(special_texts or {})
        self._template = None if chat_template is None else _compile(chat_template)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        ids_by_text = {token.content: i for i, token in added.items()}
        self.stop_ids = frozenset(stop_ids) | {ids_by_text[text] for text in ROLE_MARKERS if text in ids_by_text}
        self._document_end = [ids_by_text[END_OF_TEXT]] if END_OF_TEXT in ids_by_text else []
        has_prefix = all(text in ids_by_text for text in PREFIX_TOKENS)
        self.prefix_ids = tuple(ids_by_text[text] for text in PREFIX_TOKENS) if has_prefix else ()

    @classmethod
    def from_directory(cls, path: str | Path) -> ChatTokenizer:
        """Read `tokenizer.json`; and, where they exist, the template and the configurations beside it.

        The template is `chat_template.jinja` or stands in `tokenizer_config.json`. Stop ids are every `eos_token_id` of
        `generation_config.json` and `config.json`, the tokenizer's `eos_token`, and the role markers.

        Raises:
            MissingFileError: there is no `tokenizer.json`.
            ConfigError: a file does not parse, or holds something of another kind.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise MissingFileError("the directory has no tokenizer", where=str(directory), expected="tokenizer.json", got="no such file")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError("tokenizer does not parse", where=str(file), got=error) from error
        config = _read_json(directory / "tokenizer_config.json")
        special_texts = _special_texts(config)
        stop_ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            stop_ids.update(_eos_ids(_read_json(directory / name), where=f"{name}: eos_token_id"))
        eos = tokenizer.token_to_id(special_texts["eos_token"]) if "eos_token" in special_texts else None
        if eos is not None:
            stop_ids.add(eos)
        return cls(tokenizer, chat_template=_template_text(directory, config), special_texts=special_texts, stop_ids=stop_ids)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""
        return self._template is not None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text that the chat template makes of messages (`role`, `content`); `variables` reach the template too.

        Raises:
            ConfigError: there is no template, or it fails on these messages.
        """
        if self._template is None:
            raise ConfigError(
                "the tokenizer has no chat template", where="tokenizer_config.json: chat_template", expected="a template", got="none"
            )
        known = {**self._special_texts, **variables, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(known)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ConfigError("the chat template failed", where="chat_template", got=error) from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Token ids of a conversation; the template writes the special tokens, none is added to them.

        Markers spelled out inside a message become the tokens that they spell, as in the training form of these models.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_raw(self, text: str) -> list[int]:
        """Token ids of a text without template: the model's prefix once, then the text as it is."""
        if not self.prefix_ids:
            return list(self._tokenizer.encode(text, add_special_tokens=True).ids)
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        n = len(self.prefix_ids)
        return ids if tuple(ids[:n]) == self.prefix_ids else [*self.prefix_ids, *ids]

    def encode_document(self, text: str) -> list[int]:
        """Token ids of a document as these models were trained on it: `encode_raw`, then the end of text where the vocabulary has it."""
        return [*self.encode_raw(text), *self._document_end]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are left out, bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def stream(self) -> StreamingDecoder:
        """A fresh decoder for one answer."""
        return StreamingDecoder(self._tokenizer, self._special_ids)


class StreamingDecoder:
    """Turns token ids into text as they come; the pieces joined equal `ChatTokenizer.decode` of all ids.

    Tokens are mapped to bytes, not to text: a character whose bytes are spread over several tokens waits inside until it
    is whole, so no piece ever holds half of one.
    """

    def __init__(self, tokenizer: Any, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; often a word, "" for special tokens and unfinished characters."""
        return self._utf8.decode(self._bytes(token_id))

    def flush(self) -> str:
        """What was waiting, as U+FFFD where the last character never became whole. The decoder is then as new."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._special_ids:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # ids between the tokenizer's end and a padded vocabulary's
            return b""
        try:
            return bytes(_BYTE_OF_CHARACTER[c] for c in token)
        except KeyError:  # an added token's own text, spelled in no byte alphabet
            return str(token).encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself, or the next free one from U+0100 (GPT-2)."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in itself]
    return {chr(b): b for b in itself} | {chr(0x100 + i): b for i, b in enumerate(moved)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _compile(text: str) -> jinja2.Template:
    """A template that can neither reach Python nor change its messages: it comes with a download."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise ConfigError("the chat template does not parse", where="chat_template", got=error) from error


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """JSON as templates expect it; jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where the file does not exist."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("not JSON", where=str(file), got=error) from error
    if not isinstance(value, dict):
        raise ConfigError("wrong type", where=str(file), expected="a JSON object", got=type(value).__name__)
    return value


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which stand either as text or as a described token."""
    texts = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            texts[key] = value
    return texts


def _eos_ids(config: Mapping[str, Any], where: str) -> list[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise ConfigError("wrong type", where=where, expected="an integer or a list of integers", got=repr(value))
    return list(ids)


def _template_text(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # several named templates
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}.get("default")
    if value is not None and not isinstance(value, str):
        raise ConfigError("wrong type", where="tokenizer_config.json: chat_template", expected="text", got=type(value).__name__)
    return value
