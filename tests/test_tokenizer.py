"""The tokenizer: templates, stop ids, and streaming equal to decoding at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import CHAT_TEMPLATE, byte_tokenizer, write_model_directory
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from colibri_jax.errors import ConfigError, MissingFileError
from colibri_jax.tokenizer import ChatTokenizer, StreamingDecoder

MERGES = (("h", "e"), ("Ġ", "t"), ("Ã", "©"), ("ð", "Ł"))
EXTRA = (AddedToken("<think>", special=False, normalized=False), AddedToken("<two words>", special=False, normalized=False))
TOKENIZER = ChatTokenizer(byte_tokenizer(merges=MERGES, extra=EXTRA), chat_template=CHAT_TEMPLATE)


def streamed(decoder: StreamingDecoder, ids: list[int]) -> tuple[list[str], str]:
    pieces = [decoder.push(i) for i in ids]
    return pieces, decoder.flush()


def ids_of_bytes(data: bytes) -> list[int]:
    """One token a byte. Without merges, text encodes to the tokens of its UTF-8; these texts hold every byte that UTF-8 can."""
    raw = byte_tokenizer()
    points = [*range(0x80), *range(0x80, 0xC0), *range(0xC0, 0x800, 0x40), 0x800, *range(0x1000, 0xE000, 0x1000), 0xE000, 0xF000]
    text = "".join(map(chr, [*points, 0x10000, 0x40000, 0x80000, 0xC0000, 0x100000]))
    by_byte = dict(zip(text.encode(), raw.encode(text).ids, strict=True))
    return [by_byte[b] for b in data]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=40))
def test_streamed_pieces_of_random_ids_join_to_the_full_decode(ids: list[int]) -> None:
    pieces, rest = streamed(TOKENIZER.stream(), ids)
    assert "".join(pieces) + rest == TOKENIZER.decode(ids)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.text(alphabet="aé€😀\u0301🏳️\u200d🌈 \n", max_size=12))
def test_no_piece_holds_half_a_character(text: str) -> None:
    pieces, rest = streamed(TOKENIZER.stream(), TOKENIZER.encode_raw(text))
    assert "".join(pieces) == text
    assert rest == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_decoding_token_by_token_would_have_halved_a_character() -> None:
    """The fault that the two tests above are for: it must show on such text."""
    naive = "".join(TOKENIZER.decode([i]) for i in TOKENIZER.encode_raw("😀"))
    assert "\ufffd" in naive


def test_a_character_arrives_with_its_last_byte() -> None:
    pieces, rest = streamed(TOKENIZER.stream(), ids_of_bytes("a€b".encode()))
    assert (pieces, rest) == (["a", "", "", "€", "b"], "")


@pytest.mark.parametrize("tail", [b"\xf0\x9f\x98", b"\xe2\x82", b"\xc3", b"\xf4\x8f", b"\xed\x9f"])
def test_an_unfinished_character_comes_out_as_a_replacement_at_the_end(tail: bytes) -> None:
    ids = ids_of_bytes(b"ok" + tail)
    pieces, rest = streamed(TOKENIZER.stream(), ids)
    assert "".join(pieces) == "ok"
    assert "ok" + rest == TOKENIZER.decode(ids)
    assert rest == "\ufffd"


def test_special_tokens_leave_no_text_but_added_ones_do() -> None:
    ids = TOKENIZER.encode_raw("<|user|>a<think>b<two words>c")
    assert "".join(streamed(TOKENIZER.stream(), ids)[0]) == "a<think>b<two words>c"


def test_chat_has_the_prefix_once_and_ends_where_the_answer_begins() -> None:
    ids = TOKENIZER.encode_chat([{"role": "user", "content": "hey"}])
    names = [TOKENIZER._tokenizer.id_to_token(i) for i in ids]
    assert names == ["[gMASK]", "<sop>", "<|user|>", "Ċ", "he", "y", "<|assistant|>", "Ċ"]
    assert tuple(ids[:2]) == TOKENIZER.prefix_ids == (1, 2)


def test_raw_text_gets_the_prefix_exactly_once() -> None:
    assert TOKENIZER.encode_raw("[gMASK]<sop>he") == TOKENIZER.encode_raw("he") == [1, 2, *TOKENIZER.encode_raw("he")[2:]]


def test_a_tokenizer_without_glm_markers_has_no_prefix() -> None:
    plain = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    plain.decoder = decoders.ByteLevel()
    assert ChatTokenizer(plain).encode_raw("ab") == [0, 1]


def test_a_prompt_is_never_cut_or_padded_whatever_the_file_says() -> None:
    raw = byte_tokenizer()
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    assert len(raw.encode("abcdefgh").ids) == 50
    assert len(ChatTokenizer(raw).encode_raw("abcdefgh")) == 2 + 8


def test_stop_ids_come_from_every_place_that_names_them(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path, eos_token_id=200)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [201, 202]}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!", "special": True}}))
    tokenizer = ChatTokenizer.from_directory(directory)
    markers = {0, 3, 4, 5, 6}
    assert tokenizer.stop_ids == {200, 201, 202, byte_tokenizer().token_to_id("!")} | markers


def test_role_markers_end_a_turn_even_if_no_file_lists_them(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path)
    (directory / "generation_config.json").unlink()
    assert {byte_tokenizer().token_to_id(t) for t in ("<|user|>", "<|observation|>", "<|endoftext|>")} <= ChatTokenizer.from_directory(
        directory
    ).stop_ids


def test_the_template_file_wins_and_named_templates_have_a_default(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path)
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D{{ messages[0].content | tojson }}"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTokenizer.from_directory(directory).render_chat([{"role": "user", "content": "<é>"}]) == 'D"<é>"'
    (directory / "chat_template.jinja").write_text("{% for m in messages %}\n  F\n{% break %}{% endfor %}\n{{ eos_token }}")
    assert ChatTokenizer.from_directory(directory).render_chat([{"role": "user", "content": "x"}]).strip() == "F"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_named_error(template: str) -> None:
    tokenizer = ChatTokenizer(byte_tokenizer(), chat_template=template)
    with pytest.raises(ConfigError, match="chat template failed"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"tokenizer\.json"):
        ChatTokenizer.from_directory(tmp_path)
    with pytest.raises(ConfigError, match="does not parse"):
        ChatTokenizer(byte_tokenizer(), chat_template="{% for %}")
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTokenizer(byte_tokenizer()).encode_chat([])
    other = byte_tokenizer()
    other.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        ChatTokenizer(other)
    directory = write_model_directory(tmp_path)
    (directory / "generation_config.json").write_text('{"eos_token_id": "0"}')
    with pytest.raises(ConfigError, match="eos_token_id"):
        ChatTokenizer.from_directory(directory)
    (directory / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match="not JSON"):
        ChatTokenizer.from_directory(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer does not parse"):
        ChatTokenizer.from_directory(directory)
