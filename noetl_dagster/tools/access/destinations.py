"""Addresses that outgoing requests may reach: the deny list of an installation, and public ones after redirects.

Addresses are checked when a connection opens, after names are resolved, so a name cannot resolve to another address
between check and use. Requests on open connections cost nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from noetl_dagster.errors import ServiceError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All public IPv6 addresses that are assigned."""

_LOOPBACK = (ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1"))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_LOCAL_NAMES = (".localhost", ".localhost.localdomain")


class RefusedAddressError(OSError):
    """A connection to a refused address, which is not opened; all have the same text, which names no address."""


@dataclass(frozen=True, slots=True)
class DenyList:
    """Networks and lower-case host names; a name that begins with a dot is that of a domain."""

    networks: tuple[Network, ...] = ()
    names: frozenset[str] = frozenset()
    domains: tuple[str, ...] = ()

    @classmethod
    def parse(cls, items: Iterable[str]) -> DenyList:
        """Parses the setting ``NOETL_HTTP_DENY``. Raises ``ServiceError`` for an invalid network."""
        networks: list[Network] = []
        names, domains = set(), []
        for item in items:
            try:
                networks.append(ipaddress.ip_network(item, strict=False))
            except ValueError:
                if "/" in item or ":" in item or _parsed(item) is not None:
                    raise ServiceError(
                        f"NOETL_HTTP_DENY: {item!r} is neither a network (10.0.0.0/8) nor a host name (*.internal)"
                    ) from None
                name = item.lower().rstrip(".")
                if name.startswith(("*.", ".")):
                    domains.append(name.removeprefix("*"))
                else:
                    names.add(name)
        return cls(tuple(networks), frozenset(names), tuple(domains))

    def __bool__(self) -> bool:
        return bool(self.networks or self.names or self.domains)

    def has_name(self, host: str) -> bool:
        """Reports whether the list has a host name."""
        name = host.lower().rstrip(".")
        return name in self.names or name.endswith(self.domains)

    def has(self, address: Address) -> bool:
        """Reports whether the list has an address, or the IPv4 address in it; ``0.0.0.0`` and ``::`` are loopback."""
        forms = [address, *_embedded(address)]
        if any(form.is_unspecified for form in forms):  # where Linux connects to
            forms += _LOOPBACK
        return any(form in network for form in forms for network in self.networks)


def is_public(address: Address) -> bool:
    """Reports whether an address is one of the internet: not private, loopback, link-local, multicast or reserved."""
    forms = tuple(_embedded(address)) or (address,)
    return all(form.is_global and not form.is_multicast and (form.version == 4 or form in _UNICAST) for form in forms)


def _embedded(address: Address) -> Iterator[ipaddress.IPv4Address]:
    """Yields the IPv4 addresses that an IPv6 address leads to."""
    if address.version == 4:
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    elif address.sixtofour is not None:
        yield address.sixtofour
    elif address.teredo is not None:
        yield from address.teredo
    elif address in _NAT64 or (address in _COMPATIBLE and int(address) > 0xFFFF):
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def _parsed(host: str) -> Address | None:
    """Returns the address that a host is written as; None for a name. ``127.1`` and ``0x7f000001`` are addresses."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except (OSError, UnicodeError):
            return None


class Destinations:
    """The addresses that a request may reach.

    Args:
        public_only: the request follows a redirect from a public address.

    Attributes:
        are_bounded: whether any address is refused.
    """

    def __init__(self, denied: DenyList, *, public_only: bool = False) -> None:
        self._denied = denied
        self._public_only = public_only
        self.are_bounded = public_only or bool(denied)

    def refusal_of_host(self, host: str) -> str | None:
        """Returns why a request to a host is refused before its name is resolved; None if it is not."""
        if self._denied.has_name(host):
            return "its host is refused by NOETL_HTTP_DENY"
        address = _parsed(host.partition("%")[0])
        if address is not None:
            return self.refusal(address)
        if self._public_only and f".{host.lower().rstrip('.')}".endswith(_LOCAL_NAMES):
            return _REDIRECTED
        return None

    def refusal(self, address: Address) -> str | None:
        """Returns why a connection to an address is refused; None if it is not."""
        if self._denied.has(address):
            return "its address is refused by NOETL_HTTP_DENY"
        return _REDIRECTED if self._public_only and not is_public(address) else None

    def connect(self, info: tuple[Any, ...]) -> socket.socket:
        """Returns a socket for an entry of ``getaddrinfo``; raises ``RefusedAddressError``."""
        family, kind, protocol, _, place = info
        address = _parsed(str(place[0]).partition("%")[0])
        reason = "its address is malformed" if address is None else self.refusal(address)
        if reason is not None:
            raise RefusedAddressError(reason)
        return socket.socket(family, kind, protocol)

    @property
    def connector(self) -> Callable[[tuple[Any, ...]], socket.socket] | None:
        """The factory of sockets for a connector of aiohttp; None if no address is refused."""
        return self.connect if self.are_bounded else None


_REDIRECTED = "a public address redirects to a private one"
