"""Every served point of every family against what plain Hugging Face says it is."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from locant import Cache, EagerModel, Facts
from zoo.oracle import Claim, claims
from zoo.sizes import UNBUILT
from zoo.survey import EVERY, examined

ROW = 2e-4
"""What each row may be off by, of its largest number."""

FEWEST = 20_000
"""Addresses that the claims reach in all; fewer means that a recipe stopped finding its modules."""

OPEN: dict[str, set[str]] = {}
"""Points that are served and wrong, until they are put right or refused."""

_reached = 0


@pytest.mark.parametrize("name", [name for name in EVERY if name not in UNBUILT])
def test_every_served_point_is_what_hugging_face_computes(name):
    global _reached  # noqa: PLW0603 - counted over the families, for the last test
    model, locant = examined(name)
    if not isinstance(locant, EagerModel):
        return  # refused as a whole: nothing is served, so nothing can be wrong
    ids = torch.randint(5, _vocabulary(locant.facts), (2, 9), generator=torch.Generator().manual_seed(3))
    served = [address for address in locant.points().served() if address.name not in OPEN.get(name, ())]
    cache = locant.capture(ids, served)
    wrong = []
    for claim, got in _checkable(claims(model, ids), locant, cache):
        _reached += 1
        error = _error(got, _as_captured(claim.value, got))
        if not error < ROW:
            wrong.append(f"{claim.address} is not the {claim.recipe}: off by {error:.1e}")
    assert not wrong, "\n".join(wrong)


def test_the_claims_reach_most_of_what_is_served(request):
    if request.config.getoption("keyword") or len(request.session.items) < len(EVERY):
        pytest.skip("only some of the families ran")
    assert _reached > FEWEST


def _vocabulary(facts: Facts) -> int:
    return min(facts.vocab_size or 128, 128) - 8


def _checkable(found: list[Claim], locant: EagerModel, cache: Cache) -> Iterator[tuple[Claim, Tensor]]:
    """The claims about what is served, with what was captured there."""
    having: dict[str, list[str]] = {}
    for status in locant.points():
        if status.proof != "not applicable":
            having.setdefault(status.address.name, []).append(str(status.address))
    numbered = [claim.address.partition("#")[0] for claim in found if "#" in claim.address]
    for claim in found:
        addresses = claim.address.split("+")
        point, numbers, index = claim.address.partition("#")
        if numbers:
            layers = having.get(point, [])
            if len(layers) != numbered.count(point):
                continue  # what the model returns is not one per layer that has the point
            addresses = [layers[int(index)]]
        if all(address in cache for address in addresses):
            got = (
                torch.stack([cache[address] for address in addresses]).sum(0) if addresses[1:] else cache[addresses[0]]
            )
            yield claim, claim.through(got) if claim.through else got


def _as_captured(value: Tensor, got: Tensor) -> Tensor:
    """Heads side by side, no columns for sinks, and one row per position."""
    if value.dim() == 4 and got.dim() == 3:
        value = value.transpose(1, 2) if value.shape[1] != got.shape[1] else value
        return value.flatten(2)
    if value.dim() == 4:
        return value[..., : got.shape[-1]]
    return value.unflatten(0, got.shape[:2]) if value.dim() == 2 else value


def _error(got: Tensor, want: Tensor) -> float:
    """The largest of the rows' errors; infinite for another shape."""
    if got.shape != want.shape:
        return float("inf")
    got, want = got.double(), want.double()
    size = want.abs().amax(-1)
    return float(((got - want).abs().amax(-1) / size.clamp_min(1e-3 * size.max()).clamp_min(1e-30)).max())
