"""Instructions of a Dockerfile become the steps of a build, or are refused by line."""

import pytest

from paddock.cli.template.dockerfile.model import Copy, DockerfileError, PlainStep, StageSteps
from paddock.cli.template.dockerfile.stages import find_target, parse
from paddock.cli.template.dockerfile.translate import translate
from paddock.kit.errors import InvalidError

ROOT = [("USER", "root"), ("WORKDIR", "/")]
DEFAULTS = [("USER", "user"), ("WORKDIR", "/home/user")]


def translated(
    text: str, arguments: dict[str, str] | None = None, target: str | None = None
) -> StageSteps:
    dockerfile = parse(text, arguments or {})
    return translate(dockerfile, find_target(dockerfile, target), arguments or {})


def shown(found: StageSteps) -> list[tuple[str, ...]]:
    """The steps of the Dockerfile, without those that set and restore defaults."""
    plain = [(step.type, *step.args) for step in found.steps if isinstance(step, PlainStep)]
    assert plain[:2] == ROOT
    return [item for item in plain[2:] if item not in DEFAULTS]


def only_copy(text: str, arguments: dict[str, str] | None = None) -> Copy:
    (found,) = [step for step in translated(text, arguments).steps if isinstance(step, Copy)]
    return found


STEPS = {
    "RUN make all": [("RUN", "make all")],
    "RUN make \\\n  all": [("RUN", "make   all")],
    'RUN ["echo", "a b", "$HOME"]': [("RUN", "echo 'a b' '$HOME'")],
    "RUN echo $HOME": [("RUN", "echo $HOME")],
    "RUN <<EOF\na\nb\nEOF": [("RUN", "a\nb\n")],
    "RUN <<-EOF\n\ta\n\tEOF": [("RUN", "a\n")],
    "RUN python3 <<EOF\nprint(1)\nEOF": [("RUN", "python3 <<EOF\nprint(1)\nEOF")],
    "RUN cat <<A <<B\n1\nA\n2\nB": [("RUN", "cat <<A <<B\n1\nA\n2\nB")],
    'SHELL ["/bin/bash", "-o", "pipefail", "-c"]\nRUN a | b': [
        ("RUN", "/bin/bash -o pipefail -c 'a | b'")
    ],
    'SHELL ["/bin/ash", "-c"]\nRUN ["a"]': [("RUN", "a")],
    "ENV A=1 B='x y'": [("ENV", "A", "1", "B", "x y")],
    "ENV A two words": [("ENV", "A", "two words")],
    "ENV A=1\nENV A=2 B=$A": [("ENV", "A", "1"), ("ENV", "A", "2", "B", "1")],
    "ENV PATH=/opt/bin:$PATH": [("ENV", "PATH", "/opt/bin:$PATH")],
    "ENV PATH=/a:$PATH\nENV PATH=/b:$PATH": [
        ("ENV", "PATH", "/a:$PATH"),
        ("ENV", "PATH", "/b:$PATH"),
    ],
    "ARG V=1\nENV W=$V": [("ARG", "V", "1"), ("ENV", "W", "1")],
    "ARG V\nENV W=${V:-none}": [("ENV", "W", "none")],
    "ENV V=env\nARG V=arg\nENV W=$V": [("ENV", "V", "env"), ("ENV", "W", "env")],
    "ARG D=/srv\nWORKDIR $D/app": [("ARG", "D", "/srv"), ("WORKDIR", "/srv/app")],
    "WORKDIR app": [("WORKDIR", "app")],
    "USER www-data": [("USER", "www-data")],
    "USER 1000:1000": [("USER", "1000")],
    "# escape=`\nRUN a `\n b": [("RUN", "a  b")],
    "EXPOSE 80\nLABEL a=b\nVOLUME /data\nSTOPSIGNAL 9\nMAINTAINER me": [],
    "RUN --mount=type=cache,target=/root/.cache pip install x": [("RUN", "pip install x")],
}


@pytest.mark.parametrize("instructions", STEPS)
def test_instructions_become_steps(instructions: str) -> None:
    head, sep, rest = instructions.partition("\n")
    if head.startswith("#"):
        text = f"{head}{sep}FROM debian\n{rest}"
    else:
        text = f"FROM debian\n{instructions}"
    assert shown(translated(text)) == STEPS[instructions]


