"""The fused gated MLP against plain products and against the compiler's own estimate, for every width of the configs.

    python benchmarks/gated_mlp.py --topology=v6e:2x2 [--tokens=8192] [--configs=GLOB] [--every=N] [--output=FILE.json]
    python benchmarks/gated_mlp.py --device [--tokens=8192] ...        on a TPU: checks and times each width

Without a TPU it needs libtpu of the version that jax asks for (`pip install "libtpu==0.0.42.*"` for jax 0.10.2) and
prints predictions, by this method. A kernel takes the longest of: the bundles of its static schedule, the matrix units'
ideal, and its bytes over HBM bandwidth (by tiles: what streams past is counted as often as it is read). The plain
products take what XLA estimates. Shares are of the matrix units' peak for 6·N·D·F FLOPs forward and 18·N·D·F for both
passes, so that the kernel's own recomputation counts against it; `bytes` is the kernel's HBM traffic over that of the
unfused sequence of products and elementwise operations, each reading and writing its arrays once, keeping between
the passes what the kernel does: x alone, or gate and up with `--keeps`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from static_schedule import estimated_cycles, kernel_cycles

ROOT = Path(__file__).parent.parent
# Core clock (Hz), peak bfloat16 FLOP/s and HBM bytes/s of a chip, and the cores that share a kernel's outer grid axis.
CHIPS = {
    "v5e": (1.5e9, 197e12, 0.82e12, 1),
    "v5p": (1.75e9, 459e12, 2.46e12, 2),
    "v6e": (1.75e9, 918e12, 1.64e12, 1),
}


def shapes_of(pattern: str) -> list[tuple[int, int]]:
    """Every (d_model, d_ff) of the configs whose path fits, in order, no twice."""
    from tlm_jax.capacity.from_config import profile_from_config
    from tlm_jax.config import load_config

    found: dict[tuple[int, int], None] = {}
    for path in sorted((ROOT / "configs").glob(pattern)):
        profile = profile_from_config(load_config(str(path), []))
        for layer in profile.layers:
            if not layer.num_experts and layer.mlp in ("swiglu", "geglu", "reglu"):
                found[layer.d_model, layer.d_ff] = None
    return sorted(found)


def traffic(N: int, D: int, F: int, tiles: Any, keeps: bool) -> tuple[list[float], list[float]]:
    """HBM bytes of the three kernels, and of the two passes of the unfused sequence, in bfloat16."""
    weights, tokens, hidden = 3 * D * F * 2, N * D * 2, N * F * 2
    (fn, _), (bn, _), (_, wf) = tiles.forward, tiles.backward_tokens, tiles.backward_weights
    kernels = [
        math.ceil(N / fn) * weights + 2 * tokens,
        math.ceil(N / bn) * weights + 3 * tokens + 3 * hidden,
        math.ceil(F / wf) * 2 * tokens + 3 * hidden + weights,
    ]
    # gate, up: x and a weight in, hidden out; h = act(gate) · up: two in, one out; y: h and a weight in, tokens out.
    forward = 2 * (tokens + hidden) + 3 * hidden + hidden + tokens + weights
    # gate, up and h again, as nothing but x is kept; d_h; d_gate and d_up, of three in; d_x, of two products and their
    # sum; three gradients of weights.
    again = 2 * (tokens + hidden) + 3 * hidden + 2 * D * F * 2
    backward = (
        again
        + (tokens + hidden)
        + 5 * hidden
        + 2 * (hidden + tokens)
        + 3 * tokens
        + 3 * (hidden + tokens)
        + 2 * weights
    )
    if keeps:  # gate and up are written by the first kernel and read, in x's place, by the second
        kernels = [kernels[0] + 2 * hidden, kernels[1] + 2 * hidden - tokens, kernels[2]]
        backward -= again
    return kernels, [forward, backward]


def program(topology: str, N: int, D: int, F: int, both: bool, **keywords: Any) -> str:
    """The compiled text of the forward pass, or of both."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from tlm_jax.kernels.gated_mlp import gated_mlp

    place = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0])
    shapes = ((N, D), (D, F), (D, F), (F, D), (N, D))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]

    def passes(x: Any, w_gate: Any, w_up: Any, w_down: Any, d_y: Any) -> Any:
        if not both:
            return gated_mlp(x, w_gate, w_up, w_down, **keywords)
        y, back = jax.vjp(lambda *a: gated_mlp(*a, **keywords), x, w_gate, w_up, w_down)
        return y, back(d_y)

    return jax.jit(passes).trace(*arrays).lower().compile().as_text()


def plain_one(topology: str, N: int, D: int, F: int) -> list[float]:
    """Seconds of plain products by XLA's own estimates, forward and both passes."""
    clock = CHIPS[topology.split(":")[0]][0]
    return [estimated_cycles(program(topology, N, D, F, both)) / clock for both in (False, True)]


