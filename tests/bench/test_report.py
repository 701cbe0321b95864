"""`deepytorch bench report`: what the pages hold, what became worse or better, and files that are refused."""

from __future__ import annotations

import json
import re
import subprocess
from html import unescape
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from deepytorch.bench import report as module
from deepytorch.bench.plots import Plot, Points, draw, svg_of
from deepytorch.bench.report import ReportOptions, generic_tables, run_report
from deepytorch.bench.results import Results, Row, write_json
from deepytorch.bench.table import Table, markdown_of
from deepytorch.errors import ConfigError, DataError
from tests.api.headless import browser

SCATTER = Plot(
    "Gain <b>over</b> $x$ & $y$",
    "scatter",
    "ddp_acc",
    "acc_ratio",
    (
        Points("2 hosts", (0.5, 0.8), (1.4, 1.1), ("bert", "vgg_16")),
        Points("8 hosts", (0.3, 0.31), (1.5, 1.5), ("bert", "vgg_16"), predicted=True),
    ),
    lines=(1.0,),
)
CURVES = Plot(
    "Bandwidth",
    "curves",
    "bytes",
    "GB/s",
    (Points("gloo", (1024, 4096, 1 << 20), (0.01, 0.1, 2)), Points("model", (1024, 1 << 20), (0.02, 3), (), True)),
    log_x=True,
    log_y=True,
)


class Known:
    """A benchmark with a table and plots of its own."""

    def tables(self, results):
        rows = tuple((str(row.key["model"]), f"{row.figures.get('step_s', 0):.1f}") for row in results.rows)
        return [Table("Steps of each model", ("model", "step, s"), rows, ("model",), ("Median of <5> steps.",))]

    def plots(self, results):
        return [SCATTER, CURVES]


@pytest.fixture(autouse=True, scope="module")
def _benchmarks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BENCHMARKS", {"known": Known()})
        yield


def results(benchmark="other", rows=(), **changed):
    given = {
        "command": f"deepytorch bench {benchmark} --name 'a<b'",
        "options": {"steps": 20},
        "machine": "x86_64, 2 CPUs",
        "versions": {"torch": "2.13.0"},
        "date": "2026-11-29",
        "notes": ["Another job <ran> | here."],
    }
    return Results(benchmark=benchmark, rows=list(rows), **given | changed)


def row(model, failed="", **figures):
    return Row(key={"model": model, "rate": None}, figures=figures, failed=failed)


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        write_json(folder / f"{name}.json", content.to_json() if isinstance(content, Results) else content)
    return folder


