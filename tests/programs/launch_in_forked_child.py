"""Launches in a process, in one forked from it, and once more in the first one."""
import os

from book.launch import launch


def twice(number):
    return 2 * number


print("parent", list(launch(twice, 2, 1)), flush=True)
child = os.fork()
if child == 0:
    print("child", list(launch(twice, 2, 2)), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent", list(launch(twice, 2, 3)), flush=True)
