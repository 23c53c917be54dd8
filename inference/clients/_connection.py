"""Where a service is and how it is trusted; what it means when it cannot be reached."""

import ssl
from collections.abc import Iterator
from os import PathLike
from urllib.parse import urlsplit

import httpx

from inference.errors import ConfigError, InferenceError, Overloaded

Trust = bool | str | PathLike[str] | ssl.SSLContext
"""False, or the certificates to trust: a CA file, a TLS context, or True for the system's."""


def check_address(base_url: str) -> None:
    """Refuse what is no http(s) address with a host and a usable port.

    Raises:
        ConfigError: it is none.
    """
    try:
        parts = urlsplit(base_url)
        host = httpx.URL(base_url).host
        host.encode("idna")
        usable = (
            parts.scheme in ("http", "https")
            and bool(host)
            and parts.port != 0
            and not any(character.isspace() or not character.isprintable() for character in base_url)
            and not (parts.query or parts.fragment)
        )
    except (ValueError, httpx.InvalidURL):  # UnicodeError too
        usable = False
    if not usable:
        raise ConfigError(f"{base_url!r} is no address of a service: give http://host:port")


def token_headers(token: str | None) -> dict[str, str]:
    """The header that carries a token.

    Raises:
        ConfigError: no header can.
    """
    if not token:
        return {}
    if not (token.isascii() and token.isprintable()) or token != token.strip():
        raise ConfigError("the token cannot be sent: it is printable ASCII, without spaces or a line's end around it")
    return {"Authorization": f"Bearer {token}"}


def trusted(verify: Trust) -> ssl.SSLContext | bool:
    """The TLS context of a setting; False trusts anyone.

    Raises:
        ConfigError: a CA file that cannot be read.
    """
    if verify is True:
        return ssl.create_default_context()
    if verify is False or isinstance(verify, ssl.SSLContext):
        return verify
    try:
        return ssl.create_default_context(cafile=verify)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"verify={str(verify)!r} is no readable CA file in PEM format ({type(error).__name__})"
        ) from error


def unreachable(error: Exception, model: str, base_url: str) -> InferenceError:
    """What a failed connection means to the caller: a setting to change, or a service that is not there."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ConfigError(
                f"the certificate of {model}'s service is not trusted ({cause.verify_message}): "
                "give its CA file as verify="
            )
        if isinstance(cause, ssl.SSLError):
            return Overloaded(
                f"the service of {model} takes no TLS connection ({cause.reason or type(cause).__name__}): "
                "does it speak http instead of https?"
            )
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        advice = "did it stop?" if base_url.startswith("https") else "did it stop, or does it speak https, not http?"
        return Overloaded(f"the service of {model} broke the connection off ({type(error).__name__}): {advice}")
    return Overloaded(f"the service of {model} cannot be reached ({type(error).__name__}): is it running?")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        if isinstance(seen, BaseExceptionGroup):
            for member in seen.exceptions:
                yield from _causes(member)
        seen = seen.__cause__ or seen.__context__
