"""``locant capture`` and ``locant show``."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys

import pytest
import torch
from rich.cells import cell_len

from commands import run
from locant import Cache, load_model


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "some.safetensors"


def flags(flag: str, *values: str) -> list[str]:
    return [part for value in values for part in (flag, value)]


def capture(folder, file, *arguments, stdin=None):
    return run("capture", folder, "-o", file, *arguments, stdin=stdin)


def same(got: Cache, wanted: Cache) -> None:
    assert list(got) == list(wanted)
    assert (got.tokens, got.positions) == (wanted.tokens, wanted.positions)
    for address, tensor in wanted.items():
        torch.testing.assert_close(got[address], tensor, rtol=0, atol=0, equal_nan=True)


def test_the_file_holds_what_the_library_captures(llama_folder, file):
    addresses = ["resid_post.2", "attn_probs.0", "model.layers.1.mlp"]
    prompts = ["the capital", "France is and Paris"]
    done = capture(llama_folder, file, *flags("-a", *addresses), *flags("-p", *prompts))
    assert (done.code, done.err) == (0, "")
    same(Cache.load(file), load_model(llama_folder).capture(prompts, addresses))


def test_the_report(llama_folder, file):
    done = capture(llama_folder, file, *flags("-a", "resid_post.0", "resid_post.1", "z.2", "logits"), "-p", "the a|b")
    assert "\x1b" not in done.out
    model, ran, *rest = done.out.splitlines()
    assert model == str(llama_folder)
    assert re.fullmatch(r"float32, sdpa attention; locant \S+, torch \S+, transformers \S+", ran)
    # fmt: off
    assert re.sub(r"\de-\d\d", "#e-##", "\n".join(rest)) == f"""
## 4 tensors, 1.1 KB

| point      | layers |  shape | dtype   |  size | proof               |
| ---------- | ------ | -----: | ------- | ----: | ------------------- |
| resid_post | 0-1    | 1×3×24 | float32 | 576 B | proven, error 0     |
| z          | 2      | 1×3×24 | float32 | 288 B | proven, error #e-## |
| logits     | -      | 1×3×16 | float32 | 192 B | proven, error 0     |

## 1 prompt

| prompt | tokens | text                 |
| -----: | -----: | -------------------- |
|      0 |      3 | 0 <s>  1 the  2 a\\|b |

## Saved {file} ({file.stat().st_size / 1000:.1f} KB)

