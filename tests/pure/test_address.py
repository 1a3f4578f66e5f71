import pickle
import string
from itertools import pairwise
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from locant import (
    POINTS,
    Address,
    AddressError,
    UnknownCoordinate,
    format_address,
    parse_address,
    to_address,
)
from strategies import BLOCK_POINTS, STREAM_POINTS, TRUNK_POINTS, addresses, module_paths

ALPHABET = string.ascii_letters + string.digits + "._~-" + ":/ \n\t+%٣é\x00"


def refusal(call, *args, kind=AddressError) -> str:
    with pytest.raises(AddressError) as caught:
        call(*args)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("embeddings", Address("embeddings")),
        ("resid_post.0", Address("resid_post", 0)),
        ("resid_post.5.stream-2", Address("resid_post", 5, 2)),
        ("resid_streams.5.stream-2", Address("resid_streams", 5, 2)),
        ("attn_probs.17", Address("attn_probs", 17)),
        ("model.layers.5", Address("model.layers.5")),
        ("resid_pots.3", Address("resid_pots.3")),
        ("path.lm_head", Address("path.lm_head")),
        ("path.embeddings.3", Address("path.embeddings.3")),
        ("path.path", Address("path.path")),
    ],
)
def test_string_form(text, address):
    assert format_address(address) == str(address) == text
    assert parse_address(text) == to_address(text) == address


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("model.layers.5.mlp", "model.layers.5.mlp"),
        ("lm_head", "path.lm_head"),
        ("embeddings.word.weight", "path.embeddings.word.weight"),
        ("path", "path.path"),
        ("path.model", "path.path.model"),
        ("path.lm_head", "path.path.lm_head"),
    ],
)
def test_a_module_path_is_escaped_only_where_it_would_be_read_as_something_else(module, text):
    address = Address.of_module(module)
    assert str(address) == text
    assert (address.module_path, address.point) == (module, None)


def test_a_point_knows_its_row_and_has_no_module_path():
    assert Address("z", 3).point is POINTS["z"]
    assert Address("z", 3).module_path is None


@given(addresses())
def test_round_trip(address):
    text = format_address(address)
    assert parse_address(text) == address
    assert pickle.loads(pickle.dumps(address)) == address
    assert eval(repr(address)) == address


@given(module_paths())
def test_every_module_path_has_an_address(path):
    assert Address.of_module(path).module_path == path


@given(addresses())
def test_only_unreserved_characters_are_emitted(address):
    assert quote(str(address), safe="") == str(address)


def check_one_spelling(text):
    try:
        address = parse_address(text)
    except AddressError:
        return
    assert format_address(address) == text


@given(st.text(ALPHABET, max_size=24) | st.text(max_size=12))
@example("path.path.path")
@example("path.resid_post")
@example("resid_post.00")
def test_no_address_has_two_spellings(text):
    check_one_spelling(text)


@given(
    st.lists(
        st.sampled_from(["path", "resid_post", "embeddings", "z", "model", "5", "05", "stream-2", "stream-", ""]),
        min_size=1,
        max_size=5,
    )
)
def test_no_address_has_two_spellings_among_those_of_its_own_parts(parts):
    check_one_spelling(".".join(parts))


def mutants(text, alphabet):
    """Every text one insertion, deletion or replacement away."""
    for i in range(len(text) + 1):
        yield text[:i] + text[i + 1 :]
        for character in alphabet:
            yield text[:i] + character + text[i:]
            yield text[:i] + character + text[i + 1 :]


def check_mutants(text, alphabet):
    for mutant in mutants(text, alphabet):
        if mutant != text:
            check_one_spelling(mutant)


@given(addresses(), st.sampled_from(ALPHABET))
def test_a_changed_character_gives_another_address_or_an_error(address, character):
    check_mutants(str(address), character)


@pytest.mark.parametrize(
    "text",
    [
        "embeddings",
        "z.0",
        "resid_post.10",
        "resid_post.5.stream-2",
        "path.z",
        "path.path",
        "model.layers.5.mlp",
    ],
)
def test_every_changed_character_gives_another_address_or_an_error(text):
    check_mutants(text, ALPHABET)


@pytest.mark.parametrize(
    "text",
    [
        "resid_post.5.head-3",
        "resid_post.5.stream-1.stream-1",
        "resid_post.stream-2.5",
        "resid_post.stream-2",
        "resid_post.5.6",
        "resid_post.5.weight",
        "resid_post.mlp",
        "resid_post.5.Stream-1",
        "z.5.stream-1",
        "lm_head.weight",
    ],
)
def test_a_coordinate_out_of_its_place_is_unknown(text):
    refusal(parse_address, text, kind=UnknownCoordinate)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        ".resid_post.5",
        "resid_post.5.",
        "resid_post..5",
        "a..b",
        "resid_post",
        "resid_post:5",
        "resid_post.5:stream-2",
        "resid_post.-1",
        "resid_post.+1",
        "resid_post.05",
        "resid_post.00",
        "resid_post.5 ",
        " resid_post.5",
        "resid_post.5\n",
        "resid_post. 5",
        "resid_post.٣",
        "resid_post.\N{FULLWIDTH DIGIT FIVE}",
        "resid_post.5_0",
        "resid_post.1e1",
        "resid_post.0x5",
        "resid_post.1234567890",
        "resid_post." + "9" * 5000,
        "resid_post.5.stream-",
        "resid_post.5.stream-02",
        "resid_post.5.stream--2",
        "resid_post.5.stream-x",
        "resid_post.5.stream-1234567890",
        "embeddings.3",
        "logits.0",
        "path",
        "path.",
        "path.model.layers.5",
        "-model",
        "~model",
        "path.-model",
        "modèle.layers",
    ],
)
def test_what_is_no_address(text):
    with pytest.raises(AddressError):
        parse_address(text)


