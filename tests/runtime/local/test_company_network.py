"""Proxies, CA certificates and mirrors reach programs in real sandboxes, without a new image."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paddock.runtime.local.net.settings import HOST_NAME
from tests.installation import Box, Installation
from tests.runtime.local.company import PASSWORD, REGISTRY, USER, Company, gateway_of
from tests.runtime.local.nodes import eventually

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

TEMPLATES = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxtemplates"
FETCH = "import urllib.request as u; print(u.urlopen('{}').read().decode())"
REQUESTS = "from pip._vendor import requests; print(requests.get('{}').text)"
NODE = "fetch('{}').then(r => r.text()).then(console.log)"
GREETING = "hello from the company"


@pytest.fixture
async def company(tmp_path: Path) -> AsyncIterator[Company]:
    if os.geteuid() != 0:
        pytest.skip("real sandboxes need root")
    made = Company(tmp_path)
    yield made
    await made.close()


def settings_of(company: Company, fabric_number: int) -> dict[str, object]:
    return {
        # Not by name: apt confuses a proxy and a mirror with the same host name.
        "sandbox_http_proxy": company.proxy_url.replace(HOST_NAME, gateway_of(fabric_number)),
        "sandbox_ca_file": company.ca,
        "sandbox_pip_index": f"{company.mirror_url}/simple/",
        "sandbox_npm_registry": f"{company.mirror_url}/npm/",
        "sandbox_apt_mirror": company.mirror_url,
        "sandbox_host_ports": f"{company.mirror_port},{company.proxy_port}",
    }


async def test_every_program_of_a_sandbox_uses_the_settings_of_the_installation(company: Company):
    direct = f"{company.mirror_url}/hello"
    place = Installation(pool_size=1)
    place.settings |= settings_of(company, place._number)
    async with place:
        await company.open(place._number)
        box = await place.create(timeout=250)

        # Through the proxy, which alone knows the name.
        assert await place.run(box, f"curl -sS https://{REGISTRY}/hello") == GREETING
        assert company.tunnels == [(f"{REGISTRY}:443", f"{USER}:{PASSWORD}")]

        # Certificates: from variables, and from the system's store without any variable.
        assert (await python(place, box, REQUESTS.format(direct))) == GREETING
        assert await place.run(box, f"env -i /usr/bin/curl -sS {direct}") == GREETING
        assert await python(place, box, FETCH.format(direct), "env -i ") == GREETING
        assert len(company.tunnels) == 1, "the machine itself is reached without the proxy"

        # Mirrors, also with sudo.
        options = "-q --no-cache-dir --break-system-packages --root-user-action=ignore"
        assert await place.run(box, f"sudo pip install {options} paddock-demo 2>&1") == ""
        assert "mirror" in await python(place, box, "import paddock_demo")
        await place.run(box, "sudo apt-get update 2>&1")
        assert any(path.startswith("/debian/dists/") for path in company.requests)
        found = await place.run(box, "printenv NPM_CONFIG_REGISTRY UV_DEFAULT_INDEX")
        assert found.split() == [f"{company.mirror_url}/npm/", f"{company.mirror_url}/simple/"]

        # Nothing more of this machine.
        other = f"https://{HOST_NAME}:{company.closed_port}/hello"
        assert await place.run(box, f"curl -sS -m 5 {other} || echo refused") == "refused\n"

        # A variable of the caller wins.
        own = await place.create(timeout=100, envVars={"HTTPS_PROXY": "http://own:1"})
        assert await place.run(own, "printenv HTTPS_PROXY") == "http://own:1\n"

        for name in ("node", "control", "gateway-0"):
            assert PASSWORD not in place.log(name)


async def test_a_template_overrides_the_settings_and_node_trusts_its_certificates(
    company: Company,
):
    installed = {"sandbox_http_proxy": company.proxy_url, "sandbox_host_ports": company.mirror_port}
    pem = company.ca.read_text()
    direct = f"{company.mirror_url}/hello"
    async with Installation(pool_size=0, **installed) as place:
        await company.open(place._number)
        template = {
            "apiVersion": "paddock.dev/v1alpha1",
            "kind": "SandboxTemplate",
            "metadata": {"name": "strict", "namespace": "default"},
            "spec": {
                "image": "base",
                "startCommand": f"curl -sS {direct} > /tmp/started",
                "readyCommand": "test -s /tmp/started",
                "outbound": {"httpProxy": "", "caCertificates": pem},
            },
        }
        await place.kube("POST", TEMPLATES, template)
        box = await place.create(templateID="strict", timeout=200)

        assert await place.run(box, "cat /tmp/started") == GREETING
        assert await place.run(box, "printenv HTTP_PROXY HTTPS_PROXY || echo none") == "none\n"
        assert await place.run(box, f'node -e "{NODE.format(direct)}"') == GREETING + "\n"


async def test_a_changed_setting_reaches_running_warm_and_restored_sandboxes(company: Company):
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    before = {"sandbox_ca_file": company.ca, "sandbox_apt_mirror": company.mirror_url}
    async with Installation(pool_size=1, **before) as place:
        box = await place.create(timeout=250)
        assert "Paddock" in await place.run(box, f"cat {bundle}")
        assert HOST_NAME in await place.run(box, "cat /etc/apt/sources.list*  2>/dev/null; true")
        made = await place.api("POST", f"/sandboxes/{box.id}/snapshots", {})
        await place.stocked()

        for name in before:
            del place.settings[name]
        place.settings["sandbox_pip_index"] = "https://mirror.example/simple/"
        for name in ("control", "node"):
            place.kill(name)
        await place.start_node()
        await place.start_control()

        show = f"printenv SSL_CERT_FILE PIP_INDEX_URL; grep -c Paddock {bundle}; ls /etc/paddock"
        wanted = "https://mirror.example/simple/\n0\nwritten.json\n"

        async def is_current() -> bool:
            return await place.run(box, show) == wanted

        await eventually(is_current, seconds=60)
        warm = await place.create(timeout=100)
        restored = await place.create(templateID=made["snapshotID"], timeout=100)
        for one in (warm, restored):
            assert await place.run(one, show) == wanted
            sources = await place.run(one, "cat /etc/apt/sources.list*  2>/dev/null; true")
            assert HOST_NAME not in sources


async def python(place: Installation, box: Box, code: str, prefix: str = "") -> str:
    return (await place.run(box, f'{prefix}/usr/bin/python3 -c "{code}"')).strip()
