# exercise: 1
# ends: a check failed
# right if: found

# The kernel's keyrings are in no name space: a note left by somebody outside, or by another submission.
import ctypes
import platform

KEYCTL = {"x86_64": 250, "aarch64": 219}[platform.machine()]
SEARCH, SESSION, USER, USER_SESSION = 10, -3, -4, -5
libc = ctypes.CDLL(None, use_errno=True)
found = [ring for ring in (SESSION, USER, USER_SESSION)
         if libc.syscall(KEYCTL, SEARCH, ring, b"user", b"lockstep-@PORT@", 0) >= 0]