NO_COORDINATES = {
    "bool": True,
    "negative": -1,
    "float": 1.0,
    "string": "1",
    "bytes": b"1",
    "nan": float("nan"),
    "ten digits": 10**9,
    "too long to print": 10**5000,
    "negative and too long to print": -(10**5000),
}


@pytest.mark.parametrize("field", ["layer", "stream"])
@pytest.mark.parametrize("number", NO_COORDINATES.values(), ids=NO_COORDINATES)
def test_coordinates_are_small_whole_numbers(field, number):
    refusal(lambda: Address("resid_post", **{"layer": 1, "stream": 1, field: number}))


@pytest.mark.parametrize("name", [None, 5, b"embeddings", ("embeddings",), "", "resid_post.5", "lm_head.weight"])
def test_names_are_points_or_module_paths(name):
    refusal(Address, name)


@pytest.mark.parametrize("name", TRUNK_POINTS)
def test_trunk_points_take_no_coordinates(name):
    refusal(Address, name, 0)
    refusal(Address, name, None, 0)


@pytest.mark.parametrize("name", BLOCK_POINTS)
def test_block_points_need_a_layer_and_only_some_take_a_stream(name):
    refusal(Address, name)
    refusal(Address, name, None, 0)
    if name in STREAM_POINTS:
        assert Address(name, 0, 0).stream == 0
    else:
        refusal(Address, name, 0, 0, kind=UnknownCoordinate)


def test_module_paths_take_no_coordinates():
    refusal(Address, "model.layers", 5)
    refusal(Address, "model.layers", None, 1)


def test_to_address_reads_every_form():
    address = Address("z", 7)
    assert to_address(address) is address
    assert to_address("z.7") == to_address(("z", 7)) == address
    assert to_address(("resid_post", 5, 2)) == Address("resid_post", 5, 2)
    assert to_address(("embeddings", None)) == Address("embeddings")


@pytest.mark.parametrize(
    "value",
    [None, 5, [], ["z", 7], (), ("z",), ("z", 7, None, None), ("z", "7"), ("z", True), b"z.7", {"z": 7}],
)
def test_to_address_refuses_everything_else(value):
    refusal(to_address, value)


def test_addresses_are_values():
    assert len({Address("z", 7), parse_address("z.7"), Address("z", 8)}) == 2
    assert repr(Address("resid_post", 5)) == "Address('resid_post', 5)"
    assert repr(Address("resid_post", 5, 2)) == "Address('resid_post', 5, 2)"
    assert repr(Address("embeddings")) == "Address('embeddings')"
    with pytest.raises(AttributeError):
        Address("z", 7).layer = 8
    with pytest.raises((AttributeError, TypeError)):
        Address("z", 7).head = 3


def test_addresses_are_ordered_by_number_not_by_text():
    ordered = [
        Address("embeddings"),
        *(Address("resid_post", 9, s) for s in (None, 0, 1)),
        Address("resid_post", 10),
    ]
    assert sorted(set(ordered)) == ordered
    assert ordered[0] <= ordered[0] < ordered[1]
    with pytest.raises(TypeError):
        _ = Address("embeddings") < "embeddings"


@given(st.lists(addresses()))
def test_any_addresses_can_be_sorted(some):
    ordered = sorted(some)
    assert all(a <= b for a, b in pairwise(ordered))


def test_refusals_say_what_to_do():
    assert refusal(parse_address, "resid_post:5").endswith("Write 'resid_post.5'.")
    assert refusal(parse_address, "resid_post").endswith("Write for example 'resid_post.5'.")
    assert refusal(parse_address, "embeddings.3").endswith("Write 'embeddings'.")
    assert refusal(parse_address, "path.model.layers.5").endswith("Write 'model.layers.5'.")
    assert refusal(parse_address, "path").endswith("The module called path is 'path.path'.")
    assert refusal(Address, "resid_pots", 3).endswith("Did you mean resid_post or resid_pre or resid_mid?")
    assert "parse_address('resid_post.5')" in refusal(Address, "resid_post.5")
    assert "counts from 0. A locator can count from the end." in refusal(Address, "resid_post", -1)
    unknown = refusal(parse_address, "resid_post.5.head-3", kind=UnknownCoordinate)
    assert unknown == (
        "resid_post.5.head-3: head-3 is no coordinate of resid_post, or not in this place. After resid_post "
        "comes a layer, then stream-S. If this is a module path, write 'path.resid_post.5.head-3'."
    )
