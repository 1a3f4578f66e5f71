import os
import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers", "polars", "altair", "numpy", "safetensors"]
HEAVIEST = {"torch", "transformers", "polars"}
CPU_SECONDS = 0.1


def python(code: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def heavy_modules_after(statement: str) -> str:
    return python(f"{statement}\nimport sys\nprint(*[m for m in {HEAVY} if m in sys.modules])")


def cpu_seconds_of(statement: str, cache) -> float:
    code = f"import time; start = time.process_time(); {statement}; print(time.process_time() - start)"
    return min(float(python(code, PYTHONPYCACHEPREFIX=str(cache))) for _ in range(5))


@pytest.mark.parametrize(
    "statement",
    [
        "import locant",
        "import locant; dir(locant); locant.__version__",
        "from locant import Address, AddressError, POINTS, parse_address, points",
        "import locant.names",
        "import locant.locators",
        "import locant.locators.axes",
    ],
)
def test_the_vocabulary_needs_no_heavy_library(statement):
    assert heavy_modules_after(statement) == ""


@pytest.mark.parametrize("statement", ["import locant.locators.locator", "from locant import Facts, Index"])
def test_locators_resolve_without_a_model_and_without_its_libraries(statement):
    assert HEAVIEST.isdisjoint(heavy_modules_after(statement).split())


def test_a_locator_is_read_without_numpy():
    assert heavy_modules_after("from locant import ModelLocatorConfig; ModelLocatorConfig('embed')") == ""


def test_the_check_for_heavy_libraries_can_fail(tmp_path):
    (tmp_path / "polars.py").touch()
    statement = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import locant, polars"
    assert heavy_modules_after(statement) == "polars"


@pytest.mark.parametrize("statement", ["import locant", "from locant import Address, POINTS"])
def test_importing_is_fast(statement, tmp_path):
    assert cpu_seconds_of(statement, tmp_path) <= CPU_SECONDS


def test_the_check_for_speed_can_fail(tmp_path):
    assert cpu_seconds_of("sum(range(10**8))", tmp_path) > CPU_SECONDS
