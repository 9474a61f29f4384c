"""`tlm config` and the reference that it makes."""

from pathlib import Path

import pytest

from tlm_jax import cli, config_command
from tlm_jax.cli import main
from tlm_jax.config import default_config, keys

ROOT = Path(__file__).resolve().parents[1]


def test_the_reference_is_up_to_date(capsys):
    assert main(["config", "--markdown"]) == 0
    made = capsys.readouterr().out
    assert made == (ROOT / "docs" / "config.md").read_text(), "run: tlm config --markdown > docs/config.md"


def test_every_key_says_what_it_means():
    said = config_command.comments()
    silent = [key for key in keys(default_config()) if not said.get(key)]
    assert silent == []


def test_the_comments_are_read_from_above_and_from_the_end_of_the_line():
    said = config_command.comments()
    assert said["profile.d_ff"] == "mean MLP width over layers"
    assert said["profile.group_ratios"].startswith("three_group: d_ff of the early, middle and late third")
    assert said["profile.group_ratios"].endswith("late")
    assert said["profile.layers"].startswith("list: d_ff of each layer. file:")
    assert said["profile"] == "One layer's sizes, and how they vary with depth. The only source of widths."
    assert said["mesh"].startswith("axis sizes")


def test_the_markdown_has_every_key_once_in_the_order_of_the_code():
    rows = [line.split("`")[1] for line in config_command.markdown().splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(keys(default_config()))
    assert rows.index("name") < rows.index("profile.schedule") < rows.index("profile.d_ff") < rows.index("mesh.data")
    assert r"| `model.remat` | `'none'` | none \| " in config_command.markdown()


def test_values_of_a_config_file_and_overrides(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from tlm_jax.config import default_config\n"
        "def get_config():\n    c = default_config()\n    c.profile.d_ff = 640\n    return c\n"
    )
    assert main(["config", "profile.d_", f"--config={path}", "--config.profile.d_model=64"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:4] for line in lines] == [
        ["profile.d_model", "64", "[default", "768]"],
        ["profile.d_ff", "640", "[default", "2048]"],
    ]
    assert main(["config", f"--config={path}", "--config.profile.d_model=64", "profile.d_"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == lines
    assert main(["config", "profile.d_", f"--config={path}", "--config.profile.d_model=64", "more"]) == 2
    assert "unknown argument 'more'" in capsys.readouterr().err
    assert main(["config"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(list(keys(default_config())))


def test_a_word_is_looked_for_in_names_and_meanings(capsys):
    assert main(["config", "MOVING AVERAGE"]) == 0
    found = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert found == ["train.ema_decay", "validation.weights"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["lerning"],
            "tlm config: error: no key and no meaning contains 'lerning'; the nearest key is train.learning_rate",
        ),
        (["--config.seed=1"], "unknown argument '--config.seed=1'"),
        (["--markdown", "seed"], "unknown argument 'seed'"),
        (["--markdown", "--config=f.py"], "unknown argument '--config'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, says, capsys):
    assert main(["config", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_an_interrupt_while_the_command_is_imported(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert main(["config"]) == 130
    assert capsys.readouterr().err == "tlm config: interrupted\n"


@pytest.mark.parametrize("command", ["train"])
def test_help_of_the_commands_that_take_a_config_points_at_it(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "`tlm config` lists them all" in " ".join(capsys.readouterr().out.split())
