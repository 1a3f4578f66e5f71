"""``locant index``: rows without a model, from a file or from the command line, on whoever's sizes."""

import csv
import json

import pytest
import transformers

from commands import run
from locant import Facts
from locant.cli import indexing

LOCATOR = """
activation: attn.z
location: [layer, head, position]
filter:
  - layer: {range: [0, 5]}
    position: -1
  - layer: 11
  - not: {head: 0}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "locator.yaml"
    path.write_text(LOCATOR, encoding="utf-8")
    return path


@pytest.fixture
def facts(tmp_path):
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"n_layers": 12, "n_heads": 12, "d_model": 768}), encoding="utf-8")
    return path


def rows_of(*arguments) -> list[dict]:
    done = run("index", *arguments, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)["source"]


def test_the_rows_of_gpt2_are_printed_without_loading_it(config, monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", load)
    done = run("index", config, "--facts", "gpt2", "--tokens", 6, "--rows", 3)
    assert done.code == 0
    assert "12 layers, 768 wide, 12 heads of 64, 3072 neurons" in done.out
    assert "132 rows" in done.out
    assert "|            0 |           1 |               5 | attn.z            |" in done.out
    assert "and 129 more" in done.out
    assert len(run("index", config, "--facts", "gpt2", "-t", 6, "--rows", 0).out.splitlines()) > 132


def test_a_locator_may_stand_on_the_command_line(facts):
    found = rows_of("{activation: resid.post, location: [layer, position]}", "--facts", facts, "-t", 6)
    assert len(found) == 72
    assert found[-1] == {"source_layer": 11, "source_position": 5, "source_activation": "resid.post"}


def test_source_and_target_of_a_patch_are_both_printed(tmp_path, facts):
    both = {"source": {"activation": "embed"}, "target": {"activation": "resid_post.3"}, "type": "replace"}
    path = tmp_path / "patch.json"
    path.write_text(json.dumps(both), encoding="utf-8")
    done = run("index", path, "--facts", facts)
    assert "Source: 1 row\n" in done.out
    assert "| target_layer | target_activation |" in done.out
    assert "Target: 1 row\n" in done.out
    assert run("index", path, "--facts", facts, "-o", tmp_path / "index.csv").code == 1


def test_the_rows_are_saved(config, facts, tmp_path):
    target = tmp_path / "index.csv"
    assert run("index", config, "--facts", facts, "-t", 6, "-o", target).code == 0
    with target.open(newline="", encoding="utf-8") as file:
        saved = list(csv.DictReader(file))
    assert saved == [
        {name: str(cell) for name, cell in row.items()} for row in rows_of(config, "--facts", facts, "-t", 6)
    ]


def test_prompts_of_different_lengths(facts):
    last = "{activation: resid.post, location: [layer, position], filter: [{layer: 0, position: -1}]}"
    for tokens in (["-t", "6,9"], []):
        assert rows_of(last, "--facts", facts, *tokens)[0]["source_position"] == -1
    assert rows_of(last, "--facts", facts, "-t", 6)[0]["source_position"] == 5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            "{activation: resid.pots, location: [layer]}",
            ["the locator: activation 'resid.pots'", "Did you mean resid.post"],
        ),
        ("{activation: resid.post, location: [layer]", ["the locator cannot be read", "YAML"]),
        ("{source: {activation: resid.post}}", ["the locator, source: activation resid.post: no layer"]),
        ("{activation: resid.post, location: [layer], filter: [{layer: yes}]}", ["True", "bool"]),
        ("missing.yaml", ["missing.yaml cannot be read"]),
        ("{activation: attn.z, location: [layer, head], filter: [{head: 12}]}", ["head 12", "0 to 11"]),
    ],
)
def test_a_locator_that_is_wrong_ends_in_one_message(config, said, facts):
    done = run("index", config, "--facts", facts, "-t", 6)
    assert (done.code, done.out) == (1, "")
    for part in said:
        assert part in done.err


def test_what_has_no_sizes_is_refused(config, tmp_path):
    wrong = tmp_path / "wrong.json"
    for text in ("[]", "{", '{"n_haeds": 3, "n_layers": 2}'):
        wrong.write_text(text, encoding="utf-8")
        assert "no facts of a model" in run("index", config, "--facts", wrong).err
    assert "cannot be read" in run("index", config, "--facts", "nobody/no-such-model").err
    assert "--tokens" in run("index", config, "--tokens", "six").err


# ---- the sizes a config states are those that the model it makes has


def built(config) -> dict[str, int | None]:
    """The sizes of the weights of a model made from the config."""
    weights = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters())
    first = {name.rsplit(".", 2)[-2]: w for name, w in weights.items() if ".0." in name and name.endswith("weight")}
    if config.model_type == "gpt2":
        return {"d_model": first["c_attn"].shape[0], "d_mlp": first["c_fc"].shape[1]}
    down, key, out = (first[name] for name in ("down_proj", "k_proj", "o_proj"))
    return {
        "d_model": down.shape[0],
        "d_mlp": down.shape[1],
        "heads": out.shape[1],
        "keys": key.shape[0],
    }


def test_the_sizes_of_a_config_are_those_of_its_model(tmp_path):
    llama = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=99, head_dim=10,
    )  # fmt: skip
    gpt2 = transformers.GPT2Config(n_embd=24, n_layer=3, n_head=4, vocab_size=99)
    for config in (llama, gpt2):
        config.save_pretrained(tmp_path / config.model_type)
        real = built(config)
        for place in (tmp_path / config.model_type, tmp_path / config.model_type / "config.json"):
            facts, said = indexing.read_facts(str(place))
            assert said == str(place)
            assert (facts.d_model, facts.d_mlp) == (real["d_model"], real["d_mlp"])
            assert facts.n_layers == config.num_hidden_layers
            assert facts.vocab_size == 99
            sizes = facts.to_dict()
            if config is llama:
                assert sizes["n_heads"] * sizes["head_dim"] == real["heads"]
                assert sizes["n_kv_heads"] * sizes["head_dim"] == real["keys"]
            else:
                assert (sizes["n_heads"], sizes["n_kv_heads"], sizes["head_dim"]) == (4, 4, 24 // 4)


def test_the_embedded_models_config_states_its_sizes(embedded):
    stated, _ = indexing.read_facts("smollm2-135m")
    assert Facts(**stated.to_dict()) == Facts(**embedded.facts.to_dict())


@pytest.mark.parametrize(
    "config",
    [
        "{activation: resid.post, activation: mlp.out, location: [layer]}",
        "{activation: resid.post, location: [layer], filter: [{layer: 1, layer: 2}]}",
    ],
)
def test_a_key_that_stands_twice_is_refused(config, facts):
    done = run("index", config, "--facts", facts)
    assert done.code != 0
    assert "stands twice" in done.err
