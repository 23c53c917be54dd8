"""The command `slide-inference` as a person or a script meets it: exit codes, lines, no traceback."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from inference.cli import main
from inference.console import OneLine
from inference.errors import ModelContractError
from inference.models.artifact import manifest_path
from inference.models.registry import Checkpoint, resolve_model
from inference.slides.discovery import discover
from tests.inference.engine.runs import BATCH, make_chain
from tests.inference.engine.tiny_slides import section, write_slide
from tests.inference.store.mounts import make_read_only, tmpfs

REPO = Path(__file__).resolve().parents[2]

# As `python -m inference.cli`, and then whether torch was needed.
PROBED = """
import sys
from inference import cli
try:
    cli.main()
finally:
    print("torch" in sys.modules)
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


class Cli:
    """Runs the command in a process of its own."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.model = str(checkpoint.path)
        self.slides, self.out = folder / "slides", folder / "out"

    def __call__(
        self, *arguments: object, environment: dict[str, str] | None = None, program: tuple[str, ...] = ()
    ) -> Ended:
        command = [sys.executable, *(program or ("-m", "inference.cli")), *map(str, arguments)]
        clean = {name: value for name, value in os.environ.items() if name not in ("SLIDE_KEY_SECRET", "SLIDE_MODELS")}
        done = subprocess.run(
            command, cwd=REPO, env=clean | {"COLUMNS": "100"} | (environment or {}), capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        ended = Ended(done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in ended.err + ended.out, ended.err
        return ended

    def run(self, *more: object, **options: object) -> Ended:
        """The slides through the demo model into the store."""
        batch = ("--batch-size", BATCH)
        return self("run", self.slides, "--model", self.model, "--out", self.out, *batch, *more, **options)  # type: ignore[arg-type]


@pytest.fixture
def cli(demo_checkpoint: Checkpoint, tmp_path: Path) -> Cli:
    return Cli(demo_checkpoint, tmp_path)


def test_failed_tiles_within_the_budget_end_well_and_a_second_run_finds_everything_done(cli: Cli) -> None:
    write_slide(cli.slides / "whole.svs", section())
    write_slide(cli.slides / "hurt.svs", section(), damaged=[(1, 1)])
    ended = cli.run()
    assert ended.code == 0, ended.err
    assert re.fullmatch(
        r"ok with failures  hurt\.svs   12 of 16 tiles, 4 failed, \d+ tiles/s, bound by (reading|forward|writing)\n"
        r" {18}note: \d+ % of the slide cannot be read\n"
        r"ok                whole\.svs  16 of 16 tiles, \d+ tiles/s, bound by (reading|forward|writing)\n",
        ended.err,
    )
    assert ended.out == f"2 slides: 1 ok, 1 ok with failures\nreport: {cli.out}/report.html\n"
    assert (cli.out / "report.html").is_file()

    again = cli.run(program=("-c", PROBED))
    assert again.code == 0
    assert again.lines == [
        "ok with failures  hurt.svs   12 of 16 tiles, 4 failed, done before",
        "ok                whole.svs  16 of 16 tiles, done before",
    ]
    assert again.out.splitlines()[-1] == "False", "torch was loaded although nothing was to be computed"


def test_every_slide_gets_one_line_that_begins_with_what_became_of_it_and_a_failed_one_makes_the_exit_code_1(
    cli: Cli,
) -> None:
    write_slide(cli.slides / "a good one.svs", section(2, 3))
    write_slide(cli.slides / "glass.svs", section(2, 3, glass_cols=3))
    write_slide(cli.slides / "no-mpp.svs", section(2, 3), mpp=None)
    (cli.slides / "page.svs").write_text("<html>not found</html>")
    (cli.slides / "link.svs").symlink_to("nowhere")
    ended = cli.run()
    assert ended.code == 1
    good, glass, no_mpp, page, link = ended.lines
    assert good.startswith("ok                a good one.svs  4 of 4 tiles, ")
    assert glass == "empty             glass.svs       no tiles: no tissue was found: the slide is 100 % bare glass"
    assert no_mpp == (
        "failed            no-mpp.svs      unknown_resolution: the slide says nothing of its resolution: give its "
        "level-0 µm/px with --mpp X (make: MPP=X) or in a cohort file's mpp column"
    )
    assert page.startswith("failed            page.svs        unreadable_slide: not a slide but a web page")
    assert link == "skipped           link.svs        a link whose target does not exist"
    assert ended.out.splitlines()[0] == "4 slides: 1 ok, 1 empty, 2 failed"

    (cli.slides / "page.svs").unlink()
    mended = cli.run("--mpp", "0.5")
    assert mended.code == 0
    assert [line.split()[0] for line in mended.lines] == ["ok", "empty", "ok", "skipped"]
    assert mended.out.splitlines()[0] == "3 slides: 2 ok, 1 empty"


Call = Callable[..., Ended]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command in this process, for what ends before any work: a new one takes a second to start."""

    def run_main(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["slide-inference", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, out, err)

    monkeypatch.delenv("SLIDE_KEY_SECRET", raising=False)
    monkeypatch.delenv("SLIDE_MODELS", raising=False)
    return run_main


@pytest.fixture
def one_slide(cli: Cli) -> Cli:
    write_slide(cli.slides / "a.svs", section(2, 3))
    return cli


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": "no-such-model"}, r"error: no model 'no-such-model': .*registered names: demo, or .* lists"),
        ({"--model": "nowhere/x.pt2"}, r"error: no checkpoint at nowhere/x\.pt2"),
        ({"slides": "nowhere"}, r"error: .*nowhere.*"),
        ({"--mpp": "0"}, r"error: --mpp 0 is no µm/px of a slide: give a value in 0\.05-50"),
        ({"--batch-size": "0"}, r"error: batch_size is 0: give a whole number, 1 or more"),
        ({"--batch-size": "10000"}, r"error: demo\S*\.pt2 takes batches of 1 to 4096 tiles, not 10000"),
        ({"--device": "gpu"}, r"error: 'gpu' is no device: give cpu, cuda, cuda:1 or mps"),
        ({"--out": "README.md"}, r"error: --out README\.md: cannot write .*README\.md: .*"),
    ],
    ids=str,
)
def test_bad_usage_is_one_line_with_the_remedy_and_exit_code_2_and_creates_nothing(
    change: dict[str, str], message: str, one_slide: Cli, call: Call
) -> None:
    options = {"--model": one_slide.model, "--out": str(one_slide.out), "slides": str(one_slide.slides)} | change
    slides = options.pop("slides")
    ended = call("run", slides, *(text for option in options.items() for text in option))
    assert ended.code == 2
    assert re.fullmatch(message, ended.err.rstrip("\n")), ended.err
    assert ended.out == ""
    assert not one_slide.out.exists()


