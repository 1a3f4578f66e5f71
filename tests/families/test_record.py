"""Every family, surveyed again: nothing that was proven may stop being so."""

import pytest

from locant.families import Coverage, Family
from zoo.survey import EVERY, surveyed, versions

RECORD = Coverage.recorded()
AGAIN = "python .ci/families.py writes the record and docs/FAMILIES.md anew"


def test_the_record_has_every_family_of_this_transformers():
    if RECORD.versions["transformers"] != versions()["transformers"]:
        pytest.skip(f"the record is of transformers {RECORD.versions['transformers']}, which has other families")
    assert list(RECORD.families) == EVERY, AGAIN


@pytest.mark.parametrize("name", [name for name in EVERY if name in RECORD.families])
def test_what_was_proven_still_is(name):
    before, now = RECORD.families[name], surveyed(name)
    lost = {p: now.points[p].reason for p in before.named("proven") if now.points[p].state != "proven"}
    assert not lost, f"{name} was proven here and is not any more"
    if RECORD.versions["transformers"] == versions()["transformers"]:
        assert _told(now) == _told(before), f"{name} has changed, for the better or in its reasons: {AGAIN}"


def _told(family: Family) -> tuple[object, ...]:
    """All but the errors, which differ from one machine to the next."""
    return family.kind, {name: (outcome.state, outcome.reason) for name, outcome in family.points.items()}
