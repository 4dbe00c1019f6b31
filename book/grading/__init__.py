"""L4: labs as course assignments.

    lab           what a lab's cells are; the notebook that grades one exercise; `lab_schema` is what marks may hold
    release       student copies, variants
    submission    a submission, read as untrusted data; `recognised` finds the lab's cells in one
    course        who handed in what and when: `handed_in` finds it in a folder, `exports` in what Canvas, Moodle,
                  Gradescope, nbgrader and GitHub Classroom export; `roster` is who is in the course, and who was late;
                  `by_hand` are questions that the instructor grades
    own           numbers that each student has of their own, drawn from the roster
    sandbox       bubblewrap around untrusted code, and its limits; `calls` are the system calls that it refuses
    warm          processes that have imported everything, and fork what grades an exercise: `forking` is what they
                  run, `enclosed` how a forked process enters a sandbox of its own
    kernel        a Jupyter kernel in a sandbox; `listening` runs inside
    run           one job under nbval, watched from outside; `nbval_plugin` writes its verdicts,
                  `withheld_modules` are those of the book that it can't call
    reference     what a lab's own solutions print, and the limits derived from their run
    lint          whether a lab is fit to be graded; `simulated` are its rules for players without a run
    mutate        what a lab's checks say about small faults in its solutions: `mutations` makes them,
                  `trial` runs the checks of one exercise on an answer
    ranks         ranks on a wire, each in its own sandbox
    wired         exercises whose ranks can only send and receive, over `book.wire`
    grade         submissions -> points
    pace          how long a run will still take
    report        CSV, JSON, Gradescope, HTML, right while grading runs; `upload` is what systems import again
    feedback      what failed, once more with nothing that the student's copy does not have: messages and pictures
    autograder    a lab as what Gradescope, a container or GitHub Classroom runs by itself
    similar       answers that are alike beyond what their exercise makes alike
    check         a student's own check

The way of a submission, as a rule through warm processes; where those can't be had, `run` starts each job anew:

    __main__.grade → course.Course.read              who handed in what
    grade.Grader.start → warm, reference             what the lab's own solutions print, and the limits
    submission.read_submission → recognised          its cells
    Grader.attempt → lab.job → run.run → nbval       one exercise, in the sandbox: what its checks said
    Grader's _checked, then _close                   points of an exercise, and of the submission
    course.Course.told → report.Reports → upload     with lateness and points by hand

`lockstep lint | mutate | release | check | grade | autograder | similar` is the command line of it all.
"""
