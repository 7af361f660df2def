"""Every command is documented, helps, and starts quickly."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from expstore_cli.main import COMMANDS, main
from expstore_cli.reference import reference

ROOT = Path(__file__).parents[2]


def command_named(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


def test_the_reference_is_up_to_date() -> None:
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")

    assert written == reference(), "run: python -m expstore_cli.reference > docs/cli.md"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_names_every_command_and_option(name: str) -> None:
    section = reference().split(f"## expstore {name}\n")[1].split("\n## ")[0]

    for parameter in command_named(name).params:
        for spelling in parameter.opts:
            assert spelling.upper() in section or spelling in section


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    for parameter in command_named(name).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.opts
            assert parameter.help.endswith("."), parameter.help


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_itself(name: str) -> None:
    help_text = command_named(name).help or ""

    assert help_text.splitlines()[0] == COMMANDS[name][1]


@pytest.mark.parametrize("name", ["", *COMMANDS])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_ends_with_an_example_that_calls_the_command(name: str, option: str) -> None:
    result = CliRunner().invoke(main, [*name.split(), option])

    assert result.exit_code == 0
    *_, head, example = result.output.rstrip().partition("Example")
    assert head
    assert f"  expstore {name}".rstrip() in example


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_use_options_that_exist(name: str) -> None:
    command = command_named(name)
    options = {spelling for parameter in command.params for spelling in parameter.opts}

    words = (command.epilog or "").split()

    assert {word for word in words if word.startswith("--")} <= options


def test_the_version_is_that_of_the_package() -> None:
    import expstore

    result = CliRunner().invoke(main, ["--version"], prog_name="expstore")

    assert result.output == f"expstore {expstore.__version__}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["inspekt", "a.exp"])

    assert result.exit_code == 2
    assert "No such command 'inspekt'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["-h"], ["torch", "numba", "gymnasium", "numpy", "rich", "zarr"]),
        (["--version"], ["torch", "numba", "gymnasium", "numpy", "rich", "zarr"]),
        (["ingest", "-h"], ["torch", "numba", "gymnasium", "zarr"]),
        (["inspect", "STORE"], ["torch", "numba", "gymnasium", "zarr"]),
        (["verify", "STORE"], ["torch", "numba", "gymnasium", "zarr"]),
        (["repair", "STORE"], ["torch", "numba", "gymnasium", "zarr"]),
        (["delete", "STORE", "0", "--yes"], ["torch", "numba", "gymnasium", "zarr"]),
        (["history", "STORE"], ["torch", "numba", "gymnasium", "zarr"]),
    ],
)
def test_a_command_loads_only_what_it_needs(
    tmp_path: Path, arguments: list[str], absent: list[str]
) -> None:
    import expstore

    with expstore.Writer(tmp_path / "a.exp") as writer:
        writer.append({"reward": [1.0]})
    code = (
        "import sys\n"
        "from expstore_cli.main import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        f"print('loaded:', sorted(set({absent!r}) & set(sys.modules)))"
    )

    run = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            *(str(tmp_path / "a.exp") if word == "STORE" else word for word in arguments),
        ],
        capture_output=True,
        text=True,
        check=True,
    )

    assert run.stdout.splitlines()[-1] == "loaded: []"
