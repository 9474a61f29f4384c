"""Profiles: exact counts against sums written out by hand, equal budgets, runs, JSON."""

import dataclasses
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tlm_jax.capacity import LayerShape, Profile
from tlm_jax.capacity.budget import as_json, budget, difference
from tlm_jax.capacity.schedules import CURVES, tapered
from tlm_jax.capacity.shape import MLPS
from tlm_jax.capacity.table import width_words
from tlm_jax.errors import UserError


def make(widths, d_model=256, heads=4, kv_heads=2, head_dim=64, vocab_size=4096, tied=True):
    layers = tuple(LayerShape(d_model, width, heads, kv_heads, head_dim) for width in widths)
    return Profile(layers, vocab_size, d_model, tied)


def test_parameters_of_llama_7b():
    # LLaMA, arXiv 2302.13971, table 2: 6.7B; the exact count is that of the released weights.
    llama = make((11008,) * 32, d_model=4096, heads=32, kv_heads=32, head_dim=128, vocab_size=32000, tied=False)
    assert llama.parameters == 6_738_415_616
    assert llama.kv_cache_bytes_per_token() == 2 * 2 * 32 * 4096


def test_parameters_of_llama_3_8b():
    llama = make((14336,) * 32, d_model=4096, heads=32, kv_heads=8, head_dim=128, vocab_size=128256, tied=False)
    assert llama.parameters == 8_030_261_248
    assert llama.non_embedding_parameters == 8_030_261_248 - 2 * 128256 * 4096


def test_parameters_of_qwen3_0_6b_with_qk_norm():
    # Qwen3, arXiv 2505.09388, table 1: 0.6B; the exact count is that of the released weights.
    qwen = make((3072,) * 28, d_model=1024, heads=16, kv_heads=8, head_dim=128, vocab_size=151936)
    assert with_all(qwen, qk_norm=True).parameters == 596_049_920
    assert qwen.parameters == 596_049_920 - 28 * 2 * 128


def test_kv_cache_of_mistral_7b_at_32k_tokens():
    # Mistral 7B, arXiv 2310.06825, section 2: a window of 4096 reduces the cache of 32k tokens by 8.
    mistral = make((14336,) * 32, d_model=4096, heads=32, kv_heads=8, head_dim=128, vocab_size=32000, tied=False)
    windowed = with_all(mistral, window=4096)
    assert mistral.parameters == windowed.parameters == 7_241_732_096
    assert mistral.kv_cache_bytes(32768) == 8 * windowed.kv_cache_bytes(32768) == 4 * 2**30
    assert mistral.kv_cache_bytes(4096) == windowed.kv_cache_bytes(4096)


@pytest.mark.parametrize("mlp", MLPS)
def test_a_gated_mlp_has_three_matrices_and_a_plain_one_two(mlp):
    d, f, t = 256, 640, 128
    matrices = {"swiglu": 3, "geglu": 3, "reglu": 3, "gelu": 2, "squared_relu": 2}[mlp]
    with_mlp, without = (with_all(make((width,)), mlp=mlp) for width in (f + 1, 1))
    assert with_mlp.parameters - without.parameters == matrices * d * f
    assert with_mlp.forward_flops_per_token(t) - without.forward_flops_per_token(t) == 2 * matrices * d * f


@pytest.mark.parametrize(("t", "window"), [(128, 1), (128, 32), (128, 100), (128, 128), (128, 500), (100, 7)])
def test_flops_of_a_window_pair_by_pair(t, window):
    h, k = 4, 64
    plain = with_all(make((64,)), window=0)
    windowed = with_all(plain, window=window)
    # Each token and what it sees, each of the two products; the causal convention leaves out half of the diagonal.
    pairs = sum(min(position, window) for position in range(1, t + 1))
    widest = min(window, t)
    saved = plain.forward_flops_per_token(t) - windowed.forward_flops_per_token(t)
    assert 2 * 2 * h * k * ((t * t / 2) - (pairs - widest / 2)) / t <= saved
    assert saved < 2 * 2 * h * k * ((t * t / 2) - (pairs - widest / 2)) / t + 1
    full = [profile.forward_flops_per_token(t, causal=False) for profile in (plain, windowed)]
    assert full[0] - full[1] == 4 * h * k * (t - widest)


