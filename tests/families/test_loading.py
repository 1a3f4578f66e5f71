"""Loading a family: a multimodal one by its text tower, and one that nobody surveyed with a word about it."""

import logging

import pytest
import torch

import tokenizing
import zoo
from locant import load, load_model


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "mistral3"])
def test_a_multimodal_folder_loads_as_its_text_tower(tmp_path, family):
    hf = zoo.build(family)
    hf.save_pretrained(tmp_path)
    tokenizing.words().save_pretrained(tmp_path)
    model = load_model(tmp_path, attn_implementation="eager")
    ids = torch.arange(9, 15)[None]
    with torch.no_grad():
        wanted = hf(input_ids=ids, output_hidden_states=True)
    got = model.capture(ids.tolist(), ["resid_pre.1", "logits"])
    assert torch.allclose(got["resid_pre.1"], wanted.hidden_states[1], atol=1e-5)
    assert torch.allclose(got["logits"], wanted.logits, atol=1e-5)


def test_an_unknown_family_is_introduced_once(monkeypatch, caplog):
    hf = zoo.build("llama")
    monkeypatch.setattr(type(hf.config), "model_type", "llama_of_tomorrow")
    monkeypatch.setattr(load, "_INTRODUCED", set())
    with caplog.at_level(logging.WARNING, logger="locant"):
        model = load_model(hf)
        load_model(hf)
    (said,) = caplog.messages
    assert "llama_of_tomorrow" in said
    assert f"{hf.config.num_hidden_layers} blocks of width {hf.config.hidden_size}" in said
    assert f"{len(model.points().served())} addresses proven" in said


def test_a_family_on_record_is_loaded_in_silence(caplog):
    load_model(zoo.build("llama"))
    assert not caplog.messages
