"""The requests that Paddock sends to envd, read by envd's own types."""

import msgspec

from paddock.envd.config import Config, EnvdSettings
from paddock.envd.rpc.connect_frames import EnvelopeReader, JsonCodec
from paddock.envd.rpc.messages import StartRequest
from paddock.envd.sandbox_context import InitRequest, SandboxContext
from paddock.runtime import envd_api


def applied(body: bytes, config: Config) -> SandboxContext:
    context = SandboxContext(config)
    context.apply(msgspec.json.decode(body, type=InitRequest))
    return context


def test_init_replaces_all_settings_and_the_ids() -> None:
    wanted = EnvdSettings(access_token="t", env_vars={"A": "b"}, default_user="root")

    context = applied(
        envd_api.init_body(wanted, sandbox_id="s", template_id="x"), Config(identity_dir=None)
    )

    assert context.settings == wanted
    assert context.sandbox_id == "s"


def test_init_without_a_token_clears_the_one_before() -> None:
    before = EnvdSettings(access_token="t", default_workdir="/srv")

    context = applied(
        envd_api.init_body(EnvdSettings()), Config(settings=before, sandbox_id="kept")
    )

    assert context.settings == EnvdSettings()
    assert context.sandbox_id == "kept"


def test_a_command_is_a_start_request_of_envd() -> None:
    sent = envd_api.frame(envd_api.shell_command("true", env={"A": "b"}, cwd="/srv"))

    ((_, payload),) = EnvelopeReader().feed(sent)
    message = JsonCodec().decode(payload, StartRequest)

    assert isinstance(message, StartRequest)
    assert message.process is not None
    assert message.process.args == ("-l", "-c", "true")
    assert (message.process.cwd, message.process.envs) == ("/srv", {"A": "b"})
    assert message.stdin is False


def test_a_login_shell_has_a_terminal() -> None:
    message = JsonCodec().decode(msgspec.json.encode(envd_api.login_shell((90, 30))), StartRequest)

    assert isinstance(message, StartRequest)
    assert message.pty is not None
    assert message.pty.size is not None
    assert (message.pty.size.cols, message.pty.size.rows) == (90, 30)


def test_frames_are_read_as_far_as_they_are_complete() -> None:
    data = envd_api.frame({"a": 1}) + envd_api.FRAME_HEAD.pack(envd_api.END_STREAM, 2) + b"{}"

    assert list(envd_api.read_frames(data + b"\0\0")) == [(0, b'{"a":1}'), (2, b"{}")]


def test_a_refusal_names_sandbox_path_status_and_reason() -> None:
    error = envd_api.refusal("ab12", "/init", 503, b"not yet")

    assert error.message == "envd of sandbox ab12 refused /init with status 503: not yet"
