"""`tlm profile` as its users call it."""

import builtins
import json
import subprocess
import sys

import pytest

from tlm_jax.cli import main

CONFIG = """
from tlm_jax.config import default_config

def get_config():
    c = default_config()
    c.profile.schedule = "cosine"
    c.profile.num_layers, c.profile.d_model, c.profile.d_ff = 6, 256, 640
    c.profile.num_heads, c.profile.num_kv_heads = 4, 4
    c.model.vocab_size, c.data.sequence_length = 4096, 256
    return c
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return str(path)


def test_json_alone_with_every_key(config, capsys):
    assert main(["profile", f"--config={config}", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [layer["d_ff"] for layer in values["layers"]] == [960, 896, 736, 544, 384, 320]
    assert values["layers"][0] == {
        "d_model": 256,
        "d_ff": 960,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 64,
        "mixer": "attention",
        "num_experts": 0,
        "experts_per_token": 0,
        "expert_d_ff": 0,
        "padded_experts": 0,
        "mlp": "swiglu",
        "window": 0,
        "qk_norm": False,
    }
    attention, mlp, head = 4 * 256 * 256, 3 * 256 * 640, 256 * 4096
    forward = 6 * (2 * (attention + mlp) + 2 * 256 * 256) + 2 * head
    assert values["d_ff_sum"] == 3840
    assert values["non_embedding_parameters"] == 6 * (attention + mlp + 2 * 256) + 256
    assert values["parameters"] == values["non_embedding_parameters"] + head
    assert values["forward_flops_per_token"] == forward
    assert values["train_flops_per_token"] == 3 * forward
    assert values["forward_flops_per_token_full_attention"] == forward + 6 * 2 * 256 * 256
    assert values["train_flops_per_token_full_attention"] == 3 * (forward + 6 * 2 * 256 * 256)
    assert values["kv_cache_bytes_per_token"] == 6 * 2 * 256 * 2
    assert values["kv_cache_bytes"] == 256 * 6 * 2 * 256 * 2
    assert (values["vocab_size"], values["d_embedding"], values["tied_embeddings"]) == (4096, 256, True)
    assert values["sequence_length"] == 256


def test_its_json_is_a_config_again(config, capsys, tmp_path):
    main(["profile", f"--config={config}", "--json"])
    first = capsys.readouterr().out
    (tmp_path / "p.json").write_text(first)
    from_file = [f"--config.profile.layers={tmp_path / 'p.json'}", "--config.profile.schedule=file"]
    assert main(["profile", f"--config={config}", "--json", *from_file]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(first)


def test_table_and_overrides(config, capsys):
    assert main(["profile", f"--config={config}", "--config.profile.plateaus=3"]) == 0
    out = capsys.readouterr().out
    assert "6 layers in 3 runs of equal shape" in out
    rows = [line.split() for line in out.splitlines() if "█" in line]
    assert [row[2] for row in rows] == ["960", "960", "640", "640", "320", "320"]
    assert [len(row[-1]) for row in rows] == [32, 32, 22, 22, 11, 11]
    assert "5,573,888" in out


def test_the_table_shows_what_is_not_usual(config, capsys):
    assert main(["profile", f"--config={config}", "--config.profile.windows=64,0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(line.split() for line in lines if line.startswith("layer"))
    assert "window" in header
    assert not {"mlp", "qk_norm"} & set(header)
    column = header.index("window")
    assert [line.split()[column] for line in lines if "█" in line] == ["64", "0"] * 3
    assert main(["profile", f"--config={config}", "--compare=:profile.mlp=gelu"]) == 0
    out = capsys.readouterr().out
    assert "A mlp  B mlp" in out
    assert "window" not in out


@pytest.mark.parametrize("form", ["{config}:profile.schedule=uniform", ":profile.schedule=uniform", "{other}"])
def test_compare_with_a_file_or_overrides(form, config, capsys, tmp_path):
    other = tmp_path / "uniform.py"
    other.write_text(CONFIG.replace('"cosine"', '"uniform"'))
    compare = form.format(config=config, other=other)
    assert main(["profile", f"--config={config}", f"--compare={compare}", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert set(values) == {"a", "b", "difference"}
    assert [layer["d_ff"] for layer in values["b"]["layers"]] == [640] * 6
    assert values["difference"]["d_ff"] == [-320, -256, -96, 96, 256, 320]
    assert values["difference"]["d_model"] == [0] * 6
    assert {value for value in values["difference"].values() if not isinstance(value, list)} == {0}


def test_compare_shows_both_and_what_differs(config, capsys):
    compare = "--compare=:profile.schedule=uniform:profile.num_layers=7:profile.num_kv_heads=2"
    assert main(["profile", f"--config={config}", compare]) == 0
    out = capsys.readouterr().out
    header = next(line for line in out.splitlines() if line.startswith("layer"))
    assert "A num_kv_heads  B num_kv_heads" in header
    assert "num_heads  " not in header.replace("A num_kv_heads  B num_kv_heads", "")
    assert next(line.split() for line in out.splitlines() if line.startswith("    0"))[1:6] == [
        "960",
        "640",
        "4",
        "2",
        "-320",
    ]
    assert next(line.split() for line in out.splitlines() if line.startswith("    6"))[1:5] == ["-", "640", "-", "2"]


def test_overrides_alone_apply_on_top_of_the_first_config(config, capsys):
    argv = [f"--config={config}", "--config.profile.d_ff=1280", "--compare=:profile.schedule=uniform", "--json"]
    assert main(["profile", *argv]) == 0
    assert json.loads(capsys.readouterr().out)["difference"]["d_ff_sum"] == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--config.profile.d_ff=1000"], "config.profile.d_ff"),
        (["--config.profile.schedul=cosine"], "the nearest key is config.profile.schedule"),
        (["--config.data.sequence_length=0"], "config.data.sequence_length: must be a positive integer"),
        (["--compare=:profile.d_ff=1000"], "--compare=:profile.d_ff=1000: config.profile.d_ff"),
        (["--compare=nowhere.py"], "nowhere.py: no such config file"),
        (["--compare=:profile.d_f=1"], "unknown key config.profile.d_f"),
        (["--plot=widths.bmp"], "end the name in .png, .svg, .pdf"),
        (["surplus"], "unknown argument 'surplus'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, says, config, capsys):
    assert main(["profile", f"--config={config}", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_plot_writes_the_kind_its_suffix_says(config, tmp_path):
    pytest.importorskip("matplotlib")
    compare = "--compare=:profile.schedule=uniform"
    for name, magic in (("w.png", b"\x89PNG"), ("w.svg", b"<?xml")):
        assert main(["profile", f"--config={config}", compare, f"--plot={tmp_path / name}"]) == 0
        assert (tmp_path / name).read_bytes().startswith(magic)
    assert main(["profile", f"--config={config}", f"--plot={tmp_path}/none/w.png"]) == 2


def test_plot_without_matplotlib_says_what_to_install(config, capsys, monkeypatch):
    real = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert main(["profile", f"--config={config}", "--plot=w.png"]) == 2
    assert 'pip install "tlm_jax[report]"' in capsys.readouterr().err


def test_a_terminal_without_block_characters_gets_plain_ones(config):
    command = [sys.executable, "-m", "tlm_jax", "profile", f"--config={config}"]
    done = subprocess.run(command, capture_output=True, env={"PYTHONIOENCODING": "ascii"}, check=True)
    assert b"#" * 32 in done.stdout


def test_neither_jax_nor_matplotlib_is_imported(config):
    code = (
        "import sys; from tlm_jax.cli import main; "
        f"assert main(['profile', '--config={config}', '--compare=:profile.schedule=uniform']) == 0; "
        "found = {'jax', 'jaxlib', 'flax', 'matplotlib'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


X_SHAPED = ("--config.profile.width_schedule=x", "--config.profile.width_multiple_of=16")


def test_widths_that_vary_are_drawn_beside_those_of_mlps(config, capsys):
    assert main(["profile", f"--config={config}", "--config.profile.schedule=uniform", *X_SHAPED]) == 0
    out = capsys.readouterr().out
    header, *rows = [line.split() for line in out.splitlines() if line.startswith(("layer ", "    "))][:7]
    assert header[-4:] == ["d_model", "drawn", "d_ff", "drawn"]
    widths = [int(row[1]) for row in rows]
    halves = [2 * row[-2].count("█") + row[-2].count("▌") for row in rows]
    assert halves == [round(2 * 16 * width / max(widths)) for width in widths]
    assert widths.index(min(widths)) == 3
    totals = {line[:46].strip(): line.split()[-1] for line in out.splitlines() if line}
    assert totals["sum of d_model"] == f"{sum(widths):,}"
    stored, effective = (int(totals[key].replace(",", "")) for key in ("parameters", "parameters with an effect"))
    wide = widths[0] - 256
    assert stored - effective == 3 * wide * widths[0] + wide * int(rows[-1][2])


def test_an_x_beside_its_twin_and_beside_its_taper(config, capsys):
    plain = "--config.profile.schedule=uniform"
    assert main(["profile", f"--config={config}", plain, *X_SHAPED, "--compare=:profile.width_schedule=uniform"]) == 0
    out = capsys.readouterr().out
    header, first = (next(line.split() for line in out.splitlines() if line.startswith(s)) for s in ("layer", "    0"))
    assert header[1:5] == ["A", "d_model", "B", "d_model"]
    assert first[2] == "256"
    assert int(first[1]) > 256
    assert f"{256 - int(first[1])}" in first
    assert "parameters with an effect" in out
    assert main(["profile", f"--config={config}", plain, *X_SHAPED, "--compare=:profile.schedule=cosine"]) == 0
    out = capsys.readouterr().out
    assert "A d_ff  B d_ff" in out
    for total in ("parameters with an effect", "training FLOPs per token, causal", "KV cache bytes per token"):
        assert next(line for line in out.splitlines() if line.startswith(total)).endswith("equal")


def test_experts_are_shown_and_drawn(tmp_path, capsys):
    experts = [f"--config.profile.{key}" for key in ("num_experts=4", "experts_per_token=2", "expert_d_ff=128")]
    plain = "--config.profile.schedule=uniform"
    path = tmp_path / "experts.py"
    path.write_text(CONFIG.replace(", c.profile.d_ff = 6, 256, 640", " = 6, 256"))
    arguments = ["profile", f"--config={path}", plain, *experts, "--config.profile.padded_experts=1"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    header = next(line for line in out.splitlines() if line.startswith("layer"))
    assert header.split()[6:10] == ["num_experts", "experts_per_token", "expert_d_ff", "padded_experts"]
    assert header.endswith("expert_d_ff drawn")
    assert "parameters active for a token" in out
    assert f"{6 * 3 * 256 * 128:,}" in next(line for line in out.splitlines() if "padded experts, beside" in line)
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["parameters"] - values["active_parameters"] == 6 * 2 * 3 * 256 * 128
    assert values["padded_parameters"] == 6 * 3 * 256 * 128


def test_a_plain_model_shows_none_of_that(config, capsys):
    assert main(["profile", f"--config={config}"]) == 0
    out = capsys.readouterr().out
    assert not any(text in out for text in ("effect", "active", "padded", "sum of d_model", "d_model drawn", "experts"))


def test_varying_widths_are_plotted_in_two_panels(config, tmp_path):
    pytest.importorskip("matplotlib")
    for name, keys in (("one", ()), ("two", X_SHAPED)):
        plot = [f"--plot={tmp_path / name}.svg", "--config.profile.schedule=uniform", *keys]
        assert main(["profile", f"--config={config}", *plot]) == 0
    texts = [(tmp_path / f"{name}.svg").read_text() for name in ("one", "two")]
    heights = [float(text.split('height="')[1].split("pt")[0]) for text in texts]
    assert heights[1] == pytest.approx(2 * heights[0])
