import inspect
import pickle

import pytest

from locant import errors
from locant.errors import AddressError, CacheError, LocantError, UnknownPoint, did_you_mean

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, LocantError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_says_what_was_asked_what_there_is_and_what_to_do(kind):
    error = kind(
        asked="resid_pots.3: no such point",
        has="This model has 12 layers",
        instead="Did you mean resid_post?",
    )
    assert str(error) == "resid_pots.3: no such point. This model has 12 layers. Did you mean resid_post?"
    assert (error.asked, error.has, error.instead) == (
        "resid_pots.3: no such point",
        "This model has 12 layers",
        "Did you mean resid_post?",
    )


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_survive_pickling(kind):
    error = pickle.loads(pickle.dumps(kind(asked="a", instead="c")))
    assert type(error) is kind
    assert (str(error), error.asked, error.has, error.instead) == ("a. c.", "a", None, "c")


@pytest.mark.parametrize("kind", CLASSES)
def test_the_tree_drawn_in_the_docstring_has_every_class(kind):
    assert f" {kind.__name__} " in inspect.getdoc(errors).replace("\n", " ")
    assert kind.__doc__


def test_who_else_can_catch_them():
    assert issubclass(AddressError, ValueError)
    assert issubclass(CacheError, KeyError)
    assert str(CacheError(asked="z.3: not captured")) == "z.3: not captured."


def test_did_you_mean_offers_close_names_or_nothing():
    assert did_you_mean("resid_pots", ["resid_post", "z"]) == "Did you mean resid_post?"
    assert did_you_mean("xyzzy", ["resid_post", "z"]) is None
    assert str(UnknownPoint(asked="xyzzy: no such point", instead=None)) == "xyzzy: no such point."
