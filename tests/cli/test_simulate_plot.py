"""`headrace simulate run --plot`."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli import simulation_plot
from headrace.cli.main import main

has_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an extra, and not here"
)
BEGINNINGS = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", "run", *arguments])


@has_matplotlib
@pytest.mark.parametrize("suffix", BEGINNINGS)
def test_every_format_is_drawn_and_the_same_again(suffix: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"one{suffix}", tmp_path / f"two{suffix}"]
    for path in paths:
        result = call("--load", "overload", "--duration", "60", "--plot", str(path))
        assert result.exit_code == 0, result.output
        assert path.read_bytes().startswith(BEGINNINGS[suffix])
    assert paths[0].read_bytes() == paths[1].read_bytes()


@has_matplotlib
def test_every_run_and_tenant_is_in_it_whatever_their_names(tmp_path: Path) -> None:
    trace = tmp_path / "odd.csv"
    names = ["$a$_{x", "_b", "日本", *(f"t{number}" for number in range(9))]
    rows = [f"{number},{name},{500 - number},9" for number, name in enumerate(names)]
    trace.write_text("req_time_s,client,prompt_len,output_len\n" + "\n".join(rows))
    drawn = tmp_path / "x.svg"
    result = call(
        "--trace", str(trace), "--plot", str(drawn), "--policy", "fifo", "--policy", "fair,weight.$a$_{x=2"
    )
    assert result.exit_code == 0, result.output
    text = drawn.read_text()
    for label in ("fifo", "fair,weight.$a$_{x=2", "$a$_{x", "_b", "日本", "t4", "others"):
        assert f"<!-- {label}" in text or f"<!--  {label}" in text, label
    assert "<!-- t5" not in text


def test_without_matplotlib_it_is_said_before_anything_is_simulated(tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from headrace.cli.main import main; main()"
    path = tmp_path / "x.png"
    command = [sys.executable, "-c", code, "simulate", "run", "--load", "overload", "--plot", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "headrace: --plot needs matplotlib, which is not installed: pip install 'headrace[plot]'\n"
    )
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "x.jpg"], "cannot draw x.jpg: allowed are files that end in .png, .svg, .pdf"),
        (["--plot", "/nowhere/x.png"], "cannot write /nowhere/x.png: there is no directory /nowhere"),
        (
            ["--plot", "x.png", *(word for slots in range(1, 10) for word in ("--policy", f"fair,slots={slots}"))],
            "cannot draw 9 runs side by side; at most 8",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_said(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation_plot, "has_matplotlib", lambda: True)
    result = call("--load", "overload", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
