"""The configuration: every key with its default, files, command-line overrides, and the JSON form in checkpoints.

A config file is a Python file with `get_config()`, which takes `default_config()` and changes what differs. The
result is locked: an unknown key is an error that names the nearest key.

The comments in `default_config` are documentation: `tlm config` prints them, and docs/config.md is made from them by
`tlm config --markdown > docs/config.md`, which a test compares. Every key has one at the end of its line, or full
comment lines right above the key, or both, then read as one text from top to bottom; a group likewise, at its
`ConfigDict()` line. A blank line ends a comment's reach.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import runpy
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict

from tlm_jax.errors import UserError, raise_together
from tlm_jax.files import parse_json


def default_config() -> ConfigDict:
    """Returns every key with its default, locked."""
    c = ConfigDict()
    c.name = "run"  # shown in reports and progress
    c.seed = 0  # of the initial weights

    # One layer's sizes, and how they vary with depth. The only source of widths.
    c.profile = ConfigDict()
    c.profile.schedule = "uniform"  # of d_ff: uniform | linear | cosine | sigmoid | three_group | list | file
    c.profile.num_layers = 12  # depth
    c.profile.d_model = 768  # width of the residual stream; where it varies, of the embedding and of the uniform twin
    c.profile.d_ff = 2048  # mean MLP width over layers
    c.profile.num_heads = 12  # query heads
    c.profile.num_kv_heads = 12  # fewer than num_heads: grouped-query attention
    c.profile.head_dim = 0  # 0: d_model / num_heads
    c.profile.mlp = "swiglu"  # swiglu | geglu | reglu (gated, 3·d_model·d_ff weights) | gelu | squared_relu (plain, 2)
    c.profile.qk_norm = False  # RMSNorm with a learned scale on every query and key, before the rotary embedding
    # Tokens that a token attends to, itself included; 0: all before it. The values take turns over the layers, which
    # are scanned only where neighbours are equal, so that compilation follows the depth:
    c.profile.windows = (0,)  # (4096, 0) is every other layer, (1024, 1024, 0) all but each third
    c.profile.start_ratio = 1.5  # first layer's d_ff over the mean
    c.profile.end_ratio = 0.5  # last layer's d_ff over the mean
    c.profile.sigmoid_steepness = 10.0  # sigmoid: how steep it falls at half the depth; 10 is the paper's
    # three_group: d_ff of the early, middle and late third over the mean. The values are ours: the paper gives none.
    c.profile.group_ratios = (1.5, 1.0, 0.5)  # (0.75, 1.5, 0.75) is wider in the middle, (0.5, 1, 1.5) late
    c.profile.multiple_of = 16  # every d_ff is a multiple of this
    c.profile.plateaus = 0  # 0: each layer its own width; G: G runs of equal width
    # list: d_ff of each layer. file: path of a profile's JSON, with which all sizes set in config.profile must agree.
    c.profile.layers = config_dict.placeholder(object)
    # d_model by layer: uniform | x (narrowest in the middle) | diamond (widest there) | v (narrowest first) | lambda
    # (narrowest last). MLPs keep uniform's ratio of d_ff to d_model, times the taper of `schedule`, and the weights in
    # matrices are matched with uniform's; the next ten keys say how.
    c.profile.width_schedule = "uniform"
    c.profile.width_progression = "geometric"  # geometric (neighbours of one ratio) | arithmetic (of one difference)
    c.profile.bottleneck_ratio = 0.3  # narrowest layer's d_model over uniform's
    c.profile.bottleneck_depth = 0.75  # x, diamond: where in num_layers the narrowest, or the widest, layer lies
    c.profile.width_multiple_of = 32  # every d_model is a multiple of this
    # Round the widest to an integer before all to multiples, as the authors' code does; False: the paper's means and
    c.profile.round_widest = True  # FLOPs, which differ by one multiple in one layer
    c.profile.width_plateaus = 0  # 0: each layer its own d_model; G: G runs of equal d_model
    # rounded: each d_model is the nearest multiple, and the budget what that leaves (the paper). exact: d_model and
    # then d_ff move on in steps until the weights are exactly the uniform twin's. nearest: as near as the steps allow,
    c.profile.width_budget = "rounded"  # where exactly is not possible, as with many experts in large steps
    # What is matched: effective, without the weights of the end layers that multiply zeros or that nothing reads (the
    c.profile.width_count = "effective"  # paper), or raw, all
    c.profile.fixed_head_dim = 0  # 0: num_heads heads in every layer (the paper); K: heads of K, as many as d_model has
    # Coordinates that the layer before has not: carry_forward (as the newest layer with them left them; the paper) |
    c.profile.resize = "carry_forward"  # zero_padding | projection (a matrix at every change, beyond the budget)
    c.profile.num_experts = 0  # experts instead of each MLP, to which a router sends tokens; 0: none
    c.profile.experts_per_token = 0  # experts that each token is sent to
    c.profile.expert_d_ff = 0  # width of an expert, in d_ff's place; where d_model varies, the twin's
    c.profile.padded_experts = 0  # stored beyond num_experts and never sent to, so that an axis divides them all

    c.model = ConfigDict()
    c.model.vocab_size = 32000  # at least the tokenizer's
    c.model.tied_embeddings = True  # the output projection is the token embedding's transpose
    c.model.rope_theta = 10000.0  # base of the rotary embedding's wavelengths
    c.model.norm_epsilon = 1e-5  # added to the mean square in RMSNorm
    c.model.document_mask = True  # attention stays inside a document
    c.model.attention = "auto"  # auto, or a row of the table in tlm_jax/model/attention_kernels.py
    # auto: a TPU computes gated MLPs by the fused kernel, others by plain products; or plain | pallas_tpu, which a CPU
    c.model.mlp_kernel = "auto"  # interprets, slowly
    # of the fused kernel, for its backward pass: products (gate and up), or input (x, the rest is made again); auto:
    c.model.mlp_keeps = "auto"  # products where model.remat would keep those of a plain MLP
    c.model.compute_dtype = "auto"  # auto: bfloat16 on accelerators, float32 on CPU; or float32 | bfloat16
    c.model.layer_stacking = "auto"  # auto: runs of equal layers are scanned; unrolled: none is
    c.model.attention_soft_cap = 0.0  # attention logits become cap · tanh(logits / cap); 0: off
    c.model.final_soft_cap = 0.0  # the same for the vocabulary's logits
    # none | dots | minimal | context_mlp | context | full | minimal_offloaded: what the backward pass keeps of a block,
    c.model.remat = "none"  # from everything to its input alone; see tlm_jax/model/remat.py
    c.model.loss_chunk_tokens = 1024  # tokens per device whose logits exist at one time
    c.model.init_scale = 1.0  # multiplies every initial standard deviation
    # Standard deviation of a layer's matrices; 0: 1 / sqrt(inputs summed over). A layer whose d_model is not the
    c.model.init_deviation = 0.0  # embedding's takes it times (embedding's / its own)^init_width_power
    c.model.init_width_power = 0.5  # with init_deviation; 0.5: the variance goes with 1 / d_model
    c.model.init_depth_scaling = True  # wo and w_down are divided by sqrt(2 · num_layers)
    c.model.embedding_init_deviation = 0.0  # of the embedding and an untied output projection; 0: 1 / sqrt(d_model)
    c.model.embedding_multiplier = 1.0  # embeddings times this enter the first layer (muP)
    c.model.residual_multiplier = 1.0  # what attention and MLP add to the residual stream is multiplied by it (muP)
    c.model.logits_multiplier = 1.0  # the vocabulary's logits are, before their soft-cap (muP)
    # What attention's logits are multiplied by: inverse_sqrt (1 / sqrt(head_dim)) | inverse (1 / head_dim, muP)
    c.model.attention_scale = "inverse_sqrt"

    c.data = ConfigDict()
    c.data.store = ""  # a token store made by `tlm prepare` or `tlm adopt`
    # Instead of store: several in fixed proportions, pairs of a store and its weight: (("web", 0.7), ("books", 0.3))
    c.data.mixture = ()
    c.data.sequence_length = 1024  # tokens of a training example
    c.data.seed = 0  # order of the windows
    c.data.num_workers = 0  # loader processes per host, at most 1024; the batches do not depend on it

    c.train = ConfigDict()
    c.train.num_steps = 1000  # updates of the parameters
    c.train.global_batch_size = 8  # sequences per step, over all hosts
    c.train.gradient_accumulation = 1  # micro-batches per step
    c.train.schedule = "cosine"  # cosine | linear | constant | inverse_sqrt | wsd | power, after a linear warm-up
    c.train.learning_rate = 3e-4  # peak
    c.train.warmup_steps = 100  # learning rate rises linearly from 0
    c.train.final_learning_rate_ratio = 0.1  # at the last step: of the peak; power: of the rate where the decay begins
    c.train.decay_steps = 0  # wsd, power: over how many of the last steps the rate falls to that ratio
    c.train.decay_shape = "linear"  # wsd, power: linear | cosine | sqrt | exponential
    c.train.power_amplitude = 4.0  # power: a in min(learning_rate, global_batch_size * a * tokens^b)
    c.train.power_exponent = -0.51  # power: b
    c.train.optimizer = "adamw"  # adamw | muon | lion | adafactor; a key that the chosen one does not read is an error
    c.train.beta1 = 0.9  # adamw, muon's Adam part: decay of the first moment
    c.train.beta2 = 0.95  # the same: decay of the second moment
    c.train.epsilon = 1e-8  # the same: added to the root of the second moment
    c.train.muon_momentum = 0.95  # muon: decay of the momentum
    c.train.muon_dtype = "auto"  # muon: of its iterations; auto: bfloat16 on accelerators, float32 on CPU
    c.train.adam_learning_rate = 0.0  # muon: peak for what is not a hidden matrix; 0: learning_rate
    c.train.lion_beta1 = 0.9  # lion: weight of the momentum in the step
    c.train.lion_beta2 = 0.99  # lion: decay of the momentum
    c.train.adafactor_decay_exponent = 0.8  # adafactor: second moments at step n decay by 1 - n^-exponent
    c.train.adafactor_clip = 1.0  # adafactor: largest root mean square of one parameter's update in a layer; 0: off
    c.train.adafactor_momentum = 0.0  # adafactor: decay of the momentum; 0: none, and no memory for it
    c.train.adafactor_parameter_scale = True  # adafactor: learning rate relative to a parameter's root mean square
    c.train.adafactor_min_factored = 128  # adafactor: matrices with a shorter side keep a whole second moment
    c.train.weight_decay = 0.1  # decoupled, times the learning rate
    c.train.weight_decay_exclude = ("norm", "embedding")  # parameter names that contain one of these do not decay
    # Dicts such as {"match": "embedding", "learning_rate_multiplier": 2.0, "weight_decay": 0.0}, of one number or both,
    # for the parameters in whose names (such as layers.mlp.w_up) the regular expression is found.
    c.train.groups = ()
    c.train.gradient_clip = 1.0  # global norm; 0: off
    c.train.z_loss = 0.0  # times log(sum of exp(logits))² per target, added to the loss; 0: off; PaLM: 1e-4
    # Moving average of the weights, kept beside them: after each step d * average + (1 - d) * weights; 0: none is kept.
    c.train.ema_decay = 0.0
    # Where loss or gradient is not finite: skip (the step changes nothing) | hunt (the run stops and names the first
    c.train.nonfinite = (
        "skip"  # layer and operation that is not; slower, for no step is dispatched before the last ends)
    )
    c.train.max_nonfinite_steps = 10  # skipped in a row before the run stops
    # A step whose loss lies more than so many robust standard deviations (1.4826 times the median absolute deviation)
    c.train.spike_deviations = 0.0  # above the median of the last spike_window steps changes nothing; 0: off
    c.train.spike_window = 128  # losses that a spike is told by; until there are so many, no step is one
    # Longest wait for the end of a step, in seconds, after which a process gives the others up for lost and exits with
    # 75; ten times as long where programs are compiled, and checkpoint.timeout_seconds more where one is saved;
    c.train.hang_seconds = 900.0  # 0: forever

    c.validation = ConfigDict()
    c.validation.every_steps = 0  # 0: only at the end
    c.validation.num_windows = 0  # evenly spaced over the held-out split; 0: all of it
    c.validation.weights = "params"  # params, or ema: the moving average that train.ema_decay keeps
    c.validation.batch_size = 0  # 0: train.global_batch_size

    c.checkpoint = ConfigDict()
    c.checkpoint.every_steps = 1000  # permanent
    c.checkpoint.every_seconds = 600.0  # temporary: only the newest keep_last stay
    c.checkpoint.keep_last = 2  # temporary ones that stay
    # What the best checkpoint has the lowest of: validation/loss | validation/perplexity | validation/bits_per_byte
    c.checkpoint.best_metric = "validation/loss"
    c.checkpoint.keep_best = 0  # a validation among the so many best is saved, and these are never removed
    c.checkpoint.timeout_seconds = 1800.0  # a save that takes longer stops the run

    c.log = ConfigDict()
    c.log.every_steps = 10  # a line of metrics
    c.log.norms_every_steps = 100  # per-layer norms; 0: never
    c.log.tensorboard = True  # also TensorBoard events, in WORKDIR/tensorboard
    c.log.profile_at_step = 0  # first step of a profiler trace, such as SIGUSR1 asks for at any time; 0: none
    c.log.peak_flops = 0.0  # per device, for MFU; 0: the accelerator's data sheet, on CPU a measured matmul

    c.mesh = ConfigDict()  # axis sizes; one may be -1: what is left
    c.mesh.data = -1  # copies of the parameters, each with its part of the batch
    c.mesh.fsdp = 1  # the batch and the parameters are cut
    c.mesh.expert = 1  # experts are spread; none yet
    c.mesh.tensor = 1  # heads and d_ff are cut
    return c.lock()


def keys(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    """Yields every leaf key, dotted, in the order of the alphabet."""
    for key in config:
        value = config[key]
        if isinstance(value, ConfigDict):
            yield from keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _unknown_key(key: str, config: ConfigDict, where: str) -> UserError:
    near = difflib.get_close_matches(key, list(keys(config)), n=1, cutoff=0.0)
    return UserError(f"unknown key config.{key}", where=where, mend=f"the nearest key is config.{near[0]}")


def _has_huge_integer(value: Any) -> bool:
    """Whether an integer in it has more than 64 bits: no library takes one, and few say so."""
    if isinstance(value, dict):
        return any(map(_has_huge_integer, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_huge_integer, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _huge(key: str, where: str) -> UserError:
    return UserError(f"config.{key} is beyond what 64 bits can hold", where=where)


def _check_integers(config: ConfigDict, where: str) -> None:
    raise_together([_huge(key, where) for key in keys(config) if _has_huge_integer(config[key])])


def _parse(text: str, current: Any, key: str) -> Any:
    """Reads `text` as the type of `current`; a key without a type takes any literal, or the text itself."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
        if isinstance(current, float) and text.lower() in ("nan", "inf", "-inf"):
            value = float(text)  # whoever reads the key says what it may be
    if isinstance(current, str):
        return text
    if _has_huge_integer(value):
        raise _huge(key, "command line")
    if isinstance(current, bool):
        wanted = isinstance(value, bool)
    elif isinstance(current, int):
        wanted = isinstance(value, int) and not isinstance(value, bool)
    elif isinstance(current, float):
        wanted = isinstance(value, (int, float)) and not isinstance(value, bool)
        value = float(value) if wanted else value
    elif isinstance(current, tuple):
        value = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        wanted = True
    else:
        wanted = True
    if not wanted:
        kind = type(current).__name__
        raise UserError(f"config.{key} takes a value of type {kind}, not {text!r}", where="command line")
    return value