def _other_bytes(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _other_manifest(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        manifest = manifest_path(path)
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, r"no checkpoint at \S+/model\.pt2"),
        (lambda path: manifest_path(path).unlink(), r"model\.pt2 has no manifest model\.pt2\.json: .*"),
        (lambda path: manifest_path(path).write_text("{"), r"model\.pt2\.json is not an artifact manifest: .*"),
        (lambda path: os.truncate(path, 100), r"model\.pt2 is not the file its manifest pins .*; export it again: .*"),
        (_other_bytes, r"model\.pt2 is not the file its manifest pins .*; export it again: .*"),
        (
            _other_manifest(torch_version="1.0"),
            r"model\.pt2 was exported by torch 1\.0, this is .*; export it again: .*",
        ),
        (
            _other_manifest(format="aotinductor", arch="sparc"),
            r"model\.pt2 is compiled for sparc, this machine is .*; export it again: .*",
        ),
        (
            _other_manifest(format="aotinductor", device="cuda"),
            r"model\.pt2 is compiled for cuda, not cpu; run it on cuda, or export it with --device cpu",
        ),
    ],
    ids=[
        "gone",
        "no manifest",
        "broken manifest",
        "cut",
        "other bytes",
        "other torch",
        "other machine",
        "other device",
    ],
)
def test_a_checkpoint_that_is_gone_or_refused_is_bad_usage_and_creates_nothing(
    damage: Callable[[Path], None], message: str, one_slide: Cli, call: Call, tmp_path: Path
) -> None:
    model = tmp_path / "model.pt2"
    shutil.copy(one_slide.model, model)
    shutil.copy(manifest_path(Path(one_slide.model)), manifest_path(model))
    damage(model)
    ended = call("run", str(one_slide.slides), "--model", str(model), "--out", str(one_slide.out))
    assert re.fullmatch(f"error: {message}", ended.err.rstrip("\n")), ended.err
    assert ended.code == 2
    assert not one_slide.out.exists()


