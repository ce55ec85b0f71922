"""A server's limits show without anything of ours, and only where the table says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hosts.matrix.host import PLACES, Hosts, Place
from tests.hosts.matrix.limits import LIMITS
from tests.hosts.matrix.reproduce import EXAMPLES, HTTP1_ONLY, HTTP2_ONLY, raw_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = [
    (place, example)
    for place in PLACES
    for example in EXAMPLES
    if example not in (HTTP1_ONLY if place.http2 else HTTP2_ONLY)
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = raw_hosts(tmp_path_factory.mktemp("certificate"))
    yield hosts
    hosts.close()


@pytest.mark.parametrize(("place", "example"), CASES, ids=lambda it: getattr(it, "name", it))
def test_a_limit_shows_where_the_table_says_so(hosts: Hosts, place: Place, example: str) -> None:
    protocol = "HTTP/2" if place.http2 else "HTTP/1.1"
    declared = any(
        (column, of) == (place.column.name, protocol) and limit.example == example
        for (column, of, _), limit in LIMITS.items()
    )
    host = hosts.host(place.column, http2=place.http2)
    path = f"/{protocol[-1]}-{example}"
    try:
        assert EXAMPLES[example](host, path) is declared
    finally:
        host.close_connections()
