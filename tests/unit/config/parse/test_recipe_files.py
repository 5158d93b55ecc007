"""--recipe reads a recipe below --config and the flags; for --dry-run it brings its devices and synthetic tokens."""

import pytest

from megatron_ext.cli.recipes import main
from megatron_ext.config.parse.arguments import read
from megatron_ext.config.parse.recipe_files import find_recipe, heading, recipe_paths
from megatron_ext.errors import ConfigurationError


def test_flags_win_over_a_recipe() -> None:
    typed = read(["--recipe", "llama3.1-8b", "--num-layers", "2", "--data-path", "data/a"])
    assert (typed.values["num_layers"], typed.values["hidden_size"]) == (2, 4096)
    assert typed.problems == ()
    assert "world_size" not in typed.values
    assert "mock_data" not in typed.values


@pytest.mark.parametrize(
    ("more", "values", "device", "said"),
    [
        ("", {"world_size": 8, "mock_data": True}, "h100", "synthetic tokens on 8 x H100, which it is made for"),
        ("--world-size 64", {"world_size": 64, "mock_data": True}, None, "judged with synthetic tokens"),
        ("--world-size 64 --mock-data", {"world_size": 64}, None, None),
        ("--data-path data/a --device-name h200", {"world_size": 8}, "h200", "8 x H100, which it is made for"),
    ],
)
def test_a_dry_run_is_judged_on_the_devices_of_the_recipe(
    more: str, values: dict[str, object], device: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    typed = read(["--recipe", "llama3.1-8b", "--dry-run", *more.split()])
    assert values.items() <= typed.values.items()
    assert typed.device_name == device
    assert [(said or "nothing") in warning for warning in typed.warnings] == ([] if said is None else [True])


def test_a_misspelled_recipe_is_told() -> None:
    [problem] = read(["--recipe", "llama3.1-9b"]).problems
    assert problem == "--recipe llama3.1-9b: there is no such recipe; did you mean llama3.1-8b?"
    with pytest.raises(ConfigurationError, match="`megatron-ext recipes` lists them"):
        find_recipe("xyz")


def test_the_recipes_are_listed_by_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(recipe_paths())
    main(["mixtral"])
    assert capsys.readouterr().out.startswith(f"mixtral-8x7b  {heading(find_recipe('mixtral-8x7b')).devices[0]}")
    with pytest.raises(ConfigurationError, match="no recipe has to do with 'xyzzy'"):
        main(["xyzzy"])
