"""One command for all that is asked from a shell: `lockstep`, or `python -m book`.

    lockstep run --ranks 4 train.py  your own script by torchrun: why it hangs or fails, who is late
    lockstep show FILES...           Flight Recorder dumps of a job that hangs, profiler traces of one that is slow
    lockstep plan llama3-70b --gpus 64
    lockstep release labs -o student

Each word belongs to one part of the book, which reads the rest of the line and says what went wrong in a sentence.
"""
from __future__ import annotations

import sys
from importlib import import_module

# What each word does, and the module that does it.
COMMANDS = {
    "run": ("book.report", "run your own script by torchrun: why it hangs or fails, who is late"),
    "show": ("book.report", "what a job's files say: Flight Recorder dumps, profiler traces, runs"),
    "doctor": ("book.doctor", "what this machine's ranks will stumble on, each with a remedy"),
    "plan": ("book.cost", "the fastest layout of a model that fits on so many GPUs"),
    "estimate": ("book.cost", "what a layout of your own costs: memory and time, part by part"),
    "read": ("book.cost", "a configuration of torchtitan: what a GPU sends along each axis"),
    "models": ("book.cost", "names of models and GPUs that a plan knows"),
    "scoreboard": ("book.cost", "how far plans are off from steps that others measured"),
    "check": ("book.grading", "check your own answers to a lab as they will be graded"),
    "release": ("book.grading", "make the students' copies of labs"),
    "grade": ("book.grading", "grade a folder of submissions in a sandbox"),
    "autograder": ("book.grading", "what Gradescope, a container or GitHub Classroom runs by itself"),
    "similar": ("book.grading", "which answers of a course are alike"),
    "lint": ("book.grading", "is a lab fit to be graded?"),
    "mutate": ("book.grading", "what a lab's checks miss"),
    "calibrate": ("book.cost", "fit a plan's constants to measured steps"),
    "slides": ("book.authoring", "slides for weeks of the syllabus, from the chapters' figures"),
}


def main(arguments: list[str] | None = None) -> int:
    """Hand the line to the part that its first word belongs to; the exit status is that part's, 2 for another word."""
    arguments = sys.argv[1:] if arguments is None else arguments
    word = arguments[0] if arguments else "--help"
    if word in ("-h", "--help"):
        print(usage())
        return 0
    if word not in COMMANDS:
        print(f"lockstep has no command {word!r}: use {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    part, _ = COMMANDS[word]
    rest = arguments[1:] if word == "doctor" else arguments  # every other part has several words
    status: int = import_module(f"{part}.__main__").main(rest)
    return status


def usage() -> str:
    """The commands, a line each."""
    lines = [f"  lockstep {word:<11}{does}" for word, (_, does) in COMMANDS.items()]
    return "\n".join(["One command for what the book does outside of notebooks.", "", *lines, "",
                      "`lockstep COMMAND --help` tells its options; `python -m book` is the same command."])


if __name__ == "__main__":
    sys.exit(main())
