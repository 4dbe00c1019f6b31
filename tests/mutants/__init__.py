"""Faults that the tests must find: patches of `book/`, each headed by a line that says what is then wrong.

`python -m tests.mutants` applies each to a copy of the working tree and runs the tests there.
"""
