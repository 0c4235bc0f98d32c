"""Programs that people run in sandboxes work in spite of all limits.

Small ones, and some servers, run on the image of the machine, as far as it has them. Large ones
(browser, databases, Node, Java) run with `--security-full` on an image that is built for them
(`programs.py`).
"""

import base64
import glob
import shutil

import pytest

from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.port import Blueprint
from tests.runtime.local.inside import run
from tests.security import programs

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

HELLO = r"""
#include <pthread.h>
#include <stdio.h>
static void *work(void *text) { return puts(text) < 0 ? text : 0; }
int main(void) {
    pthread_t thread;
    return pthread_create(&thread, 0, work, "from a thread") || pthread_join(thread, 0);
}
"""
COMPILE = f"cat > hello.c <<'EOF'\n{HELLO}\nEOF\ngcc -g -O1 -pthread hello.c -o hello"
BUILD = r"""
for name in one two three; do echo "int $name(void) { return 2; }" > $name.c; done
cat > main.c <<'EOF'
#include <stdio.h>
int one(void), two(void), three(void);
int main(void) { return printf("answer %d\n", (one() + two() + three()) * 7) < 0; }
EOF
cat > Makefile <<'EOF'
all: main
main: main.o libparts.a
	$(CC) -o $@ main.o libparts.a
libparts.a: one.o two.o three.o
	$(AR) rcs $@ $^
EOF
make -j4 > log 2>&1 || cat log
./main
"""
SMALL = {
    "make": (BUILD, "answer 42"),
    "gcc": (f"{COMPILE} && ./hello", "from a thread"),
    "ip": ("ip -brief address show lo", "127.0.0.1/8"),
    "ss": (
        """python3 -c '
import socket, subprocess
with socket.create_server(("127.0.0.1", 4567)):
    print(subprocess.run(["ss", "-tlnp"], capture_output=True, text=True, check=True).stdout)'""",
        '127.0.0.1:4567      0.0.0.0:*    users:(("python3"',
    ),
    "strace": (
        "strace -f -e trace=execve,exit_group sh -c '/bin/true; exit 7' 2>&1",
        "exited with 7",
    ),
    "gdb": (
        f"{COMPILE} && gdb -q -batch -ex 'break work' -ex run -ex bt -ex continue ./hello 2>&1",
        "exited normally",
    ),
}
PAGE = "<body><script>document.body.append(`answer ${6 * 7}`)</script></body>"
JAVA = """
import com.sun.net.httpserver.HttpServer;
import java.net.*;
import java.net.http.*;
public class Main {
  public static void main(String[] a) throws Exception {
    var server = HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
    server.createContext("/", exchange -> {
      var body = ("answer " + 6 * 7).getBytes();
      exchange.sendResponseHeaders(200, body.length);
      try (var out = exchange.getResponseBody()) { out.write(body); }
    });
    server.start();
    var uri = URI.create("http://127.0.0.1:" + server.getAddress().getPort() + "/");
    System.out.println(HttpClient.newHttpClient().send(
        HttpRequest.newBuilder(uri).build(), HttpResponse.BodyHandlers.ofString()).body());
    Thread.sleep(5000);
    server.stop(0);
    System.exit(0);
  }
}
"""
NODE = """
const http = require("http");
const server = http.createServer((_, reply) => reply.end(`answer ${6 * 7}`));
server.listen(0, "127.0.0.1", async () => {
  const reply = await fetch(`http://127.0.0.1:${server.address().port}/`);
  console.log(await reply.text());
  setTimeout(() => process.exit(0), 5000);
});
"""
# Servers and the browser stay for 5 s, so that the watch of kernel memory inspects them.
LARGE = {
    # Chromium's own sandbox needs namespaces, which a sandbox may not create.
    "chromium": f"""
cat > index.html <<'EOF'
{PAGE}
EOF
python3 -m http.server --bind 127.0.0.1 8765 > server.log 2>&1 & server=$!
until curl -s -o /dev/null http://127.0.0.1:8765/; do sleep 0.1; done
chromium --headless --no-sandbox --disable-gpu --user-data-dir=profile \\
  --dump-dom http://127.0.0.1:8765/ 2> chromium.log || tail -20 chromium.log
timeout 5 chromium --headless --no-sandbox --disable-gpu --user-data-dir=profile \\
  --remote-debugging-port=9222 http://127.0.0.1:8765/ 2> chromium.log
test $? = 124 || tail -20 chromium.log >&2
kill $server""",
    "postgresql": """
bin=$(echo /usr/lib/postgresql/*/bin)
$bin/initdb -D data -A trust > init.log 2>&1 || cat init.log
$bin/pg_ctl -D data -w -t 60 -l log -o "-k $PWD -c listen_addresses=127.0.0.1" start > /dev/null \
  || cat log
psql -h 127.0.0.1 -d postgres -qAt -c 'create table t as select generate_series(1, 7) n' \
  -c "select 'answer ' || 6 * count(*) from t"
sleep 5
$bin/pg_ctl -D data -w -m fast stop > /dev/null""",
    "mariadb": """
mariadb-install-db --no-defaults --datadir="$PWD/data" --auth-root-authentication-method=normal \
  > init.log 2>&1 || tail -20 init.log
/usr/sbin/mariadbd --no-defaults --datadir="$PWD/data" --socket="$PWD/s" --skip-networking \
  --pid-file="$PWD/pid" > log 2>&1 & server=$!
for _ in $(seq 300); do test -S s && break; sleep 0.1; done
mariadb --no-defaults --socket="$PWD/s" -u root -N -e "create database d; use d;
  create table t (n int) engine=innodb; insert into t values (7);
  select concat('answer ', 6 * n) from t" || tail -20 log
sleep 5
kill $server; wait $server""",
    "node": f"cat > main.js <<'EOF'\n{NODE}\nEOF\nnode main.js",
    "java": f"cat > Main.java <<'EOF'\n{JAVA}\nEOF\njavac Main.java && java Main",
    "strace": "strace -f -o /dev/null sh -c 'echo answer $(expr 6 \\* 7)'",
    "gdb": f"{COMPILE} && gdb -q -batch -ex 'break work' -ex run"
    " -ex 'printf \"answer %d %s\\n\", 6 * 7, (char *)text' -ex kill ./hello 2>&1",
}


