"""Object stores and other remote file systems through fsspec: URLs, what lies there, and errors in plain words."""

import calendar
import email.utils
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, cast

from inference.errors import ConfigError, InferenceError, SourceUnavailable

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_COLLAPSED = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|https?|memory):/(?!/)")
_CHAINED = re.compile(r"::[A-Za-z][A-Za-z0-9+.-]*://")
_ALIASES = {"s3a": "s3", "gcs": "gs"}
_LOCAL = frozenset({"file", "local"})
_TOKEN = re.compile(r"[A-Za-z0-9_]{1,40}")
# What a store calls a file's content, strongest first. A weak HTTP tag (W/"...") does not promise the same bytes.
_VERSION_FIELDS = ("md5Hash", "generation", "ETag", "etag")
_TIME_FIELDS = ("LastModified", "mtime", "updated", "last_modified", "Last-Modified", "created")
_SECOND = 1_000_000_000


class FileSystem(Protocol):
    """The part of an fsspec file system that is used."""

    def info(self, path: str) -> dict[str, object]: ...
    def ls(self, path: str, detail: bool) -> list[dict[str, object]]: ...
    def find(self, path: str, detail: bool) -> dict[str, dict[str, object]]: ...
    def cat_file(self, path: str, start: int, end: int) -> bytes: ...


@dataclass(frozen=True, repr=False)
class RemoteFile:
    """One file of a slide as its store describes it, without reading it.

    Attributes:
        url: where it lies; never with credentials.
        name: posix path relative to the main file's folder.
        mtime_ns: last modification; whole seconds where there is a version, since listings and single look-ups of one
            store differ in their fractions.
        version: the store's own name for the content (`etag:...`, `md5hash:...`), or None.
    """

    url: str
    name: str
    size: int
    mtime_ns: int
    version: str | None = None

    def __repr__(self) -> str:
        return f"RemoteFile({self.size} bytes, {self.version})"  # the name may be an accession number


def is_url(text: str) -> bool:
    """Whether a source is a URL of something that is not a local file."""
    found = _URL.fullmatch(text)
    return found is not None and found[1].lower() not in _LOCAL


def local_path(text: str) -> str:
    """The path that a `file://` URL means; other text as it is.

    Raises:
        ConfigError: a URL that went through `Path`, which makes one slash of two.
    """
    if _COLLAPSED.match(text):
        raise ConfigError("a URL has two slashes after its colon: give it as text, not as a Path")
    found = _URL.fullmatch(text)
    return found[2] if found else text


def split_sources(text: str, separator: str) -> list[str]:
    """Sources listed in one text as in `PATH`; the colons of `s3://` and of a port separate nothing."""
    if separator != ":":
        return text.split(separator)
    return re.split(r":(?!//|(?<=[A-Za-z0-9.\]]:)\d{1,5}(?:/|$))", text)


def without_secrets(text: str) -> str:
    """A source for messages: a URL without its user part and query."""
    found = _URL.fullmatch(text)
    if not found:
        return text
    host, slash, rest = found[2].partition("/")
    if found[1].lower() in ("http", "https"):
        rest = rest.partition("?")[0]
    return f"{found[1]}://{host.rpartition('@')[2]}{slash}{rest}"


@dataclass(frozen=True)
class Location:
    """A URL taken apart: `path` has no empty ends; `folder` says that it ended in a slash."""

    protocol: str
    path: str
    folder: bool = False

    @property
    def url(self) -> str:
        return f"{self.protocol}://{self.path}"

    def child(self, relpath: str) -> "Location":
        """What lies at a relative posix path below."""
        return Location(self.protocol, f"{self.path}/{relpath}".strip("/"))

    @property
    def parent(self) -> "Location":
        return Location(self.protocol, self.path.rpartition("/")[0])


