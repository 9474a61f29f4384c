"""The configs of this repository load, build, and are what their names and headers say."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from tlm_jax.capacity import profile_from_config
from tlm_jax.capacity.budget import budget
from tlm_jax.config import load_config
from tlm_jax.errors import EXIT_COMPLETE, UserError
from tlm_jax.train.loop import train
from tlm_jax.train.setup import build

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TAPERED = {"440m": (440e6, 30e9), "760m": (760e6, 50e9), "1b3": (1.3e9, 100e9)}  # parameters and tokens of the paper
UNIFORM = "--config.profile.schedule=uniform"


def path_of(name: str, size: str = "") -> str:
    return str(CONFIGS / "tapered" / f"{name}.py") + (f":{size}" if size else "")


def test_every_config_loads():
    files = sorted(CONFIGS.rglob("*.py"))
    assert {file.stem for file in files} >= {"quickstart", *TAPERED}
    for file in files:
        profile_from_config(load_config(str(file)))


@pytest.mark.parametrize("name", TAPERED)
def test_parameters_tokens_and_recipe_are_those_of_the_paper(name: str):
    config, (parameters, tokens) = load_config(path_of(name)), TAPERED[name]
    assert profile_from_config(config).parameters == pytest.approx(parameters, rel=0.015)
    batch = config.train.global_batch_size * config.data.sequence_length
    assert (config.data.sequence_length, batch) == (4096, 2**19)
    assert 0 <= config.train.num_steps * batch - tokens < batch
    assert (config.train.optimizer, config.train.learning_rate, config.train.weight_decay) == ("adamw", 4e-4, 0.1)
    p = config.profile
    assert (p.schedule, p.start_ratio, p.end_ratio, p.multiple_of) == ("cosine", 1.5, 0.5, 16)


@pytest.mark.parametrize("size", ["", "tiny"])
@pytest.mark.parametrize("name", TAPERED)
def test_the_twin_has_the_same_budget(name: str, size: str):
    tapered, twin = (profile_from_config(load_config(path_of(name, size), changes)) for changes in ([], [UNIFORM]))
    assert budget(tapered, 4096) == budget(twin, 4096)
    assert len({layer.d_ff for layer in twin.layers}) == 1
    assert len({layer.d_ff for layer in tapered.layers}) == len(tapered.layers)


def test_the_headers_tell_the_truth():
    for name in TAPERED:
        config = load_config(path_of(name))
        profile = profile_from_config(config)
        header = " ".join(Path(path_of(name)).read_text().split('"""')[1].split())
        widths = re.search(r"from (\d+) to (\d+) in (\d+) layers, ([\d,]+)M parameters, ([\d.]+)B tokens", header)
        assert widths, name
        assert [int(n) for n in widths.groups()[:3]] == [profile.layers[0].d_ff, profile.layers[-1].d_ff, 24]
        assert int(widths[4].replace(",", "")) == round(profile.parameters / 1e6)
        tokens = config.train.num_steps * config.train.global_batch_size * config.data.sequence_length
        assert float(widths[5]) == round(tokens / 1e9, 1)
        flops = re.search(r"(\d\.\de\d\d) training FLOPs \(causal attention\)", header)
        assert flops
        assert float(flops[1]) == pytest.approx(tokens * profile.train_flops_per_token(4096), rel=0.01)
        for override in re.findall(r"--config\.\S+|`profile\.\S+`", header):
            key = override.strip("`").removeprefix("--config.")
            if key not in ("data.store=store",):
                profile_from_config(load_config(path_of(name), [f"--config.{key}"]))


@pytest.mark.parametrize("name", ["440m", "1b3"])
def test_widths_can_be_whole_tiles(name: str):
    profile = profile_from_config(load_config(path_of(name), ["--config.profile.multiple_of=256"]))
    assert all(layer.d_ff % 256 == 0 for layer in profile.layers)
    twin = profile_from_config(load_config(path_of(name), [UNIFORM]))
    assert budget(profile, 4096) == budget(twin, 4096)


@pytest.mark.parametrize("size", ["", "tiny"])
@pytest.mark.parametrize("name", TAPERED)
def test_it_builds_over_eight_devices(name: str, size: str, store: Path):
    """Shapes only: no array of it is ever allocated."""
    setup = build(load_config(path_of(name, size), [f"--config.data.store={store}"]))
    leaves = jax.tree.leaves(setup.abstract["params"])
    assert sum(leaf.size for leaf in leaves) == setup.profile.parameters
    assert setup.mesh.shape["fsdp"] == 8


@pytest.mark.slow
def test_the_small_size_trains(store: Path, tmp_path: Path):
    changes = [
        "profile.plateaus=2",
        "train.num_steps=3",
        "train.warmup_steps=1",
        "validation.num_windows=8",
        "log.peak_flops=1e12",
    ]
    changes = [f"--config.{change}" for change in (*changes, f"data.store={store}")]
    assert train(build(load_config(path_of("440m", "tiny"), changes)), tmp_path, "") == EXIT_COMPLETE


def test_another_size_is_told():
    with pytest.raises(UserError, match=r"440m.py:\d+: ValueError: the sizes are full and tiny, not 'big'"):
        load_config(path_of("440m", "big"))
    with pytest.raises(UserError, match=r"quickstart.py: TypeError: get_config"):
        load_config(str(CONFIGS / "quickstart.py") + ":tiny")
    with pytest.raises(UserError, match=r"nowhere.py: no such config file"):
        load_config("nowhere.py:tiny")
