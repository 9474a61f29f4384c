"""Worker: tlm_jax generates; a step is one batch of prompts continued, greedily, by the wanted number of tokens."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from serving import Session

from tlm_jax.capacity.from_config import profile_from_config
from tlm_jax.config import default_config
from tlm_jax.data.adopted_tokenizer import IdTokenizer
from tlm_jax.evaluate.generate import Generator, generation_settings
from tlm_jax.evaluate.sampling import Sampling
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.settings import settings_from_config


def main() -> None:
    session = Session()
    wanted = session.settings
    sizes = dict(wanted["sizes"])
    config = default_config()
    config.model.vocab_size = vocab_size = sizes.pop("vocab_size")
    config.model.compute_dtype = wanted["dtype"]
    config.profile.update({**sizes, "num_kv_heads": sizes["num_heads"], "schedule": "uniform"})
    B, P = wanted["batch_size"], wanted["prompt_tokens"]
    model = FunctionalDecoder(profile_from_config(config), generation_settings(settings_from_config(config)))

    def as_used(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:  # and so as they are read from a checkpoint
        return leaf if path[-1].key == "scale" else leaf.astype(model.settings.dtype)

    parameters = jax.tree_util.tree_map_with_path(as_used, jax.jit(model.init)(jax.random.key(0)))
    generator = Generator(
        model,
        parameters,
        IdTokenizer(vocab_size, separator=0),
        Sampling(temperature=0.0),
        batch_size=B,
        prompt_tokens=P,
        max_new_tokens=wanted["new_tokens"],
    )
    prompts = np.random.default_rng(0).integers(1, vocab_size, (B, P)).tolist()
    keys = jax.random.split(jax.random.key(0), B)

    compiled = 0

    def count(event: str, duration_secs: float, **_: str | int) -> None:
        nonlocal compiled
        compiled += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(count)
    before = -1
    for _ in session.steps(lambda: None):
        generated = sum(1 for _ in generator.stream(prompts, keys))
        assert generated == wanted["new_tokens"]
        assert before in (-1, compiled), f"generating compiled {compiled - before} times more"
        before = compiled


if __name__ == "__main__":
    main()
