"""The residual stream of layers that differ in width, against its definition; what it keeps, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from test_decoder import VOCABULARY, example, gradients, parameters

from tlm_jax.capacity.profile import Profile
from tlm_jax.capacity.shape import LayerShape
from tlm_jax.capacity.widths import RESIZES
from tlm_jax.config import default_config
from tlm_jax.model import decoder as decoder_module
from tlm_jax.model.decoder import Decoder, layout
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.loss import loss_sums
from tlm_jax.model.settings import settings_from_config
from tlm_jax.model.stream import Stream, resized
from tlm_jax.train.per_layer import is_matrix
from tlm_jax.train.step import loss_sum

D_EMBEDDING = 16
# Falls and rises by more than one step, plateaus, ends on either side of the embedding, and growth beyond every width
# before: at once, in steps, and of a first and a last layer.
LISTS = [
    (32, 24, 8, 8, 12, 40),
    (8, 12, 28, 20, 48, 4),
    (24, 40, 40, 12, 36, 28),
]


def shape(d_model: int) -> LayerShape:
    return LayerShape(d_model=d_model, d_ff=3 * d_model, num_heads=2, num_kv_heads=1, head_dim=d_model // 2)


def model_of(
    widths: Sequence[int], d_embedding: int = D_EMBEDDING, resize: str = "carry_forward", **keys
) -> FunctionalDecoder:
    config = default_config()
    config.model.update(keys)
    profile = Profile(tuple(map(shape, widths)), VOCABULARY, d_embedding, tied_embeddings=False, resize=resize)
    return FunctionalDecoder(profile, settings_from_config(config))


def random_widths(seed: int) -> tuple[int, ...]:
    return tuple((4 * np.random.default_rng(seed).integers(1, 12, 6)).tolist())


def carried_forward(states: list[jax.Array], width: int) -> jax.Array:
    """Each coordinate of the newest of the states that has it, 0 where none has: the paper's equation, literally."""
    columns = []
    for i in range(width):
        holders = [state for state in states if state.shape[-1] > i]
        columns.append(holders[-1][..., i] if holders else jnp.zeros(states[0].shape[:-1]))
    return jnp.stack(columns, axis=-1)


def read(states: list[jax.Array], width: int, resize: str, params) -> jax.Array:
    """What the layer behind the last of the states reads."""
    if resize == "carry_forward":
        return carried_forward(states, width)
    if resize == "zero_padding":
        return carried_forward(states[-1:], width)
    newest = states[-1]
    return newest if newest.shape[-1] == width else newest @ params[f"resize_{len(states) - 1}"]["w_resize"]


def literal_loss(model: FunctionalDecoder, params, batch) -> jax.Array:
    """The loss of an unrolled model from the definition of its residual stream; the blocks are the model's own."""
    bound: Decoder = model.bind(params)
    at, resize = bound.at(batch["positions"], batch["segment_ids"]), model.profile.resize
    states = [params["embedding"][batch["inputs"]]]
    for layer, run in enumerate(bound.runs):
        x, _ = getattr(bound, f"layer_{layer}")(read(states, run.shape.d_model, resize, params), at, None)
        states.append(x)
    x = read(states, max(states[-1].shape[-1], D_EMBEDDING), resize, params)
    x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * params["final_norm"]["scale"]
    return loss_sums(x[..., :D_EMBEDDING], params["head"].T, batch["targets"], batch["mask"], 4096).objective


@pytest.mark.parametrize(
    ("resize", "widths"),
    [
        *(("carry_forward", widths) for widths in (*LISTS, *map(random_widths, range(2)))),
        ("zero_padding", LISTS[0]),
        ("projection", LISTS[1]),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_definition(resize, widths):
    model, batch = model_of(widths, resize=resize, layer_stacking="unrolled"), example(T=12)
    params = parameters(model)
    want, want_gradients = jax.jit(jax.value_and_grad(lambda p: literal_loss(model, p, batch)))(params)
    got, got_gradients = jax.jit(jax.value_and_grad(lambda p: loss_sum(model, p, batch)))(params)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got_gradients), jax.tree.leaves(want_gradients), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), rtol=1e-3, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_is_one_buffer_bit_for_bit(seed):
    """Whatever its pieces: layers that add a number to all they read, against the first columns of one array."""
    widths = random_widths(seed)
    buffer = np.zeros((2, 3, max(*widths, D_EMBEDDING)), np.float32)
    buffer[..., :D_EMBEDDING] = np.random.default_rng(seed).standard_normal((2, 3, D_EMBEDDING))
    stream = Stream(jnp.asarray(buffer[..., :D_EMBEDDING]))
    for layer, width in enumerate((*widths, D_EMBEDDING)):
        x, parked = resized(stream, width)
        np.testing.assert_array_equal(x, buffer[..., :width])
        buffer[..., :width] += layer
        stream = Stream(x + layer, parked)
    assert all(piece.shape[-1] > 0 for piece in stream.parked)


