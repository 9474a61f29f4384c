"""The page: one section after the other, most important first."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from html import escape

from tlm_jax import __version__
from tlm_jax.capacity.table import width_words
from tlm_jax.counts import counted
from tlm_jax.report import elements
from tlm_jax.report.charts import Line, chart, colour, loss_limits, smoothed
from tlm_jax.report.comparison import difference, differing_keys, seed_spread
from tlm_jax.report.profiles import profiles_section
from tlm_jax.report.runs import Record, Run, number
from tlm_jax.report.style import STYLE

_NO_BYTES = "not known: the store has no byte counts"
_BASELINES = {"gzip_bits_per_byte": "gzip -9", "bigram_bits_per_byte": "bigram model"}


def build(runs: Sequence[Run]) -> str:
    """The report on `runs` as one HTML document that refers to nothing outside itself."""
    heading = " · ".join(f"<span>{escape(run.name)}</span>" for run in runs)
    return document(
        " · ".join(run.name for run in runs),
        f'<header><h1>{heading}</h1><p class="lead">{escape(_lead(runs))}</p>{_cards(runs)}</header>\n',
        _notes(runs),
        _differences(runs),
        loss_section(runs),
        profiles_section(runs),
        _final(runs),
        speed_section(runs),
        _samples(runs),
        configs_section(runs),
    )


def document(title: str, *parts: str) -> str:
    """A whole HTML document of `parts`, which are HTML."""
    body = "".join([*parts, f"<footer>tlm_jax {escape(__version__)}</footer>"])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _lead(runs: Sequence[Run]) -> str:
    return f"{counted(len(runs), 'training run')}: loss, budgets, speed and samples."


def _cards(runs: Sequence[Run]) -> str:
    return f'<div class="runs">{"".join(_card(index, run) for index, run in enumerate(runs))}</div>'


def _card(index: int, run: Run) -> str:
    measured, source = run.final
    bits = number(measured.get("bits_per_byte")) if measured is not None else None
    loss = number(measured.get("loss")) if measured is not None else None
    step, num_steps = (run.records[-1]["step"] if run.records else 0), run.config.get("train.num_steps")
    progress = f"{step:,}" if step == num_steps else f"{step:,} of {num_steps:,}" if num_steps else f"{step:,}"
    facts = [
        ("held-out loss", elements.decimal(loss)),
        ("measured by", run.measured_by or elements.MISSING),
        ("schedule", _schedule(run)),
        ("parameters", elements.short(run.profile.parameters)),
        ("tokens", elements.short(run.last("tokens"))),
        ("compute", elements.short(run.last("train_flops"), "FLOP")),
        ("steps", progress),
    ]
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts)
    unit = "held-out bits per byte" if source else "no held-out numbers yet"
    if bits is None and loss is not None:  # the text's bytes are not known
        bits, unit = loss, "held-out loss, nats per token"
    return (
        f'<div class="run" style="--colour: {colour(index)}"><div class="name">{escape(run.name)}</div>'
        f'<div class="figure">{elements.decimal(bits)}</div><div class="unit">{escape(unit)}</div>'
        f'<dl class="facts">{listed}</dl></div>'
    )


def _schedule(run: Run) -> str:
    schedule = run.config.get("profile.schedule", "profile")
    of_d_model = run.config.get("profile.width_schedule", "uniform")
    if of_d_model != "uniform":
        schedule = of_d_model if schedule == "uniform" else f"{of_d_model} and {schedule}"
    return f"{schedule}, {width_words(run.profile.layers)}"


def _notes(runs: Sequence[Run]) -> str:
    items = [f"<li><b>{escape(run.name)}</b>: {escape(note)}</li>" for run in runs for note in run.notes]
    return f'<section class="notes"><h2>Notes</h2><ul class="small">{"".join(items)}</ul></section>\n' if items else ""


def _differences(runs: Sequence[Run]) -> str:
    """Each run against the first, with the budgets, and what may be concluded."""
    if len(runs) < 2:
        return ""
    first, parts = runs[0], []
    for run in runs[1:]:
        found = difference(first, run)
        name, other = f"<b>{escape(run.name)}</b>", f"<b>{escape(first.name)}</b>"
        if found.budgets:
            budget = f"The budgets are <b>not equal</b>: they differ in {escape(', '.join(found.budgets))}."
        else:
            budget = "The budgets are equal: parameters, training FLOPs per token and training tokens are the same."
        if found.loss is None:
            measured = f"The held-out loss cannot be compared: {escape(found.reason or 'it is missing')}."
        else:
            bits = "" if found.bits_per_byte is None else f", {_signed(found.bits_per_byte)} bits per byte"
            measured = (
                f"Held-out difference ({escape(found.source)}): <b>{_signed(found.loss)} nats per token{bits}</b>."
            )
        parts.append(f"<p>{name} less {other}. {measured} {budget}</p>")
    spread = seed_spread(runs)
    if spread is None:
        caution = (
            "Each configuration was trained with one seed, so this difference is an observation and no winner: "
            "another seed alone could move the loss by as much. Train each with several seeds before concluding."
        )
    else:
        caution = (
            f"Runs here that differ only in their seeds are up to {spread:.4f} nats apart. "
            "A difference that is not clearly larger than this says nothing about the configurations."
        )
    return elements.section("Difference", *parts, elements.paragraph(caution, "soft"), difference_chart(runs))


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "\N{MINUS SIGN}")


def difference_chart(runs: Sequence[Run]) -> str:
    """Held-out loss less the first run's, where both were validated after as many tokens."""
    base = {record.get("tokens"): validation["loss"] for record, validation in runs[0].validations()}
    lines = []
    for index, run in enumerate(runs[1:], 1):
        points = [
            (float(record["tokens"]), validation["loss"] - base[record["tokens"]])
            for record, validation in run.validations()
            if number(record.get("tokens")) is not None and record["tokens"] in base
        ]
        if len(points) > 1:
            lines += [Line(index, points), Line(index, points, "dots")]
    if not lines:
        return ""
    reached = [x for line in lines for x, _ in line.points]
    drawn = chart(
        [Line(0, [(min(reached), 0.0), (max(reached), 0.0)]), *lines],
        title=f"Held-out loss less that of {runs[0].name}, over training tokens",
        x_label="training tokens",
        y_label=f"held-out loss − {_clipped(runs[0].name)}, nats per token",
    )
    return elements.legend([run.name for run in runs]) + elements.figure(
        drawn, f"Below zero: lower loss than the first run. Held-out loss here is on {_validated_on(runs)}."
    )


