"""Imports a package of a metrics service, which is optional."""

import importlib
from typing import Any

from megatron_ext.errors import ConfigurationError


def imported(package: str, flag: str, value: str) -> Any:
    """Return the module `package`, which `flag` needs.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"{flag} {value} needs the {package} package, which is not installed: pip install {package}, or leave the "
            "flag out."
        ) from error
