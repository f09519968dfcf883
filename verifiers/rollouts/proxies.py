"""Which proxy, if any, stands between this process and a server."""

from __future__ import annotations

import ipaddress
import urllib.parse
import urllib.request

from verifiers.errors import ConfigError

__all__ = ["is_loopback", "proxy_for"]


def is_loopback(url: str) -> bool:
    """True where the URL's host is this machine: localhost, 127.0.0.0/8, ::1, or an unspecified address."""
    host = (urllib.parse.urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def proxy_for(url: str) -> str | None:
    """The proxy that HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY give for a URL; loopback never has one.

    Raises:
        ConfigError: a proxy that does not speak HTTP.
    """
    if is_loopback(url):
        return None
    parts = urllib.parse.urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    scheme = urllib.parse.urlsplit(proxy).scheme
    if scheme not in ("http", "https"):
        # not the whole of it: it may hold a password
        raise ConfigError(
            f"the environment names a {scheme} proxy for {parts.hostname}, and only HTTP proxies are spoken to; "
            "set HTTPS_PROXY to one, or list the host in NO_PROXY."
        )
    return proxy