def _clipped(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"


def loss_section(runs: Sequence[Run]) -> str:
    """Loss over tokens and over FLOPs: training smoothed over its raw values, held-out as dots."""
    figures: list[str] = []
    for key, over in (("tokens", "training tokens"), ("train_flops", "training FLOPs, causal")):
        raw, smooth, dots = [], [], []
        for run in runs:
            pairs = [(number(record.get(key)), loss) for record, loss in run.series("loss")]
            raw.append([(x, y) for x, y in pairs if x is not None])
            smooth.append(smoothed(raw[-1]))
            held_out = [(number(record.get(key)), float(v["loss"])) for record, v in run.validations()]
            dots.append([(x, y) for x, y in held_out if x is not None])
        if not any(raw):
            continue
        lines = [Line(i, points, "faint") for i, points in enumerate(raw)]
        lines += [Line(i, points) for i, points in enumerate(smooth)]
        lines += [Line(i, points, "dots") for i, points in enumerate(dots)]
        drawn = chart(
            lines,
            title=f"Loss over {over}",
            x_label=over,
            y_label="loss, nats per token",
            limits=loss_limits(smooth, dots),
        )
        figures.append(elements.figure(drawn, _loss_caption(runs) if figures else ""))
    if not figures:
        return elements.section("Loss", elements.paragraph("No losses were logged.", "soft"))
    return elements.section("Loss", elements.legend([run.name for run in runs]), *figures)


def _loss_caption(runs: Sequence[Run]) -> str:
    dots = f"Dots: held-out loss on {_validated_on(runs)}"
    if any(run.evaluation is not None for run in runs):
        dots += "; the final numbers that `evaluation` measured are of all the text that it was given"
    return (
        f"Lines: training loss, smoothed, over the loss of each step. {dots}. "
        "The steep fall of the first tenth may begin above the chart."
    )


def _validated_on(runs: Sequence[Run]) -> str:
    """What validation during training read of the held-out split."""
    found = list(dict.fromkeys(run.validated_on for run in runs))
    return found[0] if len(found) == 1 else "; ".join(f"{run.validated_on} ({run.name})" for run in runs)


def _final(runs: Sequence[Run]) -> str:
    """Held-out numbers beside the baselines."""
    measured = [run.final for run in runs]
    baselines = [_baselines(values) for values, _ in measured]
    rows: list[tuple[str, Sequence[str]]] = []

    def row(label: str, of: Callable[[Record], str]) -> None:
        rows.append((label, [of(values) if values is not None else elements.MISSING for values, _ in measured]))

    if any(values is None or number(values.get("bits_per_byte")) is not None for values, _ in measured):
        row("bits per byte", lambda values: elements.decimal(number(values.get("bits_per_byte"))))
    row("loss, nats per token", lambda values: elements.decimal(number(values.get("loss"))))
    row("perplexity", lambda values: elements.decimal(number(values.get("perplexity")), 2))
    for key, label in _BASELINES.items():
        if any(key in found for found in baselines):
            rows.append((f"{label}, bits per byte", [elements.decimal(found.get(key)) for found in baselines]))
            rows.append(
                (
                    f"ratio to {label}",
                    [_ratio(v, found.get(key)) for (v, _), found in zip(measured, baselines, strict=True)],
                )
            )
    row("held-out tokens", lambda values: elements.count(number(values.get("tokens"))))
    row("held-out bytes", _bytes)
    rows.append(("measured by", [run.measured_by or elements.MISSING for run in runs]))
    rows.append(("training loss, smoothed", [elements.decimal(_last_smoothed(run)) for run in runs]))
    return elements.section("Final numbers", _bars(runs, baselines), elements.table([run.name for run in runs], rows))


def _bytes(values: Record) -> str:
    found = number(values.get("bytes"))
    return elements.count(found) if found else _NO_BYTES


def _baselines(values: Record | None) -> dict[str, float]:
    given = values.get("baselines") if values is not None else None
    found = {key: number(given.get(key)) for key in _BASELINES} if isinstance(given, dict) else {}
    return {key: value for key, value in found.items() if value is not None and value > 0}


def _ratio(values: Record | None, baseline: float | None) -> str:
    bits = number(values.get("bits_per_byte")) if values is not None else None
    return elements.MISSING if bits is None or baseline is None else f"{bits / baseline:.3f}"


def _last_smoothed(run: Run) -> float | None:
    points = smoothed([(float(record["step"]), loss) for record, loss in run.series("loss")])
    return points[-1][1] if points else None


def _bars(runs: Sequence[Run], baselines: Sequence[dict[str, float]]) -> str:
    """Bits per byte of the runs and of the baselines, as bars."""
    values = []
    for index, run in enumerate(runs):
        measured, _ = run.final
        bits = number(measured.get("bits_per_byte")) if measured is not None else None
        if bits is not None:
            values.append((run.name, bits, colour(index)))
    for key, label in _BASELINES.items():
        for bits in dict.fromkeys(found[key] for found in baselines if key in found):
            values.append((label, bits, "var(--base)"))
    if not values:
        missing = all(run.final[0] is None for run in runs)
        return elements.paragraph("No held-out numbers yet.", "soft") if missing else ""
    return elements.paragraph("Held-out bits per byte; lower is better.", "soft small") + elements.bars(values)


def speed_section(runs: Sequence[Run]) -> str:
    """Medians of speed, the memory, and the norm of the gradient drawn."""

    def median(run: Run, key: str) -> float | None:
        values = [value for _, value in run.series(key)]
        return statistics.median(values) if values else None

    def wait(run: Run) -> float | None:
        pairs = [(value, number(record.get("step_seconds"))) for record, value in run.series("data_wait_seconds")]
        shares = [waited / seconds for waited, seconds in pairs if seconds]
        return statistics.median(shares) if shares else None

    def memory(run: Run) -> float | None:
        return max((value for _, value in run.series("memory_bytes")), default=None)

    rows = [
        ("tokens per second", [elements.count(median(run, "tokens_per_second")) for run in runs]),
        ("seconds per step", [elements.decimal(median(run, "step_seconds"), 3) for run in runs]),
        ("MFU, causal FLOPs", [elements.percent(median(run, "mfu_causal")) for run in runs]),
        ("MFU, full-attention FLOPs", [elements.percent(median(run, "mfu_full")) for run in runs]),
        ("waiting for data", [elements.percent(wait(run)) for run in runs]),
        ("peak memory of a device", [elements.short(memory(run), "B") for run in runs]),
        ("skipped steps", [elements.count(run.last("skipped_steps")) for run in runs]),
    ]
    lines = [
        Line(index, [(float(record["step"]), norm) for record, norm in run.series("gradient_norm")])
        for index, run in enumerate(runs)
    ]
    drawn = ""
    if any(line.points for line in lines):
        lines = [Line(line.run, smoothed(line.points)) for line in lines]
        picture = chart(
            lines,
            title="Gradient norm over steps",
            x_label="step",
            y_label="global gradient norm, before clipping",
            limits=loss_limits([line.points for line in lines], []),
        )
        drawn = elements.legend([run.name for run in runs]) + elements.figure(
            picture, "Norm of the gradient, smoothed."
        )
    note = elements.paragraph("Medians over the logged windows, compilation left out.", "soft small")
    return elements.section("Speed and stability", elements.table([run.name for run in runs], rows), note, drawn)


def _samples(runs: Sequence[Run]) -> str:
    parts = []
    for index, run in enumerate(runs):
        for sample in run.samples:
            settings = [
                f"{k} {v}" for k, v in sample.items() if k not in ("prompt", "completion", "text") and _plain(v)
            ]
            head = escape(" · ".join([run.name, *settings]))
            text = f"<b>{escape(str(sample.get('prompt', '')))}</b>{escape(str(sample['completion']))}"
            parts.append(
                f'<div class="sample" style="--colour: {colour(index)}"><div class="small soft">{head}</div>'
                f'<div class="text">{text}</div></div>'
            )
    if not parts:
        return ""
    return elements.section("Samples", elements.paragraph("Prompts in bold.", "soft small"), *parts)


def _plain(value: object) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def configs_section(runs: Sequence[Run]) -> str:
    """The keys that differ, and all keys folded away."""
    names = [run.name for run in runs]

    def rows(keys: Sequence[str]) -> list[tuple[str, list[str]]]:
        return [(key, [_value(run, key) for run in runs]) for key in keys]

    parts = []
    if len(runs) > 1:
        differing = differing_keys(runs)
        parts.append(
            elements.table(names, rows(differing), "text")
            if differing
            else elements.paragraph("The configurations are the same.", "soft")
        )
    every = list(dict.fromkeys(key for run in runs for key in run.config))
    parts.append(elements.fold("Every key", elements.table(names, rows(every), "text")))
    return elements.section("Configuration" if len(runs) == 1 else "Differences of configuration", *parts)


def _value(run: Run, key: str) -> str:
    if key not in run.config:
        return elements.MISSING
    value = run.config[key]
    return value if isinstance(value, str) and value else json.dumps(value)
