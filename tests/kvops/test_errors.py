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
    branches = {"ArenaError": [], "DiskError": [], "VineyardError": []}
    branch = ""
    for depth, name in re.findall(r"^( +│?   )[├└]── (\w+)", errors.__doc__, re.MULTILINE):
        if "│" in depth:
            branches[branch].append(name)
        else:
            branch = name
    assert all(branches.values())
    for name in defined:
        parents = getattr(errors, name).__mro__
        assert errors.KVFerryError in parents
        for root, below in branches.items():
            assert (getattr(errors, root) in parents) == (name in [*below, root])
