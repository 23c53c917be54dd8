"""Bulk RNA from files: GDC's layout and plain tables, and every way in which one is not what a model takes."""

import gzip
import hashlib
import math
import subprocess
import sys
from pathlib import Path

import pytest

from inference.errors import ConfigError
from inference.models import rna
from inference.models.rna import BulkRna, bulk_rna_sha256, read_bulk_rna
from inference.models.spec import ModelSpec
from tests.inference.models.kinds import GENES, TPM, make_spec, rna_spec

GDC = (
    "# gene-model: GENCODE v36\n"
    "gene_id\tgene_name\tgene_type\tunstranded\tstranded_first\tstranded_second\ttpm_unstranded\tfpkm_unstranded\n"
    "N_unmapped\t\t\t2000\t2000\t2000\t\t\n"
    "N_multimapping\t\t\t30\t30\t30\t\t\n"
    "N_noFeature\t\t\t4\t5\t6\t\t\n"
    "N_ambiguous\t\t\t7\t8\t9\t\t\n"
    "ENSG03.11\tC\tprotein_coding\t40\t1\t1\t400000.0\t4.0\n"
    "ENSG01.5\tA\tprotein_coding\t0\t0\t0\t0.0\t0.0\n"
    "ENSG04.1_PAR_Y\tD\tprotein_coding\t9\t0\t0\t0.0\t0.0\n"
    "ENSG02.7\tB\tlncRNA\t10\t1\t1\t100000.0\t1.0\n"
    "ENSG04.1\tD\tprotein_coding\t50\t1\t1\t450000.0\t4.5\n"
    "ENSG99.1\tZ\tprotein_coding\t5\t1\t1\t50000.0\t0.5\n"
)
"""As the augmented STAR counts of GDC are laid out, with invented genes."""

PART = rna_spec(tpm_share=0.5)


def _table(*rows: tuple[str, object], header: str = "gene_id,tpm", comma: str = ",") -> str:
    return "\n".join([header.replace(",", comma), *(f"{gene}{comma}{value}" for gene, value in rows)]) + "\n"


WHOLE = _table(*zip(GENES, TPM, strict=True))


def _read(tmp_path: Path, text: str | bytes, spec: ModelSpec | None = None, **options: object) -> BulkRna:
    path = tmp_path / "rna.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_bulk_rna(path, spec or rna_spec(), **options)  # type: ignore[arg-type]


def test_a_gdc_file_gives_the_models_genes_in_the_models_order(tmp_path: Path) -> None:
    found = _read(tmp_path, GDC, PART, strip_versions=True)
    assert found.values.tolist() == [0.0, 100_000.0, 400_000.0, 450_000.0]
    report = found.report
    assert (report.unit, report.value_column) == ("tpm", "tpm_unstranded")
    assert (report.n_rows, report.n_unknown) == (6, 2), "the Y copy of a gene is no second of it"
    assert (report.missing, report.duplicates, report.warnings) == ((), (), ())
    assert (report.file_sum, report.model_sum) == (1_000_000.0, 950_000.0)
    assert report.genes_sha256 == hashlib.sha256(b"ENSG01\nENSG02\nENSG03\nENSG04").hexdigest()
    assert report.values_sha256 == bulk_rna_sha256(found.values)
    assert report.file_sha256 == hashlib.sha256(GDC.encode()).hexdigest()


def test_a_model_of_counts_takes_the_counts_of_a_gdc_file(tmp_path: Path) -> None:
    found = _read(tmp_path, GDC, rna_spec(rna_unit="counts"), strip_versions=True)
    assert found.values.tolist() == [0.0, 10.0, 40.0, 50.0]
    assert found.report.value_column == "unstranded"


