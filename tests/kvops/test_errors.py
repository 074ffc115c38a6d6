"""The exception tree: as drawn."""

import inspect
import re

from kvferry.kvops import errors


def test_the_tree_in_the_docstring_is_the_tree_in_the_code():
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__))
    defined = {
        name
        for name, item in inspect.getmembers(errors, inspect.isclass)
        if issubclass(item, Exception)
    }
    assert drawn == defined
    below_arena = re.findall(r"│   [├└]── (\w+)", errors.__doc__)
    assert below_arena
    for name in defined:
        parents = getattr(errors, name).__mro__
        assert errors.KVFerryError in parents
        assert (errors.ArenaError in parents) == (name in [*below_arena, "ArenaError"])
