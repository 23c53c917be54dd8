"""Bulk RNA values: what they must be, what names them, and how they are read from a file. Needs no torch."""

import csv
import gzip
import hashlib
import io
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from inference.errors import BadRequest, ConfigError
from inference.models.spec import ModelSpec, OmicsSpec

TPM_TOTAL = 1e6
"""Transcripts per million add up to this over all genes, by definition."""

TPM_TOLERANCE = 0.01

MAX_FILE_BYTES = 64 << 20
"""Of one file, unpacked; a GDC file of 60,660 genes has 4.2 MB."""

GENE_COLUMNS = ("gene_id", "gene", "ensembl_gene_id")

VALUE_COLUMNS = {"tpm": ("tpm_unstranded", "tpm", "TPM"), "counts": ("unstranded", "count", "counts")}
"""Looked for in this order where no column is named. `tpm_unstranded` and `unstranded` are GDC's."""

NO_GENES = frozenset({"N_unmapped", "N_multimapping", "N_noFeature", "N_ambiguous"})
"""Rows of STAR's `ReadsPerGene` table, which GDC's files keep, that count reads outside genes."""

_VERSION = re.compile(r"^(ENS[A-Z]*\d+)\.\d+(?=$|_PAR_Y$)")
"""Of an Ensembl identifier. The copy of a gene on the Y chromosome's pseudoautosomal region stays another gene."""


@dataclass(frozen=True)
class BulkRnaReport:
    """What was found in a file of bulk RNA.

    Attributes:
        unit: as the model declares it.
        value_column: where the values were taken from.
        n_rows: genes in the file, those that the model does not know included.
        n_unknown: of these, genes that the model does not know; left out.
        missing: genes of the model that the file lacks, taken as 0.
        duplicates: genes of the model that the file has more than once, added up.
        file_sum: of all genes in the file.
        model_sum: of the model's genes.
        genes_sha256: of the model's genes in order, joined by line feeds.
        values_sha256: as `bulk_rna_sha256` of the values.
        file_sha256: of the file's bytes.
        warnings: what is unusual but usable, one line each.
    """

    unit: Literal["tpm", "counts"]
    value_column: str
    n_rows: int
    n_unknown: int
    missing: tuple[str, ...]
    duplicates: tuple[str, ...]
    file_sum: float
    model_sum: float
    genes_sha256: str
    values_sha256: str
    file_sha256: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class BulkRna:
    """Values in the model's order of genes, float64 (n_genes,), before any transform; and the report on their file."""

    values: NDArray[np.float64]
    report: BulkRnaReport


def bulk_rna_sha256(values: Sequence[float] | NDArray[np.float64]) -> str:
    """Names a list of values: SHA-256 of their little-endian IEEE doubles, one after the other, in the order of genes.

    Zeros are taken as positive, so the digest depends on the numbers alone.
    """
    return hashlib.sha256((np.asarray(values, "<f8") + 0.0).tobytes()).hexdigest()


def check_bulk_rna(values: Sequence[float] | NDArray[np.float64], omics: OmicsSpec) -> NDArray[np.float64]:
    """The values as an array (n_genes,), if they can be what the model takes.

    Raises:
        BadRequest: not one finite, non-negative number per gene, all zero, or a sum that is not that of the unit.
    """
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise BadRequest("bulk RNA is one number per gene: something else is among them") from None
    if found.shape != (omics.n_genes,):
        raise BadRequest(
            f"bulk RNA has {found.size} values, this model takes {omics.n_genes}: one per gene, in its order"
        )
    if not np.isfinite(found).all():
        raise BadRequest(f"bulk RNA value {int(np.argmin(np.isfinite(found)))} is not finite")
    if found.min() < 0:
        raise BadRequest(
            f"bulk RNA value {int(np.argmin(found))} is negative: give {omics.rna_unit} without a transform"
        )
    _check_sum(float(found.sum()), omics)
    return found


def transform_bulk_rna(values: NDArray[np.float64], omics: OmicsSpec) -> NDArray[np.float64]:
    """What goes into the model for these values."""
    return np.log1p(values) if omics.transform == "log1p" else values