REFUSED = {
    "ONBUILD RUN a": "ONBUILD is not supported",
    "RUN --mount=type=secret,id=a cat /run/secrets/a": "--mount=type=secret",
    "RUN --mount=target=/src make": "--mount=type=bind",
    "RUN --network=none make": "--network=none",
    "RUN --security=insecure make": "--security",
    "RUN": "RUN has no command",
    "COPY --parents a /": "--parents",
    "COPY --chmod=u+x a /": "--chmod=u+x",
    "COPY a b /dst": "must be a directory",
    "COPY a": "a source and a destination",
    "COPY $HOME/a /": "$HOME is known only in the base image",
    "COPY --from=7 a /": "no such stage",
    "ADD https://example.com/a /": "cannot fetch https://example.com/a",
    "WORKDIR ${PYTHON_ROOT}": "$PYTHON_ROOT is known only in the base image",
    "ENV A='$B'": "a dollar sign",
    "SHELL bash": "a list in JSON",
    "HEALTHCHECK GET /": "CMD or NONE",
    "NOPE a": "unknown instruction",
    'ENV A="b': "looking for matching",
}


@pytest.mark.parametrize("instruction", REFUSED)
def test_what_cannot_be_built_is_refused_with_its_line(instruction: str) -> None:
    with pytest.raises(DockerfileError) as caught:
        translated(f"FROM debian\n\n{instruction}\n")
    assert caught.value.message.startswith("line 3: ")
    assert REFUSED[instruction] in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM"),
        ("RUN a\nFROM b", "line 1: RUN is not allowed before FROM"),
        ("FROM scratch", "FROM scratch is not supported"),
        ("FROM $IMAGE", "$IMAGE is known only in the base image"),
        ("ARG IMAGE\nFROM $IMAGE", "is empty"),
        ("FROM a b c d", "FROM takes an image"),
        ("FROM a AS x\nFROM b AS X", "exists already"),
    ],
)
def test_a_malformed_stage_is_refused(text: str, message: str) -> None:
    with pytest.raises(DockerfileError) as caught:
        translated(text)
    assert message in caught.value.message


def test_a_shebang_script_is_run_from_a_file() -> None:
    ((kind, command),) = shown(
        translated("FROM debian\nRUN <<EOF\n#!/usr/bin/env python3\nprint(1)\nEOF")
    )
    assert kind == "RUN"
    assert "<<'EOF'" in command
    assert "#!/usr/bin/env python3\nprint(1)\nEOF\n" in command


def test_user_and_workdir_are_those_of_a_sandbox_unless_the_dockerfile_sets_them() -> None:
    def last(text: str) -> list[tuple[str, ...]]:
        return [
            (step.type, *step.args)
            for step in translated(text).steps[2:]
            if isinstance(step, PlainStep)
        ]

    assert last("FROM debian") == DEFAULTS
    assert last("FROM debian\nUSER www-data") == [("USER", "www-data"), ("WORKDIR", "/home/user")]
    assert last("FROM debian\nWORKDIR /srv") == [("WORKDIR", "/srv"), ("USER", "user")]


@pytest.mark.parametrize(
    ("instructions", "start"),
    [
        ("CMD serve --port 80", "serve --port 80"),
        ('CMD ["serve", "a b"]', "serve 'a b'"),
        ('ENTRYPOINT ["serve"]\nCMD ["--port", "80"]', "serve --port 80"),
        ('ENTRYPOINT ["serve"]\nCMD -p 80', "serve /bin/sh -c '-p 80'"),
        ('ENTRYPOINT serve\nCMD ["ignored"]', "serve"),
        ("CMD []", ""),
        ("", ""),
    ],
)
def test_entrypoint_and_cmd_become_the_start_command(instructions: str, start: str) -> None:
    assert translated(f"FROM debian\n{instructions}").start_command == start


