"""``locant points``."""

import json
import re

import pytest
from rich.cells import cell_len

from commands import run
from locant import POINTS, Address, load_model

QK_NORM = ["q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out"]


def table(text: str, heading: str) -> dict[str, list[str]]:
    """The rows of the Markdown table below a heading, by their first cell."""
    part = text.split(f"## {heading}")[1].split("\n## ", maxsplit=1)[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]
    return {first.strip(): rest for first, *rest in cells}


@pytest.fixture(scope="module")
def listed(llama_folder) -> str:
    done = run("points", llama_folder)
    assert (done.code, done.err) == (0, "")
    return done.out


def test_every_point_is_listed_once_and_in_forward_order(listed):
    served, absent = table(listed, "Served and proven"), table(listed, "Absent")
    assert [name for name in POINTS if name in served] == list(served)
    assert [name for name in POINTS if name in absent] == list(absent)
    assert served.keys() | absent.keys() == POINTS.keys()
    assert not served.keys() & absent.keys()
    assert "## Served and proven: 24 points\n" in listed
    assert "## Absent: 15 points\n" in listed
    assert "## Refused" not in listed


def test_a_served_point_says_where_it_is_and_with_what_error(listed):
    served = table(listed, "Served and proven")
    assert served["resid_post"] == ["0-2", "24", "0", "model.layers.*.output"]
    assert served["attn_probs"][:2] == ["0-2", "4×query×key"]
    assert re.fullmatch(r"\de-0[78]", served["attn_probs"][2])
    assert served["logits"] == ["-", "16", "0", "the model.output['logits']"]


def test_an_absent_point_says_why_and_what_instead(listed, llama_folder):
    status = load_model(llama_folder).points()["q_norm_out.0"]
    assert "no norm" in status.reason
    assert "query" in status.instead
    assert table(listed, "Absent")["q_norm_out"] == ["0-2", f"{status.reason}; {status.instead}"]


def test_the_first_lines_say_what_was_loaded(listed, llama_folder):
    assert listed.splitlines()[:3] == [
        f"{llama_folder}, 64 of the 109 addresses served",
        "3 layers, 24 wide, 4 heads of 6 (2 for keys), 40 neurons, 16 tokens",
        "float32, sdpa attention, on cpu",
    ]


def test_a_point_whose_proof_proves_nothing_is_refused_where_it_is_so(unproven_folder):
    out = run("points", unproven_folder).out
    reason = "its identities hold trivially on these weights and prove nothing"
    assert table(out, "Refused")["attn_out"] == ["1", "vacuous", "", reason]
    assert table(out, "Served and proven")["attn_out"][0] == "0, 2"


def test_one_layer(llama_folder):
    out = run("points", llama_folder, "--layer", 1).out
    served = table(out, "Served and proven")
    assert served["resid_post"] == ["1", "24", "0", "model.layers.1.output"]
    assert "embeddings" not in served


def test_a_layer_that_is_not_there(llama_folder):
    done = run("points", llama_folder, "--layer", 3)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"locant: layer 3\n  there is:  {llama_folder} has 3 layers, 0 to 2\n"


@pytest.mark.parametrize(
    ("options", "shown"),
    [(["--served"], {True}), (["--refused"], {False}), ([], {True, False}), (["--served", "--refused"], {True, False})],
)
def test_served_and_refused_select(llama_folder, options, shown):
    points = json.loads(run("points", llama_folder, "--json", *options).out)["points"]
    assert {point["served"] for point in points} == shown
    out = run("points", llama_folder, *options).out
    assert ("## Served" in out, "## Absent" in out) == (True in shown, False in shown)


def test_json_says_the_same_as_the_model(llama_folder):
    model = load_model(llama_folder)
    said = json.loads(run("points", llama_folder, "--json").out)
    points = said.pop("points")
    assert said == {
        "model": str(llama_folder),
        "revision": None,
        "dtype": "float32",
        "attention": "sdpa",
        "facts": model.facts.to_dict(),
    }
    assert len(points) == len(model.points())
    for row, status in zip(points, model.points(), strict=True):
        assert list(row) == [
            "address",
            "point",
            "layer",
            "served",
            "width",
            "proof",
            "error",
            "how",
            "reason",
            "instead",
        ]
        assert row["address"] == str(status.address)
        assert Address(row["point"], row["layer"]) == status.address
        for field in ("served", "width", "proof", "how", "reason", "instead"):
            assert row[field] == getattr(status, field)
        assert row["error"] == pytest.approx(status.error)


