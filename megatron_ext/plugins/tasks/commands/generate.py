"""Let a trained model go on from prompts, on the ranks of any layout: `megatron-ext generate --load ckpt`.

    megatron-ext generate --load ckpt --prompts "def main(" --num-tokens-to-generate 64
    megatron-ext generate --load ckpt --prompt-file prompts.jsonl --temperature 0.8 --top-p 0.95 --output made.jsonl
    torchrun --nproc-per-node 4 -m megatron_ext generate --load ckpt --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --prompts "Once upon a time"
    megatron-ext generate --load-hf Llama-3.2-1B

Prompts come from --prompts, from --prompt-file, or from the standard input, one a line. What the model is, the
checkpoint says; --tensor-model-parallel-size, --device, --bf16 and the other flags of `megatron-ext pretrain` choose
layout and precision.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.commandline import ToolParser
from megatron_ext.config.parse.options import options_by_flag
from megatron_ext.config.parse.settings import Settings, words_of
from megatron_ext.durable import replacing
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prepare.chat_templates import TEMPLATES
from megatron_ext.registry import with_own
from megatron_ext.terminal import say

if TYPE_CHECKING:
    from megatron_ext.plugins.tasks.generation import Generated
    from megatron_ext.plugins.tasks.leader import Leader
    from megatron_ext.plugins.tasks.sampling import Sampling
    from megatron_ext.train.configure import Configured

type Encoder = Callable[[str], list[int]]


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    _led(argv, _serve)
    return 0


def generate(
    prompts: str | Sequence[str], settings: Settings = None, /, *, families: Sequence[Any] = (), **flags: Any
) -> "list[Generated]":
    """Let a trained model go on from prompts, in this process, and return an answer for each prompt.

        [answer] = generate("Once upon a time", load="run", num_tokens_to_generate=64, temperature=0.8)
        answer.text, answer.tokens, answer.reason

    Settings are the flags of `megatron-ext generate` without their hyphens, `load` or `load_hf` among them. Under
    torchrun every rank calls it, and the first rank gets the answers; the others get an empty list.

    Args:
        prompts: a text, or several. Of a model without a tokenizer of text, token ids: "5 17 42".
        settings: a dict of settings by the flags' names, or flags as on a command line.
        families: families of Hugging Face models beyond the program's, as `pretrain` takes them.
        flags: settings as keywords, which win over `settings`.
    Raises:
        ConfigurationError: the settings cannot work, or a prompt cannot be encoded.
    """
    asked = [prompts] if isinstance(prompts, str) else list(prompts)

    def answer(leader: "Leader", options: Any, sampling: "Sampling") -> "list[Generated]":
        return _generated(leader, asked, options, sampling)

    with with_own("families", families):
        return _led(words_of(settings, flags, _parser().knows, ["families"]), answer) or []


def _led[Result](argv: list[str], ask: "Callable[[Leader, Any, Sampling], Result]") -> "Result | None":
    """Return what `ask` returns on the first rank, with the model that a command line names; None on the others."""
    options, flags = _parser().parse_with_flags(argv, options_by_flag())
    configured, sampling = _configured(options, flags)
    from megatron_ext.plugins.tasks.trained_model import trained_model

    with trained_model(configured, depths=options.speculative) as model:
        from megatron_ext.plugins.tasks.leader import Leader, follow

        if model.rank != 0:
            follow(model)
            return None
        leader = Leader(model)
        try:
            return ask(leader, options, sampling)
        finally:
            leader.close()


def _parser() -> ToolParser:
    parser = ToolParser(
        "Let a trained model go on from prompts; further flags are those of megatron-ext pretrain.",
        __doc__,
        command="generate",
    )
    parser.add_argument("--prompts", nargs="+", metavar="TEXT", help="texts to go on from")
    parser.add_argument("--prompt-file", metavar="FILE", help='a prompt a line, or .jsonl with "prompt"')
    parser.add_argument(
        "--chat-template",
        metavar="NAME",
        help=f"ask as a user in a conversation: {', '.join(TEMPLATES)}, tokenizer (its own), or a file of jinja",
    )
    parser.add_argument(
        "--num-tokens-to-generate", "--max-new-tokens", type=int, default=128, help="most tokens of an answer"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 takes the most likely token")
    parser.add_argument("--top-k", type=int, default=0, help="draw from so many most likely tokens; 0 for all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest with this probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="draw from tokens with this share of the likeliest's")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="makes used tokens less likely; 1: none")
    parser.add_argument("--stop", nargs="+", default=[], metavar="TEXT", help="end an answer before one of these")
    parser.add_argument("--ignore-eod", action="store_true", help="go on after the end of a document")
    parser.add_argument("--seed", type=int, default=1234, help="of sampling")
    parser.add_argument("--max-batch-size", type=int, default=16, help="prompts at work at once on a replica")
    parser.add_argument("--stream", action="store_true", help="write one prompt's answer token by token")
    parser.add_argument(
        "--speculative",
        action="store_true",
        help="draft with the model's depths of multi-token prediction; the tokens stay the same",
    )
    parser.add_argument("--output", metavar="FILE", help="write JSON lines of prompt, text, tokens and reason there")
    return parser


def _configured(options: Any, flags: list[str]) -> tuple["Configured", "Sampling"]:
    """Return the configuration of the model and the sampling, all flags checked before anything is loaded."""
    from megatron_ext.plugins.tasks.trained_model import configure_trained

    _check(options)
    configured = configure_trained(flags)
    from megatron_ext.plugins.tasks.sampling import Sampling, check_drafts

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        max_new_tokens=options.num_tokens_to_generate,
        stop=tuple(options.stop),
        ignore_eod=options.ignore_eod,
    )
    sampling.check()
    if options.speculative:
        check_drafts(configured.config, sampling)
    return configured, sampling


def _check(options: Any) -> None:
    if options.max_batch_size < 1:
        raise ConfigurationError(f"--max-batch-size {options.max_batch_size} is not positive; use 16")
    if options.prompts and options.prompt_file:
        raise ConfigurationError("--prompts and --prompt-file are two sources of prompts; give one of them")
    if options.prompt_file and not os.path.isfile(options.prompt_file):
        raise ConfigurationError(f"--prompt-file {options.prompt_file} is no file; give one prompt a line, or .jsonl")


def _serve(leader: "Leader", options: Any, sampling: "Sampling") -> None:
    """Answer all prompts."""
    prompts = _prompts(options)
    made = _answered(leader, prompts, options, sampling)
    if options.speculative:
        drafted, accepted = sum(one.drafted for one in made), sum(one.accepted for one in made)
        say(f"drafts: {accepted} of {drafted} accepted ({accepted / max(drafted, 1):.1%})")
    if options.output:
        _write(options.output, prompts, made)


def _answered(leader: "Leader", prompts: list[str], options: Any, sampling: "Sampling") -> "Sequence[Generated]":
    if not prompts:
        raise ConfigurationError("no prompt; give --prompts, --prompt-file, or lines on the standard input")
    shown = [f"{prompt}\n" if options.chat_template else prompt for prompt in prompts]
    if len(prompts) == 1 and (options.stream or sys.stdout.isatty()) and leader.model.tokenizer is not None:
        say(shown[0], end="")
        encode = encoder(leader.model, options.chat_template)
        return [_answer_streaming(leader, prompts[0], encode, sampling, options.speculative)]
    made = _generated(leader, prompts, options, sampling)
    _show(shown, made)
    return made


def _generated(leader: "Leader", prompts: Sequence[str], options: Any, sampling: "Sampling") -> "list[Generated]":
    encode = encoder(leader.model, options.chat_template)
    asked = [encode(prompt) for prompt in prompts]
    return leader.generate(asked, sampling, options.max_batch_size, speculative=options.speculative)


def _prompts(options: Any) -> list[str]:
    from megatron_ext.plugins.tasks.task_files import lines_of, read_prompts

    if options.prompts is not None:
        return options.prompts
    if options.prompt_file is not None:
        return read_prompts(options.prompt_file)
    if sys.stdin.isatty():
        return []
    return lines_of(sys.stdin.read())


def _answer_streaming(
    leader: "Leader", prompt: str, encode: "Encoder", sampling: "Sampling", speculative: bool
) -> "Generated":
    """Write the answer to the only prompt token by token, and return it. The model has a tokenizer."""
    from megatron_ext.plugins.tasks.generation import Stream

    ids, tokenizer = encode(prompt), leader.model.tokenizer
    assert tokenizer is not None
    stream = Stream(tokenizer, ids, sampling.stop, lambda piece: say(piece, end=""))
    [made] = leader.generate([ids], sampling, 1, stream, speculative=speculative)
    stream.finish(_words(made))
    say()
    return made


def encoder(model: Any, template: str | None) -> "Encoder":
    """Return a function that encodes a prompt; without a tokenizer, prompts are ids already, such as "17 4 99".

    Args:
        model: the model.
        template: --chat-template, of which each prompt is then a user's message.
    Raises:
        ConfigurationError: there is no such template. The returned function raises it, too, for a prompt that is no
            text, or no ids, that the model can go on from.
    """
    from megatron_ext.plugins.tasks.tasks import unframed

    tokenizer = model.tokenizer
    chat = None
    if template is not None:
        if tokenizer is None:
            raise ConfigurationError("--chat-template needs the model's tokenizer; name it with --tokenizer-type")
        from megatron_ext.plugins.prepare.chat import chat_template

        chat = chat_template(template, tokenizer)

    def encode(prompt: str) -> list[int]:
        if chat is not None:
            text = chat.text([{"role": "user", "content": prompt}], add_generation_prompt=True)
            return unframed(tokenizer, text)  # it holds its special tokens already
        if tokenizer is not None and not prompt:
            return [tokenizer.eod]
        try:
            return [int(word) for word in prompt.split()] if tokenizer is None else tokenizer.encode(prompt)
        except ValueError as error:
            raise ConfigurationError(
                f"the prompt {prompt[:40]!r} cannot be encoded ({error}); without a text tokenizer give ids, as '5 17'"
            ) from None

    return encode


def _words(made: "Generated") -> str:
    return made.text if made.text is not None else " ".join(map(str, made.tokens))


def _show(prompts: Sequence[str], made: "Sequence[Generated]") -> None:
    """Print each prompt with its answer, under a line where there are several."""
    for number, (prompt, one) in enumerate(zip(prompts, made, strict=True), start=1):
        if len(prompts) > 1:
            say(f"--- prompt {number} of {len(prompts)}, {len(one.tokens)} tokens, ended by {one.reason}")
        say(prompt + ("" if one.text is not None else " ") + _words(one))


def _write(path: str, prompts: Sequence[str], made: "Sequence[Generated]") -> None:
    lines = [
        json.dumps({"prompt": prompt, "text": one.text, "tokens": one.tokens, "reason": one.reason})
        for prompt, one in zip(prompts, made, strict=True)
    ]
    with replacing(Path(path)) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
