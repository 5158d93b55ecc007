"""Each variable of a launcher is read for what it says and for nothing else: every number here is another one."""

import pytest

from megatron_ext import environment
from megatron_ext.environment import check_launch, launch_warning, take_ranks_of_mpi
from megatron_ext.errors import ConfigurationError

LAUNCH = {
    "RANK": "7",
    "WORLD_SIZE": "11",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "5",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "9",
}
READ = ("rank", "world_size", "local_rank", "local_world_size", "attempt", "attempts_left")
ALONE = (0, 1, 0, 1, 0, 0)


def _read() -> tuple[int, ...]:
    return tuple(getattr(environment, name)() for name in READ)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, (7, 11, 3, 5, 2, 7)),
        (dict.fromkeys(LAUNCH), ALONE),
        (dict.fromkeys(LAUNCH, ""), ALONE),
        (dict.fromkeys(LAUNCH, "x"), ALONE),
        (dict.fromkeys(LAUNCH, "-4"), ALONE),
        ({"RANK": None}, (0, 11, 3, 5, 2, 7)),
        ({"RANK": "0"}, (0, 11, 3, 5, 2, 7)),
        ({"WORLD_SIZE": None}, (7, 1, 3, 5, 2, 7)),
        ({"LOCAL_RANK": None}, (7, 11, 0, 5, 2, 7)),
        ({"LOCAL_WORLD_SIZE": None}, (7, 11, 3, 4, 2, 7)),
        ({"LOCAL_WORLD_SIZE": "4"}, (7, 11, 3, 4, 2, 7)),
        ({"TORCHELASTIC_RESTART_COUNT": None}, (7, 11, 3, 5, 0, 9)),
        ({"TORCHELASTIC_RESTART_COUNT": "9"}, (7, 11, 3, 5, 9, 0)),
        ({"TORCHELASTIC_RESTART_COUNT": "10"}, (7, 11, 3, 5, 10, 0)),
        ({"TORCHELASTIC_MAX_RESTARTS": None}, (7, 11, 3, 5, 2, 0)),
    ],
)
def test_what_is_read(changed: dict[str, str | None], found: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (LAUNCH | changed).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert _read() == found


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("RANK", 0),
        ("LOCAL_RANK", 0),
        ("WORLD_SIZE", 1),
        ("LOCAL_WORLD_SIZE", 1),
        ("MASTER_PORT", 0),
        ("TORCHELASTIC_RESTART_COUNT", 0),
    ],
)
def test_each_variable_has_a_range(name: str, least: int) -> None:
    check_launch({name: str(least)})
    check_launch({"WORLD_SIZE": str(2**20), name: str(2**20 - name.endswith("RANK"))})
    for text in (str(least - 1), str(2**20 + 1), "", "x", "1.5", "1" * 21):
        with pytest.raises(ConfigurationError) as caught:
            check_launch({name: text})
        [problem] = caught.value.problems
        assert problem.startswith(f"${name} is {text!r}, not an integer from {least}; ")


@pytest.mark.parametrize(("rank", "size"), [("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")])
def test_a_rank_is_below_its_own_number_of_ranks(rank: str, size: str) -> None:
    """A local rank is told by the local number: on a machine of two, rank 2 of the four of the launch is none."""
    whole = {"RANK": "0", "WORLD_SIZE": "9", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "5"}
    check_launch(whole | {rank: str(int(whole[size]) - 1)})
    for number in (whole[size], str(int(whole[size]) + 1)):
        with pytest.raises(ConfigurationError) as caught:
            check_launch(whole | {rank: number})
        assert caught.value.problems == [
            f"${rank} is {number}, but ${size} is {whole[size]}: ranks count from 0; set both as torchrun does"
        ]


MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