def test_json_has_a_line_per_point(llama_folder):
    lines = run("points", llama_folder, "--json", "--layer", 0).out.splitlines()
    assert sum(line.startswith('  {"address": ') for line in lines) == 35


def test_the_model_options_reach_the_model(gpt2_folder):
    said = json.loads(run("points", gpt2_folder, "--json", "--dtype", "bfloat16", "--attn", "eager").out)
    assert (said["dtype"], said["attention"]) == ("bfloat16", "eager")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "abacus"], "device 'abacus' cannot be used: "),
        (["--attn", "sideways"], 'cannot be loaded: Specified `attn_implementation="sideways"` is not supported'),
        (["--revision", "sideways"], None),
    ],
)
def test_options_that_this_machine_or_model_does_not_have(llama_folder, options, said):
    done = run("points", llama_folder, *options)
    assert done.code == (0 if said is None else 1)
    assert (said or "") in done.err


def test_a_model_that_is_not_there(tmp_path):
    done = run("points", tmp_path / "nothing")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"locant: {tmp_path / 'nothing'}")


def test_a_folder_without_a_model(tmp_path):
    done = run("points", tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"locant: {tmp_path} cannot be loaded: ")
    assert "  instead:   pass a hub id, a folder with a config.json, a .gguf file, or a model object\n" in done.err


def test_plain_output_has_no_colour_and_cuts_nothing(listed, llama_folder, monkeypatch):
    assert "\x1b" not in listed
    assert "…" not in listed
    monkeypatch.setenv("COLUMNS", "40")
    assert run("points", llama_folder).out == listed


def unwrapped(out: str, column: int) -> list[str]:
    """Lines of a styled table, those that go on in the last column joined."""
    rows: list[str] = []
    for line in out.splitlines():
        if rows and line.startswith(" " * column):
            rows[-1] += f" {line.strip()}"
        else:
            rows.append(line.rstrip())
    return rows


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_terminal_shows_whole_names_in_lines_that_fit(llama_folder, in_a_terminal, width):
    in_a_terminal(width)
    out = run("points", llama_folder).out
    assert max(map(cell_len, out.splitlines())) <= width
    for name, point in POINTS.items():
        assert re.search(rf"^{name} +{'-' if point.scope == 'trunk' else '0-2'} ", out, re.MULTILINE)
    site = "self_attn: argument 0 of scaled_dot_product_attention #0 after v_proj"
    before = "model.layers.*." if width == 140 else "…"
    assert any(row.endswith(before + site) for row in unwrapped(out, 40))
    assert ("… is model.layers.*." in out) == (width < 140)
    status = load_model(llama_folder).points()["q_norm_out.0"]
    assert any(row.endswith(f"{status.reason}; {status.instead}") for row in unwrapped(out, 30))


def test_a_terminal_gets_colours_and_a_pipe_does_not(llama_folder, in_a_terminal):
    in_a_terminal(80, "truecolor")
    assert "\x1b[" in run("points", llama_folder).out


def test_the_model_is_loaded_quietly_and_the_bars_come_back(llama_folder, capfd):
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    bars = gguf.tqdm
    assert logging.is_progress_bar_enabled()
    run("points", llama_folder)
    assert logging.is_progress_bar_enabled()
    assert gguf.tqdm is bars
    assert capfd.readouterr() == ("", "")


def test_bars_that_were_off_stay_off(llama_folder):
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        run("points", llama_folder)
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()


def test_progress_goes_to_a_terminal_only(capsys, monkeypatch):
    from rich.console import Console

    from locant.cli.terminal import progress

    with progress("Counting"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("locant.cli.terminal.Console", lambda **kinds: Console(force_terminal=True, **kinds))
    with progress("Forced"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress("Counting"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert "Counting" in err
