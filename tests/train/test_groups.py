"""Groups of parameters: their learning rates and weight decays, whatever the stacking, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from whole_run import setup_for

from tlm_jax.config import default_config, from_json, to_json
from tlm_jax.errors import UserError
from tlm_jax.train.optimizer import OPTIMIZERS, build_optimizer

GROUPS = (
    {"match": "embedding", "learning_rate_multiplier": 3.0, "weight_decay": 0.2},
    {"match": r"mlp\.w_", "weight_decay": 0.0},
    {"match": "norm", "learning_rate_multiplier": 0.0},
)


def config_with(groups, **train):
    config = default_config()
    config.train.update({"schedule": "constant", "warmup_steps": 0, "learning_rate": 0.1, "gradient_clip": 0.0} | train)
    config.train.groups = groups
    return config


def tree(seed: int, run: str = "layers_0_to_1", stack: tuple[int, ...] = (2,)):
    rng = np.random.default_rng(seed)
    shapes = {"attention": {"wq": (4, 2, 2)}, "attention_norm": {"scale": (4,)}, "mlp": {"w_up": (4, 8)}}
    layer = jax.tree.map(
        lambda shape: rng.normal(size=(*stack, *shape)).astype(np.float32), shapes, is_leaf=lambda x: type(x) is tuple
    )
    return {"embedding": rng.normal(size=(5, 4)).astype(np.float32), run: layer}


@pytest.mark.parametrize("run", ["layers_0_to_1", "layer_7"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_group_has_its_own_rate_and_decay(optimizer, run):
    stack = (2,) if run == "layers_0_to_1" else ()
    params, gradient = tree(0, run, stack), tree(1, run, stack)

    def updates(groups, **train):
        built = build_optimizer(config_with(groups, optimizer=optimizer, **train))
        return built.update(gradient, built.init(params), params)[0]

    plain, grouped = updates((), weight_decay=0.0), updates(GROUPS, weight_decay=0.5)

    def same(found, direction, rate, decay, parameter):
        np.testing.assert_allclose(found, rate * (direction - 0.1 * decay * parameter), rtol=1e-4, atol=1e-6)

    same(grouped["embedding"], plain["embedding"], 3.0, 0.2, params["embedding"])  # though decay excludes its name
    mlp, wq, scale = (lambda t: t[run]["mlp"]["w_up"]), (lambda t: t[run]["attention"]["wq"]), "attention_norm"
    same(mlp(grouped), mlp(plain), 1.0, 0.0, mlp(params))
    same(wq(grouped), wq(plain), 1.0, 0.5, wq(params))
    assert not np.any(grouped[run][scale]["scale"])


def test_groups_survive_json_and_are_told_apart():
    config = config_with(GROUPS)
    assert from_json(to_json(config)).train.groups == GROUPS
    assert build_optimizer(from_json(to_json(config))).init(tree(0)) is not None


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (
            ({"match": "embeding", "weight_decay": 0.0},),
            "'embeding' matches no parameter; the parameters are embedding,",
        ),
        (({"match": "layer_0", "weight_decay": 0.0},), "layers.mlp.w_up"),
        (
            ({"match": "mlp", "weight_decay": 0.0}, {"match": "w_up", "weight_decay": 0.1}),
            "'mlp' and 'w_up' both match layers.mlp.w_up; the parameters are embedding,",
        ),
        (({"match": "mlp"},), "is no group; give dicts such as"),
        (({"match": "(", "weight_decay": 0.0},), "'(' is no regular expression"),
        (({"match": "a{99999999999999}", "weight_decay": 0.0},), "is no regular expression: the repetition number is"),
        (({"match": "(" * 6000, "weight_decay": 0.0},), "is no regular expression: "),
        ("{{'match': 'mlp', 'weight_decay': 1}}", "is no group; give dicts such as"),
        (({"match": "mlp", "learning_rate": 0.0, "weight_decay": 0.0},), "unknown key 'learning_rate'"),
        (({"match": "mlp", "weight_decay": -1},), "weight_decay must be a number of at least 0, not -1"),
        (("mlp",), "'mlp' is no group"),
    ],
)
def test_what_cannot_be_is_told(store: Path, groups, told):
    with pytest.raises(UserError) as error:
        setup_for(store, f"--config.train.groups={groups!r}")
    assert told in str(error.value)
    assert "config.train.groups" in str(error.value)


def test_an_excluded_name_that_no_parameter_has_is_told(store: Path):
    with pytest.raises(UserError, match=r"weight_decay_exclude: 'bias' is in the name of no parameter; the parameters"):
        setup_for(store, "--config.train.weight_decay_exclude=('norm', 'bias')")


def test_a_group_alone_on_the_command_line_and_the_rate_of_zero_stands_still(store: Path):
    setup = setup_for(store, "--config.train.groups={'match': 'embedding', 'learning_rate_multiplier': 0.0}")
    shapes = setup.abstract["params"]
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    updates, _ = jax.jit(setup.optimizer.update)(params, setup.optimizer.init(params), params)
    assert not np.any(updates["embedding"])
    assert optax.tree_utils.tree_norm(updates) > 0