@pytest.mark.parametrize("comma", [",", "\t"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("before", ["", "# made by hand\n\n", "\ufeff"], ids=["plain", "comment", "byte order mark"])
def test_commas_or_tabs_packed_or_not_give_the_same(tmp_path: Path, comma: str, packed: bool, before: str) -> None:
    raw = (before + _table(*zip(GENES, TPM, strict=True), comma=comma)).encode()
    found = _read(tmp_path, gzip.compress(raw) if packed else raw)
    assert found.values.tolist() == list(TPM)


def test_quoted_fields_windows_line_ends_and_rows_of_htseq_are_understood(tmp_path: Path) -> None:
    text = 'gene,"the, value"\r\n"ENSG01",5\r\n__no_feature,7\r\n\r\nENSG02,1\r\nENSG03,2\r\nENSG04,"3.5"\r\n'
    found = _read(tmp_path, text, rna_spec(rna_unit="counts"), value_column="the, value")
    assert found.values.tolist() == [5.0, 1.0, 2.0, 3.5]
    assert found.report.warnings == ("some counts are not whole numbers",)
    assert found.report.n_rows == 4


def test_columns_can_be_named(tmp_path: Path) -> None:
    text = _table(*zip(GENES, TPM, strict=True), header="Name,sample 7")
    assert _read(tmp_path, text, gene_column="Name", value_column="sample 7").values.tolist() == list(TPM)


def test_versions_are_stripped_only_on_request_and_only_from_ensembl_identifiers(tmp_path: Path) -> None:
    versioned = _table(*((f"{gene}.{i}", tpm) for i, (gene, tpm) in enumerate(zip(GENES, TPM, strict=True))))
    with pytest.raises(ConfigError, match="has ENSG01 in another version: give strip_versions=True"):
        _read(tmp_path, versioned)
    assert _read(tmp_path, versioned, strip_versions=True).values.tolist() == list(TPM)
    clones = rna_spec(n_genes=2, genes=("RP11-34P13.7", "RP11-34P13.8"))
    text = _table(("RP11-34P13.7", 400_000), ("RP11-34P13.8", 600_000))
    assert _read(tmp_path, text, clones, strip_versions=True).values.tolist() == [400_000, 600_000]


def test_a_models_own_versions_are_stripped_too_unless_nothing_else_tells_its_genes_apart(tmp_path: Path) -> None:
    own = rna_spec(genes=("ENSG01.9", "ENSG02.9", "ENSG03.9", "ENSG04.9"))
    assert _read(tmp_path, WHOLE, own, strip_versions=True).values.tolist() == list(TPM)
    with pytest.raises(ConfigError, match="two genes of rna differ in their version only"):
        _read(tmp_path, WHOLE, rna_spec(n_genes=2, genes=("ENSG01.1", "ENSG01.2")), strip_versions=True)


def test_missing_genes_are_refused_unless_they_may_be_zero(tmp_path: Path) -> None:
    text = _table(("ENSG02", 400_000), ("ENSG04", 600_000))
    with pytest.raises(ConfigError, match=r"lacks 2 of the model's 4 genes, such as ENSG01, ENSG03: .*missing='zero'"):
        _read(tmp_path, text)
    found = _read(tmp_path, text, missing="zero")
    assert found.values.tolist() == [0, 400_000, 0, 600_000]
    assert found.report.missing == ("ENSG01", "ENSG03")
    assert found.report.warnings == ("2 of 4 genes are missing and taken as 0",)


def test_repeated_genes_are_refused_unless_they_may_be_added_up(tmp_path: Path) -> None:
    text = _table(("ENSG02", 300_000), ("ENSG01", 0), ("ENSG03", 0), ("ENSG04", 600_000), ("ENSG02", 100_000))
    with pytest.raises(ConfigError, match=r"has 1 of the model's genes more than once, such as ENSG02: .*'sum'"):
        _read(tmp_path, text)
    found = _read(tmp_path, text, duplicates="sum")
    assert found.values.tolist() == [0, 400_000, 0, 600_000]
    assert found.report.duplicates == ("ENSG02",)
    assert found.report.warnings == ("1 genes are there more than once and added up",)


def test_a_gene_that_the_model_does_not_know_may_be_repeated(tmp_path: Path) -> None:
    found = _read(tmp_path, WHOLE + "ENSG77,1\nENSG77,2\n")
    assert (found.report.duplicates, found.report.n_unknown) == ((), 2)


def test_a_file_that_is_no_whole_profile_is_told_apart_in_the_report(tmp_path: Path) -> None:
    found = _read(tmp_path, _table(*((gene, tpm * 0.8) for gene, tpm in zip(GENES, TPM, strict=True))), PART)
    assert found.report.warnings == ("the file's TPM sum to 800000, not to 1e6: it is not a whole profile",)


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (0.4, r"rna\.csv, column tpm: bulk RNA sums to 400000, .* to 0\.5 to 1 times 1e\+06 within 1%"),
        (1.1, r"bulk RNA sums to 1\.1e\+06"),
        (1e-5, "give TPM, not counts, FPKM or logarithms"),
        (0, "0 for every gene"),
    ],
)
def test_a_file_in_another_unit_is_refused_with_its_sum(tmp_path: Path, factor: float, says: str) -> None:
    text = _table(*((gene, tpm * factor) for gene, tpm in zip(GENES, TPM, strict=True)))
    with pytest.raises(ConfigError, match=says):
        _read(tmp_path, text, PART)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ENSG01,", "line 3: 'ENSG01' has '' as tpm: a finite number from 0 up"),
        ("ENSG01", "line 3: 'ENSG01' has ''"),
        ("ENSG01,NA", "line 3: 'ENSG01' has 'NA'"),
        ("ENSG01,nan", "line 3: 'ENSG01' has 'nan'"),
        ("ENSG01,inf", "line 3: 'ENSG01' has 'inf'"),
        ("ENSG01,-1", "line 3: 'ENSG01' has '-1'"),
        (",1", "line 3: 'no gene' has '1'"),
        ('ENSG01,"1', "line 3 is no line of a table"),
        ("x" * 200_000 + ",1", "line 3 is no line of a table: field larger"),
    ],
    ids=["empty", "short", "NA", "nan", "inf", "negative", "no gene", "open quote", "long"],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"rna\.csv {says}") as caught:
        _read(tmp_path, f"gene_id,tpm\nENSG02,1\n{line}\n")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("header", "options", "says"),
    [
        ("a,b", {}, "none of the columns gene_id, gene, ensembl_gene_id, .*: its columns are a, b; give gene_column"),
        ("gene_id,b", {}, "none of the columns tpm_unstranded, tpm, TPM, .*; give value_column"),
        ("gene_id,unstranded", {}, "none of the columns tpm_unstranded"),
        ("gene_id,tpm", {"value_column": "x"}, "no column 'x', .*its columns are gene_id, tpm; give value_column"),
        ("gene_id,tpm,tpm", {}, "has it twice"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_those_that_are(
    tmp_path: Path, header: str, options: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        _read(tmp_path, _table(("ENSG01", "1,2"), header=header), None, **options)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"# only\n\n", "is empty"),
        (b"gene_id,tpm\n", "none of the model's genes"),
        (b"\xff\xfe\x00g", "is no UTF-8 text"),
        (gzip.compress(WHOLE.encode())[:-12], "does not unpack"),
        (b"\x1f\x8b\x08\x00 not really", "does not unpack"),
        (gzip.compress(b"x" * 5000), "over 0 MiB"),
        (b"x" * 5000, "over 0 MiB"),
    ],
    ids=["nothing", "comments", "header", "UTF-16", "cut gzip", "broken gzip", "bomb", "large"],
)
def test_a_file_that_is_no_table_is_refused_by_name(
    tmp_path: Path, content: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rna, "MAX_FILE_BYTES", 4096)
    with pytest.raises(ConfigError, match=rf"rna\.csv {says}|rna\.csv has {says}"):
        _read(tmp_path, content)


