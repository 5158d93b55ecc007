"""The configuration is kept as a YAML file, which is written with every checkpoint and read back by `--config`.

The file is flat: one line per option, named as its flag with underscores. The world size is left out, because it
belongs to the launch: the same file may be started on another number of ranks. So is a metrics file at its usual
place, so that a run with another `--save` does not write into the metrics of the first.
"""

import dataclasses
from typing import Any

import yaml

from megatron_ext.config.resolve import default_metrics_file
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.untrusted.text import ExcessiveError, TextError, read_file
from megatron_ext.untrusted.yaml_text import MOST_YAML, load_yaml


class ExcessiveFile(ConfigurationError):
    """Raised where the file is larger or deeper than any configuration: that is no accident."""


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML; resolving it again, with the same facts, gives an equal one."""
    left_out = {"world_size"}
    if config.checkpoint.save and config.logging.metrics_file == default_metrics_file(config.checkpoint.save):
        left_out.add("metrics_file")
    parts = [f"# Configuration of a run on {config.layout.world_size} ranks; pass it back with --config.\n"]
    for group in dataclasses.fields(Config):
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(getattr(config, group.name)).items()
            if name not in left_out and value is not None
        }
        parts.append(f"\n# {group.name}\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return "".join(parts)


def read_yaml(path: str, whose: str = "--config", keys: type = str, example: str = "num_layers: 4") -> dict[Any, Any]:
    """Return the names and values of a configuration file, as YAML gives them (plain data; no tag builds an object).

    Args:
        whose: whose file it is, for messages.
        keys: type of the names.
        example: a line of such a file, for messages.
    Raises:
        ConfigurationError: the file is missing, is no YAML, names a key twice, or is not a list of `name: value`.
        ExcessiveFile: it is larger, deeper or of more values than a configuration can be.
    """
    try:
        content = load_yaml(read_file(path, MOST_YAML, pipes=True).decode())
    except OSError as error:
        raise ConfigurationError(f"{whose} {path}: {error.strerror}; give the path of a YAML file") from None
    except ExcessiveError as error:
        raise ExcessiveFile(f"{whose} {path} is not read: {error}; give lines of the form `{example}`") from None
    except (TextError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{whose} {path} is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(type(key) is keys for key in content):
        raise ConfigurationError(f"{whose} {path}: expected lines of the form `{example}`")
    return content
