"""The control connection: a challenge that proves to each side that the other has the token, then frames.

Owns the bytes of both and every check before one is believed; reads and writes no socket itself. Does not own what
frames say (messages.py).

The token never travels. Both sides prove that they have it, of two fresh nonces, before either reads anything else::

    server -> machine   "PDiTjoin" | version u16 | nonce 32                                   42 bytes
    machine -> server   "PDiTjoin" | version u16 | nonce 32 | HMAC(token, "machine", nonces)  74 bytes
    server -> machine   1 | HMAC(token, "server", nonces)      or 0 and zeros: refused        33 bytes

Then frames both ways, each with the code of its direction, number and bytes, so that no one on the way adds, changes,
repeats or leaves out one::

    length u32 | HMAC(key of the direction, number u64 | text) | text: JSON, UTF-8, at most MAX_FRAME_BYTES

All codes are HMAC-SHA256 (RFC 2104). Nothing is encrypted.
"""

import errno
import hmac
import ipaddress
import json
import os
import re
import stat
import struct
from typing import Any

from ..wire.protocol import FROM_JSON, ProtocolError

MAGIC, VERSION = b"PDiTjoin", 1
GREETING = struct.Struct("<8sH32s")
ANSWER = struct.Struct("<8sH32s32s")
VERDICT = struct.Struct("<B32s")
HEAD = struct.Struct("<I32s")
NUMBER = struct.Struct("<Q")
NONCE_BYTES = 32
MAX_FRAME_BYTES = 64 * 1024
LINK_LOCAL = re.compile(r"fe[89ab][0-9a-f]:|.*%", re.IGNORECASE)
MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 1024
HOW_TO_MAKE = "(umask 077; openssl rand -hex 32 > FILE)"
CLOSED = "it closed the connection"


class TokenRefusedError(ValueError):
    """The other side has another token."""


def in_words(error: OSError, before: str = "") -> str:
    """Why a connection ended. One that is closed before all that was sent is read is reset, or its pipe is broken."""
    return CLOSED if error.errno in (errno.ECONNRESET, errno.EPIPE) else before + (error.strerror or str(error))


def read_token(path: str | os.PathLike[str]) -> bytes:
    """The token in a file that only its owner may read. Raises ValueError for any other file."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"token file {path} is no plain file; make one: {HOW_TO_MAKE}")
            if found.st_mode & 0o077:
                mode = stat.S_IMODE(found.st_mode)
                raise ValueError(f"token file {path} has mode {mode:04o}, so others can read it; chmod 600 {path}")
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise ValueError(f"token file {path} cannot be read: {error.strerror}; make one: {HOW_TO_MAKE}") from error
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise ValueError(
            f"token file {path} holds {len(token)} bytes, not {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}; "
            f"make one: {HOW_TO_MAKE}"
        )
    return token


def join_address(host: str, port: int) -> str:
    """`HOST:PORT`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, an IPv6 address in brackets. Raises ValueError, also for a link-local one.

    Link-local addresses are each machine's own to complete (`%eth0`): what one calls so, no other can reach.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host and "/" not in host:
        raise ValueError(f"address {text!r}: write an IPv6 address in brackets, [fd00::1]:7860")
    if not (colon and _may_be_host(host) and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"address {text!r} is not HOST:PORT; write for example 192.168.1.10:7860")
    if LINK_LOCAL.match(host):
        raise ValueError(
            f"address {text!r} is link-local, which other machines cannot name alike; give both a private one, such as "
            "fd00::1, by: ip address add fd00::1/64 dev eth0"
        )
    return host, int(port)


def _may_be_host(text: str) -> bool:
    """Whether a resolver can be asked for it: Python's raises UnicodeError for `10.0.0..1`. No `http://10.0.0.1`."""
    try:
        return "/" not in text and bool(text.encode("idna"))
    except UnicodeError:
        return False


def listen_address(text: str) -> tuple[str, int]:
    """The one address to listen on, as numbers. Raises ValueError for a name, all interfaces, or a multicast group."""
    host, port = split_address(text)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(
            f"address {text!r} names no single interface; give this machine's own address in the private network, "
            "such as 192.168.1.10:7860"
        ) from None
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address  # [::ffff:0.0.0.0] means all interfaces, too
    if address.is_unspecified or address.is_multicast:
        raise ValueError(
            f"address {text!r} would listen on all interfaces; give this machine's one address in the private network"
        )
    return str(address), port