def set_key(config: ConfigDict, key: str, text: str) -> None:
    """Sets one dotted key from its text.

    Raises:
      UserError: the key does not exist (names the nearest), or the text is not of the key's type.
    """
    if key not in set(keys(config)):
        raise _unknown_key(key, config, "command line")
    *path, leaf = key.split(".")
    node = config
    for part in path:
        node = node[part]
    node[leaf] = _parse(text, node[leaf], key)


def apply_overrides(config: ConfigDict, overrides: Iterable[str]) -> ConfigDict:
    """Applies `--config.key=value` arguments in order and returns `config`.

    Raises:
      UserError: every malformed argument and unknown key, together.
    """
    problems: list[UserError] = []
    for argument in overrides:
        name, equals, text = argument.partition("=")
        if not name.startswith("--config.") or not equals:
            problems.append(
                UserError(
                    f"unknown argument {argument!r}", where="command line", mend="overrides read --config.key=value"
                )
            )
            continue
        try:
            set_key(config, name.removeprefix("--config."), text)
        except UserError as problem:
            problems.append(problem)
    raise_together(problems)
    return config


def reject_overrides(arguments: Sequence[str]) -> None:
    """Raises a `UserError` for the first of the arguments that a command without a config has been given too much."""
    if arguments:
        raise UserError(f"unknown argument {arguments[0]!r}", where="command line")


