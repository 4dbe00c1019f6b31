"""Arguments of a launch that cannot work: refused in one sentence, before anything starts."""
import re
import threading

import pytest

from book.launch import LaunchError, arguments, launch, rank_device


def nothing():
    pass


def scaled(scale):
    return scale


async def awaited():
    pass


def yielded():
    yield


async def yielded_later():
    yield


@pytest.mark.parametrize("args, options, error, words", [
    ((nothing, 0), {}, ValueError, "world_size must be at least 1, not 0"),
    ((nothing, -2), {}, ValueError, "world_size must be at least 1, not -2"),
    ((nothing, 2.0), {}, TypeError, "world_size is a number of processes, not 2.0"),
    ((nothing, True), {}, TypeError, "world_size is a number of processes, not True"),
    ((nothing, 65), {}, ValueError, "pass allow_many_ranks=True to start more than 64"),
    ((4, nothing), {}, TypeError, "launch needs a function to run on the ranks, not 4"),
    ((scaled, 2), {}, TypeError, "scaled(scale) cannot be called with 0 arguments"),
    ((awaited, 2), {}, TypeError, "awaited is an async function, which a call does not run: launch one that calls"),
    ((yielded, 2), {}, TypeError, "yielded yields, so a call does not run it: collect the values in a list and return"),
    ((yielded_later, 2), {}, TypeError, "yielded_later yields, so a call does not run it"),
    ((nothing, 2), {"timeout_s": 0}, ValueError, "timeout_s must be more than 0 seconds, not 0"),
    ((nothing, 2), {"hang_s": -1}, ValueError, "hang_s must be more than 0 seconds, not -1"),
    ((nothing, 2), {"hang_s": float("nan")}, ValueError, "hang_s must be more than 0 seconds, not nan"),
    ((nothing, 2), {"timeout_s": None}, TypeError,
     "timeout_s is a number of seconds, not None: pass a number, such as 10"),
    ((nothing, 2), {"hang_s": "5"}, TypeError, "hang_s is a number of seconds, not '5': pass a number, such as 10"),
    ((nothing, 2), {"on_line": 5}, TypeError, "on_line must be a function of a rank and a line, not 5: write on_line="),
    ((nothing, 2), {"on_line": lambda line: None}, TypeError, "on_line must be a function of a rank and a line"),
    ((nothing, 2), {"env": 5}, TypeError, "env must be a dict of environment variables, not 5: write env={'NAME'"),
    ((nothing, 2), {"env": {5: 5}}, TypeError, "names in env must be text, not 5: write env={'NAME': 'value'}"),
    ((nothing, 2), {"env": {"A=B": "1"}}, ValueError, "'A=B' in env cannot name an environment variable: leave out"),
    ((nothing, 2), {"env": {"A": None}}, TypeError, "env['A'] must be text or a number, not None: leave it out"),
    ((nothing, 2), {"env": {"A": "a\0b"}}, ValueError, "env['A'] must not contain the character '\\0'"),
    ((scaled, 2, threading.Lock()), {}, TypeError, "argument 1 cannot be sent to the ranks"),
])
def test_bad_arguments_are_refused_in_one_sentence(args, options, error, words, capsys):
    with pytest.raises(error, match=re.escape(words)):
        launch(*args, **options)
    assert capsys.readouterr().out == ""


def test_a_working_folder_that_was_deleted_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(LaunchError, match="the folder that this process works in has been deleted: call os.chdir"):
        launch(nothing, 2)


def test_an_object_that_cannot_be_pickled_is_named():
    guard = threading.Lock()

    def use_lock():
        with guard:
            pass

    with pytest.raises(TypeError, match="'guard', which use_lock uses, cannot be sent to the ranks"):
        launch(use_lock, 2)


def test_rank_device_raises_outside_a_rank():
    with pytest.raises(LaunchError, match="belongs inside a function that launch or torchrun runs"):
        rank_device()


def test_code_travels_with_the_name_of_its_file() -> None:
    """cloudpickle 3.1.3 puts another name in its place, and a message could not quote the line anymore."""
    code = launch.__code__
    args = (0, "<dynamic-code>", "launch")
    assert arguments._code(type(code), args, filename="cell") == (type(code), (0, "cell", "launch"))