class ServerChallenge:
    """ComfyUI's side of one challenge: send `greeting`, then ask `session` once ANSWER.size bytes have come."""

    def __init__(self, token: bytes) -> None:
        self._token, self._nonce = token, os.urandom(NONCE_BYTES)
        self.greeting = GREETING.pack(MAGIC, VERSION, self._nonce)

    def session(self, answer: bytes) -> tuple[bytes, "Session"]:
        """What to send back, and the session. Raises ProtocolError for other bytes, TokenRefusedError."""
        magic, version, nonce, proof = ANSWER.unpack(answer)
        _refuse_other(magic, version)
        if not hmac.compare_digest(proof, _code(self._token, b"machine", self._nonce, nonce)):
            raise TokenRefusedError("it has another token; give both machines the same token file")
        verdict = VERDICT.pack(1, _code(self._token, b"server", self._nonce, nonce))
        return verdict, Session(self._token, self._nonce, nonce, ours=b"from server", theirs=b"from machine")


REFUSAL = VERDICT.pack(0, bytes(32))


class MachineChallenge:
    """A joining machine's side: `answer` to the greeting, then `session` of the verdict."""

    def __init__(self, token: bytes) -> None:
        self._token, self._nonce, self._theirs = token, os.urandom(NONCE_BYTES), b""

    def answer(self, greeting: bytes) -> bytes:
        """What to send to the greeting. Raises ProtocolError for what is none."""
        magic, version, self._theirs = GREETING.unpack(greeting)
        _refuse_other(magic, version)
        return ANSWER.pack(MAGIC, VERSION, self._nonce, _code(self._token, b"machine", self._theirs, self._nonce))

    def session(self, verdict: bytes) -> "Session":
        """The session. Raises TokenRefusedError when either side does not believe the other."""
        accepted, proof = VERDICT.unpack(verdict)
        if accepted != 1:
            raise TokenRefusedError("it refuses our token; give both machines the same token file")
        if not hmac.compare_digest(proof, _code(self._token, b"server", self._theirs, self._nonce)):
            raise TokenRefusedError("it does not have our token; is this the right address?")
        return Session(self._token, self._theirs, self._nonce, ours=b"from machine", theirs=b"from server")


def _refuse_other(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolError("the other side is no Parallel DiT; is this the right address and port?")
    if version != VERSION:
        raise ProtocolError(f"the other side speaks version {version} of the control connection, we {VERSION}")


def _code(key: bytes, label: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"parallel-dit join 1 " + label + b"\0" + b"".join(parts), "sha256")


class Session:
    """The frames of one proven connection. Not for two threads at once."""

    def __init__(self, token: bytes, server: bytes, machine: bytes, *, ours: bytes, theirs: bytes) -> None:
        self._our_key, self._their_key = (_code(token, label, server, machine) for label in (ours, theirs))
        self._sent = self._taken = 0
        self._come = bytearray()

    def frame(self, value: dict[str, Any]) -> bytes:
        """The bytes of the next frame. Raises ProtocolError for a value that is too long, or not JSON's."""
        try:
            text = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a message cannot be written as JSON: {error}") from error
        if len(text) > MAX_FRAME_BYTES:
            raise ProtocolError(f"a message of {len(text)} bytes, at most {MAX_FRAME_BYTES}")
        code = hmac.digest(self._our_key, NUMBER.pack(self._sent) + text, "sha256")
        self._sent += 1
        return HEAD.pack(len(text), code) + text

    def take(self, data: bytes) -> list[Any]:
        """The frames that are complete with `data`. Raises ProtocolError; the connection is spoilt then."""
        self._come += data
        found = []
        while len(self._come) >= HEAD.size:
            length, code = HEAD.unpack_from(self._come)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES}")
            if len(self._come) < HEAD.size + length:
                break
            text = bytes(self._come[HEAD.size : HEAD.size + length])
            del self._come[: HEAD.size + length]
            if not hmac.compare_digest(code, hmac.digest(self._their_key, NUMBER.pack(self._taken) + text, "sha256")):
                raise ProtocolError(
                    "a frame was changed on its way, or is of an unknown sender; use a network that you trust"
                )
            self._taken += 1
            found.append(_parsed(text))
        return found


def _parsed(text: bytes) -> Any:  # noqa: ANN401  JSON's value
    try:
        return FROM_JSON.decode(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame is not JSON: {error}") from error