def read_bulk_rna(
    path: Path | str,
    spec: ModelSpec,
    *,
    gene_column: str | None = None,
    value_column: str | None = None,
    strip_versions: bool = False,
    missing: Literal["refuse", "zero"] = "refuse",
    duplicates: Literal["refuse", "sum"] = "refuse",
) -> BulkRna:
    """Bulk RNA from a TSV or CSV file, `.gz` or not: a header, then a gene and a value per line.

    Lines that start with `#` and rows that count reads outside genes are passed over, as in GDC's files.

    Args:
        path: the file.
        spec: of the model that the values are for; names its genes and their unit.
        gene_column: by default `gene_id`, `gene` or `ensembl_gene_id`.
        value_column: by default the unit's own column in GDC's files, or one named after the unit.
        strip_versions: take ENSG00000000003.15 as ENSG00000000003, in the file and in the model's list.
        missing: whether genes that the file lacks are an error or 0.
        duplicates: whether genes that the file has more than once are an error or added up.

    Raises:
        ConfigError: the model takes no RNA or its genes are not published; or the file cannot be read, lacks a column,
            has a value that is no finite, non-negative number, lacks or repeats genes, or has another unit.
    """
    path = Path(path)
    if spec.omics is None:
        raise ConfigError(f"{spec.model_name} takes no bulk RNA")
    omics = spec.omics
    if not omics.genes:
        raise ConfigError(f"the genes of {spec.model_name} are not in its spec: name them in omics.genes, in order")
    genes = [_stripped(gene) if strip_versions else gene for gene in omics.genes]
    index = {gene: place for place, gene in enumerate(genes)}
    if len(index) < len(genes):
        raise ConfigError(f"two genes of {spec.model_name} differ in their version only: leave strip_versions off")
    raw = _read_bytes(path)
    table = _Table(path.name, _unpacked(raw, path.name), omics, gene_column, value_column)
    values, seen, n_rows, n_unknown, total = np.zeros(len(genes)), Counter[str](), 0, 0, 0.0
    other_versions: set[str] = set()
    for gene, value in table.rows():
        place = index.get(_stripped(gene) if strip_versions else gene)
        n_rows, total = n_rows + 1, total + value
        if place is None:
            n_unknown += 1
            other_versions.add(_stripped(gene))
            continue
        seen[omics.genes[place]] += 1
        values[place] += value
    lacking = tuple(gene for gene in omics.genes if gene not in seen)
    repeated = tuple(gene for gene in omics.genes if seen[gene] > 1)
    if any(_stripped(gene) in other_versions for gene in lacking) and not strip_versions:
        example = next(gene for gene in lacking if _stripped(gene) in other_versions)
        raise ConfigError(
            f"{path.name} has {example} in another version: give strip_versions=True to take it as that one"
        )
    _check_genes(path.name, omics, lacking, repeated, missing, duplicates)
    try:
        check_bulk_rna(values, omics)
    except BadRequest as error:
        raise ConfigError(f"{path.name}, column {table.value_column}: {error.message}") from None
    return BulkRna(
        values,
        BulkRnaReport(
            unit=omics.rna_unit, value_column=table.value_column, n_rows=n_rows, n_unknown=n_unknown, missing=lacking,
            duplicates=repeated, file_sum=total, model_sum=float(values.sum()),
            genes_sha256=hashlib.sha256("\n".join(omics.genes).encode()).hexdigest(),
            values_sha256=bulk_rna_sha256(values), file_sha256=hashlib.sha256(raw).hexdigest(),
            warnings=tuple(_warnings(omics, lacking, repeated, total, values)),
        ),
    )  # fmt: skip