PROGRAMS = {
    "node": ("/usr/bin/node", "/usr/local/bin/node"),
    "java": ("/usr/bin/javac", "/usr/local/bin/javac"),
    "postgresql": ("/usr/lib/postgresql/*/bin/initdb",),
}
"""Files by which the machine has a program; sandboxes see only these places."""


def script(commands: str) -> str:
    """Return a command that runs in a new directory; encoded because of its quotes."""
    code = base64.b64encode(f"cd $(mktemp -d)\nexport HOME=$PWD\n{commands}\n".encode()).decode()
    return f"echo {code} | base64 -d > /tmp/script-$$; bash /tmp/script-$$"


@pytest.fixture(params=["sudo", "locked"])
async def small_box(node, request):
    """A sandbox of the image of the machine; one per privilege."""
    name = f"programs-{request.param}"
    found = await node.runtime.inspect(name)
    if found is None:
        blueprint = Blueprint(uid=name, image="host", privileges=request.param)
        found = await node.runtime.create(blueprint)
    return found


@pytest.mark.parametrize("user", ["root", "user"])
@pytest.mark.parametrize("name", SMALL)
async def test_small_programs_work(small_box, name, user):
    if shutil.which(name) is None:
        pytest.skip(f"the machine has no {name}")
    commands, expected = SMALL[name]
    outcome = await run(small_box, script(commands), user=user)
    squeezed = " ".join(outcome.out.split())
    assert " ".join(expected.split()) in squeezed, outcome


@pytest.mark.parametrize("name", ["node", "java", "postgresql"])
async def test_servers_of_the_machine_work(node, small_box, name):
    if not any(map(glob.glob, PROGRAMS[name])):
        pytest.skip(f"the machine has no {name}")
    outcome = await run(small_box, script(LARGE[name]), user="user", timeout=100)
    assert "answer 42" in outcome.out, outcome
    found = await node.runtime.inspect(small_box.uid)
    assert found is not None
    assert found.state == "running"  # no watch took it for an attack


@pytest.mark.parametrize("privileges", ["sudo", "locked"])
@pytest.mark.parametrize("name", LARGE)
async def test_large_programs_work(node, request, name, privileges):
    if not request.config.getoption("--security-full"):
        pytest.skip("needs --security-full")
    ImageStore(node.state / "images").add_directory(programs.build(), "programs", in_place=True)
    uid = f"large-{name}-{privileges}"
    instance = await node.runtime.create(
        Blueprint(uid=uid, image="programs", privileges=privileges)
    )
    try:
        outcome = await run(instance, script(LARGE[name]), user="user", timeout=150)
        assert "answer 42" in outcome.out, outcome
        assert outcome.error == "", outcome
        found = await node.runtime.inspect(uid)
        assert found is not None
        assert found.state == "running"  # no watch, every two seconds, took it for an attack
    finally:
        await node.runtime.destroy(uid)
