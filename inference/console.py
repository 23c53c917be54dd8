"""What commands share: one line per complaint, a log without tracebacks of our own errors, a folder to write to."""

import logging
from pathlib import Path

from rich.console import Console
from rich.text import Text

from inference.errors import ConfigError, InferenceError
from inference.slides.discovery import printable


def complain(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(" ".join(message.split()), "bold red"))


def log_in_lines() -> None:
    """Warnings go to stderr; where an error of ours came from is for nobody but a debugger."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class OneLine(logging.Formatter):
    """Tracebacks for faults that nobody foresaw, not for errors raised on purpose."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, InferenceError):
            return super().format(record)
        plain = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None})
        return f"{super().format(plain)}: {error.message}"


def named_path(text: str) -> Path:
    """The path that an option gives; an empty one, as of a variable that is not set, means no folder.

    Raises:
        ConfigError: it is empty.
    """
    if not text:
        raise ConfigError("a path is empty: name a folder, . for the current one")
    return Path(text)


def text_path(option: str, path: Path) -> Path:
    """The path, which reports, manifests and databases can hold as text, whatever it is relative to.

    Raises:
        ConfigError: its name is not UTF-8.
    """
    whole = str(path.absolute())
    try:
        whole.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{option} {printable(whole)}: the name is not UTF-8; name another folder") from None
    return path
