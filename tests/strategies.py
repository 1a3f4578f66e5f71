"""Hypothesis strategies for locant's values, shared by all tests."""

import string

from hypothesis import strategies as st

from locant import POINTS, Address

BLOCK_POINTS = sorted(name for name, point in POINTS.items() if point.scope == "block")
TRUNK_POINTS = sorted(name for name, point in POINTS.items() if point.scope == "trunk")
STREAM_POINTS = sorted(name for name, point in POINTS.items() if point.takes_stream)

NUMBERS = st.integers(0, 99) | st.integers(0, 10**9 - 1)
IDENTIFIERS = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=8)


@st.composite
def module_paths(draw: st.DrawFn) -> str:
    """Paths of modules as models have them, some of which start like a point or like the escape."""
    head = draw(st.sampled_from([*POINTS, "path"]) | IDENTIFIERS)
    tail = st.sampled_from(["5", "stream-2", "weight", "path", "resid_post", "a-b~c"]) | IDENTIFIERS
    return ".".join([head, *draw(st.lists(tail, max_size=4))])


def addresses() -> st.SearchStrategy[Address]:
    """Every kind of address: points with and without coordinates, and module paths."""
    return st.one_of(
        st.builds(Address, st.sampled_from(TRUNK_POINTS)),
        st.builds(Address, st.sampled_from(BLOCK_POINTS), NUMBERS),
        st.builds(Address, st.sampled_from(STREAM_POINTS), NUMBERS, NUMBERS),
        st.builds(Address.of_module, module_paths()),
    )
