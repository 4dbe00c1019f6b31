# exercise: 1
# ends: a check failed
# right if: found

# Another user, another name space, a mount, a device, a setuid program.
import ctypes
import os
from pathlib import Path

libc, found = ctypes.CDLL(None, use_errno=True), []
for name, flag in (("user", 0x10000000), ("mount", 0x20000), ("network", 0x40000000), ("pid", 0x20000000)):
    found += [name] if libc.unshare(flag) == 0 else []
found += ["mount"] if libc.mount(b"none", b"/home", b"tmpfs", 0, None) == 0 else []
found += ["chroot"] if libc.chroot(b"/tmp") == 0 else []
for call in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]),
             lambda: os.mknod("/tmp/sda", 0o60666, 0x800),
             lambda: os.open("/dev/sda", os.O_RDONLY), lambda: os.open("/dev/mem", os.O_RDONLY),
             lambda: Path("/proc/sys/kernel/domainname").open("a"), lambda: Path("/proc/sysrq-trigger").open("a"),
             lambda: Path("/usr/bin/lockstep").write_text("x"), lambda: Path("/etc/passwd").write_text("x"),
             lambda: Path(formula.__file__).with_name("mine.py").write_text("x"), lambda: Path(os.__file__).open("a")):
    try:
        call()
        found.append(str(call))
    except OSError:
        pass
status = Path("/proc/self/status").read_text()
held = [line.split() for line in status.splitlines() if line.startswith(("CapEff", "CapPrm", "CapBnd"))]
found += [name for name, value in held if int(value, 16)]
found += [] if "NoNewPrivs:\t1" in status else ["new privileges"]
