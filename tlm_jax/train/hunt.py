"""Finds the first operation of a step that made something not finite, by running it one operation at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util  # where an operation was written has no public name

from tlm_jax.errors import UserError
from tlm_jax.model.decoder import layers_of
from tlm_jax.model.functional import FunctionalDecoder, Parameters
from tlm_jax.parallel.rules import pin_batch
from tlm_jax.train.step import MODEL_KEYS, Batch, loss_sums, micro_batches


class Origin(NamedTuple):
    """An operation with finite inputs and an output that is not.

    Attributes:
      layer: whose; None: of none, such as the embedding or the loss.
      backward: whether it belongs to the backward pass.
      operation: XLA's name of it, such as "dot_general".
      source: the line of the model that asked for it.
      output: dtype and shape of what it made.
    """

    layer: int | None
    backward: bool
    operation: str
    source: str
    output: str

    def __str__(self) -> str:
        where = "outside the layers" if self.layer is None else f"layer {self.layer}"
        direction = "backward" if self.backward else "forward"
        return f"{where}, {direction} pass, {self.operation} at {self.source}, which makes {self.output}"


class _Found(Exception):
    def __init__(self, origin: Origin) -> None:
        self.origin = origin


@jax.jit
def _finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(array)) for array in arrays]))


def _is_finite(values: Sequence[Any]) -> bool:
    arrays = [v for v in values if hasattr(v, "dtype") and jnp.issubdtype(v.dtype, jnp.inexact) and np.size(v)]
    return not arrays or bool(_finite(arrays))


def parameters_not_finite(params: Parameters) -> list[str]:
    """The names of the parameters that hold a number that is not finite."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [".".join(str(key.key) for key in path) for path, leaf in leaves if not _is_finite([leaf])]


def first_not_finite(
    model: FunctionalDecoder, params: Parameters, batch: Batch, gradient_accumulation: int, z_loss: float
) -> Origin | None:
    """Runs loss and gradients again, one operation at a time, each looked at.

    Args:
      model: the run's.
      params: finite ones, those that the step began with.
      batch: the step's, on the devices.
      gradient_accumulation: as in `make_train_step`.
      z_loss: likewise.

    Returns:
      The first operation of which some output is not finite although all inputs are; None: there is none.
    """

    def gradients(params: Parameters, batch: Batch) -> Any:
        return jax.value_and_grad(lambda params: loss_sums(model, params, batch, z_loss).objective)(params)

    for micro in _each_micro_batch(batch, gradient_accumulation):
        closed = jax.make_jaxpr(gradients)(params, micro)
        try:
            _run(closed.jaxpr, closed.consts, jax.tree.leaves((params, micro)), "", 0)
        except _Found as found:
            return found.origin
    return None


def _each_micro_batch(batch: Batch, count: int) -> Iterator[Batch]:
    if count == 1:
        yield {key: batch[key] for key in MODEL_KEYS}
        return
    stacked = jax.jit(micro_batches, static_argnums=1)(batch, count)
    for k in range(count):
        yield {key: pin_batch(value[k]) for key, value in stacked.items()}


def _run(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], scope: str, iteration: int) -> list[Any]:
    """Evaluates a jaxpr; raises `_Found` at the first operation that makes what is not finite from what is.

    `scope` is the path of names around it, `iteration` which turn of the innermost scan it is.
    """
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        inner_scope = f"{scope}/{equation.source_info.name_stack}"
        with equation.ctx.manager:
            outputs = _apply(equation, inputs, inner_scope, iteration)
        if not _is_finite(outputs) and _is_finite(inputs):
            raise _Found(_origin(equation, outputs, inner_scope, iteration))
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, inputs: list[Any], scope: str, iteration: int) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _scan(params, inputs, scope)
    if name in ("jit", "pjit", "checkpoint", "remat2", "closed_call", "custom_vjp_call", "custom_jvp_call"):
        return _run(*_inner(params), inputs, scope, iteration)
    outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(params))
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _inner(params: dict[str, Any]) -> tuple[Any, Sequence[Any]]:
    inner = next(params[key] for key in ("jaxpr", "call_jaxpr") if key in params)
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def _scan(params: dict[str, Any], inputs: list[Any], scope: str) -> list[Any]:
    """The turns of a scan in its order, each looked into."""
    if "num_consts" in params:
        fixed, carried = params["num_consts"], params["num_carry"]
    else:  # from jax 0.12 on
        fixed, carried = (len(part.vals) for part in params["ft_in"].unpack()[:2])
    carry, scanned = inputs[fixed : fixed + carried], inputs[fixed + carried :]
    rows: dict[int, list[Any]] = {}
    turns = range(params["length"])
    for i in reversed(turns) if params["reverse"] else turns:
        out = _run(*_inner(params), [*inputs[:fixed], *carry, *(x[i] for x in scanned)], scope, i)
        carry, rows[i] = out[:carried], out[carried:]
    return [*carry, *(jnp.stack(column) for column in zip(*(rows[i] for i in turns), strict=True))]


def _origin(equation: Any, outputs: list[Any], scope: str, iteration: int) -> Origin:
    named = [layers for word in re.findall(r"\w+", scope) if (layers := layers_of(word))]
    layer = None if not named else named[-1].start + (iteration if len(named[-1]) > 1 else 0)
    wrong = next(output for output in outputs if not _is_finite([output]))
    return Origin(
        layer=layer,
        backward="transpose" in scope,
        operation=equation.primitive.name,
        source=source_info_util.summarize(equation.source_info).rpartition("/")[2],
        output=f"{wrong.dtype}{list(wrong.shape)}",
    )


def explained(
    model: FunctionalDecoder,
    params: Parameters,
    batch: Batch,
    gradient_accumulation: int,
    z_loss: float,
    *,
    step: int,
    windows: np.ndarray,
    where: str,
) -> UserError:
    """What `train.nonfinite = "hunt"` stops a run with: the origin of a step's number that is not finite."""
    names = parameters_not_finite(params)
    if names:
        what = f"parameters are not finite before the step: {', '.join(names)}"
    else:
        origin = first_not_finite(model, params, batch, gradient_accumulation, z_loss)
        what = f"first in {origin}" if origin else "but every operation by itself is: the sum over devices or batches"
    listed = ", ".join(map(str, windows))
    return UserError(
        f"loss or gradient of step {step} is not finite: {what}; this host's windows: {listed}", where=where
    )
