"""A console logger for people: what the pipeline says, without Dagster's own events."""

import logging

import dagster as dg


class _OnlyOurs(logging.Filter):
    """Drops the records that Dagster logs for its own events."""

    def filter(self, record: logging.LogRecord) -> bool:
        meta = getattr(record, "dagster_meta", None) or {}
        return meta.get("dagster_event") is None


def _plain(_context: dg.InitLoggerContext) -> logging.Logger:
    """Writes the bare text of each message to stderr."""
    logger = logging.Logger("slide_inference", level=logging.INFO)  # noqa: LOG001 - one per run, not a global one
    handler = logging.StreamHandler()
    handler.setFormatter(_BareText())
    handler.addFilter(_OnlyOurs())
    logger.addHandler(handler)
    return logger


class _BareText(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        meta = getattr(record, "dagster_meta", None) or {}
        return str(meta.get("orig_message") or record.getMessage())


plain_console = dg.LoggerDefinition(_plain, description="Messages alone, one per line.")