def test_a_second_model_is_not_dropped_in_silence(one_slide: Cli, call: Call) -> None:
    models = ("--model", one_slide.model, "--model", "demo")
    ended = call("run", str(one_slide.slides), *models, "--out", str(one_slide.out))
    assert ended.code == 2
    assert ended.err == "error: --model is given twice: run one model after the other, into the same --out\n"
    assert not one_slide.out.exists()


@pytest.mark.slow
def test_a_checkpoint_that_turns_out_not_to_run_is_bad_usage_too(one_slide: Cli, tmp_path: Path) -> None:
    # Known only when torch looks at the processor, and that is after the store was opened.
    model = tmp_path / "model.pt2"
    shutil.copy(one_slide.model, model)
    shutil.copy(manifest_path(Path(one_slide.model)), manifest_path(model))
    _other_manifest(format="aotinductor", cpu_features=["avx2048"])(model)
    one_slide.model = str(model)
    ended = one_slide.run()
    assert ended.code == 2
    assert re.match(r"stopped after 0 of 1 slides: model\.pt2 is compiled for a processor with avx2048", ended.err)
    assert len(ended.lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize("row", ["none*.svs", "tile.png"])
def test_a_cohort_row_without_a_slide_is_told_and_a_cohort_of_only_such_rows_is_bad_usage(
    row: str, one_slide: Cli
) -> None:
    (one_slide.slides / "tile.png").write_bytes(b"x")
    cohort = one_slide.slides / "cohort.csv"
    cohort.write_text(f"path\na.svs\n{row}\n")
    arguments = ("run", cohort, "--model", one_slide.model, "--out", one_slide.out, "--batch-size", BATCH)
    ended = one_slide(*arguments)
    assert ended.code == 1, "a row without a slide is no success"
    assert ended.lines[-1].startswith("skipped ")
    assert row in ended.lines[-1]
    assert "row 3 of the cohort file" in ended.lines[-1]
    cohort.write_text(f"path\n{row}\n")
    nothing = one_slide(*arguments)
    assert nothing.code == 2
    assert len(nothing.lines) == 1
    assert nothing.err.startswith("error: no slide found under ")
    assert "row 2 of the cohort file" in nothing.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Usage"),
        (["run"], "Missing argument"),
        (["run", "x.svs", "--out", "y"], "Missing option '--model'"),
        (["run", "x.svs", "--out", "y", "--model", "demo", "--mpp", "abc"], "--mpp"),
        (["walk"], "No such command 'walk'"),
    ],
    ids=str,
)
def test_a_command_that_is_not_complete_shows_how_it_is_used_with_exit_code_2(
    arguments: list[str], text: str, call: Call
) -> None:
    ended = call(*arguments)
    assert ended.code == 2
    assert text in ended.err + ended.out


