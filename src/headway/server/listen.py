"""The sockets of a server, bound before anything slow begins."""

from __future__ import annotations

import errno
import socket


class ListenError(Exception):
    """The address cannot be listened on; one line says why and what to do."""


def listen(host: str, port: int) -> list[socket.socket]:
    """A bound socket for each address of `host`, all on the same port (0: any that is free).

    Raises:
        ListenError: no such host, port in use or not allowed.
    """
    if not 0 <= port <= 65535:
        raise ListenError(f"port must be between 0 and 65535, got {port}")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ListenError(f"cannot listen on host {host!r}: {reason}; give an address of this machine") from None
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            sockets.append(_bound(family, kind, protocol, (address[0], port, *address[2:])))
            port = sockets[0].getsockname()[1]
        except OSError as error:
            failure = error
            if error.errno == errno.EADDRINUSE:
                break
    if failure is not None and (not sockets or failure.errno == errno.EADDRINUSE):
        for bound in sockets:
            bound.close()
        raise ListenError(_said(failure, host, port))
    return sockets


def _bound(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.listen(2048)
    except OSError:
        bound.close()
        raise
    return bound


def _said(failure: OSError, host: str, port: int) -> str:
    match failure.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host or 'this machine'} is in use; stop what uses it or choose another with --port"
        case errno.EACCES:
            return f"port {port} needs rights that this user does not have; choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return f"{host!r} is not an address of this machine; choose another with --host"
        case _:
            return f"cannot listen on {host}:{port}: {failure.strerror}"