@pytest.mark.parametrize("names", MPI, ids=lambda names: names[0].partition("_")[0])
def test_ranks_of_each_other_launcher(names: tuple[str, ...]) -> None:
    given: dict[str, str] = dict(zip(names, ("7", "11", "3", "5"), strict=True))
    taken = {"RANK": "7", "WORLD_SIZE": "11", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "5", "MASTER_PORT": "29500"}
    found = dict(given)
    take_ranks_of_mpi(found)
    assert found == given | taken
    with pytest.raises(ConfigurationError, match=rf"\${names[0]} says that this is rank 7 of 11, but \$MASTER_ADDR is"):
        check_launch(found)
    check_launch(found | {"MASTER_ADDR": "node1"})
    here = dict(given) | {names[3]: "11"}
    found = dict(here)
    take_ranks_of_mpi(found)
    assert found == here | taken | {"LOCAL_WORLD_SIZE": "11", "MASTER_ADDR": "127.0.0.1"}, "all are on one machine"
    for kept in ({"RANK": "1"}, {names[1]: "1"}, {names[1]: ""}, {names[0]: ""}):
        alone = given | kept
        found = dict(alone)
        take_ranks_of_mpi(found)
        assert found == alone, "torchrun's own variables count, and one process needs none"
    said = given | {"MASTER_ADDR": "node1", "MASTER_PORT": "4000"}
    found = dict(said)
    take_ranks_of_mpi(found)
    assert found == said | taken | {"MASTER_PORT": "4000"}


@pytest.mark.parametrize(("node", "here"), [("0", "8"), ("1", "8"), ("2", "4"), ("3", None), ("x", None)])
def test_slurm_counts_for_each_node(node: str, here: str | None) -> None:
    values = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "20", "SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}
    found = values | {"SLURM_NODEID": node}
    take_ranks_of_mpi(found)
    assert found.get("LOCAL_WORLD_SIZE") == here


def test_deepspeeds_launcher_has_another_name_for_the_ranks_of_a_machine() -> None:
    """Accelerate's sets torchrun's own variables."""
    launched = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    for more, here in (({"LOCAL_SIZE": "4"}, "4"), ({"LOCAL_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "2"), ({}, None)):
        found = launched | more
        take_ranks_of_mpi(found)
        assert found.get("LOCAL_WORLD_SIZE") == here
        check_launch(found)


ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}
"""Set by `accelerate launch --cpu`; where it is asked for several processes, MASTER_ADDR as well."""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (ACCELERATE | {"MASTER_ADDR": "127.0.0.1"}, "accelerate launch was asked for several processes"),
        ({"RANK": "1"}, r"\$RANK is 1"),
        ({"LOCAL_RANK": "1"}, r"\$LOCAL_RANK is 1"),
        ({"LOCAL_WORLD_SIZE": "2"}, r"\$LOCAL_WORLD_SIZE is 2"),
        *(({names[1]: "2"}, rf"\${names[1]} is 2") for names in MPI),
    ],
)
def test_one_of_several_processes_does_not_train_alone(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{says}.*, but .WORLD_SIZE is not set.*torchrun"):
        check_launch(given)
    check_launch(given | {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0"})


@pytest.mark.parametrize(
    "given",
    [{}, ACCELERATE, {"MASTER_ADDR": "node0"}, {"RANK": "0"}, {"LOCAL_WORLD_SIZE": "1"}, {"SLURM_STEP_NUM_TASKS": "1"}],
)
def test_one_process_trains_alone(given: dict[str, str]) -> None:
    check_launch(given)


@pytest.mark.parametrize("names", MPI)
def test_each_process_of_an_outer_launcher_may_be_a_run_of_its_own(names: tuple[str, ...]) -> None:
    """As where srun starts torchrun once on each of two machines, and no rendezvous is named."""
    outer = {names[0]: "1", names[1]: "2"}
    warning = launch_warning(outer | {"WORLD_SIZE": "1"})
    assert warning is not None
    assert warning.startswith(f"${names[1]} is 2, but this run has 1 rank ($WORLD_SIZE)")
    assert launch_warning(outer | {"WORLD_SIZE": "16"}) is None
    assert launch_warning({"WORLD_SIZE": "1"}) is None