def test_equal_layers_stay_scanned_and_equal_those_unrolled():
    widths, batch = (24, 24, 8, 8, 8, 32), example()
    scanned, unrolled = model_of(widths), model_of(widths, layer_stacking="unrolled")
    assert [run.name for run in layout(scanned.profile, "auto")] == ["layers_0_to_1", "layers_2_to_4", "layer_5"]
    losses = [float(jax.jit(lambda p, m=m: loss_sum(m, p, batch))(parameters(m))) for m in (scanned, unrolled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("widths", LISTS, ids=str)
def test_parameter_count_is_the_profiles(widths, resize):
    model = model_of(widths, resize=resize)
    assert sum(leaf.size for leaf in jax.tree.leaves(model.abstract_parameters)) == model.profile.parameters


def test_weights_counted_without_effect_have_no_gradient():
    model = model_of((32, 8, 24))
    grads = gradients(model, parameters(model), example())
    first = grads["layer_0"]["attention"]
    for name in ("wq", "wk", "wv"):
        assert not np.any(first[name][D_EMBEDDING:])
        assert np.any(first[name][:D_EMBEDDING])
    assert not np.any(grads["layer_0"]["mlp"]["w_down"][:, 24:])
    without_effect = model.profile.parameters - model.profile.effective_parameters
    # Two query heads and a key and a value head of 16 read 16 zeros; w_down of the first and last write 8 too many.
    assert without_effect == 4 * 16 * (32 - D_EMBEDDING) + 96 * (32 - 24) + 72 * (24 - D_EMBEDDING)


@pytest.mark.parametrize("resize", ["carry_forward", "zero_padding"])
def test_columns_that_nothing_has_written_are_not_multiplied(resize):
    """Weights that are not numbers would make the loss none, even times 0."""
    model, batch = model_of((32, 8, 24, 40), resize=resize), example()
    of_layer = (
        {"layer_0": 16, "layer_3": 32} if resize == "carry_forward" else {"layer_0": 16, "layer_2": 8, "layer_3": 24}
    )

    def without(path, leaf):
        written = of_layer.get(path[0].key)
        return leaf.at[written:].set(np.nan) if written and path[-1].key in ("wq", "wk", "wv") else leaf

    params = parameters(model)
    losses = [float(loss_sum(model, p, batch)) for p in (params, jax.tree_util.tree_map_with_path(without, params))]
    assert losses[0] == losses[1]


def test_with_zero_padding_neighbours_alone_decide_what_has_an_effect():
    """The final norm's statistics would see all of a last layer: here it is no wider than the embedding."""
    model = model_of((32, 8, 24, 16), resize="zero_padding")
    grads = gradients(model, parameters(model), example())
    idle = 0
    for layer, (fresh, unread) in enumerate(((16, 24), (0, 0), (16, 8), (0, 0))):
        of_layer = grads[f"layer_{layer}"]
        for weights in (*(of_layer["attention"][name] for name in ("wq", "wk", "wv")), of_layer["mlp"]["w_down"].T):
            count = unread if weights.ndim == 2 else fresh
            empty = ~np.any(np.reshape(weights, (len(weights), -1)), axis=1)
            assert empty.sum() == count
            assert empty[len(empty) - count :].all()
            idle += count * (weights.size // len(weights))
    assert model.profile.parameters - model.profile.effective_parameters == idle


def test_projections_are_matrices_of_the_readers_layer_and_trained_as_such():
    widths = (32, 32, 8, 8, 24)
    scanned, unrolled = (model_of(widths, resize="projection", layer_stacking=way) for way in ("auto", "unrolled"))
    names = [name for name in scanned.abstract_parameters if "resize" in name]
    assert names == ["resize_0", "resize_2", "resize_4"]
    for name in names:
        weights = parameters(scanned)[name]["w_resize"]
        np.testing.assert_array_equal(weights, parameters(unrolled)[name]["w_resize"])
        assert is_matrix(jax.tree_util.tree_leaves_with_path({name: {"w_resize": weights}})[0][0])
    assert scanned.profile.projections() == {0: (16, 32), 2: (32, 8), 4: (8, 24)}
    assert Profile.from_json(scanned.profile.to_json()) == scanned.profile
    narrow_end = model_of((32, 8), resize="projection")
    assert narrow_end.profile.projections() == {0: (16, 32), 1: (32, 8), 2: (8, 16)}
    assert narrow_end.abstract_parameters["resize_2"]["w_resize"].shape == (8, 16)


def lowered(model: FunctionalDecoder) -> str:
    batch = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in example().items()}
    return jax.jit(jax.grad(lambda p, b: loss_sum(model, p, b))).lower(model.abstract_parameters, batch).as_text()


def test_one_width_compiles_to_the_program_without_a_stream(monkeypatch):
    widths, usual = [16] * 4, lowered(model_of([16] * 4))
    varied = lowered(model_of((16, 16, 8, 8)))
    monkeypatch.setattr(decoder_module, "resized", lambda stream, width: stream)
    assert lowered(model_of(widths)) == usual
    monkeypatch.undo()
    assert lowered(model_of((16, 16, 8, 8))) == varied != usual


@pytest.mark.parametrize("widths", [(64, 48, 16, 16, 16, 40, 60), (8, 64, 24)], ids=str)
def test_the_backward_pass_keeps_of_each_layer_as_much_as_it_is_wide(widths):
    """With remat=full: one input of each layer, a run's stacked. Beside them, what the final norm and the loss keep."""
    B, T, d_embedding = 3, 24, 20
    model, batch = model_of(widths, d_embedding, remat="full"), example(B, T)
    found = saved_residuals(lambda p: loss_sum(model, p, batch), model.abstract_parameters)
    shapes = [a.shape for a, _ in found if a.dtype == jnp.float32 and a.shape[-3:-1] == (B, T)]
    kept = [width for *stack, _, _, width in shapes for _ in range(stack[0] if stack else 1)]
    at_the_end = (widths[-1], d_embedding, 1)
    assert sorted(width for width in kept if width not in at_the_end) == sorted(widths[:-1])
    assert kept.count(widths[-1]) <= 4  # the last layer's input, the final norm's, and what that makes of it


def test_remat_changes_no_gradient():
    batch, plain = example(), model_of(LISTS[0])
    want = gradients(plain, parameters(plain), batch)
    got = gradients(model_of(LISTS[0], remat="full"), parameters(plain), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
