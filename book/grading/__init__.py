"""L4: labs as course assignments.

    lab           what a lab's cells are; the notebook that grades one exercise
    release       student copies, variants
    submission    what was handed in, read as untrusted data; `handed_in` finds it in a folder
    sandbox       bubblewrap around untrusted code, and its limits; `calls` are those of the system that it refuses
    kernel        a Jupyter kernel in that sandbox; `listening` runs inside
    run           one job under nbval, watched from outside; `nbval_plugin` writes its verdicts
    reference     what a lab's own solutions print, and the limits that follow
    lint          whether a lab is fit to be graded
    withheld      modules of the book that are not there when an exercise is graded
    ranks         ranks on a wire, each in a sandbox of its own
    wired         exercises whose ranks can only send and receive, over `book.wire`
    grade         a folder of submissions -> points
    report        CSV, JSON, Gradescope, HTML
    check         a student's own check

`python -m book.grading lint | release | check | grade` is all of it.
"""
import sys

# jsonschema, which nbformat checks notebooks with, imports this where it is installed, to check IRIs: that builds a
# grammar, for seconds, in each of a grading run's processes, and no notebook has an IRI to check.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # None is how Python keeps a module out