def test_a_process_of_its_own_ends_in_the_same_way(cli: Cli) -> None:
    missing = cli("run", "nowhere", "--model", "demo", "--out", cli.out)
    assert (missing.code, missing.out, len(missing.lines)) == (2, "", 1)
    assert missing.err.startswith("error: ")
    nothing = cli()
    assert nothing.code == 2
    assert "Usage" in nothing.err + nothing.out


def test_help_names_every_option_and_what_the_exit_codes_mean(call: Call) -> None:
    ended = call("run", "--help")
    assert ended.code == 0
    for text in (
        "--model",
        "--out",
        "--mpp",
        "--allow-upsampling",
        "--batch-size",
        "--device",
        "--root",
        "Exit code 0",
    ):
        assert text in ended.out
    assert ended.err == ""
    assert call("models").out.startswith("demo ")


def test_a_store_that_can_only_be_read_is_refused_at_the_start_as_bad_usage(
    one_slide: Cli, call: Call, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        make_read_only(disk)
        ended = call("run", str(one_slide.slides), "--model", one_slide.model, "--out", str(disk / "out"))
    assert ended.code == 2
    assert ended.err.rstrip("\n").endswith("Read-only file system: name a folder that this user may write to")
    assert len(ended.lines) == 1


@pytest.mark.slow
def test_a_store_that_fills_up_stops_the_run_in_one_line_and_what_is_finished_is_kept(
    one_slide: Cli, tmp_path: Path
) -> None:
    write_slide(one_slide.slides / "b.svs", section(2, 3, seed=2))
    with tmpfs(tmp_path / "disk", "size=460k") as disk:
        ended = one_slide.run("--out", disk / "out")
        assert ended.code == 1
        done, stopped = ended.lines
        assert done.startswith("ok ")
        assert re.match(r"stopped after 1 of 2 slides: the store is full at \S+: free space and run again", stopped)
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        again = one_slide.run("--out", disk / "out")
    assert again.code == 0
    assert again.lines[0].endswith("done before")


def every_byte_written(folder: Path) -> Iterator[tuple[Path, str]]:
    """Names and contents of all files, Parquet unpacked."""
    for path in folder.rglob("*"):
        yield path, str(path.relative_to(folder))
        if path.is_file():
            yield path, path.read_bytes().decode("latin-1")
            if path.suffix == ".parquet":
                table = pq.read_table(path)
                yield path, f"{table.schema.metadata} {table.to_pydict()}"


@pytest.mark.slow
def test_under_a_secret_no_file_and_no_line_tells_a_slides_name(cli: Cli) -> None:
    folder = cli.slides / "WARD-NINE"
    write_slide(folder / "ACC-0042.svs", section(), damaged=[(1, 1)])
    write_slide(folder / "ACC-0043.svs", section(2, 3), mpp=None)
    (folder / "ACC-0044.svs").write_text("<html>")
    write_slide(folder / "ACC-0045.svs", section(2, 3, glass_cols=3))
    (folder / "ACC-0046.svs").symlink_to("ACC-0047.svs")
    ended = cli.run(environment={"SLIDE_KEY_SECRET": "a secret for this test"})
    assert ended.code == 1
    assert sorted(line.split("  ")[0] for line in ended.lines if "  note: " not in line) == [
        "empty", "failed", "failed", "ok with failures", "skipped",
    ]  # fmt: skip
    assert len(re.findall(r"\bs-[0-9a-f]{24}\b", ended.err)) == 4
    told = [(Path("output"), ended.out + ended.err), *every_byte_written(cli.out)]
    assert len(told) > 60
    # The one file that says which slide a key is, for its owner alone.
    assert (cli.out / "cohort.parquet").stat().st_mode & 0o777 == 0o600
    told = [(path, text) for path, text in told if path.name != "cohort.parquet"]
    for path, text in told:
        assert "ACC-00" not in text, path
        assert "WARD-NINE" not in text, path


@pytest.mark.slow
def test_the_report_shows_every_slide_of_the_store_and_not_only_those_of_the_last_command(cli: Cli) -> None:
    for name, image in (("a.svs", section(2, 3)), ("b.svs", section(2, 3, seed=2))):
        write_slide(cli.slides / name, image)
        ended = cli("run", cli.slides / name, "--model", cli.model, "--out", cli.out, "--batch-size", BATCH)
        assert ended.code == 0, ended.err
    page = (cli.out / "report.html").read_text()
    assert "a.svs" in page
    assert "b.svs" in page
    assert "not run" not in page.split("</style>")[1]
    other = cli("run", cli.slides / "a.svs", "--model", cli.model, "--out", cli.out, "--min-tissue", "0.5")
    assert other.code == 0, other.err
    page = (cli.out / "report.html").read_text().split("</style>")[1]
    assert "not run yet with the settings below" in page
    assert "status-failed" not in page


@pytest.mark.slow
def test_a_slide_that_another_process_works_on_is_busy_and_no_failure_of_its_own(one_slide: Cli) -> None:
    write_slide(one_slide.slides / "b.svs", section(2, 3, seed=2))
    chain = make_chain(one_slide.out, resolve_model(one_slide.model))
    key = next(ref.key for ref in discover([one_slide.slides]).slides if ref.name == "a.svs")
    ((_, addresses),) = chain.addresses(key)
    with chain.store.lock(addresses.info):
        ended = one_slide.run()
    busy, done = ended.lines
    assert busy.startswith(f"busy              a.svs  partition_busy: {key}: info/qc is being written by process ")
    assert busy.endswith("; try again later")
    assert done.startswith("ok ")
    assert ended.code == 1
    assert ended.out.splitlines()[0] == "2 slides: 1 ok, 1 busy"
    assert chain.store.failure(key) is None
    assert one_slide.run().code == 0


def test_an_error_of_ours_in_the_log_is_one_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ModelContractError("demo returned 3 numbers, its spec declares 2")
    except ModelContractError as error:
        raised = (type(error), error, error.__traceback__)
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(levelname)s %(name)s: %(message)s"))
    log = logging.Logger("engine")  # noqa: LOG001 - one for this test
    log.addHandler(handler)
    log.warning("the forward pass of %d tiles failed", 8, exc_info=raised)
    told = capsys.readouterr().err
    assert told == (
        "WARNING engine: the forward pass of 8 tiles failed: demo returned 3 numbers, its spec declares 2\n"
    )
    try:
        raise KeyError("a fault of ours")
    except KeyError:
        log.exception("unexpected failure")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["below a file", "too long", "not UTF-8", "no such device"])
