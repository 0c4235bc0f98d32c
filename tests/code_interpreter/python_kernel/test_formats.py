"""Results that programs use: tables, charts, JSON, images. The kernel is real."""

import pytest

from code_interpreter.kernels.run import RunRequest
from tests.code_interpreter.conftest import run, seen

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def formats(contexts, code: str) -> dict:
    """The formats of the only result."""
    result = await run(contexts, code)
    assert result.failures == []
    [only] = result.results
    return dict(only.data)


async def test_a_table_is_data_by_column(contexts) -> None:
    code = """
import pandas as pd, numpy as np
pd.DataFrame({
    "text": ["a", "b"], "whole": [1, 2], "part": [0.5, np.nan],
    "time": pd.to_datetime(["2024-01-02", None]), "both": [[1, np.int64(2)], {"k": np.float32(1)}],
})
"""
    shown = await formats(contexts, code)
    assert shown["e2b/data"] == {
        "text": ["a", "b"],
        "whole": [1, 2],
        "part": [0.5, None],
        "time": ["2024-01-02T00:00:00", None],
        "both": [[1, 2], {"k": 1.0}],
    }
    assert "<table" in shown["text/html"]


async def test_dicts_and_lists_are_json_if_they_can_be(contexts) -> None:
    assert (await formats(contexts, "{'a': [1, None, 'x'], 2: float('nan')}"))[
        "application/json"
    ] == {
        "a": [1, None, "x"],
        "2": None,
    }
    assert (await formats(contexts, "[1, {'k': (2,)}]"))["application/json"] == [1, {"k": [2]}]
    for other in ("[object()]", "{1: {2}}", "a = []; a.append(a); a"):
        assert "application/json" not in await formats(contexts, other)


async def test_long_values_are_shown_whole(contexts) -> None:
    shown = await formats(contexts, "list(range(5000))")
    assert shown["text/plain"].endswith("4999]")


async def test_objects_show_themselves(contexts) -> None:
    code = """
class Page:
    def _repr_html_(self): return "<b>x</b>"
    def _repr_markdown_(self): return "**x**"
    def _repr_latex_(self): return "$x$"
    def _repr_svg_(self): return "<svg/>"
    def _repr_javascript_(self): return "x()"
Page()
"""
    shown = await formats(contexts, code)
    assert shown["text/html"] == "<b>x</b>"
    assert shown["text/markdown"] == "**x**"
    assert shown["text/latex"] == "$x$"
    assert shown["image/svg+xml"] == "<svg/>"
    assert shown["application/javascript"] == "x()"


async def test_a_saved_image_is_displayed(contexts) -> None:
    code = "from PIL import Image\nImage.new('RGB', (4, 4), 'red').save('red.png')"
    assert (await formats(contexts, code))["image/png"].startswith("iVBOR")
    shown = await formats(contexts, "Image.new('RGB', (4, 4), 'red').show()")
    assert shown["image/png"].startswith("iVBOR")


async def test_pillow_is_changed_when_a_cold_kernel_imports_it(contexts) -> None:
    made = await contexts.create("python", None)
    code = "import sys; print('PIL.Image' in sys.modules)\n"
    code += "from PIL import Image\nImage.new('L', (2, 2)).save('grey.png')"
    result = await seen(made.run(RunRequest(code)))
    assert result.printed() == "False\n"
    assert ["image/png" in shown.data for shown in result.results] == [True]


CHARTS = {
    "line": "ax.plot([1, 2, 3], [4, 5, 6], label='a'); ax.plot([1, 2, 3], [6, 5, 4], label='b')",
    "scatter": "ax.scatter([1, 2], [3, 4], label='a'); ax.scatter([5], [6], label='b')",
    "bar": "ax.bar(['x', 'y'], [1, 2])",
    "pie": "ax.pie([30, 70], labels=['x', 'y'], autopct='%1.0f%%')",
    "box_and_whisker": "ax.boxplot([[1, 2, 3, 4, 5, 20], [2, 3, 4, 5]], patch_artist=True)",
}


@pytest.mark.parametrize("kind", CHARTS)
async def test_a_figure_is_an_image_and_the_data_that_it_shows(contexts, kind) -> None:
    code = f"""
import matplotlib.pyplot as plt
fig, ax = plt.subplots()
ax.set_title("Title")
ax.set_xlabel("Time (s)")
{CHARTS[kind]}
plt.show()
"""
    shown = await formats(contexts, code)
    assert shown["image/png"].startswith("iVBOR")
    chart = shown["e2b/chart"]
    assert (chart["type"], chart["title"]) == (kind, "Title")
    assert len(chart["elements"]) == 2
    if kind == "line":
        assert chart["x_label"] == "Time (s)"
        assert chart["x_unit"] == "s"
        assert chart["elements"][0]["points"] == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]


async def test_several_axes_are_a_superchart(contexts) -> None:
    code = """
import matplotlib.pyplot as plt
fig, (one, two) = plt.subplots(1, 2)
fig.suptitle("Both")
one.plot([1, 2], [3, 4]); two.bar(["x"], [5])
plt.show()
"""
    chart = (await formats(contexts, code))["e2b/chart"]
    assert (chart["type"], chart["title"]) == ("superchart", "Both")
    assert [item["type"] for item in chart["elements"]] == ["line", "bar"]


async def test_a_figure_left_open_is_shown_at_the_end(contexts) -> None:
    shown = await formats(contexts, "import matplotlib.pyplot as plt; plt.plot([1, 2]); None")
    assert shown["e2b/chart"]["type"] == "line"