def written(folder):
    return write(
        folder,
        one=results("known", [row("bert", step_s=1.0), row("vgg", failed="out of memory")]),
        two=results(rows=[row("a|b", size_bytes=1 << 20, loss_rel_diff=1.25e-7)]),
        trace={"traceEvents": []},
    )


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path / "new")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The pages of a folder, for tests that only look at them."""
    return run_report(ReportOptions(folder=written(tmp_path_factory.mktemp("report"))))


def sections(text):
    """The parts of the Markdown page, by their headings."""
    return dict(part.split("\n", 1) for part in text.split("\n## ")[1:])


def table_rows(text, title):
    """The rows of a table of the Markdown page; empty without the table."""
    _, found, rest = text.partition(f"**{title}**\n\n")
    return [line[2:-2].split(" | ") for line in rest.split("\n\n")[0].splitlines()[2:]] if found else []


def compared(tmp_path, before, now, **options):
    old = before if isinstance(before, dict) else {"one": results(rows=before)}
    new = now if isinstance(now, dict) else {"one": results(rows=now)}
    given = ReportOptions(folder=write(tmp_path / "new", **new), against=write(tmp_path / "old", **old), **options)
    report = run_report(given)
    return report, report.markdown.read_text()


# ---------------------------------------------------------------------- pages


def test_the_markdown_page_has_a_section_for_each_file(report):
    assert (report.files, report.rows, report.failed) == (2, 3, 1)
    parts = sections(report.markdown.read_text())
    assert list(parts) == ["Overview", "known: one.json", "other: two.json"]
    assert "Other files: trace.json" in parts["Overview"]
    known = parts["known: one.json"]
    for text in ("x86_64, 2 CPUs", "torch 2.13.0", "2026-11-29", "Another job \\<ran> \\| here."):
        assert text in known
    assert "```bash\ndeepytorch bench known --name 'a<b'\n```" in known
    assert table_rows(known, "Steps of each model") == [["bert", "1.0"], ["vgg", "0.0"]]
    assert table_rows(known, "Not measured") == [["model vgg", "out of memory"]]
    pictures = re.findall(r"\]\((plots/.*?)\)", known)
    assert len(pictures) == 2
    for picture in pictures:
        assert (report.markdown.parent / picture).read_bytes().startswith(b"\x89PNG")


def test_a_benchmark_that_is_unknown_gets_a_table_of_keys_and_figures(report):
    parts = sections(report.markdown.read_text())
    assert table_rows(parts["other: two.json"], "other") == [["a\\|b", "-", "1,048,576", "1.25e-07"]]


def test_generic_tables_are_one_for_each_set_of_keys():
    rows = [row("a", step_s=0.5), Row(key={"op": "sum"}, texts={"why": "slow"}, figures={"step_s": 12345.6})]
    first, second = generic_tables(results(rows=rows))
    assert (first.columns, first.rows) == (("model", "rate", "step_s"), (("a", "-", "0.5"),))
    assert (second.columns, second.rows) == (("op", "step_s", "why"), (("sum", "12,346", "slow"),))
    assert second.left == ("op", "why")


class Page(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_the_html_page_needs_nothing_else_and_shows_texts_as_they_are(report):
    text = report.html.read_text()
    assert not re.search(r"https?:|<script|<link|<img|@import|\ssrc=", text)
    page = Page(text)
    for shown in ("Another job <ran> | here.", "--name 'a<b'", "Median of <5> steps.", "Gain <b>over</b> $x$ & $y$"):
        assert shown in page.text
    assert [tag for tag, _ in page.elements].count("svg") == 2
    assert not [tag for tag, _ in page.elements if tag in ("b", "ran")]
    ids = [found["id"] for _, found in page.elements if "id" in found]
    assert len(set(ids)) == len(ids)
    references = re.findall(r'(?:href="|url\()#([^")]+)', text)
    assert references
    assert set(references) <= set(ids)


def test_pages_go_where_they_are_asked_for(folder, tmp_path):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    report = run_report(ReportOptions(folder=folder, markdown=page, html=tmp_path / "page.html"))
    assert (report.markdown, report.html.exists()) == (page, True)
    (picture, *_) = re.findall(r"\]\((\S+?)\)", page.read_text())
    assert (page.parent / picture).resolve() == folder / "plots" / "one-1.png"
    assert not list(folder.glob("report.*"))


def test_every_plot_is_shown_in_a_browser(report, tmp_path):
    program = browser()
    if program is None:
        pytest.skip("no Chromium is installed: neither on PATH nor by Playwright")
    measure = """<script>
    const boxes = [...document.querySelectorAll("svg, svg text, svg path[clip-path], svg use")].map((each) => {
      const box = each.getBoundingClientRect();
      return [each.tagName, box.width, box.height, each.textContent.trim()]; });
    document.body.textContent = JSON.stringify({ boxes, width: document.documentElement.scrollWidth,
      loaded: performance.getEntriesByType("resource").length });
    </script></body>"""
    page = tmp_path / "measured.html"
    page.write_text(report.html.read_text().replace("</body>", measure))
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr")
    offline = (
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=500,900",
    )
    ran = subprocess.run(
        [program, *flags, *offline, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    found = json.loads(unescape(re.search(r"<body>(.*)</body>", ran.stdout, re.DOTALL).group(1)))
    assert "CONSOLE" not in ran.stderr
    assert found["loaded"] == 0
    assert found["width"] <= 500
    assert [tag for tag, *_ in found["boxes"]].count("svg") == 2
    for tag, width, height, text in found["boxes"]:
        assert max(width, height) > (200 if tag == "svg" else 0), (tag, text)
    texts = [text for tag, *_, text in found["boxes"] if tag == "text"]
    assert {"bert", "vgg_16", "8 hosts", "acc_ratio", "Gain <b>over</b> $x$ & $y$", "1M", "gloo"} <= set(texts)


# ---------------------------------------------------------------------- comparison


def test_figures_are_worse_or_better_by_their_direction(tmp_path):
    before = [row("a", step_s=1.0, examples_per_s=100.0, steps=5.0), row("b", step_s=2.0, examples_per_s=50.0)]
    now = [row("a", step_s=1.2, examples_per_s=70.0, steps=9.0), row("b", step_s=1.0, examples_per_s=51.0)]
    report, text = compared(tmp_path, before, now)
    assert (report.regressions, report.improvements, report.missing, report.newly_failed) == (2, 1, 0, 0)
    assert table_rows(text, "Regressions") == [
        ["one.json", "model a", "examples_per_s", "100", "70", "-30.0%"],
        ["one.json", "model a", "step_s", "1", "1.2", "+20.0%"],
    ]
    assert table_rows(text, "Improvements") == [["one.json", "model b", "step_s", "2", "1", "-50.0%"]]


def test_the_tolerance_is_kept_and_zero_is_compared_too(tmp_path):
    before = [row("a", step_s=1.0, loss_diff=0.0, wait_s=0.0)]
    now = [row("a", step_s=1.05, loss_diff=1e-3, wait_s=0.0)]
    _, text = compared(tmp_path, before, now)
    assert table_rows(text, "Regressions") == [["one.json", "model a", "loss_diff", "0", "0.001", "from 0"]]
    assert compared(tmp_path, before, now, tolerance=0.04)[0].regressions == 2


def test_rows_and_figures_that_are_missing_or_fail_are_named(tmp_path):
    before = [row("a", step_s=1.0), row("b", step_s=1.0, peak_mb=7.0), row("c", step_s=1.0), row("d", "no memory")]
    now = [row("b", step_s=1.0), row("c", "killed"), row("d", step_s=1.0), row("e", step_s=1.0)]
    report, text = compared(tmp_path, before, now)
    assert (report.regressions, report.missing, report.newly_failed) == (0, 1, 1)
    assert table_rows(text, "Rows and figures that are missing, fail, or no longer fail") == [
        ["one.json", "model a", "measured", "missing"],
        ["one.json", "model b", "peak_mb 7", "no such figure"],
        ["one.json", "model c", "measured", "killed"],
        ["one.json", "model d", "no memory", "measured"],
    ]
    assert "1 are new" in text


def test_other_machines_versions_and_options_are_said(tmp_path):
    now = results(rows=[row("a", step_s=1.0)], machine="arm64, 4 CPUs", options={"steps": 40})
    _, text = compared(tmp_path, [row("a", step_s=1.0)], {"one": now})
    assert table_rows(text, "What else differs between these runs") == [
        ["one.json", "machine", "x86_64, 2 CPUs", "arm64, 4 CPUs"],
        ["one.json", "steps", "20", "40"],
    ]
    assert "differs" not in compared(tmp_path, {"one": now}, {"one": now})[1]


def test_a_row_of_the_same_machine_is_compared_where_several_files_have_it(tmp_path):
    slow = results(rows=[row("a", step_s=9.0)], machine="arm64, 4 CPUs")
    before = {"one": slow, "two": results(rows=[row("a", step_s=1.0)])}
    report, text = compared(tmp_path, before, [row("a", step_s=1.0)])
    assert (report.regressions, report.improvements, report.missing) == (0, 0, 1)
    assert "What else differs" not in text


def test_rows_of_another_benchmark_are_others(tmp_path):
    before = {"one": results("first", [row("a", step_s=1.0)])}
    report, _ = compared(tmp_path, before, {"one": results("second", [row("a", step_s=9.0)])})
    assert (report.regressions, report.missing) == (0, 1)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"rows": [{"key": {"model": "a"}, "figures": {"step_s": "fast"}}]}, "figures of the row"),
        ({"rows": {}}, "rows of the result file"),
        ({"machine": None}, "machine of the result file"),
        ({"speed": 3}, "unknown ['speed']"),
        ({"layout": 2}, "layout of the result file is 2, expected 1"),
        ({"rows": [{"key": {"model": "a"}}, {"key": {"model": "a"}}]}, "expected each key once"),
    ],
)
def test_a_file_that_claims_to_be_a_result_file_but_does_not_fit_is_named(folder, changed, expected):
    write_json(folder / "broken.json", results().to_json() | changed)
    with pytest.raises(DataError) as error:
        run_report(ReportOptions(folder=folder))
    for part in ("broken.json has a benchmark and rows", expected, "Run its benchmark again"):
        assert part in str(error.value)
    assert not (folder / "report.md").exists()


def test_a_file_that_is_no_json_is_named(folder):
    (folder / "cut.json").write_text('{"benchmark": "known", "rows": [')
    with pytest.raises(DataError, match=r"cut\.json cannot be read"):
        run_report(ReportOptions(folder=folder))


def test_folders_and_tolerances_that_do_not_fit_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="away is no folder, expected one with result files"):
        run_report(ReportOptions(folder=tmp_path / "away"))
    with pytest.raises(ConfigError, match="away is no folder"):
        run_report(ReportOptions(folder=folder, against=tmp_path / "away"))
    with pytest.raises(DataError, match="has 1 JSON files and none is a result file"):
        run_report(ReportOptions(folder=write(tmp_path / "empty", trace={"rows": []})))
    with pytest.raises(ConfigError, match=r"tolerance is -0\.1; expected 0 or more"):
        run_report(ReportOptions(folder=folder, tolerance=-0.1))


# ---------------------------------------------------------------------- plots and tables


def test_predicted_series_are_dashed_and_hollow_and_lines_are_drawn():
    (axes,) = draw(CURVES).axes
    measured, predicted = axes.lines
    assert (measured.get_linestyle(), predicted.get_linestyle()) == ("-", "--")
    assert (measured.get_markerfacecolor() == "none", predicted.get_markerfacecolor() == "none") == (False, True)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1K", "4K", "1M"]
    (axes,) = draw(SCATTER).axes
    *series, line = axes.lines
    assert [each.get_linestyle() for each in series] == ["None", "None"]
    assert list(line.get_ydata()) == [1.0, 1.0]
    assert len({each.get_color() for each in series}) == 2


def test_labels_do_not_cover_each_other_where_there_is_room():
    figure = draw(SCATTER)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 4
    assert not [1 for at, box in enumerate(boxes) for other in boxes[:at] if box.overlaps(other)]


@pytest.mark.parametrize("series", [(), (Points("none", (), ()),), (Points("zero", (0.0, 1.0), (0.0, 2.0)),)])
def test_a_plot_of_nothing_or_of_zeros_on_logarithmic_axes_is_drawn(series):
    root = ElementTree.fromstring(svg_of(Plot("title", "curves", "x", "y", series, log_x=True, log_y=True)))
    assert "title" in [each.text for each in root.iter("text")]


def test_markdown_shows_texts_as_they_are():
    table = Table("a *b*", ("name", "step_s"), (("_x_ | <i>", "-5"), ("C:\\d\n# e", "1")), ("name",), ("- [note](x)",))
    assert markdown_of(table) == [
        "**a \\*b\\***",
        "",
        "| name | step_s |",
        "| --- | ---: |",
        "| \\_x\\_ \\| \\<i> | -5 |",
        "| C:\\\\d # e | 1 |",
        "",
        "\\- \\[note\\](x)",
    ]