def test_a_health_check_becomes_the_ready_command_of_a_start_command() -> None:
    check = "HEALTHCHECK --interval=5s CMD curl -f localhost"
    assert translated(f"FROM debian\nCMD serve\n{check}").ready_command == "curl -f localhost"
    assert translated(f"FROM debian\n{check}").ready_command == ""
    assert translated(f"FROM debian\nCMD serve\n{check}\nHEALTHCHECK NONE").ready_command == ""


def test_build_arguments_replace_defaults_and_reach_from() -> None:
    text = "ARG V=3.12\nFROM python:$V\nARG V\nARG W=a\nRUN echo $V"
    plain = translated(text)
    assert (plain.image, shown(plain)[:2]) == (
        "python:3.12",
        [("ARG", "V", "3.12"), ("ARG", "W", "a")],
    )
    passed = translated(text, {"V": "3.13", "W": "b"})
    assert passed.image == "python:3.13"
    assert shown(passed)[:2] == [("ARG", "V", "3.13"), ("ARG", "W", "b")]


def test_an_argument_before_from_is_unset_in_a_stage_that_does_not_declare_it() -> None:
    with pytest.raises(DockerfileError, match="known only in the base image"):
        translated("ARG D=/a\nFROM debian\nWORKDIR $D")


def test_a_stage_that_starts_from_another_repeats_its_steps() -> None:
    text = 'FROM debian AS a\nENV X=1\nRUN one\nCMD serve\nFROM a\nRUN two $X\nENTRYPOINT ["x"]'
    found = translated(text)
    assert found.image == "debian"
    assert shown(found) == [("ENV", "X", "1"), ("RUN", "one"), ("RUN", "two $X")]
    assert found.start_command == "x"  # the CMD of the earlier stage is dropped


def test_a_target_is_a_name_or_a_number() -> None:
    text = "FROM a AS One\nRUN 1\nFROM b AS two\nRUN 2"
    assert translated(text).image == "b"
    assert translated(text, target="one").image == "a"
    assert translated(text, target="0").image == "a"
    with pytest.raises(InvalidError) as caught:
        translated(text, target="three")
    assert caught.value.hint == "its stages: one, two"


def test_what_has_no_effect_is_noted() -> None:
    notes = translated("FROM a\nEXPOSE 80\nLABEL x=y\nUSER a:b").notes
    assert [note.partition(":")[0] for note in notes] == ["line 2", "line 3", "line 4"]


def test_copy_names_sources_destination_owner_and_mode() -> None:
    found = only_copy("FROM a\nARG U=app\nCOPY --chown=$U:app --chmod=0755 a 'b c' /dst/")
    assert found.sources == ("a", "b c")
    assert (found.destination, found.owner, found.mode) == ("/dst/", "app:app", "0755")
    assert (found.stage, found.image, found.unpacks, found.line) == (None, "", False, 3)


def test_copy_writes_as_root_for_every_user() -> None:
    assert only_copy("FROM a\nCOPY a /b").owner == ""  # the user is root already
    assert only_copy("FROM a\nUSER app\nCOPY a /b").owner == "root"


@pytest.mark.parametrize(("written", "meant"), [(".", "./"), ("/a/.", "/a/./"), ("/a", "/a")])
def test_a_dot_is_a_directory(written: str, meant: str) -> None:
    assert only_copy(f"FROM a\nCOPY x {written}").destination == meant


def test_copy_takes_files_of_earlier_stages_and_of_images() -> None:
    text = "FROM a AS build\nFROM b\nCOPY --from={} /x /y"
    assert only_copy(text.format("BUILD")).stage == 0
    assert only_copy(text.format("0")).stage == 0
    assert only_copy(text.format("nginx:1")).image == "nginx:1"


def test_a_heredoc_of_copy_is_a_file_with_expanded_variables() -> None:
    found = only_copy("FROM a\nENV N='x y'\nCOPY <<A <<'B' /etc/\nn=\"$N\"\nA\nn=$N\nB")
    assert [(item.name, item.content) for item in found.inline] == [
        ("A", 'n="x y"\n'),
        ("B", "n=$N\n"),
    ]


def test_add_unpacks_unless_told_otherwise() -> None:
    assert only_copy("FROM a\nADD x.tar /").unpacks
    assert not only_copy("FROM a\nADD --unpack=false x.tar /").unpacks
