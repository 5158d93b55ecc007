"""Ranks of one machine are found, and use its loopback interface."""

import pytest

from megatron_ext.parallel import loopback


@pytest.mark.parametrize(
    ("environment", "here"),
    [
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "node1"}, False),
        ({"MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "WORLD_SIZE": "2"}, False),
        ({"MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, True),
        ({"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, False),
    ],
)
def test_which_ranks_are_on_one_machine(environment: dict[str, str], here: bool) -> None:
    assert loopback.is_one_machine(environment) == here


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, False),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, True),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "::1"}, True),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, False),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, False),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, False),
    ],
)
def test_one_machine(variables: dict[str, str], expected: bool) -> None:
    assert loopback.is_one_machine(variables) == expected
    loopback.keep_to_this_machine(variables)
    assert ("GLOO_SOCKET_IFNAME" in variables, "NCCL_SOCKET_IFNAME" in variables) == (expected, expected)
    assert loopback.is_one_machine(variables) == expected


def test_an_interface_that_was_named_stays() -> None:
    variables = {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "eth7"}
    loopback.keep_to_this_machine(variables)
    assert variables["GLOO_SOCKET_IFNAME"] == "eth7"