def locate(url: str) -> Location:
    """The place that a URL names.

    Raises:
        ConfigError: it carries a password or query, or names nothing.
    """
    found = _URL.fullmatch(url)
    if not found or "\0" in url:
        raise ConfigError("not a URL")
    protocol, path = found[1].lower(), found[2]
    host = path.partition("/")[0]
    if ":" in host.rpartition("@")[0] or (protocol in ("http", "https") and "?" in path):
        raise ConfigError(
            "the URL carries a password or a signed query: leave them out and give credentials as the store's own "
            "tools expect them (AWS_PROFILE, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS)"
        )
    if _CHAINED.search(url):
        raise ConfigError("a URL within a URL: give the plain URL of the slides")
    if not path.strip("/") and protocol != "memory":
        raise ConfigError("the URL names no bucket: write it as s3://BUCKET/FOLDER/")
    return Location(_ALIASES.get(protocol, protocol), path.strip("/"), path.endswith("/"))


def open_filesystem(place: Location) -> tuple[FileSystem, str]:
    """The file system of a place, and the place's path in it; credentials come from the environment.

    Raises:
        ConfigError: no such protocol, or the package for it is not installed.
        SourceUnavailable: it cannot be reached.
    """
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError:
        raise ConfigError(_missing(place.protocol, "Please install fsspec")) from None
    with remote_errors():
        try:
            # No cached listings: an object replaced since must be seen.
            found, path = core.url_to_fs(place.url, use_listings_cache=False)
        except ImportError as error:
            raise ConfigError(_missing(place.protocol, str(error))) from None
        except ValueError as error:
            if "rotocol" in str(error):
                raise ConfigError(
                    f"no file system is known by {place.protocol}://; use s3://, gs:// or a path"
                ) from None
            raise
    return cast("FileSystem", found), str(path)


def _missing(protocol: str, said: str) -> str:
    named = re.search(r"[Ii]nstall (\w+)", said)
    package = "'slide-inference[cloud]'" if protocol == "s3" or named is None else named[1]
    return f"{protocol}:// needs a package that is not installed: pip install {package}"


@contextmanager
def remote_errors(what: str = "") -> Iterator[None]:
    """Turn what a store's client raises into typed errors; `FileNotFoundError` is the caller's to judge.

    Client texts are not repeated: they hold URLs, and may hold keys.

    Raises:
        ConfigError: no such bucket is possible.
        SourceUnavailable: no access, no credentials, no connection.
    """
    begin = f"{what}: " if what else ""
    try:
        yield
    except (FileNotFoundError, InferenceError):
        raise
    except Exception as error:  # noqa: BLE001 - clients raise their own classes, and those of what they stand on
        code = error_code(error)
        if code in ("InvalidBucketName", "ParamValidationError"):
            raise ConfigError(f"{begin}no bucket can have this name: check the URL") from None
        if isinstance(error, PermissionError) or "Credentials" in code:
            raise SourceUnavailable(
                f"{begin}the object store refuses access ({code}): check the credentials (AWS_PROFILE, "
                "AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL) and what they may read",
                store_code=code,
            ) from None
        raise SourceUnavailable(
            f"{begin}the object store cannot be reached ({code}): check the network and the endpoint "
            "(AWS_ENDPOINT_URL), then run again"
        ) from None


def error_code(error: BaseException) -> str:
    """A store's own word for an error, or the class of the error."""
    answer = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    said = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
    return said if isinstance(said, str) and _TOKEN.fullmatch(said) else type(error).__name__


def described(info: dict[str, object], url: str, name: str) -> RemoteFile:
    """A file from what its store says of it."""
    version = next((f"{key.lower()}:{text}" for key in _VERSION_FIELDS if (text := _version(info.get(key)))), None)
    mtime = next((found for key in _TIME_FIELDS if (found := _time_ns(info.get(key))) is not None), 0)
    size = info.get("size")
    return RemoteFile(
        url, name, size if isinstance(size, int) else 0, mtime // _SECOND * _SECOND if version else mtime, version
    )


def _version(value: object) -> str:
    text = str(value).strip('"') if isinstance(value, str | int) else ""
    return "" if text.startswith("W/") else text[:200]


def _time_ns(value: object) -> int | None:
    """Nanoseconds since 1970 of a time as clients give it: a datetime, seconds, ISO 8601 or an HTTP date."""
    if isinstance(value, str):
        try:
            value = email.utils.parsedate_to_datetime(value) if "," in value else datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        return calendar.timegm(value.utctimetuple()) * _SECOND + value.microsecond * 1000
    if isinstance(value, int | float) and not isinstance(value, bool):
        return round(value * 1_000_000) * 1000
    return None
