"""What is wrong with a run's data, found without JAX: a training and a comparison's dry run say the same."""

from __future__ import annotations

from ml_collections import ConfigDict

from tlm_jax.data.mixture import Mixture
from tlm_jax.data.store import TokenStore
from tlm_jax.errors import UserError


def data_problems(config: ConfigDict, store: TokenStore | Mixture) -> list[UserError]:
    """Returns all that keeps a run of `config` from being trained and validated on `store`."""
    return _check_vocabulary(config, store) + _check_splits(config, store)


def _check_vocabulary(config: ConfigDict, store: TokenStore | Mixture) -> list[UserError]:
    try:
        needed = store.tokenizer().vocab_size
    except UserError as problem:
        return [problem]
    if needed <= config.model.vocab_size:
        return []
    what = f"{config.model.vocab_size} is less than the {needed} ids of the tokenizer of {store.name}"
    return [UserError(what, where="config.model.vocab_size", mend=f"set it to at least {needed}")]


def _check_splits(config: ConfigDict, store: TokenStore | Mixture) -> list[UserError]:
    """A mixture trains on all its stores; what is held out may be of some."""
    needed = [(part, "train") for part in (store.stores if isinstance(store, Mixture) else [store])]
    problems = [
        UserError(
            f"the split {split!r} holds no document", where=part.name, mend="prepare more text, or another --holdout"
        )
        for part, split in [*needed, (store, "validation")]
        if not part.split(split).num_documents
    ]
    # Also without keep_best: no --step=best would ever be found.
    if config.checkpoint.best_metric == "validation/bits_per_byte" and not store.split("validation").num_bytes:
        what = "the bytes of the text are not known"
        mend = "take validation/loss, or adopt the store with its tokenizer"
        problems.append(UserError(what, where="config.checkpoint.best_metric", mend=mend))
    return problems
