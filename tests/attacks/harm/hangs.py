# exercise: 1
# ends: stopped:

# A loop without end that nobody can interrupt.
import signal


def chunk_bounds(length, num_chunks):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        signal.sigtimedwait([signal.SIGUSR1], 5)