def test_a_file_that_is_not_there_or_is_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no.tsv", tmp_path):
        with pytest.raises(ConfigError, match="no RNA file at"):
            read_bulk_rna(path, rna_spec())


def test_a_model_without_rna_or_without_published_genes_takes_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="m takes no bulk RNA"):
        _read(tmp_path, WHOLE, make_spec("m"))
    with pytest.raises(ConfigError, match=r"the genes of rna are not in its spec: name them in omics\.genes"):
        _read(tmp_path, WHOLE, rna_spec(genes=()))


def test_19374_genes_of_60660_are_found(tmp_path: Path) -> None:
    known = [f"ENSG{i:011d}" for i in range(0, 3 * 19_374, 3)]
    spec = rna_spec(n_genes=19_374, genes=known, tpm_share=0.3)
    rows = "".join(f"ENSG{i:011d}.{i % 17}\tx\t{1e6 / 60_660!r}\n" for i in reversed(range(60_660)))
    found = _read(tmp_path, "gene_id\tgene_name\ttpm_unstranded\n" + rows, spec, strip_versions=True)
    assert found.values.tolist() == [1e6 / 60_660] * 19_374
    assert math.isclose(found.report.file_sum, 1e6)
    assert (found.report.n_rows, found.report.n_unknown) == (60_660, 60_660 - 19_374)


def test_reading_rna_needs_no_torch() -> None:
    check = "import sys, inference; inference.read_bulk_rna; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
