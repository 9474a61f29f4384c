"""`tlm report` and the page it writes."""

import builtins
import json
import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

from synthetic_runs import make_run

from tlm_jax.capacity import Profile
from tlm_jax.capacity.table import width_words
from tlm_jax.cli import main

VOID = {"meta", "link", "br", "img", "hr", "input", "path", "use"}


class Page(HTMLParser):
    """Checks that tags nest, and collects text and (tag, attribute, value), each tag once without an attribute."""

    def __init__(self, source):
        super().__init__()
        self.open, self.text, self.attributes = [], "", []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, "", ""), *((tag, *attribute) for attribute in attrs)]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *attribute) for attribute in attrs]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    cosine = make_run(root, "twin-cosine", steps=100)
    return [str(cosine), str(make_run(root, "twin-uniform", steps=100, schedule="uniform", final_loss=3.25))]


def report(runs, directory):
    output = directory / "report.html"
    assert main(["report", *runs, f"--output={output}"]) == 0
    return output.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def source(twins, tmp_path_factory):
    """The page about the twins."""
    return report(twins, tmp_path_factory.mktemp("page"))


def test_the_page_is_well_formed_and_needs_nothing_from_outside(source):
    page = Page(source)
    for tag, name, value in page.attributes:
        assert tag not in ("link", "script", "img", "iframe")
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#")
    assert "http" not in source
    assert not re.search(r"url\((?!#)", source)
    assert "@import" not in source
    identifiers = [value for _, name, value in page.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    referred = set(re.findall(r'(?:href="#|url\(#)([\w-]+)', source))
    assert referred <= set(identifiers)


def test_colours_follow_the_theme(source):
    assert "prefers-color-scheme: dark" in source
    charts = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
    assert len(charts) == 2 * 5  # difference, loss twice, profiles, gradient norm; each wide and narrow
    for drawing in charts:
        assert not re.search(r"#[0-9a-f]{6}\b", drawing.replace('href="#', ""))
        assert "var(--run-" in drawing
        assert "var(--soft)" in drawing


def test_widths_that_vary_are_drawn_and_listed_too(tmp_path):
    twins = [
        make_run(tmp_path, name, schedule="uniform", steps=20, profile__width_schedule=name)
        for name in ("x", "uniform")
    ]
    source = report([str(twin) for twin in twins], tmp_path)
    assert source.count("Width of the residual stream by layer.") == 1
    text = Page(source).text
    x = Profile.from_json((twins[0] / "profile.json").read_text())
    assert "d_model of every layer" in text
    assert width_words(x.layers) in text
    assert f"x, {width_words(x.layers)}" in text
    assert all(f"{layer.d_model}" in text for layer in x.layers)
    for label in ("sum of d_model", "parameters with an effect"):
        assert label in text
    assert f"{x.effective_parameters:,}" in text


def test_what_the_page_tells(source):
    text = Page(source).text
    for told in (
        "5,573,888",  # parameters
        "35,782,656",  # training FLOPs, causal
        "38,141,952",  # and full attention
        "6,144",  # KV cache
        "1.4003",  # bits per byte
        "27.11",  # perplexity
        "gzip -9",
        "2.8200",
        "bigram model",
        "1.6100",
        "0.497",  # 1.4003 / 2.82
        "41.0%",  # MFU
        "43.7%",
        "waiting for data",
        "960 → 320",
        "profile.schedule",
    ):
        assert told in text
    assert "It was a fine day, and <b>nobody</b>" in text


def test_the_difference_is_stated_without_a_winner(source):
    text = Page(source).text
    assert "twin-uniform less twin-cosine" in text
    assert "+0.0500 nats per token, +0.0212 bits per byte" in text
    assert "The budgets are equal" in text
    assert "one seed, so this difference is an observation and no winner" in text
    assert "wins" not in text
    assert "better than" not in text


def test_several_seeds_change_the_caution(tmp_path):
    runs = [str(make_run(tmp_path, f"s{seed}", steps=20, seed=seed, final_loss=3.2 + seed / 10)) for seed in (0, 1)]
    text = Page(report(runs, tmp_path)).text
    assert "up to 0.1000 nats apart" in text
    assert "one seed" not in text


def test_unequal_budgets_are_said(twins, tmp_path):
    wider = make_run(tmp_path, "wider", steps=100, profile__d_ff=768)
    text = Page(report([twins[0], str(wider)], tmp_path)).text
    assert "The budgets are not equal: they differ in parameters (5,573,888 and 6,163,712)" in text


def test_one_run_and_a_run_just_begun(tmp_path):
    begun = make_run(tmp_path, "begun", steps=1, evaluation=False)
    (begun / "metrics.jsonl").write_text("")
    text = Page(report([str(begun)], tmp_path)).text
    assert "metrics.jsonl has no steps yet." in text
    assert "No losses were logged." in text
    assert "no held-out numbers yet" in text
    assert "Difference" not in text


def test_runs_of_different_depth(twins, tmp_path):
    deep = make_run(tmp_path, "deep", steps=20, profile__num_layers=9)
    assert "layer 8" in Page(report([twins[0], str(deep)], tmp_path)).text


def test_text_of_runs_cannot_become_markup(tmp_path):
    evil = '<script>alert("1")</script>&amp; $x^2$'
    path = make_run(tmp_path, "evil", steps=100)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(
        config.replace('"name": "evil"', '"name": ' + '"' + evil.replace('"', '\\"') + '"')
    )
    page = Page(report([str(path), str(make_run(tmp_path, "good", steps=100))], tmp_path))
    assert "script" not in {tag for tag, *_ in page.attributes}
    assert evil in page.text


def test_the_same_runs_give_the_same_page(twins, source, tmp_path):
    assert report(twins, tmp_path) == source


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere"], "nowhere: no such run directory"),
        ([".", "--config.seed=1"], "unknown argument '--config.seed=1'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *argv]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_leaves_nothing(twins, tmp_path, capsys):
    assert main(["report", *twins, f"--output={tmp_path}/none/report.html"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    assert main(["report", *twins, f"--output={tmp_path}/taken"]) == 2
    assert not (tmp_path / "taken.tmp").exists()


def test_without_matplotlib_it_says_what_to_install(twins, capsys, monkeypatch, tmp_path):
    real = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert main(["report", *twins, f"--output={tmp_path}/r.html"]) == 2
    assert 'pip install "tlm_jax[report]"' in capsys.readouterr().err


def test_what_validation_read_and_what_the_evaluation_read_is_told(tmp_path):
    part = make_run(tmp_path, "part", steps=100, validation__num_windows=64)
    whole = make_run(tmp_path, "whole", steps=100, evaluation=False)
    text = Page(report([str(part)], tmp_path)).text
    assert "Dots: held-out loss on at most 64 windows of the held-out split; the final numbers that" in text
    text = Page(report([str(part), str(whole)], tmp_path)).text
    both = "at most 64 windows of the held-out split (part); the whole held-out split (whole)"
    assert f"Dots: held-out loss on {both}" in text
    assert f"lower loss than the first run. Held-out loss here is on {both}." in text
    assert "last validation, the whole held-out split" in text


def test_bytes_that_are_not_known_are_told_so(tmp_path):
    run = make_run(tmp_path, "adopted", steps=100)
    evaluation = json.loads((run / "evaluation.json").read_text())
    for none in (None, 0):  # as earlier versions wrote it
        changed = {**evaluation, "bytes": none, "bits_per_byte": None, "baselines": {}}
        (run / "evaluation.json").write_text(json.dumps(changed))
        text = Page(report([str(run)], tmp_path)).text
        assert "held-out bytesnot known: the store has no byte counts" in text
        assert f"{evaluation['loss']:.4f}held-out loss, nats per token" in text
        assert "bits per byte" not in text
        assert "No held-out numbers" not in text
