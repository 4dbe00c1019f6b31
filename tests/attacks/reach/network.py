# exercise: 1
# ends: a check failed
# right if: any(found)

# A server of the attacker's: on the machine, on its other addresses, outside, by its name, on sockets of files.
import socket


def reached(family, address):
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(2)
            connection.connect(address)
            return True
    except OSError:
        return False


def named(name):
    try:
        return bool(socket.getaddrinfo(name, 80))
    except OSError:
        return False


port, hosts = int("@PORT@"), ("127.0.0.1", "127.0.0.2", "0.0.0.0", "@HOST@", "192.0.2.1")
found = [reached(socket.AF_INET, (host, port)) for host in hosts]
found += [reached(socket.AF_UNIX, path) for path in ("\0lockstep-@PORT@", "@FOLDER@/listening", "/run/docker.sock")]
found += [named(name) for name in ("example.com", "example.org.")]
found += [name != "lo" for _, name in socket.if_nameindex()]
