"""Checks of E2B's code interpreter SDK for Python against a whole installation."""

import base64
import contextlib
import io
import json
import threading
import uuid
import zipfile

import e2b
from e2b import Template
from e2b_code_interpreter import Sandbox
from harness import check, ending, expect, main, until

VARIABLES = "import numpy, random\nkept = [1, 2, 3]\nfile = open('kept.txt', 'w+')\nfile.write('a')"
HAS_THEM = "kept.append(4); file.write('b'); file.flush(); open('kept.txt').read(), len(kept)"
DRAW = "random.random(), float(numpy.random.rand())"
HIBERNATE = {"paddock.dev/pause-strategy": "Hibernate"}
WAKES = {"on_timeout": "pause", "auto_resume": True}


def text(box, code, **options):
    """Return the value of the last expression."""
    done = box.run_code(code, **options)
    assert done.error is None, done.error.traceback or done.error
    return done.text


def lines(execution, stream="stdout"):
    """Return everything that was printed."""
    return "".join(getattr(execution.logs, stream))


@check
def the_first_run_finds_packages_loaded_and_belongs_to_the_user():
    box = Sandbox.create()
    with ending(box):
        loaded = "import sys; [n for n in ('numpy', 'pandas', 'matplotlib') if n in sys.modules]"
        assert text(box, loaded) == "['numpy', 'pandas', 'matplotlib']"
        assert text(box, "import getpass, os; getpass.getuser(), os.getcwd()") == (
            "('user', '/home/user')"
        )
        assert box.commands.run("id -un").stdout == "user\n"


@check
def every_language_keeps_its_state():
    box = Sandbox.create()
    with ending(box):
        for language, first, second, value in (
            ("python", "x = 41", "x + 1", "42"),
            ("js", "const x = 6", "x * 7", "42"),
            ("ts", "const x: number = 84", "x / 2 as number", "42"),
        ):
            text(box, first, language=language)
            assert text(box, second, language=language) == value, language
        box.run_code("x=42; cd /usr", language="bash")
        assert lines(box.run_code("echo $x; pwd", language="bash")) == "42\n/usr\n"


@check
def charts_of_all_kinds_arrive_as_data_and_image():
    box = Sandbox.create()
    with ending(box):

        def chart(code):
            start = "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\n"
            done = box.run_code(f"{start}{code}\nplt.show()")
            assert done.error is None, done.error.traceback
            [result] = done.results
            assert base64.b64decode(result.png).startswith(b"\x89PNG")
            return result.chart

        line = chart("ax.plot([1, 2], [3, 4], label='a')\nax.set_title('T')\nax.set_xlabel('X')")
        assert (line.type, line.title, line.x_label) == ("line", "T", "X")
        assert [tuple(point) for point in line.elements[0].points] == [(1, 3), (2, 4)]
        scatter = chart("ax.scatter([1, 2], [3, 4])")
        assert scatter.type == "scatter"
        assert len(scatter.elements[0].points) == 2
        bar = chart("ax.bar(['a', 'b'], [5, 6])")
        assert (bar.type, [str(item.label) for item in bar.elements]) == ("bar", ["a", "b"])
        pie = chart("ax.pie([1, 3], labels=['a', 'b'])")
        assert (pie.type, [item.label for item in pie.elements]) == ("pie", ["a", "b"])
        rows = [[1, 2, 3, 4, 5], [10, 20, 30, 40, 50]]
        whiskers = chart(f"ax.boxplot({rows}, patch_artist=True)")  # E2B knows filled boxes only
        assert whiskers.type == "box_and_whisker"
        assert [(item.min, item.median, item.max) for item in whiskers.elements] == [
            (1, 3, 5),
            (10, 30, 50),
        ]
        both = chart(
            "plt.close(fig)\nfig, (a, b) = plt.subplots(2)\na.plot([1, 2])\nb.bar(['c'], [1])"
        )
        assert both.type == "superchart"
        assert [item.type for item in both.elements] == ["line", "bar"]


@check
def images_tables_and_other_formats_arrive():
    box = Sandbox.create()
    with ending(box):
        image = box.run_code("from PIL import Image\nImage.new('RGB', (4, 4), 'red')").results[0]
        assert base64.b64decode(image.png).startswith(b"\x89PNG")
        table = box.run_code("import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': ['x', 'y']})")
        assert "<table" in table.results[0].html
        assert table.results[0].data == {"a": [1, 2], "b": ["x", "y"]}
        shown = "from IPython.display import *\n"
        assert box.run_code(f"{shown}Markdown('# T')").results[0].markdown == "# T"
        assert box.run_code(f"{shown}SVG('<svg/>')").results[0].svg == "<svg/>"
        assert box.run_code(f"{shown}Latex('$x$')").results[0].latex == "$x$"
        assert box.run_code("{'a': [1, None]}").results[0].json == {"a": [1, None]}
        two = box.run_code(f"{shown}display(1)\n2")
        assert [(item.text, item.is_main_result) for item in two.results] == [
            ("1", False),
            ("2", True),
        ]


