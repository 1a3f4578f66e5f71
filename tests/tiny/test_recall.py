"""An examination is remembered for the same model, and for no other."""

import copy

import pytest
import torch

import families
from locant.engine.eager.model import EagerModel


def fresh(family):
    return copy.deepcopy(families.tiny(family))


@pytest.fixture
def examined(monkeypatch, tmp_path):
    """The models whose examination ran, with an empty folder to remember them in."""
    ran = []
    examine = EagerModel._examine

    def counted(self):
        ran.append(self.name)
        return examine(self)

    monkeypatch.setattr(EagerModel, "_examine", counted)
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path))
    return ran


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt2"])
def test_the_same_model_is_examined_once_and_reads_the_same(examined, family):
    ids = torch.arange(3, 9)[None]
    first = EagerModel(fresh(family), recall=True)
    again = EagerModel(fresh(family), recall=True)
    assert len(examined) == 1
    assert [(r.address, r.proof, r.error, r.how) for r in first.points()] == [
        (r.address, r.proof, r.error, r.how) for r in again.points()
    ]
    with torch.no_grad():
        wanted = again.hf(ids, output_hidden_states=True).hidden_states[1]
    assert torch.equal(again.capture(ids.tolist(), ["resid_pre.1"])["resid_pre.1"], wanted)


def test_a_changed_weight_is_another_model(examined):
    EagerModel(fresh("llama"), recall=True)
    changed = fresh("llama")
    with torch.no_grad():
        changed.model.layers[0].mlp.down_proj.weight.zero_()
    EagerModel(changed, recall=True)
    assert len(examined) == 2


def test_another_kernel_or_dtype_is_another_model(examined):
    EagerModel(fresh("llama"), recall=True)
    other = fresh("llama")
    other.set_attn_implementation("eager" if other.config._attn_implementation != "eager" else "sdpa")
    EagerModel(other, recall=True)
    EagerModel(fresh("llama").to(torch.float64), recall=True)
    assert len(examined) == 3


def test_a_model_with_hooks_of_its_own_is_not_remembered(examined, tmp_path):
    hf = fresh("llama")
    hf.model.layers[0].register_forward_hook(lambda *_: None)
    EagerModel(hf, recall=True)
    EagerModel(hf, recall=True)
    assert len(examined) == 2
    assert not list(tmp_path.iterdir())


def test_a_spoilt_file_is_made_anew(examined, tmp_path):
    EagerModel(fresh("llama"), recall=True)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    EagerModel(fresh("llama"), recall=True)
    assert len(examined) == 2
    assert len(file.read_bytes()) == len(whole)


def test_asking_for_an_examination_makes_one(examined):
    model = EagerModel(fresh("llama"), recall=True)
    model.examine()
    assert len(examined) == 2


def test_nothing_is_kept_where_no_folder_is_named(examined, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCANT_CACHE", "")
    EagerModel(fresh("llama"), recall=True)
    EagerModel(fresh("llama"), recall=True)
    assert len(examined) == 2
    assert not list(tmp_path.iterdir())


def test_a_model_object_is_examined_each_time_unless_asked(examined):
    EagerModel(fresh("llama"))
    EagerModel(fresh("llama"))
    assert len(examined) == 2


@pytest.mark.parametrize("change", ["forward", "class"])
def test_code_of_its_own_is_not_remembered(examined, tmp_path, change):
    hf = fresh("llama")
    if change == "forward":
        mlp = hf.model.layers[0].mlp
        mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))
    else:
        hf.__class__ = type("Mine", (type(hf),), {})
    model = EagerModel(hf, recall=True)
    EagerModel(hf, recall=True)
    assert len(examined) == 2
    assert not list(tmp_path.iterdir())
    if change == "forward":
        assert "up_proj" in model.points()["mlp_pre.0"].how


def test_a_config_that_cannot_be_written_down_is_no_failure(examined):
    hf = fresh("llama")
    hf.config.odd = {1, 2}
    EagerModel(hf, recall=True)
    assert examined