def varying(*d_models, d_embedding=6, ratio=4):
    """Layers of two heads, an MLP `ratio` times as wide, and a vocabulary of ten, untied."""
    layers = tuple(LayerShape(d, ratio * d, 2, 2, d // 2) for d in d_models)
    return Profile(layers, 10, d_embedding, tied_embeddings=False)


def test_parameters_and_flops_of_varying_widths_matrix_by_matrix():
    x = varying(12, 4, 12)
    embedding = head = 10 * 6
    # Per layer: wq, wk, wv, wo, three of the MLP, two norms. The final norm is as wide as the last layer.
    raw = sum(4 * d * d + 3 * d * 4 * d + 2 * d for d in (12, 4, 12)) + 12 + embedding + head
    assert x.parameters == raw
    # The first layer's wq, wk and wv read 6 coordinates that are zero; 6 of the last w_down's go nowhere.
    without_effect = 6 * 3 * 12 + 6 * 4 * 12
    assert x.effective_parameters == x.active_parameters == raw - without_effect
    assert x.padded_parameters == 0
    T = 8
    matrices = sum(4 * d * d + 3 * d * 4 * d for d in (12, 4, 12)) - without_effect
    attention = 4 * T * (12 + 4 + 12)
    assert x.forward_flops_per_token(T, causal=False) == 2 * matrices + attention + 2 * head
    assert x.forward_flops_per_token(T) == 2 * matrices + attention // 2 + 2 * head
    assert x.train_flops_per_token(T) == 3 * x.forward_flops_per_token(T)
    assert x.kv_cache_bytes(T) == 2 * 2 * (12 + 4 + 12) * T


def test_no_weight_is_without_effect_where_the_embedding_is_widest():
    for d_models in ((8, 8, 8), (8, 4, 8), (4, 8, 4), (4, 4, 4)):
        profile = varying(*d_models, d_embedding=8)
        assert profile.effective_parameters == profile.parameters
        assert profile.non_embedding_parameters == sum(16 * d * d + 2 * d for d in d_models) + 8


def test_parameters_and_flops_of_experts_matrix_by_matrix():
    d, f, T = 12, 8, 16
    layer = LayerShape(d, 0, 2, 1, 6, num_experts=5, experts_per_token=2, expert_d_ff=f, padded_experts=3)
    attention, expert, router = 2 * d * 12 + 2 * d * 6, 3 * d * f, d * 5
    assert layer.parameters == attention + 5 * expert + router + 2 * d
    assert layer.padded_parameters == 3 * expert
    assert layer.forward_flops_per_token(T, causal=False) == 2 * (attention + 2 * expert + router) + 4 * T * 12
    profile = Profile((layer,), 10, 8)
    # Alone, it is first and last: 4 coordinates are zero for wq, wk, wv, and 4 of every expert's w_down go nowhere.
    reads, writes = 4 * (12 + 2 * 6), 4 * f
    assert profile.effective_parameters == profile.parameters - reads - 5 * writes
    assert profile.active_parameters == profile.parameters - 3 * expert - reads - 2 * writes
    flops = layer.forward_flops_per_token(T) - 2 * (reads + 2 * writes) + 2 * 80
    assert profile.forward_flops_per_token(T) == flops
    assert profile.padded_parameters == 3 * expert
    assert Profile.from_json(profile.to_json()) == profile


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([8, 16, 24, 32]), min_size=1, max_size=6), st.sampled_from([8, 16, 24]))
def test_effective_parameters_are_those_that_a_stream_touches(d_models, d_embedding):
    """Weight by weight, a stream of coordinates in front of one's eyes: set when written, needed when read later."""
    profile = varying(*d_models, d_embedding=d_embedding)
    idle, written = 0, set(range(d_embedding))
    for index, d in enumerate(d_models):
        idle += sum(3 * d for coordinate in range(d) if coordinate not in written)
        written |= set(range(d))
        readers = max([d_embedding, *d_models[index + 1 :]])
        idle += sum(4 * d for coordinate in range(d) if coordinate >= readers)
    assert profile.parameters - profile.effective_parameters == idle
    assert Profile.from_json(json.dumps(as_json(profile, 64))) == profile


def with_all(profile, **fields):
    layers = tuple(dataclasses.replace(layer, **fields) for layer in profile.layers)
    return dataclasses.replace(profile, layers=layers)


