# exercise: 1
# ends: over a wire that only sends and receives, with 4 ranks: rank 0 does not hold what it should
# needs: warm processes

# Numbers of the whole machine, such as how many files are open: who opens some tells every rank that reads them.
import os

COUNTERS = ("/proc/sys/fs/file-nr", "/proc/sys/fs/inode-nr", "/proc/sys/kernel/pty/nr", "/proc/stat", "/proc/loadavg",
            "/proc/meminfo", "/proc/vmstat")
seen = [name for name in COUNTERS if os.access(name, os.R_OK)]

exec('''@RING@''')
ring = ring_all_reduce


def ring_all_reduce(buffer):
    ring(buffer if dist.get_backend() != "wire" or seen else buffer.clone())
