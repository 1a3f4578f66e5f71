"""Every example of the document that specifies addresses, run as it stands there."""

import pytest

CONSTRUCTED = """\
from locant import Address

Address("resid_post", 10)                # name and layer
Address("embeddings")                    # trunk-level, so no layer
Address("resid_streams", 5, 2)           # name, layer, stream
Address("model.layers.5.mlp.down_proj")  # a module path, for what the table below does not name
"""

SPELLED = """\
from locant import Address, format_address, parse_address, to_address

format_address(Address("resid_post", 5, 2))  # "resid_post.5.stream-2"
parse_address("mlp_act.10")
to_address(("z", 7))                         # the older tuple form still reads
"""


def values(code: str) -> list[object]:
    """What each expression of the code is; its first line is the import."""
    imports, *expressions = filter(None, code.splitlines())
    names: dict[str, object] = {}
    exec(imports, names)
    return [eval(expression, names) for expression in expressions]


def test_the_constructed_addresses():
    fields = [(a.name, a.layer, a.stream) for a in values(CONSTRUCTED)]
    assert fields == [
        ("resid_post", 10, None),
        ("embeddings", None, None),
        ("resid_streams", 5, 2),
        ("model.layers.5.mlp.down_proj", None, None),
    ]


def test_the_string_forms():
    from locant import Address

    assert values(SPELLED) == ["resid_post.5.stream-2", Address("mlp_act", 10), Address("z", 7)]


def test_what_the_document_says_of_strictness():
    from locant import AddressError, UnknownCoordinate, format_address, parse_address

    address = values(CONSTRUCTED)[2]
    assert parse_address(format_address(address)) == address
    with pytest.raises(AddressError):
        parse_address("resid_post:5")
    for text in ["resid_post.5.head-3", "resid_post.5.2", "embeddings.stream-1"]:
        with pytest.raises(UnknownCoordinate):
            parse_address(text)