@check
def contexts_are_isolated_restarted_and_removed():
    box = Sandbox.create()
    with ending(box):
        text(box, "x = 1")
        other = box.create_code_context(cwd="/tmp", language="python")
        assert box.run_code("x", context=other).error.name == "NameError"
        assert text(box, "import os; y = 2; os.getcwd()", context=other) == "/tmp"
        assert other.id in [item.id for item in box.list_code_contexts()]
        box.restart_code_context(other)
        assert box.run_code("y", context=other).error.name == "NameError"
        box.remove_code_context(other)
        assert other.id not in [item.id for item in box.list_code_contexts()]
        expect(e2b.SandboxException, box.run_code, "1", context=other)
        assert text(box, "x") == "1"


@check
def callbacks_are_called_while_code_runs():
    box = Sandbox.create()
    with ending(box):
        out, err, results, errors = [], [], [], []
        # The code goes on only after its first line has arrived here.
        code = (
            "import os, sys, time\nprint('first')\nwhile not os.path.exists('seen'): "
            "time.sleep(0.01)\nprint('second', file=sys.stderr)\ndisplay(1)\n1 / 0"
        )

        def on_stdout(message):
            out.append(message.line)
            box.files.write("seen", "")

        box.run_code(
            code,
            on_stdout=on_stdout,
            on_stderr=lambda message: err.append(message.line),
            on_result=results.append,
            on_error=errors.append,
        )
        assert (out, err) == (["first\n"], ["second\n"])
        assert [item.text for item in results] == ["1"]
        assert [item.name for item in errors] == ["ZeroDivisionError"]


@check
def an_error_has_its_name_value_and_traceback():
    box = Sandbox.create()
    with ending(box):
        done = box.run_code("def f():\n    raise ValueError('bad')\nprint('before')\nf()")
        assert (done.error.name, done.error.value) == ("ValueError", "bad")
        assert "raise ValueError('bad')" in done.error.traceback
        assert lines(done) == "before\n"
        done = box.run_code("throw new TypeError('bad')", language="js")
        assert (done.error.name, done.error.value) == ("TypeError", "bad")
        assert box.run_code("false", language="bash").error.value == "1"


@check
def a_timeout_interrupts_the_code_and_keeps_the_state():
    box = Sandbox.create()
    with ending(box):
        text(box, "kept = 1")
        expect(e2b.TimeoutException, box.run_code, "while True: pass", timeout=2)
        assert text(box, "kept") == "1"


@check
def variables_of_the_sandbox_and_of_a_run():
    box = Sandbox.create(envs={"STAGE": "it's a test"})
    with ending(box):
        for language, code in (
            ("python", "import os; print(os.environ.get('STAGE'), os.environ.get('OWN'))"),
            ("js", "console.log(process.env.STAGE, process.env.OWN)"),
            ("bash", "echo $STAGE ${OWN-None}"),
        ):
            own = box.run_code(code, language=language, envs={"STAGE": "s", "OWN": "o"})
            assert lines(own) == "s o\n", language
            after = lines(box.run_code(code, language=language)).replace("undefined", "None")
            assert after == "it's a test None\n", (language, after)


@check
def a_killed_kernel_and_a_killed_server_come_back():
    box = Sandbox.create()
    with ending(box):
        died = box.run_code("import os; os.kill(os.getpid(), 9)")
        assert (died.error.name, died.error.value) == (
            "KernelDied",
            "the kernel was killed by SIGKILL",
        )
        assert text(box, "1 + 1") == "2"
        old = box.commands.run("pgrep -of 'python -m code_interpreter'").stdout
        box.commands.run(f"kill -9 {old}")
        until(lambda: box.commands.run("curl -sf localhost:49999/health || true").stdout)
        assert text(box, "2 + 2") == "4"
        assert box.commands.run("pgrep -of 'python -m code_interpreter'").stdout != old


def _wheel(name, module):
    """Return a package of one module."""
    written = io.BytesIO()
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(written, "w") as wheel:
        wheel.writestr(f"{name}.py", module)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{about}/RECORD", "")
    return written.getvalue()


@check
def an_installed_package_can_be_imported_at_once():
    box = Sandbox.create()
    with ending(box):
        name = "fresh_one-1.0-py3-none-any.whl"
        box.files.write(name, _wheel("fresh_one", "value = 7\n"))
        assert box.run_code("import fresh_one").error.name == "ModuleNotFoundError"
        done = box.run_code(f"!pip install --no-index ./{name}")
        assert "Successfully installed" in lines(done), done
        assert text(box, "import fresh_one; fresh_one.value") == "7"


