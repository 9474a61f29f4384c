"""Generation with the cache equals the uncached forward; batches, padding, seeds, stops, compilations."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stacking import split_layers

from tlm_jax.capacity.profile import Profile
from tlm_jax.capacity.shape import LayerShape
from tlm_jax.config import default_config
from tlm_jax.data.adopted_tokenizer import IdTokenizer, SeparatedTokenizer
from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.errors import UserError
from tlm_jax.evaluate.generate import Generator, check_prefill, complete, encode_prompts, generation_settings
from tlm_jax.evaluate.sampling import Sampling
from tlm_jax.model.decoder import init_cache, layout
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.settings import settings_from_config

TOKENIZER = ByteTokenizer()
VOCAB = 272  # more than the tokenizer's 259
# A stacked run, then a layer of its own width, heads and head_dim.
PROFILE = Profile(
    (
        LayerShape(d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8),
        LayerShape(d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8),
        LayerShape(d_model=32, d_ff=32, num_heads=2, num_kv_heads=1, head_dim=12),
    ),
    VOCAB,
    32,
)
# Falls below the embedding's width, stays, and grows beyond every width before; heads in proportion, then of their own.
X_SHAPED = Profile(
    tuple(
        LayerShape(d_model=width, d_ff=2 * width, num_heads=heads, num_kv_heads=heads, head_dim=head_dim)
        for width, heads, head_dim in ((24, 2, 12), (16, 2, 8), (16, 2, 8), (40, 3, 10), (36, 2, 18))
    ),
    VOCAB,
    32,
)
GREEDY, DRAWN = Sampling(temperature=0), Sampling(0.9, 40, 0.95)
PROMPTS = ["", "a", "The quick brown fox jumps", "to be or not to be, that is the question: whether"]
NEW = 12


def make_model(profile=PROFILE, **keys):
    config = default_config()
    config.model.update({"init_scale": 2.5, **keys})  # far from uniform predictions
    return FunctionalDecoder(profile, settings_from_config(config, "cpu"))


MODEL = make_model()
PARAMETERS = jax.jit(MODEL.init)(jax.random.key(7))


def with_all(windows, **fields):
    """`PROFILE` with these windows, and other fields in every layer."""
    pairs = zip(PROFILE.layers, windows, strict=True)
    layers = (dataclasses.replace(layer, window=window, **fields) for layer, window in pairs)
    return dataclasses.replace(PROFILE, layers=tuple(layers))


# Windows shorter than most prompts, of one token, and between a prompt and its continuation.
OPTIONS = {
    "windows": make_model(with_all((5, 52, 1))),
    "soft-caps": make_model(attention_soft_cap=1.0, final_soft_cap=2.0),
    "QK-norm": make_model(with_all((0, 0, 0), qk_norm=True)),
    "x-shaped": make_model(X_SHAPED, init_scale=1.5),
    "all": make_model(
        with_all((7, 7, 0), qk_norm=True, mlp="squared_relu"), attention_soft_cap=1.0, final_soft_cap=2.0
    ),
}
ENCODED = encode_prompts(PROMPTS, TOKENIZER, NEW, 128)


@functools.cache  # each compiles
def make_generator(sampling=GREEDY, batch_size=4, prompt_tokens=max(map(len, ENCODED)), max_new_tokens=NEW):  # noqa: B008
    return Generator(
        MODEL,
        PARAMETERS,
        TOKENIZER,
        sampling,
        batch_size=batch_size,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
    )


def stream(generator, prompts=ENCODED, seed=0):
    """[prompts, new tokens]."""
    keys = jax.random.split(jax.random.key(seed), len(prompts))
    return np.stack(list(generator.stream(prompts, keys)), axis=1)


@functools.partial(jax.jit, static_argnums=0)
def uncached_logits(model, parameters, tokens_T, length):
    """Logits after the first `length` tokens, by the whole forward pass; padded on the right, which causality hides."""
    model = model.bind(parameters)
    positions = jnp.arange(tokens_T.size)[None]
    hidden, _ = model.hidden(tokens_T[None], model.at(positions, jnp.ones_like(positions)))
    return model.logits(hidden)[0, length - 1]


def uncached_greedy(prompt, count, model=MODEL, parameters=PARAMETERS):
    tokens = list(prompt)
    for _ in range(count):
        logits = np.array(uncached_logits(model, parameters, np.pad(tokens, (0, 96 - len(tokens))), len(tokens)))
        logits[[TOKENIZER.bos_id, TOKENIZER.pad_id]] = -np.inf
        logits[TOKENIZER.vocab_size :] = -np.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_greedy_equals_the_uncached_forward_token_by_token():
    generated = stream(make_generator())
    assert generated.shape == (len(PROMPTS), NEW)
    for row, prompt in enumerate(ENCODED):
        assert generated[row].tolist() == uncached_greedy(prompt, NEW)
    assert len(set(map(tuple, generated))) == len(PROMPTS)  # the prompts matter


@functools.partial(jax.jit, static_argnums=0)
def cached_logits(model, parameters, tokens_T, start, padding, segments_S, cache):
    """Logits after the last of some tokens, the first of which goes to slot `start`; and the cache."""
    bound, T = model.bind(parameters), len(tokens_T)
    at = {
        "positions": jnp.maximum(start - padding + jnp.arange(T), 0)[None],
        "segment_ids": jax.lax.dynamic_slice(segments_S, (start,), (T,))[None],
        "slots": {"write_index": start, "segment_ids": segments_S[None]},
    }
    hidden, cache = bound.hidden(tokens_T[None], at, cache)
    return bound.logits(hidden[:, -1:])[0, 0], cache


@pytest.mark.parametrize("name", OPTIONS)
def test_decoding_equals_the_whole_forward_with_every_option(name):
    model = OPTIONS[name]
    parameters = jax.jit(model.init)(jax.random.key(7))
    length, padding = 60, 6
    tokens = np.random.default_rng(2).integers(0, VOCAB, length).astype(np.int32)
    padded, slots = np.pad(tokens, (padding, 0)), np.arange(length + padding)

    @jax.jit
    def whole(parameters):
        bound, positions = model.bind(parameters), jnp.arange(length)[None]
        return bound.logits(bound.hidden(tokens[None], bound.at(positions, jnp.ones_like(positions)))[0])[0]

    want = whole(parameters)
    for prompt in (3, 50):
        cache = init_cache(model.profile, model.settings, 1, len(slots))
        first = 0
        for end in range(padding + prompt, len(slots) + 1):
            segments = ((slots >= padding) & (slots < end)).astype(np.int32)
            got, cache = cached_logits(model, parameters, padded[first:end], first, padding, segments, cache)
            np.testing.assert_allclose(got, want[end - padding - 1], atol=1e-4)
            first = end


@pytest.mark.parametrize("name", ["all", "x-shaped"])
def test_generation_equals_the_uncached_forward(name):
    model = OPTIONS[name]
    parameters = jax.jit(model.init)(jax.random.key(7))
    longest = max(map(len, ENCODED))
    generator = Generator(model, parameters, TOKENIZER, GREEDY, batch_size=4, prompt_tokens=longest, max_new_tokens=NEW)
    generated = stream(generator)
    for row, prompt in enumerate(ENCODED):
        assert generated[row].tolist() == uncached_greedy(prompt, NEW, model, parameters)
    assert (generator.prefill._cache_size(), generator.decode._cache_size()) == (1, 1)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_a_batch_equals_one_by_one(sampling):
    keys = jax.random.split(jax.random.key(0), len(PROMPTS))
    together = stream(make_generator(sampling))
    for row, prompt in enumerate(ENCODED):
        # Two lengths of padding: the short prompts fit one block.
        alone = make_generator(sampling, batch_size=1, prompt_tokens=16 if len(prompt) <= 16 else len(ENCODED[-1]))
        tokens = [int(token[0]) for token in alone.stream([prompt], keys[row : row + 1])]
        assert tokens == together[row].tolist()


def test_completions_do_not_depend_on_the_batch_size():
    texts = [
        [c.text for c in complete(make_generator(DRAWN, batch_size), ENCODED, TOKENIZER, seed=3)]
        for batch_size in (1, 3, 4)
    ]
    assert texts[0] == texts[1] == texts[2]


def test_seeds_reproduce_and_differ():
    same = [ENCODED[1]] * 2
    first, again, other = (
        [c.text for c in complete(make_generator(DRAWN), same, TOKENIZER, seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first[0] != first[1]  # equal prompts of one call draw apart


def test_prefill_and_decode_compile_once_for_all_batches():
    generator = make_generator(DRAWN)
    complete(generator, [*ENCODED, ENCODED[0]], TOKENIZER, seed=0)
    complete(generator, ENCODED[:2], TOKENIZER, seed=1)
    assert (generator.prefill._cache_size(), generator.decode._cache_size()) == (1, 1)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_decoding_step_on_cpu_copies_no_cache(rows):
    model = FunctionalDecoder(PROFILE, generation_settings(MODEL.settings))
    assert not any(run.stacked for run in layout(PROFILE, model.settings.layer_stacking))
    parameters = split_layers(PARAMETERS, PROFILE, MODEL.settings.layer_stacking)
    generator = Generator(model, parameters, TOKENIZER, GREEDY, batch_size=rows, prompt_tokens=16, max_new_tokens=NEW)
    tokens_B, keys = np.zeros(rows, np.int32), jax.random.split(jax.random.key(0), rows)
    state, _ = jax.eval_shape(generator.prefill, parameters, np.zeros((rows, 16), np.int32), tokens_B, keys)
    compiled = generator.decode.lower(parameters, state, tokens_B).compile().as_text()
    # The last layer's one key/value head and a single row would leave an axis of length 1: that is dropped by a copy.
    layers = range(3) if rows > 1 else range(2)
    shapes = {f"f32[{','.join(map(str, state['cache'][f'layer_{i}']['k'].shape))}]" for i in layers}
    assert all(shape in compiled for shape in shapes)
    assert not [line for line in compiled.splitlines() if " copy(" in line and any(shape in line for shape in shapes)]
    short = [prompt for prompt in ENCODED if len(prompt) <= 16][:rows]
    assert (stream(generator, short) == stream(make_generator(), short)).all()


def test_the_cache_of_varying_widths_is_each_layers_own_and_its_bytes_are_told():
    model = OPTIONS["x-shaped"]
    state = {"batch_size": 3, "prompt_tokens": 10, "max_new_tokens": NEW}
    generator = Generator(model, jax.jit(model.init)(jax.random.key(7)), TOKENIZER, GREEDY, **state)
    cache = init_cache(model.profile, model.settings, 3, generator.cache_slots)
    assert {name: layer["v"].shape for name, layer in cache.items()} == {
        "layer_0": (3 * 2, 16 + NEW, 12),
        "layers_1_to_2": (2, 3 * 2, 16 + NEW, 8),
        "layer_3": (3 * 3, 16 + NEW, 10),
        "layer_4": (3 * 2, 16 + NEW, 18),
    }
    assert generator.cache_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_the_cache_is_sized_by_layer():
    cache = init_cache(PROFILE, MODEL.settings, batch=3, length=20)
    assert {name: layer["k"].shape for name, layer in cache.items()} == {
        "layers_0_to_1": (2, 3 * 2, 20, 8),
        "layer_2": (3 * 1, 20, 12),
    }
    values = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert values == 3 * 20 * PROFILE.kv_cache_bytes_per_token(bytes_per_value=4)


@pytest.mark.parametrize("length", [5, 20])
def test_a_cache_of_windows_is_what_the_profile_says(length):
    model = OPTIONS["windows"]
    cache = init_cache(model.profile, model.settings, batch=3, length=length)
    assert [cache[f"layer_{i}"]["k"].shape[-2] for i in range(3)] == [5, length, 1]
    values = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert values == 3 * model.profile.kv_cache_bytes(length, bytes_per_value=4)


def test_specials_and_ids_beyond_the_tokenizer_are_never_drawn():
    generated = stream(make_generator(Sampling(temperature=50.0), max_new_tokens=40))  # close to uniform
    assert generated.max() < TOKENIZER.vocab_size
    assert not np.isin(generated, [TOKENIZER.bos_id, TOKENIZER.pad_id]).any()


class Letters(ByteTokenizer):
    """Every id is a letter, so that any output is text."""

    def id_bytes(self, token_id):
        return bytes([97 + token_id % 26])


def test_a_stop_string_ends_a_completion_and_its_batch(monkeypatch):
    prompts, tokenizer = ENCODED[2:], Letters()
    greedy = complete(make_generator(), prompts, tokenizer, seed=0)
    assert [c.finish_reason for c in greedy] == ["length", "length"]
    texts = [c.text for c in greedy]
    stops = [texts[0][2:4], texts[1][5:7]]
    cuts = [min(text.find(stop) for stop in stops if stop in text) for text in texts]

    steps, said = [], ["", ""]
    original = Generator.stream

    def counted(self, prompts, keys):
        for tokens in original(self, prompts, keys):
            steps.append(tokens)
            yield tokens

    def hear(index, piece):
        assert piece
        said[index] += piece

    monkeypatch.setattr(Generator, "stream", counted)
    stopped = complete(make_generator(), prompts, tokenizer, seed=0, stop=stops, on_text=hear)
    assert [c.finish_reason for c in stopped] == ["stop", "stop"]
    assert said == [c.text for c in stopped] == [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    assert len(steps) == max(cuts) + 2 < NEW  # the last row's stop ends the batch


def test_one_new_token():
    assert stream(make_generator(max_new_tokens=1)).tolist() == [[uncached_greedy(p, 1)[0]] for p in ENCODED]


@pytest.mark.parametrize("tokenizer", [IdTokenizer(260, None), SeparatedTokenizer(TOKENIZER, None)])
def test_no_id_begins_where_none_began_in_training(tokenizer):
    assert encode_prompts(["7"], tokenizer, 1, 8) == [tokenizer.encode("7")]
    with pytest.raises(UserError, match=r"^prompt 2: empty, and no id begins a document in the run's data; give text"):
        encode_prompts(["7", ""], tokenizer, 1, 8)
    sampling = {"batch_size": 2, "prompt_tokens": 4, "max_new_tokens": 40}
    generator = Generator(MODEL, PARAMETERS, tokenizer, Sampling(temperature=50.0), **sampling)
    generated = stream(generator, [[1, 2], [3]])
    assert not np.isin(generated, [tokenizer.bos_id, tokenizer.pad_id]).any()
    assert generated.max() < tokenizer.vocab_size


def test_prompts_that_no_kernel_takes_are_told():
    profile = with_all((0, 128, 0))
    settings = make_model(profile, document_mask=False).settings
    check_prefill(profile, settings, 4096)
    gpu = dataclasses.replace(settings, platform="gpu", compute_dtype="bfloat16")
    check_prefill(profile, gpu, 128)
    message = r"^prompts of up to 256 tokens, padding included: no .*; cudnn has no segments; pallas has no win"
    with pytest.raises(UserError, match=message):
        check_prefill(profile, gpu, 129)


def test_prompts_begin_a_document_and_must_fit():
    assert encode_prompts(["", "é"], TOKENIZER, 1, 8) == [[TOKENIZER.bos_id], [TOKENIZER.bos_id, *"é".encode()]]
    assert len(encode_prompts(["1234567"], TOKENIZER, 2, 10)[0]) == 8
    with pytest.raises(UserError, match=r"prompt 2: 9 tokens and 2 new ones .* context of 10; at most .*=1 fit"):
        encode_prompts(["ok", "12345678"], TOKENIZER, 2, 10)
    with pytest.raises(UserError, match=r"2 problems: .*prompt 1: not valid UTF-8.*prompt 2: .*shorten it"):
        encode_prompts(["\ud800", "x" * 10], TOKENIZER, 2, 10)
