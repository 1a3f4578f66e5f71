"""``locant families``."""

import json
import subprocess
import sys

from commands import run
from locant import POINTS
from locant.families import Coverage

STATES = {"proven", "refused", "not applicable", "not yet"}


def test_the_json_is_a_list_of_families_with_the_state_of_every_point():
    families = json.loads(run("families", "--json").out)
    assert len(families) > 270
    for family in families:
        assert family.keys() == {"family", "points"}
        assert list(family["points"]) == list(POINTS)
        for outcome in family["points"].values():
            assert outcome.keys() == {"state", "error", "reason"}
            assert outcome["state"] in STATES
            assert bool(outcome["reason"]) == (outcome["state"] != "proven")
    assert len({family["family"] for family in families}) == len(families)


def test_one_family_is_shown_point_by_point():
    done = run("families", "llama")
    lines = done.out.splitlines()
    assert lines[0].startswith("llama, ")
    assert "transformers" in lines[1]
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert rows[2:] == list(POINTS)
    assert any("| resid_mid " in line and "| proven" in line for line in lines)
    (only,) = json.loads(run("families", "llama", "--json").out)
    assert only["points"]["router_logits"]["state"] == "not applicable"
    assert only["points"]["resid_mid"] == {"state": "proven", "error": 0, "reason": ""}


def test_all_families_are_shown_with_what_is_refused():
    done = run("families")
    assert done.code == 0
    assert "| llama " in done.out
    recorded = Coverage.recorded()
    name, family = next((n, f) for n, f in recorded.families.items() if f.named("proven") and f.named("refused"))
    line = next(line for line in done.out.splitlines() if line.startswith(f"| {name} "))
    assert family.named("refused")[0] in line


def test_an_unknown_family_is_refused_with_the_nearest():
    done = run("families", "lama")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("locant: lama: no such family\n")
    assert "llama" in done.err


def test_the_record_is_read_as_it_was_written():
    recorded = Coverage.recorded()
    assert Coverage.parse(recorded.text()) == recorded


def test_a_fresh_process_shows_the_same():
    command = [sys.executable, "-m", "locant", "families", "llama"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("families", "llama").out
