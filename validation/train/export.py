"""Write a trained .pt file as a Hugging Face glm_moe_dsa directory: bfloat16, the router float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
from checkpoint import indexer_tensors, load_shape, load_state, to_hf
from model import Model, Shape
from safetensors.torch import save_file

COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
END_OF_TEXT, USER = 0, 4  # a generation ends with the text, or where a user would speak next
CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}"
    "{% if m['role'] == 'user' %}<|user|>\n{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>\n{{ m['content'] }}"
    "{% elif m['role'] == 'system' %}<|system|>\n{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write_new_config(out: Path, shape: Shape, tokenizer: Path) -> None:
    """Configuration and tokenizer of a model that was trained from nothing."""
    generation = {"eos_token_id": [END_OF_TEXT, USER], "pad_token_id": END_OF_TEXT, "do_sample": False}
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context,
        "chat_template": CHAT_TEMPLATE,
    }
    contents = {"config.json": shape.to_config(), "generation_config.json": generation, "tokenizer_config.json": tokens}
    for name, content in contents.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf8")
    shutil.copyfile(tokenizer, out / "tokenizer.json")


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--from",
    "start",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="directory that training started from: gives the configuration, the tokenizer and the indexer",
)
@click.option("--tokenizer", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="tokenizer.json, where there is no --from")
def main(checkpoint: Path, out: Path, start: Path | None, tokenizer: Path | None) -> None:
    """Write CHECKPOINT, a .pt file of train.py, into the new directory OUT.

    The indexer is not trained. With --from it is the one of that directory, so that a model keeps it through any number
    of rounds; without, it is random with a fixed seed.
    """
    if (start is None) == (tokenizer is None):
        raise click.UsageError("name either --from or --tokenizer")
    if out.exists() and any(out.iterdir()):
        raise click.UsageError(f"{out} is not empty, and nothing is overwritten")
    shape = load_shape(start) if start else Shape()
    state = load_state(checkpoint)
    Model(shape).load_state_dict(state)  # refuses a checkpoint of another shape, naming the tensor
    tensors = to_hf(state, shape, indexer_tensors(shape, start))

    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    if start:
        for name in COPIED:
            shutil.copyfile(start / name, out / name)
    else:
        assert tokenizer is not None
        write_new_config(out, shape, tokenizer)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    click.echo(f"{out}: {len(tensors)} tensors, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
