"""`trireme launch --console`: the page of a running job, in a browser."""

from __future__ import annotations

import signal
import socket
import stat
from pathlib import Path

from tests.chromium import chromium
from tests.programs import Template

TRAINING_SCRIPT = str(Path(__file__).with_name("training_script.py"))
READY = "[...document.querySelectorAll('dt')].some((name) => name.textContent === 'loss')"
WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


def test_a_job_is_shown_in_a_browser(programs: Template, tmp_path: Path) -> None:
    arguments = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num", "1"]
    arguments += ["--console", "0", "--log_dir", str(tmp_path / "log"), TRAINING_SCRIPT]
    env = {"TRIREME_TIMEOUT_S": "60"}
    with programs.start("launch", [*arguments, "--trainer"], env, is_quick=True) as job:
        link = job.wait_line(r"^trireme console: (http://127.0.0.1:\d+/\?token=[\w-]+)$")[1]
        assert stat.S_IMODE((tmp_path / "log" / "consolelog.0").stat().st_mode) == 0o600
        with chromium(tmp_path / "profile") as page:
            page.open(link, width=1280, height=900)
            page.wait_for(READY)
            assert "token" not in page.evaluate("location.href")
            assert page.evaluate("document.getElementById('state').textContent").startswith("runs")
            assert page.evaluate("document.querySelectorAll('figure svg .line').length") >= 4
            names = "[...document.querySelectorAll('tbody th')].map((cell) => cell.textContent)"
            assert "rows" in page.evaluate(f"{names}.join(' ')").split(), "the table of the job"
            drawings = "document.querySelectorAll('figure svg:not([aria-hidden])')"
            unnamed = f"[...{drawings}].filter((drawing) =>"
            assert page.evaluate(f"{unnamed} !drawing.ariaLabel).length") == 0
            for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light")):
                page.open(link, width=width, height=900, scheme=scheme)
                page.wait_for(READY)
                assert not page.evaluate(WIDER), f"the page is wider than {width} points"
                assert page.evaluate(LEAST_CONTRAST) >= 4.5, f"{scheme}: too little contrast"
                page.screenshot(tmp_path / f"{width}_{scheme}.png")
            assert page.errors == []
        job.signal(signal.SIGTERM)
        assert job.finish() == 0


def test_a_job_goes_on_without_its_console(programs: Template, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num", "1"]
        arguments += ["--console", port, "--log_dir", str(tmp_path / "log"), TRAINING_SCRIPT]
        env = {"TRIREME_TIMEOUT_S": "60"}
        with programs.start("launch", [*arguments, "--trainer"], env, is_quick=True) as job:
            job.wait_line("the console failed with exit code 2; the job goes on")
            job.wait_line(r"^batch \d+$")
            job.signal(signal.SIGTERM)
            assert job.finish() == 0
        assert "cannot listen" in (tmp_path / "log" / "consolelog.0").read_text()


# The least contrast of a text with what is behind it, by the definition of WCAG 2.2.
LEAST_CONTRAST = """
(() => {
  const light = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const luminance = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map((part) => light(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
    return "rgb(255, 255, 255)";
  };
  const texts = [...document.body.querySelectorAll("*")].filter((element) =>
    [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
  return Math.min(...texts.map((element) => {
    const [a, b] = [getComputedStyle(element).color, behind(element)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
})()
"""