```sh
# what it holds
locant show {file}
# read a tensor
python -c "from locant import Cache; print(Cache.load('{file}')['resid_post.0'])"
```"""
    # fmt: on


@pytest.mark.parametrize("name", ["some.safetensors", "with space.safetensors", "it's $HOME.safetensors"])
def test_the_next_commands_work(gpt2_folder, file, name):
    out = capture(gpt2_folder, name, "-a", "embeddings", "-p", "the capital").out
    show, load = [line for line in out.splitlines() if line.startswith(("locant show", "python -c"))]
    assert run(*shlex.split(show)[1:]).code == 0
    command = load.replace("python", sys.executable, 1)
    shown = subprocess.run(command, check=False, shell=True, capture_output=True, text=True)
    assert shown.stdout.startswith("tensor([[["), shown.stderr


def test_show_repeats_the_report(llama_folder, file):
    captured = capture(llama_folder, file, "-a", "z.0", *flags("-p", "the", "the capital")).out
    shown = run("show", file)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.split("```")[0] == captured.split("```")[0].replace("## Saved ", "## ")


def test_json(llama_folder, file):
    said = json.loads(capture(llama_folder, file, *flags("-a", "z.0", "model.norm"), "-p", "the", "--json").out)
    tensors = said.pop("tensors")
    assert said.pop("prompts") == [{"tokens": [0, 2], "strings": ["<s>", "the"], "positions": None}]
    assert said.pop("versions").keys() == {"locant", "torch", "transformers"}
    assert said == {
        "file": str(file),
        "model": str(llama_folder),
        "revision": None,
        "dtype": "float32",
        "attention": "sdpa",
        "bytes": 384,
    }
    proofs = [tensor.pop("proof") for tensor in tensors]
    assert re.fullmatch(r"proven \(.*\)", proofs[0])
    assert proofs[1] == "module output"
    shape = {"shape": [1, 2, 24], "dtype": "float32", "bytes": 192}
    assert tensors == [{"address": "z.0", **shape}, {"address": "model.norm", **shape}]
    assert json.loads(run("show", file, "--json").out)["file"] == str(file)


def test_positions(llama_folder, file):
    prompts = ["the capital", "France is and Paris"]
    done = capture(llama_folder, file, "-a", "z.0", *flags("-p", *prompts), "--positions", "0,-1")
    same(Cache.load(file), load_model(llama_folder).capture(prompts, "z.0", positions=[0, -1]))
    assert "| prompt | tokens | captured | text " in done.out
    assert "|      1 |      5 | 0, 4     | 0 <s>  1 France" in done.out


def test_the_last_position_alone(llama_folder, file):
    assert capture(llama_folder, file, "-a", "z.0", "-p", "the capital", "--positions", "-1").code == 0
    assert Cache.load(file)["z.0"].shape == (1, 1, 24)


def test_without_bos(llama_folder, file):
    capture(llama_folder, file, "-a", "z.0", "-p", "the capital", "--no-bos")
    assert Cache.load(file).tokens == ((2, 3),)


def test_prompts_from_a_file(llama_folder, file, tmp_path):
    (tmp_path / "prompts").write_bytes(b"the capital\r\nParis is  and\n")
    capture(llama_folder, file, "-a", "z.0", "-p", "France", "--prompts-file", "prompts")
    assert Cache.load(file).tokens == ((0, 5), (0, 2, 3), (0, 7, 6, 8))


def test_prompts_from_standard_input(llama_folder, file):
    capture(llama_folder, file, "-a", "z.0", "--prompts-file", "-", stdin="the\nFrance")
    assert Cache.load(file).tokens == ((0, 2), (0, 5))


def test_many_prompts_and_long_ones_are_summed_up(llama_folder, gpt2_folder, file):
    out = capture(llama_folder, file, "-a", "z.0", *flags("-p", *["the"] * 10)).out
    assert out.count("0 <s>  1 the") == 8
    assert f"… and 2 more: locant show {file} --json" in out
    assert "\n## 10 prompts\n" in out


def test_a_token_row_leaves_out_the_middle_of_a_long_prompt():
    from locant.cli.capturing import token_line

    line = token_line([f" {i}" for i in range(100)], range(100)).plain
    assert "29 ␣29  … 40 more …  70 ␣70" in line
    assert line.endswith("99 ␣99")
    assert "more" not in token_line(["a"] * 60, range(60)).plain


def test_tokens_without_a_tokenizer_are_numbers():
    from locant.cli.capturing import token_line

    assert token_line([], [7, 0]).plain == "0 #7  1 #0"


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" France", "␣France"),
        ("\n", "⏎"),
        ("\t", "⇥"),
        ("\r\n", "␍⏎"),
        ("", "∅"),
        ("é中", "é中"),
        ("\x1b[31m", "\\x1b[31m"),
    ],
)
def test_white_space_and_control_characters_are_visible(token, shown):
    from locant.cli.terminal import visible

    assert visible(token) == shown


def test_a_file_is_replaced_only_on_request(llama_folder, file):
    file.write_text("precious")
    done = capture(llama_folder, file, "-a", "z.0", "-p", "the")
    assert (done.code, done.out) == (1, "")
    assert done.err == f"locant: {file} exists\n  instead:   name another file with --output, or pass --force\n"
    assert file.read_text() == "precious"
    assert capture(llama_folder, file, "-a", "z.0", "-p", "the", "--force").code == 0
    assert list(Cache.load(file))


def test_the_output_has_a_default(llama_folder, file):
    assert run("capture", llama_folder, "-a", "z.0", "-p", "the").code == 0
    assert list(Cache.load("capture.safetensors"))


ONE = ["-a", "z.0", "-p", "the"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-a", "z.0"], "no prompts\n  instead:   pass --prompt TEXT, or --prompts-file FILE"),
        (["-a", "z.0", "-p", "the", "-a", "z"], "z: the layer is missing"),
        (["-a", "z.3", "-p", "the"], "z.3: layer 3\n  there is:  this model has 3 layers, 0 to 2"),
        (["-a", "q_norm_in.0", "-p", "the"], "q_norm_in.0: the query and key of this block pass through no norm"),
        (["-a", "resid_pots.0", "-p", "the"], "resid_pots.0: no point, and no module"),
        ([*ONE, "--positions", "first"], "--positions first\n  there is:  positions are integers"),
        ([*ONE, "--positions", "0,"], "--positions 0,\n"),
        ([*ONE, "--positions", "9"], "position 9 of prompt 0\n  there is:  that prompt has 2 tokens, 0 to 1"),
        ([*ONE, "-p", "the " * 40], "prompt 1 has 41 tokens\n  there is:  the model's context is 32 tokens"),
        ([*ONE, "-p", "", "--no-bos"], "prompt 1 is empty"),
        ([*ONE, "--prompts-file", "nothing"], "nothing cannot be read: No such file or directory"),
        ([*ONE, "--prompts-file", "gap"], "gap: line 2 is empty\n  there is:  one prompt per line"),
        ([*ONE, "--prompts-file", "latin"], "latin cannot be read: it is not UTF-8 text"),
        ([*ONE, "-o", "no/where.safetensors"], "no/where.safetensors cannot be written: its folder does not exist"),
        ([*ONE, "-o", "."], ". cannot be written: is a folder"),
    ],
)
def test_a_mistake_says_what_is_wrong_and_leaves_no_file(llama_folder, file, tmp_path, arguments, message):
    (tmp_path / "gap").write_text("the\n\nof\n")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    done = capture(llama_folder, file, *arguments)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"locant: {message}")
    assert done.err.count("locant: ") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gap", "latin"]


def test_what_can_be_checked_is_checked_before_the_model_is_loaded(file, monkeypatch):
    def load_model(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr("locant.load.load_model", load_model)
    for arguments in (["-a", "z"], ["-a", "z.0", "--positions", "x"], ["-a", "z.0", "-o", "no/where"]):
        assert run("capture", "gigantic", "-p", "the", *arguments).code == 1


def test_a_failing_write_leaves_what_was_there(llama_folder, file, monkeypatch):
    file.write_text("precious")

    def save_file(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", save_file)
    done = capture(llama_folder, file, *ONE, "--force")
    assert done.code == 1
    assert done.err.startswith(f"locant: {file} cannot be written: ")
    assert "No space left on device" in done.err
    assert file.read_text() == "precious"


def test_show_refuses_what_is_no_capture(file, tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, file)
    assert run("show", file).err == f"locant: {file}: a safetensors file without a capture's metadata\n"
    (tmp_path / "text").write_text("text")
    done = run("show", "text")
    assert done.code == 1
    assert done.err.startswith("locant: text cannot be read as a capture: ")
    assert run("show", tmp_path).err == f"locant: {tmp_path}: there is no such file\n"


def test_layers_that_differ_are_told(file):
    from locant import Address

    shapes = {Address("z", 0): torch.zeros(1, 2, 4), Address("z", 2): torch.zeros(1, 2, 6)}
    Cache(shapes, [[1, 2]]).save(file)
    out = run("show", file).out
    assert re.search(r"\| z     \| 0, 2   \| differs \| float32 \| 80 B \| +\|", out)
    assert "#1  1 #2" in out


@pytest.mark.parametrize("width", [80, 120])
def test_a_real_terminal_gets_lines_that_fit_and_colours(llama_folder, file, width):
    capture(llama_folder, file, *flags("-a", "resid_post.0", "model.layers.1.post_attention_layernorm"), "-p", "the")
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"COLUMNS": str(width), "TERM": "xterm-256color"}
        os.execv(sys.executable, [sys.executable, "-m", "locant", "show", "some.safetensors"])
    seen = b""
    try:
        while part := os.read(terminal, 4096):
            seen += part
    except OSError:
        pass  # how Linux says that the other end has closed
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    text = seen.decode().replace("\r\n", "\n")
    assert "\x1b[" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    told = plain.split("# read a tensor")[0]
    assert max(map(cell_len, told.splitlines())) <= width
    assert "proven, error 0" in told
    assert plain.splitlines()[-1].startswith('python -c "from locant import Cache; print(')