def kernels_one(topology: str, N: int, D: int, F: int, keeps: bool, folder: Path) -> dict[str, Any]:
    """Predictions of the kernels for one shape, in a process whose libtpu dumps into `folder`."""
    from tlm_jax.kernels.gated_mlp_tiles import choose
    from tlm_jax.kernels.gated_mlp_tpu import ROWS

    clock, peak, bandwidth, cores = CHIPS[topology.split(":")[0]]
    tiles = choose(N, D, F, 2, topology.split(":")[0])
    assert tiles is not None
    program(topology, N, D, F, True, implementation="pallas_tpu", tiles=tiles, keeps=keeps)
    moved, unfused = traffic(N, D, F, tiles, keeps)
    seconds, steps = [], []
    for name, tile, products, bytes_ in (
        ("forward", tiles.forward, 6, moved[0]),
        ("backward_tokens", tiles.backward_tokens, 6 if keeps else 10, moved[1]),
        ("backward_weights", tiles.backward_weights, 6, moved[2]),
    ):
        of_tokens, of_columns = (N, tile[0]), (F, tile[1])
        outer, inner = (of_columns, of_tokens) if name == "backward_weights" else (of_tokens, of_columns)
        looped = (D, tile[1]) if name == "backward_weights" else (tile[0],)
        trips = [each // ROWS if each % ROWS == 0 else 1 for each in looped]
        tiles_of = math.ceil(math.ceil(outer[0] / outer[1]) / cores) * cores
        cycles = kernel_cycles(
            folder, f"gated_mlp_{name}", tiles_of, math.ceil(inner[0] / inner[1]), trips, tail=inner[0] % inner[1] > 0
        )
        times = (cycles / cores / clock, products * N * D * F / peak, bytes_ / bandwidth)
        seconds.append(max(times))
        steps.append(("schedule", "matrix units", "memory")[times.index(max(times))])
    return {
        "seconds": seconds, "bound": steps,
        "bytes_forward": moved[0] / unfused[0], "bytes_both": sum(moved) / sum(unfused),
    }  # fmt: skip


def in_a_process(what: str, sizes: Sequence[Any], folder: str | None = None) -> Any:
    """`plain_one` or `kernels_one` in a process of its own; only the latter dumps, which takes long for much code."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true" if folder else "",
    }  # fmt: skip
    argv = [sys.executable, __file__, "--one=" + ",".join(map(str, (what, *sizes, *([folder] if folder else []))))]
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{what} {sizes}: {(ended.stderr.strip().splitlines() or ['ended'])[-1]}")
    return json.loads(ended.stdout.splitlines()[-1])


def predict(topology: str, N: int, D: int, F: int, keeps: bool) -> dict[str, Any]:
    """Shares and traffic of one shape."""
    peak = CHIPS[topology.split(":")[0]][1]
    with tempfile.TemporaryDirectory() as folder:
        ours = in_a_process("kernels", (topology, N, D, F, int(keeps)), folder)
    plain = in_a_process("plain", (topology, N, D, F, 0))
    forward, both = 6 * N * D * F / peak, 18 * N * D * F / peak
    return {
        "tokens": N, "d_model": D, "d_ff": F,
        "forward": forward / ours["seconds"][0], "compiler_forward": forward / max(plain[0], forward),
        "both": both / sum(ours["seconds"]), "compiler_both": both / max(plain[1], both),
        "bytes_forward": ours["bytes_forward"], "bytes_both": ours["bytes_both"], "bound": ours["bound"],
    }  # fmt: skip


def time_one(N: int, D: int, F: int, keeps: bool, rounds: int = 20) -> dict[str, Any]:
    """On a device: gradients against plain products, and seconds of both passes in turns."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tlm_jax.kernels.gated_mlp import gated_mlp

    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((N, D), (D, F), (D, F), (F, D), (N, D))
    arrays = [jax.random.normal(k, s, jnp.bfloat16) / math.sqrt(s[0]) for k, s in zip(keys, shapes, strict=True)]

    def passes(name: str) -> Any:
        def run(x: Any, w_gate: Any, w_up: Any, w_down: Any, d_y: Any) -> Any:
            y, back = jax.vjp(lambda *a: gated_mlp(*a, implementation=name, keeps=keeps), x, w_gate, w_up, w_down)
            return y, back(d_y)

        return jax.jit(run).lower(*arrays).compile()

    programs = {"plain": passes("plain"), "pallas_tpu": passes("pallas_tpu")}
    got, want = (jax.tree.leaves(jax.device_get(programs[n](*arrays))) for n in ("pallas_tpu", "plain"))
    error = max(float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, want, strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*arrays))
            seconds[name].append(time.perf_counter() - start)
    medians = {name: sorted(each)[rounds // 2] for name, each in seconds.items()}
    return {
        "tokens": N, "d_model": D, "d_ff": F, "largest_error": error,
        "ratio": medians["plain"] / medians["pallas_tpu"], "tflops": 18 * N * D * F / medians["pallas_tpu"] / 1e12,
        "peak_bytes": {n: p.memory_analysis().peak_memory_in_bytes for n, p in programs.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v6e:2x2", help="v5e:2x2, v5p:2x2x1 or v6e:2x2")
    parser.add_argument("--device", action="store_true", help="measure on the TPU of this machine instead")
    parser.add_argument(
        "--keeps", action="store_true", help="gate and up are kept between the passes, as plain products do"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="on one device")
    parser.add_argument("--configs", default="*/*.py", help="which files of configs/")
    parser.add_argument("--every", type=int, default=1, help="only every so manyth width")
    parser.add_argument("--output", type=Path, help="write the figures as JSON too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        _, topology, N, D, F, keeps, *folder = args.one.split(",")
        shape = (topology, int(N), int(D), int(F))
        print(json.dumps(kernels_one(*shape, keeps == "1", Path(folder[0])) if folder else plain_one(*shape)))
        return
    found = []
    for D, F in shapes_of(args.configs)[:: args.every]:
        figures = (
            time_one(args.tokens, D, F, args.keeps)
            if args.device
            else predict(args.topology, args.tokens, D, F, args.keeps)
        )
        found.append(figures)
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}), flush=True)
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
