"""Every kind of error has its exit code."""

from megatron_ext import errors
from megatron_ext.errors import ConfigurationError, TrainingError

CODES = {
    "TrainingError": 1,
    "ConfigurationError": 64,
    "PluginError": 64,
    "DataError": 65,
    "NumericError": 70,
    "MemoryExhaustedError": 71,
    "StorageError": 74,
    "FolderRemovedError": 74,
    "SaveFailedError": 74,
    "StoppedBySignal": 75,
    "StoppedBefore": 75,
    "PeerLostError": 76,
}


def test_every_error_has_its_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TrainingError)]
    assert {kind.__name__: kind.exit_code for kind in kinds} == CODES


def test_every_problem_is_a_line() -> None:
    two = ConfigurationError(["--a 1: too small", "--b 2: too large"])
    assert (str(two), two.problems) == ("--a 1: too small\n--b 2: too large", ["--a 1: too small", "--b 2: too large"])
    assert ConfigurationError("--a 1: too small").problems == ["--a 1: too small"]