def unread_keys(values: ConfigDict, room: str, choice: str, reads: Mapping[str, Collection[str]]) -> list[UserError]:
    """The keys that differ from their default although the row chosen from a table does not read them.

    Args:
      values: `config[room]`.
      room: such as "train".
      choice: the key that chooses the row, such as "optimizer".
      reads: row to the keys that it reads; what no row names, all read.
    """
    chosen, defaults = values[choice], default_config()[room]
    if chosen not in reads:
        return []
    problems = []
    for key in dict.fromkeys(key for row in reads.values() for key in row):
        if key not in reads[chosen] and values[key] != defaults[key]:
            readers = " or ".join(name for name, row in reads.items() if key in row)
            mend = f"leave it at {defaults[key]}, or take the {choice} {readers}"
            problems.append(UserError(f"{chosen} does not read it", where=f"config.{room}.{key}", mend=mend))
    return problems


def load_config(path: str, overrides: Iterable[str] = ()) -> ConfigDict:
    """Runs a config file's `get_config()` and applies the overrides.

    Args:
      path: the file, or `FILE:TEXT`, where `get_config` takes the text as its argument.
      overrides: `--config.key=value` arguments.

    Raises:
      UserError: no such file, no `get_config()`, an unknown key (names the nearest), or a bad override.
    """
    text: tuple[str, ...] = ()
    if not Path(path).is_file() and ":" in path:
        path, text = path.rpartition(":")[0], (path.rpartition(":")[2],)
    if not Path(path).is_file():
        raise UserError("no such config file", where=path)
    try:
        namespace = runpy.run_path(path)
        if "get_config" not in namespace:
            raise UserError("the file defines no get_config()", where=path)
        config = namespace["get_config"](*text)
    except (AttributeError, KeyError) as error:
        named = re.match(r"""['"]*Key "([^"]+)" does not exist""", str(error))
        key = named[1] if named else getattr(error, "name", None)
        if key is None:
            raise UserError(f"{type(error).__name__}: {str(error).splitlines()[0]}", where=path) from error
        raise UserError(f"unknown key {key}", where=path, mend=_hint(key)) from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the file is the user's code: whatever it raises is theirs to mend
        lines = [entry.lineno for entry in traceback.extract_tb(error.__traceback__) if entry.filename == path]
        where = f"{path}:{lines[-1]}" if lines else path
        told = (str(error).splitlines() or [""])[0]
        raise UserError(f"{type(error).__name__}: {told}", where=where) from error
    if not isinstance(config, ConfigDict) or list(keys(config)) != list(keys(default_config())):
        raise UserError(
            "get_config() returns something else than a changed default_config()",
            where=path,
            mend="begin with `config = default_config()` and end with `return config`",
        )
    _check_integers(config, path)
    return apply_overrides(config.lock(), overrides)


