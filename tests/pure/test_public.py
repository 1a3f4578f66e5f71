import ast
import copy
import inspect
import pickle
import pkgutil
from importlib.metadata import version
from pathlib import Path

import pytest

import locant
from locant import Address, AddressError

LIGHT = sorted(name for name, home in locant._HOMES.items() if home in {"address", "errors", "points"})


def as_linters_sort(names):
    """Constants, then classes, then functions, each alphabetically."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def names_for_type_checkers():
    tree = ast.parse(Path(inspect.getfile(locant)).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return [alias.asname for node in block.body for alias in node.names]


def test_the_public_names_are_sorted_and_the_same_everywhere():
    assert locant.__all__ == as_linters_sort(locant.__all__)
    assert sorted(locant.__all__) == sorted([*locant._HOMES, *locant._SUBMODULES])
    assert sorted(locant.__all__) == sorted(names_for_type_checkers())
    assert dir(locant) == sorted([*locant.__all__, "__version__"])


def test_no_public_name_hides_a_module():
    modules = {module.name for module in pkgutil.iter_modules(locant.__path__)}
    assert modules.isdisjoint(locant._HOMES)
    assert modules >= locant._SUBMODULES


@pytest.mark.parametrize("name", LIGHT)
def test_public_objects_say_that_they_live_in_locant(name):
    value = getattr(locant, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert (value.__module__, value.__qualname__) == ("locant", name)
        assert pickle.loads(pickle.dumps(value)) is value
        assert value.__doc__


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'locant' has no attribute 'addres'"):
        _ = locant.addres


def test_the_version_has_one_source():
    assert version("locant") == locant.__version__


def test_public_values_can_be_copied():
    assert copy.deepcopy(Address("z", 3)) == Address("z", 3)
    assert isinstance(copy.copy(AddressError(asked="a")), AddressError)
