"""The ×-shaped configs: recipe, headers, that they build; what cannot run is told before anything is made."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from tlm_jax.capacity import profile_from_config
from tlm_jax.cli import main
from tlm_jax.config import load_config
from tlm_jax.errors import EXIT_BAD_INPUT, EXIT_COMPLETE, UserError
from tlm_jax.model.initial import deviations, embedding_deviation
from tlm_jax.model.settings import settings_from_config
from tlm_jax.train.loop import train
from tlm_jax.train.schedules import learning_rate_schedule
from tlm_jax.train.setup import build

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "x_shaped"
SIZES = ("200m", "500m", "1b", "2b", "moe_3b")
UNIFORM = "--config.profile.width_schedule=uniform"


def path_of(size: str, variant: str = "paper") -> str:
    return f"{CONFIGS / size}.py:{variant}"


@pytest.mark.parametrize(
    ("size", "peak", "final", "billions"),
    [
        ("200m", 4.68e-3, 1.12e-3, 10.0),
        ("500m", 5.57e-3, 1.33e-3, 25.0),
        ("1b", 7.53e-3, 1.80e-3, 50.0),
        ("2b", 9.90e-3, 2.37e-3, 104.9),
        ("moe_3b", 9.90e-3, 2.37e-3, 104.9),
    ],
)
def test_learning_rates_and_tokens_are_those_of_the_paper(size: str, peak: float, final: float, billions: float):
    config = load_config(path_of(size))
    rate = learning_rate_schedule(config)
    warmup, steps = config.train.warmup_steps, config.train.num_steps
    assert float(rate(warmup - 1)) == pytest.approx(peak, rel=2e-3)
    assert float(rate(warmup - 1)) == max(float(rate(n)) for n in (0, warmup - 2, warmup - 1, warmup, steps - 1))
    assert float(rate(steps - 1)) == pytest.approx(final, rel=4e-3)
    tokens = config.train.global_batch_size * config.data.sequence_length
    assert tokens == 524288 * {"200m": 1, "500m": 2, "1b": 4}.get(size, 8)
    assert round(tokens * steps / 1e9, 1) == billions


@pytest.mark.parametrize("size", SIZES)
def test_multipliers_and_initialisation_are_those_of_the_paper(size: str):
    config = load_config(path_of(size))
    m, profile = config.model, profile_from_config(config)
    settings = settings_from_config(config, "cpu")
    assert (m.embedding_multiplier, m.residual_multiplier, m.logits_multiplier) == (12, 0.22, 0.125)
    assert (m.attention_scale, m.tied_embeddings, m.norm_epsilon, m.rope_theta) == ("inverse", False, 1e-5, 10000)
    assert embedding_deviation(settings, profile) == 0.1
    for layer in profile.layers:
        base = 0.1 / 8**0.5 * (profile.d_embedding / layer.d_model) ** 0.5
        added = base / (2 * len(profile.layers)) ** 0.5
        assert deviations(layer, settings, profile) == pytest.approx((base, added, added))
    rates = {g["match"]: g["learning_rate_multiplier"] for g in config.train.groups}
    assert [rate for match, rate in rates.items() if re.search(match, "layers.attention.wq")] == [1 / 8]
    assert not any(re.search(match, name) for match in rates for name in ("embedding", "head", "final_norm.scale"))


@pytest.mark.parametrize("size", SIZES)
def test_the_headers_tell_the_truth(size: str):
    configs = load_config(path_of(size)), load_config(path_of(size), [UNIFORM])
    profiles = [profile_from_config(config) for config in configs]
    header = " ".join((CONFIGS / f"{size}.py").read_text().split('"""')[1].split())
    ends = re.search(r"d_model from (\d+) down to (\d+) and up again in (\d+) layers", header)
    widths = [layer.d_model for layer in profiles[0].layers]
    assert ends
    assert [int(number) for number in ends.groups()] == [widths[0], min(widths), len(widths)]
    counts = re.search(r"Parameters: (.+)M stored, of which (.+)M have an effect .* twin has ([\d.,]+)M\.", header)
    assert counts
    found = [profiles[0].parameters, profiles[0].effective_parameters, profiles[1].parameters]
    assert list(counts.groups()) == [f"{count / 1e6:,.1f}" for count in found]
    flops = re.search(r"(\S+) training FLOPs \(causal attention\), about (\d+) hours .* the twin (\S+e\d+)\.", header)
    assert flops
    tokens = [c.train.num_steps * c.train.global_batch_size * c.data.sequence_length for c in configs]
    x, uniform = (p.train_flops_per_token(4096) * n for p, n in zip(profiles, tokens, strict=True))
    assert [float(flops[1]), float(flops[3])] == pytest.approx([x, uniform], rel=5e-3)
    assert int(flops[2]) == round(x / (0.4 * 989e12 * 3600))
    smaller = re.search(r"cache is ([\d.]+) % smaller", header)
    assert smaller
    caches = [p.kv_cache_bytes_per_token() for p in profiles]
    assert smaller[1] == f"{100 * (1 - caches[0] / caches[1]):.1f}"


@pytest.mark.parametrize("variant", ["paper", "hardware", "tiny"])
def test_what_the_model_cannot_run_is_one_line_before_anything_is_made(
    variant: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = f"--config={path_of('moe_3b', variant)}"
    assert main(["train", config, f"--workdir={tmp_path / 'run'}", f"--config.data.store={store}"]) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "the model cannot run layers of experts yet" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("variant", ["paper", "hardware", "tiny"])
@pytest.mark.parametrize("size", SIZES[:-1])
def test_the_models_and_their_uniform_twins_build(size: str, variant: str, store: Path):
    """Shapes only: no array of them is ever allocated."""
    for changes in ([], [UNIFORM]):
        setup = build(load_config(path_of(size, variant), [*changes, f"--config.data.store={store}"]))
        assert sum(leaf.size for leaf in jax.tree.leaves(setup.abstract["params"])) == setup.profile.parameters


@pytest.mark.slow
def test_the_small_one_trains(store: Path, tmp_path: Path):
    changes = ("train.num_steps=3", "train.warmup_steps=1", "validation.num_windows=8", "log.peak_flops=1e12")
    keys = [f"--config.{change}" for change in (*changes, f"data.store={store}")]
    assert train(build(load_config(path_of("200m", "tiny"), keys)), tmp_path, "") == EXIT_COMPLETE


def test_another_variant_is_told():
    with pytest.raises(UserError, match=r"200m.py:\d+: ValueError: the variants are paper, hardware and tiny, not 'x'"):
        load_config(path_of("200m", "x"))