@check
def the_short_name_is_the_same_template():
    box = Sandbox.create("code-interpreter")
    with ending(box):
        assert text(box, "1 + 1") == "2"


@check
def a_template_made_from_it_runs_code():
    name = f"data-{uuid.uuid4().hex[:8]}"
    made = Template().from_template("code-interpreter-v1").run_cmd("echo mine > /home/user/made")
    Template.build(made, name, cpu_count=2, memory_mb=1024)
    box = Sandbox.create(name)
    with ending(box):
        assert text(box, "import sys; open('made').read(), 'pandas' in sys.modules") == (
            r"('mine\n', True)"
        )


@check
def a_run_wakes_a_paused_sandbox_with_its_variables():
    box = Sandbox.create(lifecycle=WAKES)
    with ending(box):
        text(box, VARIABLES)
        box.pause()
        assert text(box, HAS_THEM) == "('ab', 4)"


@check
def a_run_wakes_a_hibernated_sandbox_with_its_variables():
    box = Sandbox.create(lifecycle=WAKES, metadata=HIBERNATE)
    with ending(box):
        text(box, VARIABLES)
        box.pause()
        assert text(box, HAS_THEM) == "('ab', 4)"


def _goes_on(box):
    """Pause while code runs; it ends although its caller was cut off."""
    started = threading.Event()
    code = "import time\nprint('go')\nfor step in range(20): time.sleep(0.1)\ndone = step"

    def run():
        with contextlib.suppress(Exception):  # the pause ends the connection
            box.run_code(code, on_stdout=lambda _: started.set())

    caller = threading.Thread(target=run)
    caller.start()
    assert started.wait(60)
    box.pause()
    caller.join()
    assert text(box, "done") == "19"


@check
def a_run_goes_on_after_a_pause():
    box = Sandbox.create(lifecycle=WAKES)
    with ending(box):
        _goes_on(box)


@check
def a_run_goes_on_after_a_hibernation():
    box = Sandbox.create(lifecycle=WAKES, metadata=HIBERNATE)
    with ending(box):
        _goes_on(box)


@check
def forks_have_the_variables_and_draw_their_own_numbers():
    box = Sandbox.create()
    with ending(box):
        text(box, f"{VARIABLES}\nrandom.seed(1); numpy.random.seed(1)")
        forks = box.fork(count=2)
        with ending(*forks):
            assert [text(fork, HAS_THEM) for fork in forks] == ["('ab', 4)"] * 2
            drawn = [text(each, DRAW) for each in (box, *forks)]
            _all_differ(drawn)


@check
def code_that_is_under_way_in_a_fork_draws_its_own_numbers():
    box = Sandbox.create()
    with ending(box):
        # A thread of the kernel draws when it is told to, in whichever clone it finds itself.
        code = """
import numpy, os, random, threading, time
random.seed(1); numpy.random.seed(1)
def draw():
    while not os.path.exists('draw'): time.sleep(0.01)
    with open('part', 'w') as file: print([random.random(), float(numpy.random.rand())], file=file)
    os.rename('part', 'drawn')
threading.Thread(target=draw).start()
"""
        text(box, code)
        forks = box.fork(count=2)
        with ending(*forks):
            drawn = []
            for each in (box, *forks):
                each.files.write("draw", "")
                until(lambda each=each: each.files.exists("drawn"))
                drawn.append(each.files.read("drawn"))
            _all_differ(drawn)


@check
def forks_of_a_javascript_kernel_keep_its_state_and_draw_their_own_numbers():
    box = Sandbox.create()
    with ending(box):
        text(box, "const kept = 6; Math.random()", language="js")
        forks = box.fork(count=2)
        with ending(*forks):
            assert [text(fork, "kept * 7", language="js") for fork in forks] == ["42"] * 2
            draw = "[Math.random(), crypto.getRandomValues(new Uint32Array(1))[0]].join()"
            _all_differ([text(each, draw, language="js") for each in (box, *forks)])


@check
def sandboxes_of_the_warm_pool_draw_their_own_numbers():
    boxes = [Sandbox.create() for _ in range(3)]
    with ending(*boxes):
        _all_differ([text(box, f"import numpy, random; {DRAW}") for box in boxes])


def _all_differ(drawn):
    rows = [json.loads("[" + row.strip('()[]"\n ') + "]") for row in drawn]
    for column in zip(*rows, strict=True):
        assert len(set(column)) == len(rows), drawn


@check
def a_kernel_that_needs_too_much_memory_says_so():
    box = Sandbox.create()
    with ending(box):
        text(box, "import numpy")
        grows = "blocks = []\nwhile True: blocks.append(numpy.ones(4 << 20))"
        died = box.run_code(grows, timeout=120)
        assert died.error.name == "KernelDied", died
        assert "of memory" in died.error.value, died.error.value
        assert text(box, "1 + 1") == "2"


main(True)
