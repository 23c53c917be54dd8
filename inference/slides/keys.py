"""Slide keys: names for slides that are safe as folder names and never depend on discovery order."""

import hashlib
import hmac
import os
import re

from inference.errors import ConfigError

KEY_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OUTSIDE_SLUG = re.compile(r"[^A-Za-z0-9_-]+")
_SLUG_CHARS = 110
_HASH_CHARS = 8
_HIDDEN_CHARS = 24


def slide_key(root_label: str, relpath: str, *, secret: str | None = None) -> str:
    """Key of the slide at posix path `relpath` under the root named `root_label`.

    Without a secret: `slug(relpath)[:110] + '-' + sha256(root_label + '/' + relpath)[:8]`, hashed as the bytes
    on disk. With one: an HMAC-SHA256 that tells nothing of the name to anyone without the secret.

    Raises:
        ConfigError: the label contains a slash, or the secret is blank.
    """
    if "/" in root_label:
        # 'a/b' + 'c' and 'a' + 'b/c' would share a key.
        raise ConfigError("a root label must not contain '/'")
    name = f"{root_label}/{relpath}"
    if secret is not None:
        return hidden_key(name, secret)
    # Underscores go too: a key must not start with one.
    slug = _OUTSIDE_SLUG.sub("-", relpath).strip("-_") or "slide"
    return f"{slug[:_SLUG_CHARS]}-{hashlib.sha256(_on_disk(name)).hexdigest()[:_HASH_CHARS]}"


def key_secret() -> str | None:
    """The secret under which keys reveal nothing, from `SLIDE_KEY_SECRET`; None where keys are plain."""
    return os.environ.get("SLIDE_KEY_SECRET")


def hidden_key(text: str, secret: str) -> str:
    """Key that reveals nothing of `text`; the same text and secret always give the same key.

    A slide's path under its root always contains a slash and a cohort file's `slide_key` never does, so the two
    cannot be confused.

    Raises:
        ConfigError: the secret is blank.
    """
    if not secret.strip():
        raise ConfigError("SLIDE_KEY_SECRET is blank: anyone could undo such keys; unset it or give it a value")
    return "s-" + hmac.new(_on_disk(secret), _on_disk(text), hashlib.sha256).hexdigest()[:_HIDDEN_CHARS]


def check_key(key: str) -> str:
    """The key, if a result folder may have this name.

    Raises:
        ConfigError: it does not match `^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`, contains '..' or ends in '.work',
            the store's name for unfinished work.
    """
    if not KEY_PATTERN.fullmatch(key) or ".." in key:
        raise ConfigError(
            "a slide key has 1 to 128 characters of A-Z a-z 0-9 . _ -, starts with a letter or digit and has no '..'"
        )
    if key.casefold().endswith(".work"):
        raise ConfigError("a slide key must not end in '.work': the store keeps unfinished work under that name")
    return key


def _on_disk(text: str) -> bytes:
    """The bytes of a name; Python carries undecodable ones as surrogates."""
    return text.encode("utf-8", "surrogateescape")
