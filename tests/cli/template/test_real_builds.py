"""`paddock template` against a real installation: builds, stages, history, rollback, cancel."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import PADDOCK, Cli

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(open("/srv/greeting").read().encode())
http.server.HTTPServer(("", 8000), Handler).serve_forever()
"""

DOCKERFILE = """
FROM base AS unused
RUN exit 1

FROM base AS text
ARG NAME=world
WORKDIR /out
RUN echo "hello $NAME" > greeting && mkdir d && ln -s ../greeting d/link

FROM base
ARG SECRET=argument
ENV COLOUR=blue
RUN test "$SECRET" = argument
COPY --from=text /out/greeting /srv/
COPY --from=text /out/d /srv/d
COPY *.py /srv/
COPY --chmod=755 <<END /opt/bin/colour
#!/bin/sh
echo $COLOUR
END
ADD packed.tar.gz /srv/packed/
WORKDIR /srv
CMD ["python3", "/srv/server.py"]
HEALTHCHECK CMD python3 -c "import urllib.request as r; r.urlopen('http://localhost:8000')"
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    context = tmp_path / "web"
    context.mkdir()
    (context / "server.py").write_text(SERVER)
    (context / "secret.py").write_text("password = 1")
    (context / ".dockerignore").write_text("secret.py\n")
    (context / "Dockerfile").write_text(DOCKERFILE)
    (context / "inner").write_text("inner")
    subprocess.run(["tar", "-C", context, "-czf", context / "packed.tar.gz", "inner"], check=True)
    return context


def test_a_dockerfile_with_stages_becomes_a_template_with_a_running_server(
    cli: Cli, context: Path
) -> None:
    built = cli.json("template", "build", "web", str(context), "--build-arg", "NAME=Ada")
    assert built["templateID"] == "web"
    box = cli("sandbox", "create", "web").strip()
    try:
        fetch = "python3 -c 'import urllib.request as r;"
        fetch += 'print(r.urlopen("http://localhost:8000").read().decode(), end="")\''
        assert cli("sandbox", "exec", box, fetch) == "hello Ada\n"
        assert cli("sandbox", "exec", box, "echo $SECRET") == "\n"
        assert cli("sandbox", "exec", box, "/opt/bin/colour; pwd; whoami") == "blue\n/srv\nuser\n"
        listed = cli("sandbox", "exec", box, "ls -F /srv /srv/d /srv/packed").split()
        assert listed == [
            *("/srv:", "d/", "greeting", "packed/", "server.py"),
            *("/srv/d:", "link@", "/srv/packed:", "inner"),
        ]
    finally:
        cli("sandbox", "kill", box)
    again = cli.run("template", "build", "web", str(context), "--build-arg", "NAME=Ada")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("CACHED") >= 10
    assert "] RUN" not in "\n".join(
        line for line in again.stderr.splitlines() if "CACHED" not in line
    )
    assert "unused" not in again.stderr
    cli("template", "delete", "web")


def test_history_tags_and_rollback_choose_the_build(cli: Cli, tmp_path: Path) -> None:
    def build(text: str) -> str:
        # The build of the stage has another tag, so a rollback does not choose it.
        lines = ("FROM base AS text", f"RUN echo {text} > /revision")
        lines = (*lines, "FROM base", "COPY --from=text /revision /")
        (tmp_path / "Dockerfile").write_text("\n".join(lines))
        return cli.json("template", "build", "rolling", str(tmp_path))["buildID"]

    def revision() -> str:
        box = cli("sandbox", "create", "rolling").strip()
        try:
            return cli("sandbox", "exec", box, "cat /revision").strip()
        finally:
            cli("sandbox", "kill", box)

    first, second = build("one"), build("two")
    assert revision() == "two"
    cli("template", "tag", f"rolling:{first}", "old")
    shown = cli.json("template", "history", "rolling")
    shown = [item for item in shown if item["buildID"] in (first, second)]
    assert [(item["buildID"], item["tags"]) for item in shown] == [
        (second, ["default"]),
        (first, ["old"]),
    ]
    assert f"{second}*" in cli("template", "history", "rolling")
    assert cli.json("template", "rollback", "rolling")["buildID"] == first
    assert revision() == "one"
    cli("template", "rollback", "rolling", second)
    assert revision() == "two"
    cli("template", "tag", "rolling", "old", "--remove")
    assert "rolling" in cli("template", "ls")
    assert "COPY revision /" in cli("template", "logs", "rolling", second)
    assert second in cli("get", "templates", "rolling")
    cli("template", "delete", "rolling")
    assert cli.run("template", "history", "rolling").returncode == 1


def test_a_failing_step_ends_with_its_line_and_its_output(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM base\n\nRUN echo before; exit 7\n")
    done = cli.run("template", "build", "failing", str(tmp_path), "--progress", "tty")
    assert done.returncode == 1
    assert "before" in done.stderr
    assert "error: line 3: RUN: failed to run command 'echo before; exit 7': exit status 7" in (
        done.stderr
    )
    followed = cli.run("template", "logs", "failing", "--follow")
    assert followed.returncode == 1
    assert "before" in followed.stdout
    cli("template", "delete", "failing")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupt_cancels_the_build_and_says_so(
    cli: Cli, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM base\nRUN echo running; sleep 300\n")
    with subprocess.Popen(
        [PADDOCK, "template", "build", "slow", tmp_path],
        env=cli.environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as building:
        assert building.stderr is not None
        seen = ""
        while "running\n" not in seen:
            seen += building.stderr.readline()
        os.killpg(building.pid, number)
        out, err = building.communicate(timeout=60)
    assert building.returncode == code, out + err
    assert "canceled build" in err
    deadline = time.monotonic() + 60
    while cli.json("template", "history", "slow"):
        assert time.monotonic() < deadline, "the build was not removed"
        time.sleep(0.2)
    cli("template", "delete", "slow")