def test_an_output_folder_that_cannot_be_one_is_bad_usage(
    kind: str, one_slide: Cli, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    out = {
        "below a file": str(tmp_path / "file" / "out"),
        "too long": str(tmp_path / ("x" * 300)),
        "not UTF-8": os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"),
        "no such device": "/proc/nowhere",
    }[kind]
    ended = call("run", str(one_slide.slides), "--model", one_slide.model, "--out", out)
    assert (ended.code, len(ended.lines)) == (2, 1)
    assert re.match(r"error: --out .*name another folder$", ended.lines[0])
    assert {p.name for p in tmp_path.iterdir()} == {"file", "slides"}


def test_a_disk_without_room_is_one_line_and_exit_code_1(one_slide: Cli, call: Call, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=4k") as disk:
        (disk / "filler").write_bytes(bytes(4096))
        ended = call("run", str(one_slide.slides), "--model", one_slide.model, "--out", str(disk / "out"))
    assert (ended.code, len(ended.lines)) == (1, 1)
    assert re.match(r"error: the store is full at \S+: free space and run again", ended.lines[0])


def test_help_says_when_a_resolution_that_is_given_counts(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told = " ".join(call("run", "--help").out.split())
    assert "only for slides that state none; a cohort file's mpp column overrides both" in told