def _hint(key: str) -> str:
    """Names the known key, or group of keys, whose last part is nearest to `key`."""
    paths: dict[str, str] = {}
    for known in keys(default_config()):
        parts = known.split(".")
        for i, part in enumerate(parts, 1):
            paths.setdefault(part, ".".join(parts[:i]))
    return f"the nearest key is config.{paths[difflib.get_close_matches(key, paths, n=1, cutoff=0.0)[0]]}"


def to_json(config: ConfigDict) -> str:
    """The config as JSON text; `from_json` inverts it."""
    return json.dumps(config.to_dict(), indent=1, default=list)


def from_json(text: str, where: str = "config") -> ConfigDict:
    """Reads `to_json`'s text back over the defaults: keys newer than the text take their defaults.

    Raises:
      UserError: the text is not JSON, has a key that this version does not know, or a value of another type.
    """
    config = default_config()

    def fill(node: ConfigDict, values: Any, prefix: str) -> None:
        if not isinstance(values, dict):
            raise UserError(f"config{prefix.rstrip('.') and '.' + prefix.rstrip('.')} is not an object", where=where)
        for key, value in values.items():
            if key not in node:
                raise _unknown_key(f"{prefix}{key}", config, where)
            if isinstance(node[key], ConfigDict):
                fill(node[key], value, f"{prefix}{key}.")
                continue
            if _has_huge_integer(value):
                raise _huge(f"{prefix}{key}", where)
            try:
                node[key] = tuple(value) if isinstance(value, list) else value
            except (TypeError, ValueError) as error:
                kind = type(node[key]).__name__
                raise UserError(f"config.{prefix}{key} is no {kind}: {json.dumps(value)}", where=where) from error

    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"not JSON: {error}", where=where) from error
    fill(config, values, "")
    return config
