"""Small instruction data and a byte-level tokenizer with special tokens, on the disk as users have them."""

import json
import random
from pathlib import Path
from typing import Any

WORDS = ("add", "sub", "the", "of", "two", "seven", "nine", "what", "is", "sum", "word", "list", "green", "again")

OWN_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML as models have it: nothing in it says what an assistant wrote."""


def write_tokenizer(folder: Path, template: str | None = OWN_TEMPLATE) -> str:
    """A byte-level BPE of 256 bytes, a few merges and ChatML's special tokens; <|im_end|> is the end, as Qwen's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def sentence(chooser: random.Random, longest: int = 12) -> str:
    return " ".join(chooser.choices(WORDS, k=chooser.randint(1, longest)))


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Messages of one to three turns, some after a system message, some in scripts of several bytes a character."""
    chooser = random.Random(seed)
    found = []
    for number in range(count):
        messages = [{"role": "system", "content": sentence(chooser)}] if number % 3 == 0 else []
        for _ in range(chooser.randint(1, 3)):
            messages.append({"role": "user", "content": sentence(chooser) + " ¿été?" * (number % 2)})
            messages.append({"role": "assistant", "content": sentence(chooser) + "\n\n数 🙂" * (number % 4 == 1)})
        found.append(messages)
    return found


def write_lines(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def alpaca_records(count: int, seed: int = 0) -> list[dict[str, str]]:
    chooser = random.Random(seed)
    return [
        {
            "instruction": sentence(chooser),
            "input": sentence(chooser) if number % 2 else "",
            "output": sentence(chooser),
        }
        for number in range(count)
    ]
