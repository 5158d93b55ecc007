"""Generates a sample of text from an exported model, by transformers alone: nothing of this repository computes it.

    megatron-ext sample --model model-hf --prompt "def " --max-new-tokens 60

The folder is what `megatron-ext convert to-hf` wrote. Where it has no tokenizer, --prompt is token ids, such as
"17 4 99", and so is what is printed. The same seed gives the same text; --temperature 0 takes the most likely token
each time.
"""

import importlib.util
from pathlib import Path
from typing import Any

from megatron_ext.commandline import ToolParser
from megatron_ext.errors import ConfigurationError
from megatron_ext.terminal import say


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("A sample of text from an exported model, by transformers alone.", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR", help="folder that megatron-ext convert to-hf wrote")
    parser.add_argument("--prompt", default="def ", help="text to go on from")
    parser.add_argument("--max-new-tokens", type=int, default=60, help="tokens to generate at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="of sampling; 0 takes the most likely token")
    parser.add_argument("--seed", type=int, default=1234, help="of sampling")
    options = parser.parse_args(argv)
    if not importlib.util.find_spec("transformers"):
        raise ConfigurationError("transformers is not installed; pip install -r requirements.txt")
    if not (Path(options.model) / "config.json").is_file():
        raise ConfigurationError(f"--model {options.model} has no config.json; name a folder that to-hf wrote")
    if options.max_new_tokens < 1 or options.temperature < 0:
        raise ConfigurationError("--max-new-tokens must be positive, and --temperature 0 or more")
    say(sample(options.model, options.prompt, options.max_new_tokens, options.temperature, options.seed))
    return 0


def sample(folder: str, prompt: str, count: int, temperature: float, seed: int) -> str:
    """Return the prompt and what the model makes of it. No code from the folder is run."""
    import torch

    from megatron_ext.plugins.huggingface.transformers_reference import use_plain_torch

    use_plain_torch()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    has_text = any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, **here) if has_text else None
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **here).eval()
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    ids = torch.tensor([tokenizer(prompt).input_ids if has_text else _numbers(prompt, model.config.vocab_size)])
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **sampling)
    if not has_text:
        return " ".join(map(str, made[0].tolist()))
    return tokenizer.decode(made[0], skip_special_tokens=True)


def _numbers(prompt: str, vocab_size: int) -> list[int]:
    words = prompt.split()
    if not words or not all(word.isdecimal() and int(word) < vocab_size for word in words):
        raise ConfigurationError(
            f"--model has no tokenizer, so that --prompt {prompt} must be token ids below {vocab_size}, for example "
            '--prompt "5 17"'
        )
    return list(map(int, words))