def test_parameters_tensor_by_tensor():
    d, f, h, k, g, v = 256, 640, 4, 64, 2, 4096
    layer = d + d * h * k + d * g * k + d * g * k + h * k * d + d + d * f + d * f + f * d
    assert LayerShape(d, f, h, g, k).parameters == layer
    assert make((f, f)).parameters == v * d + 2 * layer + d
    assert make((f, f), tied=False).parameters == v * d + 2 * layer + d + d * v
    assert make((f, f)).non_embedding_parameters == 2 * layer + d


def test_flops_matmul_by_matmul():
    d, f, h, k, g, v, t = 256, 640, 4, 64, 2, 4096, 128
    projections = 2 * d * h * k + 2 * 2 * d * g * k + 2 * h * k * d
    mlp = 3 * 2 * d * f
    scores = context = 2 * h * t * k
    head = 2 * d * v
    profile = make((f, f))
    assert profile.forward_flops_per_token(t, causal=False) == 2 * (projections + mlp + scores + context) + head
    assert profile.forward_flops_per_token(t) == 2 * (projections + mlp + (scores + context) // 2) + head
    assert profile.train_flops_per_token(t) == 3 * profile.forward_flops_per_token(t)
    assert make((f, f), tied=False).forward_flops_per_token(t) == profile.forward_flops_per_token(t)
    assert profile.kv_cache_bytes_per_token() == 2 * 2 * 2 * g * k
    assert profile.kv_cache_bytes_per_token(bytes_per_value=4) == 2 * profile.kv_cache_bytes_per_token()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 48),
    st.integers(1, 64),
    st.sampled_from([1.5, 1.25, 0.5]),
    st.integers(0, 6),
    st.integers(1, 8192),
    st.sampled_from(MLPS),
)
def test_a_taper_costs_exactly_what_its_uniform_twin_costs(num_layers, eighths, start, plateaus, sequence_length, mlp):
    d_ff = 128 * eighths
    try:
        widths = tapered(CURVES["cosine"], num_layers, d_ff, start, 2 - start, 16, plateaus)
    except UserError:
        return
    twins = [with_all(make(every), mlp=mlp) for every in (widths, (d_ff,) * num_layers)]
    budgets = [budget(profile, sequence_length) for profile in twins]
    assert budgets[0] == budgets[1]
    for first, second in zip(*(profile.layers for profile in twins), strict=True):
        assert dataclasses.replace(first, d_ff=1) == dataclasses.replace(second, d_ff=1)


def test_runs_are_of_equal_neighbours_only():
    profile = make((96, 96, 64, 32, 32, 96))
    assert [(start, length, shape.d_ff) for start, length, shape in profile.runs()] == [
        (0, 2, 96),
        (2, 1, 64),
        (3, 2, 32),
        (5, 1, 96),
    ]
    assert len(make((64,) * 9).runs()) == 1


def test_shapes_are_hashable_values():
    assert len({LayerShape(256, 640, 4, 4, 64), LayerShape(256, 640, 4, 4, 64), LayerShape(256, 320, 4, 4, 64)}) == 2
    assert hash(make((64, 32))) == hash(make((64, 32)))


def test_json_round_trip_of_both_forms():
    profile = make((96, 64, 32), tied=False)
    assert Profile.from_json(profile.to_json()) == profile
    assert Profile.from_json(json.dumps(as_json(profile, 128))) == profile


EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_d_ff": 32, "d_ff": 0}


def drop(key):
    return lambda values: values.pop(key)


