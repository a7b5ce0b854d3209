"""Break the product in small ways and see the fast tests fail: ``make mutants`` (half an hour), or part of it by name.

``python -m mutation [WORD ...]`` from ``tests/`` runs the mutants whose name or file contains one of these. Each runs
in a copy of the tree, against the tests named for it; a mutant that no test sees is reported, and the exit code is 1.
"""