class _Table:
    """The genes and values of a text table."""

    def __init__(
        self, name: str, text: str, omics: OmicsSpec, gene_column: str | None, value_column: str | None
    ) -> None:
        self._name = name
        lines = text.splitlines()
        self._skipped = next(
            (n for n, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines)
        )
        if self._skipped == len(lines):
            raise ConfigError(f"{name} is empty: it needs a header and one line per gene")
        delimiter = "\t" if "\t" in lines[self._skipped] else ","
        self._reader = csv.reader(lines[self._skipped :], delimiter=delimiter, strict=True)
        self._header = self._next_row() or []
        self._gene = self._column("gene", gene_column, GENE_COLUMNS)
        self._value = self._column("value", value_column, VALUE_COLUMNS[omics.rna_unit])
        self.value_column = self._header[self._value]

    def rows(self) -> Iterator[tuple[str, float]]:
        while (row := self._next_row()) is not None:
            gene = row[self._gene].strip() if len(row) > self._gene else ""
            if not row or gene.startswith(("#", "__")) or gene in NO_GENES:  # `__` begins HTSeq's rows for other reads
                continue
            text = row[self._value].strip() if len(row) > self._value else ""
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not gene or not 0 <= value < math.inf:
                raise ConfigError(
                    f"{self._name} line {self._skipped + self._reader.line_num}: {gene[:40] or 'no gene'!r} has "
                    f"{text[:40]!r} as {self.value_column}: a finite number from 0 up is needed"
                )
            yield gene, value

    def _next_row(self) -> list[str] | None:
        try:
            return next(self._reader, None)
        except csv.Error as error:
            line = self._skipped + self._reader.line_num
            raise ConfigError(f"{self._name} line {line} is no line of a table: {error}") from None

    def _column(self, what: str, wanted: str | None, usual: tuple[str, ...]) -> int:
        for name in (wanted,) if wanted is not None else usual:
            if self._header.count(name) == 1:
                return self._header.index(name)
        missing = f"no column {wanted!r}" if wanted is not None else f"none of the columns {', '.join(usual)}"
        columns = ", ".join(column[:40] for column in self._header[:12])
        raise ConfigError(f"{self._name} has {missing}, or has it twice: its columns are {columns}; give {what}_column")


def _check_sum(total: float, omics: OmicsSpec) -> None:
    if total == 0:
        raise BadRequest("bulk RNA is 0 for every gene: leave it out for a result from the image alone")
    low, high = TPM_TOTAL * omics.tpm_share * (1 - TPM_TOLERANCE), TPM_TOTAL * (1 + TPM_TOLERANCE)
    if omics.rna_unit == "tpm" and not low <= total <= high:
        part = "" if omics.tpm_share == 1 else f"{omics.tpm_share:g} to 1 times "
        raise BadRequest(
            f"bulk RNA sums to {total:.6g}, transcripts per million to {part}{TPM_TOTAL:.0e} within "
            f"{TPM_TOLERANCE:.0%}: give TPM, not counts, FPKM or logarithms"
        )


def _check_genes(
    name: str, omics: OmicsSpec, lacking: tuple[str, ...], repeated: tuple[str, ...], missing: str, duplicates: str
) -> None:
    if len(lacking) == omics.n_genes:
        raise ConfigError(
            f"{name} has none of the model's genes, such as {omics.genes[0]}: other identifiers, or give strip_versions"
        )
    if lacking and missing != "zero":
        raise ConfigError(
            f"{name} lacks {len(lacking)} of the model's {omics.n_genes} genes, such as {', '.join(lacking[:3])}: "
            "complete it, or give missing='zero' to take them as 0"
        )
    if repeated and duplicates != "sum":
        raise ConfigError(
            f"{name} has {len(repeated)} of the model's genes more than once, such as {', '.join(repeated[:3])}: "
            "give each once, or give duplicates='sum' to add them up"
        )


def _warnings(
    omics: OmicsSpec, lacking: tuple[str, ...], repeated: tuple[str, ...], total: float, values: NDArray[np.float64]
) -> Iterator[str]:
    if lacking:
        yield f"{len(lacking)} of {omics.n_genes} genes are missing and taken as 0"
    if repeated:
        yield f"{len(repeated)} genes are there more than once and added up"
    if omics.rna_unit == "tpm" and abs(total / TPM_TOTAL - 1) > TPM_TOLERANCE:
        yield f"the file's TPM sum to {total:.6g}, not to 1e6: it is not a whole profile"
    if omics.rna_unit == "counts" and (values != np.rint(values)).any():
        yield "some counts are not whole numbers"


def _stripped(gene: str) -> str:
    return _VERSION.sub(r"\1", gene)


def _read_bytes(path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ConfigError(f"no RNA file at {path}")
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
    return _bounded(raw, path.name)


def _unpacked(raw: bytes, name: str) -> str:
    try:
        if raw.startswith(b"\x1f\x8b"):
            with gzip.open(io.BytesIO(raw)) as stream:
                raw = _bounded(stream.read(MAX_FILE_BYTES + 1), name)
        return raw.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{name} does not unpack: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is no UTF-8 text: give a TSV or CSV file") from None


def _bounded(raw: bytes, name: str) -> bytes:
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{name} has over {MAX_FILE_BYTES >> 20} MiB: give a table of genes and values")
    return raw
