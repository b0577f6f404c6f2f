"""Rules for the addresses that a peer may tell this process to dial."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAME = re.compile(r"[A-Za-z0-9_*?][A-Za-z0-9_*?.-]{0,252}")
# Metadata services of clouds, which give out secrets. 169.254.169.254 is covered as link-local.
_METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200")))


def read_ip(text: str) -> IpAddress:
    """Parses an IP address; an IPv4-mapped IPv6 address becomes IPv4. Raises ValueError."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


@dataclass(frozen=True, slots=True)
class AddressRules:
    """Allowed addresses.

    Without names and networks, only the address of the asking peer is allowed. `names`: shell
    patterns of host names, in lower case. `networks`: IP networks.
    """

    names: tuple[str, ...] = ()
    networks: tuple[_Network, ...] = ()

    @classmethod
    def parse(cls, text: str) -> AddressRules:
        """Parses a list such as `10.0.0.0/8,*.example.org`. Raises ValueError."""
        names: list[str] = []
        networks: list[_Network] = []
        for part in (part.strip() for part in text.split(",")):
            try:
                networks.append(ipaddress.ip_network(part))
            except ValueError as error:
                # 10.0.0.1/8 and 999.0.0.1 are mistakes, not names.
                if not _NAME.fullmatch(part) or re.fullmatch(r"[\d.]+", part):
                    raise ValueError(
                        f"{part!r} is not allowed; it takes networks (10.0.0.0/8), addresses and"
                        " names (*.example.org), with commas between"
                    ) from error
                names.append(part.lower())
        return cls(tuple(names), tuple(networks))

    def allows(self, host: str, address: IpAddress, asking: IpAddress | None) -> bool:
        """Returns whether `address`, resolved from `host`, may be dialled.

        `asking`: address of the peer that asked; None for this machine.
        """
        if address.is_unspecified or address.is_multicast:
            return False
        if address.is_loopback and (asking is None or asking.is_loopback):
            is_near = True
        else:
            is_near = address == asking
        if not self.names and not self.networks:
            return is_near and not address.is_link_local
        around = [network for network in self.networks if address in network]
        if address.is_loopback or address.is_link_local or address in _METADATA:
            # A rule for all addresses, or for a name, is hardly meant to include these.
            meant = any(_is_about_itself(network) for network in around)
            return meant or (bool(around) and address.is_loopback and is_near)
        name = host.lower().rstrip(".")
        return bool(around) or any(fnmatchcase(name, pattern) for pattern in self.names)

    def __str__(self) -> str:
        """Returns the allowed addresses as text for people."""
        if not self.names and not self.networks:
            return "the address that it registers from"
        return ",".join((*map(str, self.networks), *self.names))


def _is_about_itself(network: _Network) -> bool:
    return network.is_loopback or network.is_link_local or network.num_addresses == 1
