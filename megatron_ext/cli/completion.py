"""Prints what completes `megatron-ext` in a shell: its commands, the flags of each, and the values of their choices.

    eval "$(megatron-ext completion bash)"      # in ~/.bashrc
    eval "$(megatron-ext completion zsh)"       # in ~/.zshrc

Flags come from the program itself, the first time that a command's are asked for in a shell; file names complete as
they always do.
"""

import contextlib
import io
import re

from megatron_ext.commandline import ToolParser
from megatron_ext.config.parse.options import options_by_flag
from megatron_ext.terminal import say

_BASH = r"""
declare -A _megatron_ext_known
_megatron_ext() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}"
    local words key=commands
    COMPREPLY=()
    if [ "$COMP_CWORD" -gt 1 ]; then
        key="$command"
        case "$word" in -*) ;; *)
            case "$before" in --*) key="$command $before" ;; *) return ;; esac ;;
        esac
    fi
    if [ -z "${_megatron_ext_known[$key]+known}" ]; then
        _megatron_ext_known[$key]="$(megatron-ext completion words $key 2>/dev/null)"
    fi
    words="${_megatron_ext_known[$key]}"
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -o bashdefault -F _megatron_ext megatron-ext
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit" + _BASH.replace(
    "declare -A", "typeset -A"
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Print what completes megatron-ext in a shell.", __doc__)
    parser.add_argument("shell", choices=("bash", "zsh", "words"), help="words: what the other two ask for")
    parser.add_argument("command", nargs="?", default="commands", help="of words: whose flags")
    options, rest = parser.parse_known_args(argv)
    if options.shell == "words":
        say(" ".join(words(options.command, rest[0] if rest else None)))
    else:
        say(_BASH if options.shell == "bash" else _ZSH)
    return 0


def words(command: str, flag: str | None = None) -> list[str]:
    """Return what may follow: the commands, the flags of one of them, or the choices of one of its flags."""
    from megatron_ext.cli.main import COMMANDS

    if command not in COMMANDS:
        return list(COMMANDS)
    if command == "pretrain":
        return _words_of_training(flag)
    text = _help_of(command)
    if flag is None:
        return list(dict.fromkeys(_FLAG.findall(text)))
    choices = re.search(re.escape(flag) + r" \{([^}]*)\}", text)
    return choices.group(1).split(",") if choices else []


def _words_of_training(flag: str | None) -> list[str]:
    known = options_by_flag()
    if flag is None:
        return ["--config", "--dry-run", "--help", "--version", *known]
    return [str(choice) for choice in known[flag].choices or ()] if flag in known else []


def _help_of(command: str) -> str:
    """Return the text of a tool's --help."""
    from megatron_ext.cli.main import command as function

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        function(command)(["--help"])
    return text.getvalue()
