import inspect

import pytest

import locant


@pytest.mark.parametrize("name", locant.__all__)
def test_every_public_name_loads_and_says_that_it_lives_in_locant(name):
    value = getattr(locant, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__module__ == "locant"
        assert value.__doc__
