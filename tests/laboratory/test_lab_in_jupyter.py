"""The lab in a cell of a real JupyterLab: the oracle is what the kernel's own engine holds."""

import importlib.util

import pytest

import fshard as fs
from tests.laboratory.chromium import CHROMIUM, Tab
from tests.laboratory.jupyter import jupyter_lab, run_first_cell

HAS_JUPYTER = all(importlib.util.find_spec(name) for name in ("jupyterlab", "anywidget"))
CELL = "import fshard as fs\nlab = fs.lab(mesh={'data': 4})\nlab"
ROOT = "document.querySelector('.fshard-lab').shadowRoot"
ANSWERED = f"{ROOT}.getElementById('page').dataset.state === 'answered'"


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.skipif(not HAS_JUPYTER, reason="needs the extra notebooks")
def test_lab_in_a_cell_answers_a_control_and_an_axis(tmp_path):
    """`test_lab_page.py` has the same widget without JupyterLab."""
    with jupyter_lab(tmp_path, [CELL]) as address:
        tab = Tab(tmp_path / "chromium", 1400, 1000)
        try:
            run_first_cell(tab, address)
            tab.errors.clear()  # those of JupyterLab itself
            tab.wait(ANSWERED, 120)
            tab.click(f"{ROOT}.querySelector('#control-plan-zero_stage-3 + label')")
            tab.wait(f"{ANSWERED} && {ROOT}.getElementById('code').textContent.includes('ZeRO-3')")
            lab = fs.lab(mesh={"data": 4}, layout=fs.Parallelism(zero_stage=3))
            assert tab.get(f"{ROOT}.getElementById('code').textContent") == lab.code

            # Keys of the lab are not commands of the notebook: "b" would add a cell, Enter edit one.
            chip = f"{ROOT}.querySelector('[data-pattern=\"norm.weight\"] [data-axis=data]')"
            tab.get(f"{chip}.focus()")
            for key in ("Enter", "ArrowLeft", "Enter"):
                tab.press(key)
            tab.wait(f"{ANSWERED} && {ROOT}.querySelector('.reset')")
            tab.press("b")
            assert tab.get("document.querySelectorAll('.jp-Cell').length") == 2
            assert tab.errors == []
        finally:
            tab.close()
