"""Tools for authors: notebooks stored in one normal form, a linter for the house rules, and the website's extension.

    python -m book.authoring run PATHS                    execute notebooks and store their outputs in normal form
    python -m book.authoring normalise [--check] PATHS    bring stored notebooks into normal form, or only compare
    python -m book.authoring lint PATHS                   the rules for notebooks, each finding with its cell
    python -m book.authoring new-lab NAME                 a lab without exercises, in labs/
    python -m book.authoring new-exercise LAB NAME        one more exercise of a lab: an example to write over
    python -m book.authoring picture                      the README's picture, from what chapter 3 stores
    lockstep slides [WEEK ...]                            slides for weeks of the syllabus, from the chapters' figures

A path is a notebook or a folder of notebooks.
"""
