"""What holds for every command: help and its speed, versions, exit codes, interrupts."""

import os
import re
import signal
import statistics
import subprocess
import sys

import pytest

import locant
from commands import run
from locant.cli import DEFAULT_MODEL

COMMANDS = ["points", "capture", "show", "index", "families", "demo"]
HEAVY = ["torch", "transformers", "numpy", "safetensors", "rich.table"]
CPU_SECONDS = 0.3


def started(*arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "locant", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finished(*arguments: str) -> tuple[int, str, str]:
    process = started(*arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def median_cpu_seconds(cache, *arguments: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(cache)
    to_nowhere = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]

    def once() -> float:
        child = os.posix_spawn(sys.executable, [sys.executable, *arguments], environment, file_actions=to_nowhere)
        used = os.wait4(child, 0)[2]
        return used.ru_utime + used.ru_stime

    once()  # writes the bytecode
    return statistics.median(once() for _ in range(5))


@pytest.mark.parametrize("arguments", [["--help"], ["capture", "--help"], ["--version"]], ids=" ".join)
def test_help_is_fast(arguments, tmp_path):
    assert median_cpu_seconds(tmp_path, "-m", "locant", *arguments) < CPU_SECONDS


def test_the_check_for_speed_can_fail(tmp_path):
    wasted = f"import time\nwhile time.process_time() < {CPU_SECONDS}: pass"
    assert median_cpu_seconds(tmp_path, "-c", wasted) >= CPU_SECONDS


def heavy_modules_after_help(*paths: str) -> list[str]:
    code = (
        f"import sys; sys.path[:0] = {list(paths)}; from locant.cli import app\n"
        "app(['--help'], standalone_mode=False)\n"
        f"print(*[m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    return done.stderr.split()


def test_help_needs_no_heavy_library():
    assert heavy_modules_after_help() == []


def test_the_check_for_heavy_libraries_can_fail(tmp_path):
    (tmp_path / "typer.py").write_text(
        "import sys, importlib\nsys.path.remove(__file__.rpartition('/')[0])\ndel sys.modules['typer']\n"
        "sys.modules['torch'] = None\nsys.modules['typer'] = importlib.import_module('typer')\n"
    )
    assert heavy_modules_after_help(str(tmp_path)) == ["torch"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    done = run(command, "--help")
    assert done.code == 0
    assert done.out.startswith(f"Usage: locant {command}")
    assert max(map(len, done.out.splitlines())) <= 80


def test_the_help_lists_every_command_in_a_line_that_is_not_cut():
    done = run("--help")
    assert (done.code, done.err) == (0, "")
    for command in COMMANDS:
        assert re.search(rf"^  {command}  +[A-Z].*\.$", done.out, re.MULTILINE)
    assert "..." not in done.out.split("Commands:")[1]
    assert run("-h").out == run().out == done.out


def test_the_version():
    assert run("--version").out == f"locant {locant.__version__}\n"
    assert finished("--version") == (0, f"locant {locant.__version__}\n", "")


def test_the_default_model_is_the_one_that_load_model_takes():
    from locant.load import EMBEDDED

    assert DEFAULT_MODEL == EMBEDDED


@pytest.mark.parametrize(
    "arguments",
    ["pionts", "--nonsense", "points --layer -1", "points --layer x", "points a b", "capture -p x", "capture -a",
     "capture -a z.0 -p x --dtype int8", "show", "demo extra"],
)  # fmt: skip
def test_a_wrong_command_line_ends_with_2_and_says_why(arguments):
    done = run(*arguments.split())
    assert (done.code, done.out) == (2, "")
    assert "Error: " in done.err


def test_a_mistyped_command_gets_a_suggestion():
    assert "Did you mean 'points'?" in run("pionts").err


def test_an_error_of_locant_ends_with_1_and_three_lines():
    done = run("capture", "-a", "resid_post:5", "-p", "x")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "locant: 'resid_post:5': an address has no ':'\n"
        '  there is:  An address is a point ("embeddings", "resid_post.5", "resid_post.5.stream-2") or a module path\n'
        "  instead:   Write 'resid_post.5'\n"
    )


def test_an_error_without_more_to_say_is_one_line():
    assert run("show", "nowhere").err == "locant: nowhere: there is no such file\n"


def test_an_interrupt_ends_with_130(tmp_path):
    waiting = tmp_path / "prompts"
    os.mkfifo(waiting)
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a background job may ignore it
    process = started("capture", "-a", "z.0", "--prompts-file", str(waiting), preexec_fn=default)
    with waiting.open("w"):  # returns when the command has opened it, too
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "\nlocant: interrupted\n")


def test_a_reader_that_leaves_early_is_no_error(llama_folder):
    process = started("points", str(llama_folder), "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait(timeout=60)


def test_a_terminal_without_the_letters_of_a_token_still_shows_the_rest(llama_folder):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    process = started("points", str(llama_folder), "--served", env=environment)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "4?query?key" in out
