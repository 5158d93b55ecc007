"""A sample of text from an exported model, by transformers alone: nothing of this repository computes it.

    python tools/generate_sample.py --model model-hf --prompt "def " --max-new-tokens 60

The folder is what `convert_checkpoint.py to-hf` wrote, tokenizer included. The same seed gives the same text;
--temperature 0 takes the most likely token each time.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.errors import ConfigurationError


def main(argv: list[str]) -> int:
    parser = ToolParser("A sample of text from an exported model, by transformers alone.")
    parser.add_argument("--model", required=True, metavar="DIR", help="folder that convert_checkpoint.py to-hf wrote")
    parser.add_argument("--prompt", default="def ", help="text to go on from")
    parser.add_argument("--max-new-tokens", type=int, default=60, help="tokens to generate at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="of sampling; 0 takes the most likely token")
    parser.add_argument("--seed", type=int, default=1234, help="of sampling")
    options = parser.parse_args(argv)
    if not importlib.util.find_spec("transformers"):
        raise ConfigurationError("transformers is not installed; pip install -r requirements.txt")
    for name in ("config.json", "tokenizer_config.json"):
        if not (Path(options.model) / name).is_file():
            raise ConfigurationError(f"--model {options.model} has no {name}; name a folder that to-hf wrote")
    if options.max_new_tokens < 1 or options.temperature < 0:
        raise ConfigurationError("--max-new-tokens must be positive, and --temperature 0 or more")
    print(sample(options.model, options.prompt, options.max_new_tokens, options.temperature, options.seed))
    return 0


def sample(folder: str, prompt: str, count: int, temperature: float, seed: int) -> str:
    """The prompt and what the model makes of it. No code from the folder is run."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, **here)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **here).eval()
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **sampling)
    return tokenizer.decode(made[0], skip_special_tokens=True)


if __name__ == "__main__":
    run_tool(main)
