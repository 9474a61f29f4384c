"""What the backward pass keeps of a block's forward pass, by name: `config.model.remat`.

The products worth keeping carry names (`jax.ad_checkpoint.checkpoint_name`); a policy is the set of names it keeps on
the device, or in the host's memory. A block's input is kept in any case, and what is cheap (norms, rotary embedding,
activations) is computed again by every policy that keeps names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tlm_jax.kernels.plain_mlp import GATE, UP

QUERY, KEY, VALUE = "query", "key", "value"  # the projections, [B, H or G, T, K]
CONTEXT = "context"  # the attention kernel's output [B, H, T, K], and its log-sum-exp where the kernel names it
ATTENTION_OUT = "attention_out"  # after the output projection [B, T, D]
PRODUCTS = (QUERY, KEY, VALUE, ATTENTION_OUT, GATE, UP)


class Policy(NamedTuple):
    """The names that stay on the device and those that move to the host's memory and back."""

    kept: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()


# By memory on the device, least first; `none` (all is kept) and `dots` have no names. The context stays on the device:
# a kernel names it inside itself, and if it were elsewhere the kernel would run again for what stands outside.
NAMED_POLICIES = {
    "full": Policy(),
    "context": Policy(kept=(CONTEXT,)),
    "minimal_offloaded": Policy(kept=(CONTEXT,), offloaded=PRODUCTS),
    "context_mlp": Policy(kept=(CONTEXT, GATE, UP)),
    "minimal": Policy(kept=(CONTEXT, *PRODUCTS)),
}
POLICIES = ("none", "dots", *NAMED_POLICIES)
OFFLOADING_PLATFORMS = ("gpu", "tpu")  # where the host's memory is another than the device's


def keeps_mlp_products(name: str) -> bool:
    """Whether under this policy the backward pass finds the products of a plain MLP rather than making them again."""
    if name in ("none", "dots"):
        return True
    return GATE in (*NAMED_POLICIES[name].kept, *NAMED_POLICIES[name].offloaded)


def remat(function: Callable[..., Any], name: str, *, scanned: bool) -> Callable[..., Any]:
    """`function` with its backward pass computing again what the policy `name` does not keep.

    Args:
      scanned: whether it is the body of a `lax.scan`, which already keeps the two computations apart.
    """
    if name == "none":
        return function
    if name == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    else:
        kept, offloaded = NAMED_POLICIES[name]
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(kept),
            names_which_can_be_offloaded=list(offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint(function, policy=policy, prevent_cse=not scanned)