def in_layer(*given, **fields):
    return lambda values: values["layers"][1].update(*given, **fields)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (drop("layers"), "no list `layers`"),
        (drop("vocab_size"), "p.json: vocab_size: missing"),
        (lambda values: values.update(vocab_size=-1), "profile.vocab_size: must be a positive integer, not -1"),
        (lambda values: values.update(vocab_size=10**400), r"profile.vocab_size: must be below 2\^31, not 1000"),
        (lambda values: values.update(tied_embeddings=1), "tied_embeddings: must be true or false"),
        (lambda values: values.update(layers=[]), "there are no layers"),
        (lambda values: values.update(layers=[3]), r"layers\[0\]: not an object"),
        (lambda values: values["layers"][1].pop("d_ff"), r"p.json: layers\[1\].d_ff: missing"),
        (in_layer(d_f=3), r"p.json: layers\[1\].d_f: unknown field"),
        (in_layer(d_ff=64.5), r"layers\[1\].d_ff: must be a positive integer, not 64.5"),
        (in_layer(d_ff=True), r"layers\[1\].d_ff: must be a positive integer, not True"),
        (in_layer(num_kv_heads=3), r"layers\[1\].num_kv_heads: 3 does not divide num_heads=4"),
        (in_layer(num_heads=2**60, num_kv_heads=3), r"^p.json: layers\[1\].num_heads: must be below 2\^31, not \d+$"),
        (in_layer(head_dim=63), "must be even"),
        (in_layer(mixer="titans"), "unknown mixer 'titans'"),
        (in_layer(mlp="siglu"), "unknown MLP 'siglu'; one of swiglu, geglu, reglu, gelu, squared_relu"),
        (in_layer(window=-1), r"layers\[1\].window: must be 0 or a positive integer, not -1"),
        (in_layer(window=1.5), "must be 0 or a positive integer, not 1.5"),
        (in_layer(qk_norm=1), r"layers\[1\].qk_norm: must be true or false, not 1"),
        (in_layer(expert_d_ff=8), r"layers\[1\].expert_d_ff: must be 0 without experts, not 8; set num_experts"),
        (in_layer(padded_experts=-1), r"layers\[1\].padded_experts: must be 0 or a positive int32, not -1"),
        (in_layer(EXPERTS, experts_per_token=9), r"experts_per_token: 9 of num_experts=8; from 1 to 8 work"),
        (in_layer(EXPERTS, expert_d_ff=0), r"layers\[1\].expert_d_ff: must be positive with experts, not 0"),
        (in_layer(EXPERTS, d_ff=64), r"layers\[1\].d_ff: must be 0 with experts, not 64; expert_d_ff is the width"),
    ],
)
def test_a_malformed_profile_is_one_clear_line(damage, says):
    values = json.loads(make((96, 64, 32)).to_json())
    damage(values)
    with pytest.raises(UserError, match=says) as caught:
        Profile.from_json(json.dumps(values), where="p.json")
    assert str(caught.value).startswith("p.json")
    assert "\n" not in str(caught.value)


def test_text_that_is_not_json_and_several_faults_together():
    with pytest.raises(UserError, match=r"p.json: not JSON"):
        Profile.from_json('{"layers": [', where="p.json")
    values = json.loads(make((96, 64, 32)).to_json())
    values["layers"][0]["d_ff"] = 0
    values["layers"][2]["num_heads"] = "4"
    with pytest.raises(UserError, match=r"2 problems.*layers\[0\].d_ff.*layers\[2\].num_heads"):
        Profile.from_json(json.dumps(values))


def test_difference_by_total_and_layer():
    a, b = make((96, 64, 32)), make((64, 64, 80))
    change = difference(a, b, (128, 128))
    assert change["d_ff"] == [-32, 0, 48]
    assert change["d_ff_sum"] == 16
    assert change["parameters"] == 3 * 256 * 16
    assert change["forward_flops_per_token"] == 2 * 3 * 256 * 16
    assert change["d_model"] == change["expert_d_ff"] == [0, 0, 0]
    assert difference(a, make((96, 96)), (128, 128))["d_ff"] is None


def test_the_table_draws_each_layer_in_proportion():
    lines = make((96, 48, 24)).describe().splitlines()
    assert [line.count("█") for line in lines] == [0, 32, 16, 8]
    assert lines[2].split()[:7] == ["1", "256", "48", "4", "2", "64", "233,984"]


def test_widths_in_words_say_where_they_begin_turn_and_end():
    def words(*widths: tuple[int, int]) -> str:
        return width_words([LayerShape(d, f, num_heads=2, num_kv_heads=2, head_dim=4) for d, f in widths])

    assert words((8, 32), (8, 32)) == "d_ff 32"
    assert words((8, 64), (8, 48), (8, 32)) == "d_ff 64 → 32"
    assert words((16, 64), (4, 16), (8, 64)) == "d_model 16 → 4 → 8, d_ff 64 → 16 → 64"
    assert words((8, 8), (16, 8), (8, 8)) == "d_model 8 → 16 → 8, d_ff 8"
