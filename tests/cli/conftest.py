"""Tiny models saved as folders, a make-believe terminal, and the real model loaded once."""

import io
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import locant

WORDS = "the capital of France is Paris and a|b".split()


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=40, max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_embd=24, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(autouse=True, scope="session")
def ordinary_environment():
    """What the machine that runs the tests says of its terminal does not matter."""
    with pytest.MonkeyPatch.context() as environment:
        for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "COLORTERM"):
            environment.delenv(name, raising=False)
        environment.setenv("TERM", "xterm-256color")
        yield


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory) -> Path:
    return saved(llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory) -> Path:
    return saved(gpt2(), tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def unproven_folder(tmp_path_factory) -> Path:
    """A model whose second attention adds nothing, so that no algebra can tell its output from another."""
    model = llama()
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    return saved(model, tmp_path_factory.mktemp("unproven"))


@pytest.fixture(scope="session")
def embedded() -> locant.EagerModel:
    """The real model, loaded once as the commands load it."""
    from locant.cli.model import Source

    return Source("smollm2-135m").load()


@pytest.fixture
def embedded_at_once(embedded, monkeypatch):
    """Commands get the embedded model without loading it again."""
    monkeypatch.setattr("locant.load.load_model", lambda *_, **__: embedded)
    return embedded


@pytest.fixture
def in_a_terminal(monkeypatch):
    """Make commands believe that they write to a terminal of some width; it shows no colour."""

    def pretend(width: int, color_system: str | None = None) -> None:
        def console(*, stderr: bool = False, highlight: bool = False) -> Console:
            if stderr:
                return Console(file=io.StringIO())
            return Console(force_terminal=True, width=width, color_system=color_system, highlight=highlight)

        monkeypatch.setattr("locant.cli.terminal.Console", console)

    return pretend
